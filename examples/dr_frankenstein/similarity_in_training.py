"""Experiment 3: similarity during task-loss matching from least squares (Csiszárik et al. 2021, section 6.2, figure 4).

R² is computed without a refit as 1 - ‖AM - B‖² / ‖B‖². With a refit it would not depend on the map.

    python examples/dr_frankenstein/similarity_in_training.py --published TINY10 --networks NETWORKS
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

import experiment
import frankenstein
import numpy as np
import tiny10
from experiment import PAPER, TEST, Preset
from matplotlib.figure import Figure
from rich.table import Table

from hf_stitch.analysis import TrajectoryRecorder

PRESETS = {"small": Preset(4_000, 500, 3, (10_000, 6)), "test": TEST, "paper": PAPER}
LAYER = "bn3"
EVERY = {"small": 12, "test": 1, "paper": 100}
PROBE = 500
"""Number of test images on which similarity is measured."""
FIGURES = {
    "cross_entropy": "cross-entropy with the target",
    "relative_accuracy": "relative accuracy",
    "r2": "R² without refit",
    "linear_cka": "linear CKA",
    "cca": "CCA",
    "svcca": "SVCCA",
}


def main() -> None:
    """Run the experiment from the command line."""
    arguments = tiny10.parser(__doc__).parse_args()
    preset = PRESETS[arguments.preset]
    networks = tiny10.loaded(arguments, preset)
    train, test = preset.samples("cifar10", arguments.data_dir)
    runs: dict[str, dict[str, list[float]]] = {}
    steps: tuple[int, ...] = ()
    for a, b in frankenstein.ring(networks):
        [start] = tiny10.direct(networks[a], networks[b], LAYER, ["lstsq"], train)
        recorder = TrajectoryRecorder(
            start, test.take(min(PROBE, len(test))), ["linear_cka", "direct_matching", "cca", "svcca"],
            every=EVERY[arguments.preset], target=networks[b],
        )  # fmt: skip
        tiny10.trained(preset.task_loss, [start], networks[b], train, preset, recorder)
        trajectory = recorder.trajectory
        steps, figures = trajectory.steps, dict(trajectory.figures)
        figures["r2"] = tuple(1 - value for value in figures["direct_matching"])
        runs[f"{a} → {b}"] = {name: list(figures[name]) for name in FIGURES}
    record = {"preset": asdict(preset), "layer": LAYER, "steps": steps, "runs": runs}
    pictures = {"similarity_in_training": _picture(runs, steps)}
    experiment.show(_table(runs), "similarity_in_training", record, pictures, arguments.out)


def _table(runs: Mapping[str, Mapping[str, Sequence[float]]]) -> Table:
    table = Table(
        "figure", "start", "end", "change", *runs,
        title=f"task-loss matching at {LAYER}; mean over pairs, in parentheses minimum and maximum; "
        "last columns: change for each pair",
    )  # fmt: skip
    for name, label in FIGURES.items():
        first, last = (np.array([run[name][i] for run in runs.values()]) for i in (0, -1))
        table.add_row(label, *map(_spread, (first, last, last - first)), *(f"{x:+.3f}" for x in last - first))
    return table


def _spread(values: np.ndarray) -> str:
    return f"{values.mean():.3f} ({values.min():.3f}, {values.max():.3f})"


def _picture(runs: Mapping[str, Mapping[str, Sequence[float]]], steps: Sequence[int]) -> Figure:
    """Draw one panel for each measure, with a line for every pair and their mean in bold."""
    figure = Figure(figsize=(10.0, 5.4), layout="constrained")
    panels = figure.subplots(2, 3, sharex=True)
    for axes, (name, label) in zip(panels.flat, FIGURES.items(), strict=True):
        for number, (pair, run) in enumerate(runs.items()):
            axes.plot(steps, run[name], color=f"C{number}", linewidth=0.9, alpha=0.7, label=pair)
        axes.plot(steps, np.mean([run[name] for run in runs.values()], 0), color="black", linewidth=2, label="mean")
        axes.set_title(label, fontsize="medium")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels[-1]:
        axes.set_xlabel("step")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=len(runs) + 1, frameon=False)
    return figure


if __name__ == "__main__":
    main()
