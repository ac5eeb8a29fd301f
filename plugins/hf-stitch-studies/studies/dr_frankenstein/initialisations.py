"""Experiment 5: task-loss matching from random and from least-squares starts (Csiszárik et al. 2021, figure 6).

Least squares has a unique solution, so that each of its starts is fitted on another random fifth of the training
images. All stitching layers are trained at once on the same images in the same order. They differ only in their starts.

    python -m dr_frankenstein.initialisations --published PUBLISHED --networks NETWORKS --data-dir DATA
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import study
from dr_frankenstein import experiment, stitching
from dr_frankenstein.experiment import PAPER, SHORT, TEST, TITLES, Preset
from hf_stitch_studies import score_curves
from matplotlib.figure import Figure

import hf_stitch
from hf_stitch.registry import registries

PRESETS = {
    "small": {
        "tiny10": Preset(4_000, 1_000, 1, (10_000, 6), batch=16, **SHORT),
        "resnet20": Preset(3_000, 1_000, 1, (10_000, 6), batch=16, **SHORT),
    },
    "test": {"tiny10": TEST, "resnet20": TEST},
    "paper": {"tiny10": PAPER, "resnet20": PAPER},
}
STARTS = {"small": 50, "test": 2, "paper": 50}
PLACES = {"tiny10": "bn3", "resnet20": "layer2.0"}
SHARE = 0.2
"""Share of the training images on which a least-squares start is fitted."""
RANDOM, DIRECT = "random", "least squares"
STUCK = 0.1
"""A start is stuck if it ends this much below the median of its kind."""


def main() -> None:
    """Run the experiment from the command line."""
    arguments = study.parser(__doc__, "data-dir", "published", "networks").parse_args()
    record: dict[str, Any] = {"architectures": {}, "preset": PRESETS[arguments.preset]}
    pictures = {}
    for architecture, layer in PLACES.items():
        preset = PRESETS[arguments.preset][architecture]
        source, target, *_ = experiment.loaded(architecture, arguments, preset).values()
        found = measured(source, target, layer, STARTS[arguments.preset], preset, arguments.data_dir)
        record["networks"] = experiment.origin(arguments, preset)
        record["architectures"][architecture] = {"layer": layer, "setting": str(preset), "relative_accuracy": found}
        pictures[f"initialisations_{architecture}"] = _picture(found, f"{TITLES[architecture]}, {layer}")
    study.leave("initialisations", record, page, pictures, arguments.out)


def measured(
    source: hf_stitch.Adapter, target: hf_stitch.Adapter, layer: str, count: int, preset: Preset, data_dir: str | None
) -> dict[str, list[float]]:
    """Train from random and least-squares starts; return the relative accuracies of all starts and ends."""
    train, test = preset.samples("cifar10", data_dir)
    random = [registries.matchers.build("random", seed=seed) for seed in range(count)]
    models = {
        RANDOM: stitching.direct(source, target, layer, random, train),
        DIRECT: [
            stitching.direct(source, target, layer, ["lstsq"], train.split(SHARE, seed)[1])[0] for seed in range(count)
        ],
    }
    together = [model for starts in models.values() for model in starts]
    ends = iter(stitching.trained(preset.task_loss, together, target, train, preset))
    layers = {f"{kind}, start": dict(enumerate(m.stitch for m in starts)) for kind, starts in models.items()}
    layers |= {kind: {i: next(ends) for i in range(count)} for kind in models}
    found = score_curves(together[0], test, "seed", layers, target=target, batch_size=stitching.BATCH, resamples=2)
    return {kind: [score.value for score in scores.values()] for kind, scores in found.scores.items()}


PAGE = """# Experiment 5: starts of task-loss matching (Csiszárik et al., NeurIPS 2021, section 8, figure 6)

**What to do**: start task loss from least squares, not from a random map.

{claims}

Claim: most starts reach similar results, random starts are sometimes stuck in poor minima, and least-squares starts are
consistently good. The paper trains from 50 starts of each kind.

