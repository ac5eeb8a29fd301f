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
from dr_frankenstein.experiment import PAPER, SHORT, TEST, TITLES, Claim, Preset
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
STUCK, REACHED = 0.1, 0.8
"""A start is stuck if it ends this much below the median of its kind. Training was long enough for a kind if its median
reaches ``REACHED``."""


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


STARTS_CLAIM = {
    architecture: Claim(
        "8, figure 6", f"{title}: most starts achieve the same order of accuracy, random ones are sometimes stuck, "
        "those "
        "from least squares are consistently good", "histogram",
        f"the median of random starts is at most {STUCK} below that of least squares; a random start ends more than "
        f"{STUCK} below the median of its kind; no start from least squares does. The first two are not known if the "
        f"median of random starts stays below {REACHED}: they were trained too short",
    )
    for architecture, title in TITLES.items()
}  # fmt: skip

PAGE = """# Experiment 5: starts of task-loss matching (Csiszárik et al., NeurIPS 2021, section 8, figure 6)

**What to do**: start task loss from least squares. After as many steps, no random start comes near it.

{verdicts}

Setting: {networks}, CIFAR-10, one pair of networks of each architecture, as in the paper; least-squares starts are
fitted on different fifths of the training images, because there is only one solution on all of them. Relative accuracy
on the test images; the spread is that over starts. The paper trains 50 starts of each kind for 30 epochs.

The bound {stuck} was written before these figures were seen. Until this version, two rows confirmed what is "stuck" and
what is "good"; but {reached} of {count} random starts reach {least}, so that slow ones cannot be told from stuck ones.
What a decision takes: 50 random starts, trained until their loss no longer falls.

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
        header = ("start", "number", "at the start: mean (sd)", "at the end: mean (sd)", "median", "worst", "best",
                  f"more than {STUCK} below the median")  # fmt: skip
        sections.append(
            f"## {TITLES[architecture]}, {found['layer']}\n\n{found['setting']}.\n\n{study.markdown(header, rows)}"
        )
    random = np.concatenate([found["relative_accuracy"][RANDOM] for found in record["architectures"].values()])
    return PAGE.format(
        footer=experiment.footer("initialisations"), verdicts=study.verdicts(claims(record)),
        networks=record["networks"], stuck=STUCK, least=REACHED, reached=int((random >= REACHED).sum()),
        count=len(random), architectures="\n\n".join(sections),
    )  # fmt: skip


def _stuck(ends: np.ndarray) -> int:
    return int((ends < np.median(ends) - STUCK).sum())


def parts(random: np.ndarray, direct: np.ndarray) -> list[bool | None]:
    """Return whether most starts do as well, random ones are sometimes stuck, and those of least squares never."""
    trained = bool(np.median(random) >= REACHED)
    same = bool(np.median(random) >= np.median(direct) - STUCK)
    return [same if trained else None, _stuck(random) > 0 if trained else None, _stuck(direct) == 0]


def claims(record: dict[str, Any]) -> list[dict[str, str]]:
    """Return the rows of the table of all experiments."""
    rows = []
    for architecture, found in record["architectures"].items():
        random, direct = (np.array(found["relative_accuracy"][kind]) for kind in (RANDOM, DIRECT))
        ours = (
            f"least squares: worst {direct.min():.3f}, {_stuck(direct)} stuck; random: best {random.max():.3f}, "
            f"{int((random >= REACHED).sum())} reach {REACHED}"
        )
        n = f"{len(random)} + {len(direct)} starts, 1 pair"
        rows.append(STARTS_CLAIM[architecture].row(ours, n, parts(random, direct), len(random)))
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
