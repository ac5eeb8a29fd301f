"""Experiment 3: similarity during task-loss matching from least squares (Csiszárik et al. 2021, section 6.2, figure 4).

R² is computed without a refit as 1 - ‖AM - B‖² / ‖B‖². With a refit it would not depend on the map.

    python -m dr_frankenstein.similarity_in_training --published PUBLISHED --networks NETWORKS --data-dir DATA
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import study
from dr_frankenstein import experiment, frankenstein, stitching
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
    arguments = study.parser(__doc__, "data-dir", "published", "networks").parse_args()
    preset = PRESETS[arguments.preset]
    train, test = preset.samples("cifar10", arguments.data_dir)
    record: dict[str, Any] = {"preset": preset, "setting": str(preset), "architectures": {}}
    pictures = {}
    for architecture, (layer, count) in PLACES.items():
        networks = experiment.loaded(architecture, arguments, preset)
        pairs = experiment.disjoint(networks, count) if len(networks) > 2 else frankenstein.ring(networks)
        runs: dict[str, dict[str, list[float]]] = {}
        for a, b in pairs:
            [start] = stitching.direct(networks[a], networks[b], layer, ["lstsq"], train)
            recorder = TrajectoryRecorder(
                start, test, ["linear_cka", "direct_matching", "cca", "svcca"],
                every=EVERY[arguments.preset], target=networks[b],
            )  # fmt: skip
            stitching.trained(preset.task_loss, [start], networks[b], train, preset, recorder)
            figures = dict(recorder.trajectory.figures)
            figures["r2"] = tuple(1 - value for value in figures["direct_matching"])
            runs[f"{a} → {b}"] = {name: list(figures[name]) for name in FIGURES}
            steps = recorder.trajectory.steps
        record["networks"] = experiment.origin(arguments, preset)
        record["architectures"][architecture] = {"layer": layer, "steps": steps, "runs": runs}
        pictures[f"similarity_in_training_{architecture}"] = _picture(runs, steps)
    study.leave("similarity_in_training", record, page, pictures, arguments.out)


FALLS = {
    (architecture, name): Claim(
        "6.2, figure 4", f"{title}: {label} falls while cross-entropy improves", "plot",
        f"it is lower at the end in every pair, and by {FALL} or more as the mean; not known if cross-entropy does not "
        "improve in every pair",
    )
    for architecture, title in TITLES.items() for name, label in (("r2", "R² without refit"), ("linear_cka", "CKA"))
}  # fmt: skip
STAYS = {
    architecture: Claim(
        "6.2", f"{title}: CCA ignores the map", "constant", f"no pair changes by more than {CONSTANT} at any time",
    )
    for architecture, title in TITLES.items()
}  # fmt: skip
JUMPS = {
    architecture: Claim(
        "6.2", f"{title}: SVCCA performs quite big jumps during the training", "–",
        f"in every pair, it changes by {JUMP} or more between two measurements, and CKA never does",
    )
    for architecture, title in TITLES.items()
}  # fmt: skip

PAGE = """# Experiment 3: similarity during task-loss matching (Csiszárik et al., NeurIPS 2021, section 6.2, figure 4)

**What to do**: do not read R², CKA or SVCCA as progress of a stitch: all fall, or jump, while it improves. CCA does not
see the map at all. Watch accuracy.

{verdicts}

One pair decides nothing, so that ResNet-20, of which two networks are public, is undecided. The paper shows means of
ten runs at the third layer of Tiny-10, and more layers in its appendix.

Setting: {networks}, CIFAR-10, task loss from least squares; {setting}. Mean over pairs of networks; in parentheses
minimum and maximum. No Tiny-10 is in two pairs; the two pairs of ResNet-20 are the two directions of one. R² is without
a refit, as in figure 4.

The bounds {fall} and {constant} were written before these figures were seen, {jump} when they were known, for a row on
SVCCA that was missing. That it does not correlate with performance "on average" would take some ten pairs.

{architectures}

{footer}"""


def page(record: dict[str, Any]) -> str:
    """Return the page of the results from the record, as it is read from JSON."""
    sections = []
    for architecture, found in record["architectures"].items():
        runs = found["runs"]
        rows = []
        for name, label in FIGURES.items():
            first, last = (np.array([run[name][i] for run in runs.values()]) for i in (0, -1))
            changes = ", ".join(f"{change:+.3f}" for change in last - first)
            jumps = [np.abs(np.diff(run[name])).max() for run in runs.values()]
            rows.append((label, *map(_spread, (first, last, last - first)), changes, f"{max(jumps):.3f}"))
        header = (
            "figure",
            "start",
            "end",
            "change",
            "change of every pair",
            "greatest change in one step of measuring",
        )
        title = f"## {TITLES[architecture]}, {found['layer']}, {len(runs)} pairs, {found['steps'][-1]:,} steps"
        sections.append(f"{title}\n\nMeasured every {found['steps'][1]} steps.\n\n{study.markdown(header, rows)}")
    return PAGE.format(
        footer=experiment.footer("similarity_in_training"), verdicts=study.verdicts(claims(record)),
        networks=record["networks"], setting=record["setting"], fall=FALL, constant=CONSTANT, jump=JUMP,
        architectures="\n\n".join(sections),
    )  # fmt: skip


def _spread(values: np.ndarray) -> str:
    return f"{values.mean():.3f} ({values.min():.3f}, {values.max():.3f})"


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
        runs = found["runs"]
        n, units = experiment.counted(runs)
        n += f", {found['steps'][-1]:,} steps"
        for name in ("r2", "linear_cka"):
            change = np.mean([run[name][-1] - run[name][0] for run in runs.values()])
            rows.append(FALLS[architecture, name].row(f"{change:+.3f}", n, falls(runs, name), units))
        most = [max(abs(value - run["cca"][0]) for value in run["cca"]) for run in runs.values()]
        rows.append(STAYS[architecture].row(f"at most {max(most):.1g}", n, [max(most) <= CONSTANT], units))
        steps = {name: [np.abs(np.diff(run[name])).max() for run in runs.values()] for name in ("svcca", "linear_cka")}
        jumps = [bool(one >= JUMP > other) for one, other in zip(*steps.values(), strict=True)]
        ours = (
            f"at once by {', '.join(f'{step:.3f}' for step in steps['svcca'])}; CKA by {max(steps['linear_cka']):.3f}"
        )
        rows.append(JUMPS[architecture].row(f"{ours} at most", n, jumps, units))
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
