"""Experiment 3: similarity during task-loss matching from least squares (Csiszárik et al. 2021, section 6.2, figure 4).

R² is computed without a refit as 1 - ‖AM - B‖² / ‖B‖². With a refit it would not depend on the map.

    python -m dr_frankenstein.similarity_in_training --published PUBLISHED --networks NETWORKS --data-dir DATA
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import study
from dr_frankenstein import experiment, stitching
from dr_frankenstein.experiment import TEST, TITLES, Claim, Preset
from hf_stitch_studies import TrajectoryRecorder
from matplotlib.figure import Figure

PRESETS = {
    "small": Preset(10_000, 500, 7, (10_000, 6), batch=64),
    "test": TEST,
    "paper": Preset(50_000, 2_000, 30, (50_000, 300), 5, True),
}
PLACES = {"tiny10": ("bn3", 3), "resnet20": ("layer2.0", 2)}
"""Layer, and number of pairs."""
EVERY = {"small": 100, "test": 1, "paper": 500}
FIGURES = {
    "cross_entropy": "cross-entropy with the target",
    "relative_accuracy": "relative accuracy",
    "r2": "R² without refit",
    "linear_cka": "linear CKA",
    "cca": "CCA",
    "svcca": "SVCCA",
}
FALL = 0.02
"""A mean fall by this much counts."""
CONSTANT, JUMP = 1e-3, 1e-2
"""A change of at most ``CONSTANT`` is none; one of ``JUMP`` or more between two measurements is a jump."""


def main() -> None:
    """Run the experiment from the command line."""
    run = experiment.Run.of(__doc__, PRESETS)
    record, pictures, (train, test) = run.record(), {}, run.samples()
    for architecture, (layer, count) in PLACES.items():
        networks, runs = run.networks(architecture), dict[str, dict[str, list[float]]]()
        for a, b in experiment.pairs_of(networks, count):
            [start] = stitching.direct(networks[a], networks[b], layer, ["lstsq"], train)
            metrics = ["linear_cka", "direct_matching", "cca", "svcca"]
            recorder = TrajectoryRecorder(start, test, metrics, every=EVERY[run.name], target=networks[b])
            stitching.trained(run.preset.task_loss, [start], networks[b], train, run.preset, recorder)
            figures = dict(recorder.trajectory.figures)
            figures["r2"] = tuple(1 - value for value in figures["direct_matching"])
            runs[f"{a} → {b}"] = {name: list(figures[name]) for name in FIGURES}
            steps = recorder.trajectory.steps
        record["architectures"][architecture] = {"layer": layer, "steps": steps, "runs": runs}
        pictures[f"similarity_in_training_{architecture}"] = _picture(runs, steps)
    study.leave("similarity_in_training", record, page, pictures, run.arguments.out)


FALLS = Claim(
    "6.2, figure 4", "{}: {} falls while cross-entropy improves", "plot",
    f"it is lower at the end in every pair, and by {FALL} or more as the mean; not known if cross-entropy does not "
    "improve in every pair",
)  # fmt: skip
STAYS = Claim("6.2", "{}: CCA ignores the map", "constant", f"no pair changes by more than {CONSTANT} at any time")
JUMPS = Claim(
    "6.2", "{}: SVCCA performs quite big jumps during the training", "–",
    f"in every pair, it changes by {JUMP} or more between two measurements, and CKA never does",
)  # fmt: skip

PAGE = study.text(__file__)


def page(record: dict[str, Any]) -> str:
    """Return the page of the results from the record, as it is read from JSON."""
    header = ("figure", "start", "end", "change", "change of every pair", "greatest change in one step of measuring")
    sections = []
    for architecture, found in record["architectures"].items():
        rows, steps = [], found["steps"]
        for name, label in FIGURES.items():
            runs = np.array([run[name] for run in found["runs"].values()])
            change = runs[:, -1] - runs[:, 0]
            spreads = map(study.spread, (runs[:, 0], runs[:, -1], change))
            jump = np.abs(np.diff(runs)).max()
            rows.append((label, *spreads, ", ".join(f"{each:+.3f}" for each in change), f"{jump:.3f}"))
        title = f"## {TITLES[architecture]}, {found['layer']}, {len(runs)} pairs, {steps[-1]:,} steps"
        sections.append(f"{title}\n\nMeasured every {steps[1]} steps.\n\n{study.markdown(header, rows)}")
    return experiment.written(
        PAGE, "similarity_in_training", record, claims(record), fall=FALL, constant=CONSTANT, jump=JUMP,
        architectures="\n\n".join(sections),
    )  # fmt: skip


def falls(runs: Mapping[str, Mapping[str, Sequence[float]]], name: str) -> list[bool | None]:
    """Return whether a figure is lower at the end in every pair, and as the mean by enough."""
    changes, losses = (
        np.array([run[figure][-1] - run[figure][0] for run in runs.values()]) for figure in (name, "cross_entropy")
    )
    return [None] if (losses >= 0).any() else [bool((changes < 0).all()), bool(changes.mean() <= -FALL)]


def claims(record: dict[str, Any]) -> list[dict[str, str]]:
    """Return the rows of the table of all experiments."""
    rows = []
    for architecture, found in record["architectures"].items():
        runs, title = found["runs"], TITLES[architecture]
        n, units = experiment.counted(runs)
        n += f", {found['steps'][-1]:,} steps"
        for name, label in (("r2", "R² without refit"), ("linear_cka", "CKA")):
            change = np.mean([run[name][-1] - run[name][0] for run in runs.values()])
            rows.append(FALLS.of(title, label).row(f"{change:+.3f}", n, falls(runs, name), units))
        most = max(abs(value - run["cca"][0]) for run in runs.values() for value in run["cca"])
        rows.append(STAYS.of(title).row(f"at most {most:.1g}", n, [most <= CONSTANT], units))
        jumps, cka = ([np.abs(np.diff(r[name])).max() for r in runs.values()] for name in ("svcca", "linear_cka"))
        held = [bool(one >= JUMP > other) for one, other in zip(jumps, cka, strict=True)]
        ours = f"at once by {', '.join(f'{jump:.3f}' for jump in jumps)}; CKA by {max(cka):.3f} at most"
        rows.append(JUMPS.of(title).row(ours, n, held, units))
    return rows


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
