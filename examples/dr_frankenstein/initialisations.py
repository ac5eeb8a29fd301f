"""Experiment 5: task-loss matching from random and from least-squares starts (Csiszárik et al. 2021, figure 6).

Least squares has a unique solution, so that each of its starts is fitted on another random fifth of the training
images. All stitching layers are trained at once on the same images in the same order. They differ only in their starts.

    python examples/dr_frankenstein/initialisations.py --published TINY10 --networks NETWORKS
"""

from collections.abc import Mapping
from dataclasses import asdict

import experiment
import numpy as np
import tiny10
from experiment import PAPER, SHORT, TEST, Preset
from matplotlib.figure import Figure
from rich.table import Table
from rich.text import Text

from hf_stitch.analysis import Score, score_curves
from hf_stitch.registry import registries

PRESETS = {"small": Preset(4_000, 2_000, 12, (10_000, 6), **SHORT), "test": TEST, "paper": PAPER}
STARTS = {"small": 6, "test": 2, "paper": 50}
LAYER = {"small": "bn3", "test": "bn8", "paper": "bn3"}
SHARE = 0.2
"""Share of the training images on which a least-squares start is fitted."""


def main() -> None:
    """Run the experiment from the command line."""
    parser = tiny10.parser(__doc__)
    parser.add_argument("--layer", help="layer to stitch at; default: that of the preset")
    arguments = parser.parse_args()
    preset, layer = PRESETS[arguments.preset], arguments.layer or LAYER[arguments.preset]
    source, target, *_ = tiny10.loaded(arguments, preset).values()
    train, test = preset.samples("cifar10", arguments.data_dir)
    seeds = range(STARTS[arguments.preset])
    drawn = [train.split(SHARE, seed)[1] for seed in seeds]
    models = {
        "random": tiny10.direct(
            source, target, layer, [registries.matchers.build("random", seed=seed) for seed in seeds], train
        ),
        "least squares": [tiny10.direct(source, target, layer, ["lstsq"], part)[0] for part in drawn],
    }
    together = [model for starts in models.values() for model in starts]
    ends = iter(tiny10.trained(preset.task_loss, together, target, train, preset))
    layers = {f"{kind}, start": {i: m.stitch for i, m in enumerate(starts)} for kind, starts in models.items()}
    layers |= {kind: {i: next(ends) for i in range(len(starts))} for kind, starts in models.items()}
    found = score_curves(together[0], test, "seed", layers, target=target, batch_size=tiny10.BATCH)
    name = f"initialisations_{layer}"
    record = {"preset": asdict(preset), "layer": layer, "relative_accuracy": found.to_dict()}
    picture = _picture({kind: found[kind] for kind in models}, layer)
    experiment.show(_table(found.scores, layer, len(test)), name, record, {name: picture}, arguments.out)


def _table(scores: Mapping[str, Mapping[float, Score]], layer: str, n: int) -> Table:
    table = Table(
        "start", "mean", "standard deviation", "worst, 95% interval", "best, 95% interval", "below 0.8",
        title=f"relative accuracy after task-loss matching at {layer}, {n} test images",
    )  # fmt: skip
    for kind, by_seed in scores.items():
        ordered = sorted(by_seed.values(), key=lambda score: score.value)
        values = np.array([score.value for score in ordered])
        ends = (Text(str(ordered[i])) for i in (0, -1))
        spread = f"{values.mean():.3f}", f"{values.std(ddof=1):.3f}"
        table.add_row(kind, *spread, *ends, f"{(values < 0.8).sum()} of {len(values)}")
    return table


def _picture(scores: Mapping[str, Mapping[float, Score]], layer: str) -> Figure:
    """Draw overlaid histograms with shared bins."""
    values = {kind: [score.value for score in by_seed.values()] for kind, by_seed in scores.items()}
    low, high = min(map(min, values.values())), max(map(max, values.values()))
    figure = Figure(figsize=(6.0, 3.4), layout="constrained")
    axes = figure.add_subplot()
    for kind, numbers in values.items():
        axes.hist(numbers, bins=np.linspace(low - 0.005, high + 0.005, 25), alpha=0.6, label=kind)
    axes.set_xlabel("relative accuracy")
    axes.set_ylabel("starts")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"task-loss matching by start, {layer}", fontsize="large")
    return figure


if __name__ == "__main__":
    main()
