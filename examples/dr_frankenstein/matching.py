"""Experiment 1: least squares and task-loss matching at every layer (Csiszárik et al. 2021, figure 2).

The baselines are no transformation and the mean of the target. Also compared are Procrustes with least squares, and
hard with soft labels.

    python examples/dr_frankenstein/matching.py --architecture tiny10 --published TINY10 --networks NETWORKS
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import experiment
import frankenstein
import networks
import numpy as np
from base_training import Base, adapted
from experiment import PAPER, TASK, TEST, Preset
from rich.table import Table
from rich.text import Text

import hf_stitch
from hf_stitch.registry import registries

PRESETS = {
    ("tiny10", "small"): Preset(50_000, 5_000, 3, (10_000, 6), lr=3e-3, schedule="cosine"),
    ("resnet20", "small"): Preset(4_000, 2_000, 3, (10_000, 6)),
    **{(architecture, "test"): TEST for architecture in ("tiny10", "resnet20")},
    **{(architecture, "paper"): PAPER for architecture in ("tiny10", "resnet20")},
}
DIRECT, HARD, PROCRUSTES = frankenstein.START, "task loss, hard labels", "Procrustes"


def main() -> None:
    """Run the experiment from the command line."""
    parser = experiment.parser(__doc__)
    parser.add_argument("--architecture", choices=("tiny10", "resnet20"), default="tiny10")
    parser.add_argument("--published", type=Path, help="folder of published Tiny-10 networks to use instead")
    parser.add_argument("--pairs", nargs="+", help="pairs source-target, e.g. 0-1; default: each with the next")
    parser.add_argument("--hard", action="store_true", help="also match on hard labels")
    arguments = parser.parse_args()
    preset = PRESETS[arguments.architecture, arguments.preset]
    loaded = _networks(arguments, preset)
    pairs = [tuple(p.split("-")) for p in arguments.pairs] if arguments.pairs else frankenstein.ring(loaded)
    if unknown := {name for pair in pairs for name in pair} - set(loaded):
        parser.error(f"--pairs names {', '.join(sorted(unknown))}; the networks are {', '.join(loaded)}")
    layers = (networks.Tiny10 if arguments.architecture == "tiny10" else networks.ResNet20).cuts
    methods = {TASK: preset.task_loss}
    if arguments.hard:
        methods[HARD] = replace(preset.task_loss, labels="hard")
    found = frankenstein.answers(
        loaded, loaded, pairs, layers, *preset.samples("cifar10", arguments.data_dir),
        direct={PROCRUSTES: registries.matchers.build("procrustes")}, trained=methods, augment=preset.augmentation,
    )  # fmt: skip
    measured = _measured(found, layers, list(methods))
    name = f"matching_{arguments.architecture}"
    title = (
        f"{arguments.architecture}, {len(pairs)} pairs, {preset.train} training images, {preset.test} test images; "
        f"mean accuracy of the targets {measured['target_accuracy']:.4f}; 95% intervals"
    )
    pictures = {
        f"{name}_{what}": experiment.lines(measured[key], layers, key.replace("_", " "), arguments.architecture)
        for what, key in (("accuracy", "relative_accuracy"), ("loss", "cross_entropy_with_target"))
    }
    record = {"preset": asdict(preset), **measured}
    experiment.show(_table(measured, title), name, record, pictures, arguments.out)


def _networks(arguments, preset: Preset) -> dict[str, hf_stitch.Adapter]:
    if arguments.published:
        files = sorted(arguments.published.glob("*.safetensors"))
        return {str(i): networks.adapted(networks.Tiny10.from_file(path)) for i, path in enumerate(files)}
    count, epochs = preset.base
    bases = [Base(arguments.architecture, epochs, count, seed) for seed in range(preset.seeds)]
    return adapted(bases, arguments.networks, arguments.data_dir)


def _measured(found: frankenstein.Answers, layers: Sequence[str], tasks: Sequence[str]) -> dict[str, Any]:
    """Collect all scores by method and layer."""
    relative = {
        method: [found.relative(layer, method) for layer in layers]
        for method in (DIRECT, *tasks, PROCRUSTES, *frankenstein.BASELINES)
    }
    losses = {method: [found.imitation(layer, method) for layer in layers] for method in ("identity", DIRECT, TASK)}
    untouched = [score.value for score in losses["identity"]]
    measured = {
        "pairs": found.pairs,
        "layers": layers,
        "target_accuracy": (found.targets.argmax(-1) == found.labels).double().mean().item(),
        "relative_accuracy": relative,
        "task_loss_less_direct": [found.relative(layer, TASK, DIRECT) for layer in layers],
        "procrustes_less_direct": [found.relative(layer, PROCRUSTES, DIRECT) for layer in layers],
        "cross_entropy_with_target": losses,
        "cross_entropy_untransformed": {"mean": np.mean(untouched), "std over layers": np.std(untouched, ddof=1)},
    }
    if HARD in tasks:
        by_layer = [[score.value for score in relative[task]] for task in (TASK, HARD)]
        measured["soft_hard_correlation"] = np.corrcoef(by_layer)[0, 1]
    return measured


def _table(measured: Mapping[str, Any], title: str) -> Table:
    """Build a table with one row for each layer."""
    relative, losses = measured["relative_accuracy"], measured["cross_entropy_with_target"]
    full = [method for method in relative if method not in (PROCRUSTES, *frankenstein.BASELINES)]
    short = [method for method in relative if method not in full]
    table = Table("layer", *full, "gain by task loss", *short, *(f"loss: {m}" for m in losses), title=title)
    for i, layer in enumerate(measured["layers"]):
        row = [str(relative[method][i]) for method in full] + [str(measured["task_loss_less_direct"][i])]
        row += [f"{relative[method][i].value:.3f}" for method in short]
        row += [f"{scores[i].value:.3f}" for scores in losses.values()]
        table.add_row(layer, *map(Text, row))
    return table


if __name__ == "__main__":
    main()