Setting: {networks}, CIFAR-10, one pair of networks of each architecture; least-squares starts are fitted on different
fifths of the training images, because there is only one solution on all of them. Relative accuracy on the test images;
the spread is that over starts.

Rules, written before these figures were seen: a start is stuck if it ends more than {stuck} below the median of its
kind; least squares is consistently good if none of its starts is stuck and its worst one is above the median of the
random ones.

{architectures}

{footer}"""


def page(record: dict[str, Any]) -> str:
    """Return the page of the results from the record, as it is read from JSON."""
    sections = []
    for architecture, found in record["architectures"].items():
        rows, scores = [], found["relative_accuracy"]
        for kind in (RANDOM, DIRECT):
            start, end = (np.array(scores[name]) for name in (f"{kind}, start", kind))
            rows.append((
                kind, len(end), f"{start.mean():.3f} ({start.std(ddof=1):.3f})",
                f"{end.mean():.3f} ({end.std(ddof=1):.3f})", f"{np.median(end):.3f}", f"{end.min():.3f}",
                f"{end.max():.3f}", _stuck(end),
            ))  # fmt: skip
        sections += [
            f"## {TITLES[architecture]}, {found['layer']}\n\n{found['setting']}.",
            study.markdown(
                ("start", "number", "at the start: mean (sd)", "at the end: mean (sd)", "median", "worst", "best",
                 "stuck"), rows
            ),
        ]  # fmt: skip
    return PAGE.format(
        claims=study.verdicts(claims(record)),
        footer=experiment.footer("initialisations"),
        networks=record["networks"],
        stuck=STUCK,
        architectures="\n\n".join(sections),
    )


def _stuck(ends: np.ndarray) -> int:
    return int((ends < np.median(ends) - STUCK).sum())


def _decided(scores: Mapping[str, Sequence[float]]) -> tuple[bool, bool]:
    random, direct = (np.array(scores[kind]) for kind in (RANDOM, DIRECT))
    return _stuck(direct) == 0 and bool(direct.min() > np.median(random)), _stuck(random) > 0


def _word(found: bool) -> str:
    return "confirmed" if found else "refuted"


def claims(record: dict[str, Any]) -> list[dict[str, str]]:
    """Return the rows of the table of all experiments."""
    rows = []
    for architecture, found in record["architectures"].items():
        scores, title = found["relative_accuracy"], TITLES[architecture]
        good, poor = _decided(scores)
        random, direct = (np.array(scores[kind]) for kind in (RANDOM, DIRECT))
        n = f"{len(random)} + {len(direct)} starts, 1 pair"
        rows.append(experiment.claim(
            "8, figure 6", f"{title}: least-squares starts are consistently good", "histogram",
            f"worst {direct.min():.3f}, sd {direct.std(ddof=1):.3f}", n, _word(good), units=1,
        ))  # fmt: skip
        rows.append(experiment.claim(
            "8, figure 6", f"{title}: random starts are sometimes stuck", "histogram",
            f"{_stuck(random)} of {len(random)}; worst {random.min():.3f}", n, _word(poor), units=1,
        ))  # fmt: skip
    return rows


def _picture(scores: Mapping[str, Sequence[float]], title: str) -> Figure:
    """Draw overlaid histograms with shared bins."""
    ends = {kind: scores[kind] for kind in (RANDOM, DIRECT)}
    low, high = min(map(min, ends.values())), max(map(max, ends.values()))
    figure = Figure(figsize=(6.0, 3.4), layout="constrained")
    axes = figure.add_subplot()
    for kind, numbers in ends.items():
        axes.hist(numbers, bins=np.linspace(low - 0.005, high + 0.005, 25), alpha=0.6, label=kind)
    axes.set_xlabel("relative accuracy")
    axes.set_ylabel("starts")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"task-loss matching by start: {title}", fontsize="large")
    return figure


if __name__ == "__main__":
    main()
