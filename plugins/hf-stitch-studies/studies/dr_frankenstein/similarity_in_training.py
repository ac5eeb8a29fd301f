"""Experiment 3: similarity during task-loss matching from least squares (Csiszárik et al. 2021, section 6.2, figure 4).

R² is computed without a refit as 1 - ‖AM - B‖² / ‖B‖². With a refit it would not depend on the map.

    python -m dr_frankenstein.similarity_in_training --published PUBLISHED --networks NETWORKS --data-dir DATA
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import study
from dr_frankenstein import experiment, frankenstein, stitching
from dr_frankenstein.experiment import TEST, TITLES, Preset
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
CONSTANT = 1e-3


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


PAGE = """# Experiment 3: similarity during task-loss matching (Csiszárik et al., NeurIPS 2021, section 6.2, figure 4)

**What to do**: do not stop training a stitch by R² or CKA: both fall while the stitched network gets better.

{claims}

Claim: while cross-entropy improves, R² (without a refit) and CKA fall. CCA is invariant to the map and stays constant.
The paper shows means of ten runs at the third layer of Tiny-10, and more layers in its appendix.

Setting: {networks}, CIFAR-10, task loss from least squares; {setting}. Mean over pairs of networks; in parentheses
minimum and maximum. No Tiny-10 is in two pairs; the two pairs of ResNet-20 are the two directions of one.

Rules, written before these figures were seen: R² or CKA *falls* if cross-entropy improves in every pair, and it is
lower at the end in every pair and by at least {fall} as the mean; it falls *in part* if it is lower in every pair, but
by less. CCA is constant if no pair changes by more than {constant}. SVCCA is shown without a rule.

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
            rows.append((label, *map(_spread, (first, last, last - first)), changes))
        better = sum(run["cross_entropy"][-1] < run["cross_entropy"][0] for run in runs.values())
        sections += [
            f"## {TITLES[architecture]}, {found['layer']}, {len(runs)} pairs, {found['steps'][-1]:,} steps",
            study.markdown(("figure", "start", "end", "change", "change of every pair"), rows),
            f"Cross-entropy improves in {better} of {len(runs)} pairs.",
        ]
    return PAGE.format(
        claims=study.verdicts(claims(record)), footer=experiment.footer("similarity_in_training"),
        networks=record["networks"], setting=record["setting"], fall=FALL, constant=CONSTANT,
        architectures="\n\n".join(sections),
    )  # fmt: skip


def _spread(values: np.ndarray) -> str:
    return f"{values.mean():.3f} ({values.min():.3f}, {values.max():.3f})"


def _falls(runs: Mapping[str, Mapping[str, Sequence[float]]], name: str) -> str:
    changes, losses = (
        np.array([run[figure][-1] - run[figure][0] for run in runs.values()]) for figure in (name, "cross_entropy")
    )
    if (losses >= 0).any():
        return "undecided"
    if (changes >= 0).any():
        return "refuted"
    return "confirmed" if changes.mean() <= -FALL else "in part"


def _constant(runs: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    within = [max(abs(value - run["cca"][0]) for value in run["cca"]) <= CONSTANT for run in runs.values()]
    return "confirmed" if all(within) else "refuted"


def claims(record: dict[str, Any]) -> list[dict[str, str]]:
    """Return the rows of the table of all experiments."""
    rows = []
    for architecture, found in record["architectures"].items():
        runs = found["runs"]
        n, units = experiment.counted(runs)
        n += f", {found['steps'][-1]:,} steps"
        for name, label in (("r2", "R² without refit"), ("linear_cka", "CKA")):
            change = np.mean([run[name][-1] - run[name][0] for run in runs.values()])
            rows.append(experiment.claim(
                "6.2, figure 4", f"{TITLES[architecture]}: {label} falls while cross-entropy improves", "plot",
                f"{change:+.3f}", n, _falls(runs, name), units=units,
            ))  # fmt: skip
        change = max(abs(value - run["cca"][0]) for run in runs.values() for value in run["cca"])
        rows.append(experiment.claim(
            "6.2, figure 4", f"{TITLES[architecture]}: CCA stays constant", "plot", f"at most {change:.1g}", n,
            _constant(runs), units=units,
        ))  # fmt: skip
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
