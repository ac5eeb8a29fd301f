"""Experiment 1: least squares against task-loss matching at every layer (Csiszárik et al. 2021, figure 2).

Also no transformation and the target's mean as baselines, Procrustes beside least squares, and hard beside soft labels.

    python examples/dr_frankenstein/matching.py --architecture tiny10 --published TINY10 --networks NETWORKS
"""

from dataclasses import asdict, replace
from itertools import permutations
from pathlib import Path

import experiment
import frankenstein
import networks
import numpy as np
from base_training import Base, adapted
from experiment import PAPER, TASK, TEST, Preset
from rich.table import Table
from rich.text import Text

import hf_stitch
from hf_stitch.matchers import build_matcher

PRESETS = {
    ("tiny10", "small"): Preset(10_000, 5_000, 4, (10_000, 6)),
    ("resnet20", "small"): Preset(4_000, 2_000, 3, (10_000, 6)),
    **{(architecture, "test"): TEST for architecture in ("tiny10", "resnet20")},
    **{(architecture, "paper"): PAPER for architecture in ("tiny10", "resnet20")},
}
DIRECT, HARD, PROCRUSTES = frankenstein.START, "task loss, hard labels", "Procrustes"


def main() -> None:
    """Parse the arguments, match, show."""
    parser = experiment.parser(__doc__)
    parser.add_argument("--architecture", choices=("tiny10", "resnet20"), default="tiny10")
    parser.add_argument("--published", type=Path, help="folder of trained Tiny-10 networks to take instead")
    parser.add_argument("--pairs", nargs="+", help="source-target, such as 0-1; default: all")
    parser.add_argument("--hard", action="store_true", help="match on hard labels too")
    arguments = parser.parse_args()
    preset = PRESETS[arguments.architecture, arguments.preset]
    loaded = _networks(arguments, preset)
    pairs = [tuple(p.split("-")) for p in arguments.pairs] if arguments.pairs else list(permutations(loaded, 2))
    layers = (networks.Tiny10 if arguments.architecture == "tiny10" else networks.ResNet20).cuts
    methods = {TASK: preset.task_loss}
    if arguments.hard:
        methods[HARD] = replace(preset.task_loss, labels="hard")
    found = frankenstein.answers(
        loaded, loaded, pairs, layers, *preset.samples("cifar10", arguments.data_dir),
        direct={PROCRUSTES: build_matcher("procrustes")}, trained=methods, augment=preset.augmentation,
    )  # fmt: skip
    _show(found, layers, list(methods), arguments, asdict(preset))


def _networks(arguments, preset: Preset) -> dict[str, hf_stitch.Adapter]:
    if arguments.published:
        files = sorted(arguments.published.glob("*.safetensors"))
        return {str(i): networks.adapted(networks.Tiny10.from_file(path)) for i, path in enumerate(files)}
    count, epochs = preset.base
    bases = [Base(arguments.architecture, epochs, count, seed) for seed in range(preset.seeds)]
    return adapted(bases, arguments.networks, arguments.data_dir)


def _show(found: frankenstein.Answers, layers, tasks: list[str], arguments, preset: dict) -> None:
    methods = [DIRECT, *tasks, PROCRUSTES, *frankenstein.BASELINES]
    relative = {method: [found.relative(layer, method) for layer in layers] for method in methods}
    gain = [found.relative(layer, TASK, DIRECT) for layer in layers]
    losses = {method: [found.imitation(layer, method) for layer in layers] for method in (DIRECT, TASK, "identity")}
    own = float((found.targets.argmax(-1) == found.labels).double().mean())
    title = (
        f"{arguments.architecture}, {len(found.pairs)} pairs, {preset['train']} images to match on, "
        f"{preset['test']} to test on; accuracy of the targets {own:.4f}; 95% intervals"
    )
    table = Table("layer", *methods, "task loss - least squares", "cross-entropy: none", "least squares", "task loss",
                  title=title)  # fmt: skip
    for i, layer in enumerate(layers):
        row = [relative[DIRECT][i], *(relative[task][i] for task in tasks)]
        short = [f"{relative[m][i].value:.3f}" for m in (PROCRUSTES, *frankenstein.BASELINES)]
        loss = [f"{losses[m][i].value:.2f}" for m in ("identity", DIRECT, TASK)]
        table.add_row(layer, *map(Text, [*map(str, row), *short, str(gain[i]), *loss]))
    name = f"matching_{arguments.architecture}"
    record = {
        "preset": preset, "pairs": found.pairs, "layers": layers, "target_accuracy": own, "relative_accuracy": relative,
        "task_loss_less_direct": gain, "cross_entropy_with_target": losses,
        "cross_entropy_untransformed": _spread([score.value for score in losses["identity"]]),
    }  # fmt: skip
    if HARD in tasks:
        soft, hard = ([score.value for score in relative[task]] for task in (TASK, HARD))
        record["soft_hard_correlation"] = float(np.corrcoef(soft, hard)[0, 1])
    picture = experiment.lines(
        {method: relative[method] for method in methods if method != "mean only"}, layers, "relative accuracy",
        f"{arguments.architecture}: direct and task-loss matching",
    )  # fmt: skip
    experiment.show(table, name, record, {name: picture}, arguments.out)


def _spread(values: list[float]) -> dict[str, float]:
    return {"mean": float(np.mean(values)), "std": float(np.std(values, ddof=1))}


if __name__ == "__main__":
    main()
