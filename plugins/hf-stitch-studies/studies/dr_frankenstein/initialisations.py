"""Experiment 5: task-loss matching from random and from least-squares starts (Csiszárik et al. 2021, figure 6).

Least squares has a unique solution, so each of its starts is fitted on a different random fifth of the training images.
All stitching layers of a pair are trained at once on the same images in the same order. They differ only in their
starts. Random starts are also trained half as long, to distinguish slow starts from stuck starts.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import study
from dr_frankenstein import experiment, stitching
from dr_frankenstein.experiment import SHORT, TITLES, Sizes
from hf_stitch_studies import score_curves

from hf_stitch import Adapter, registries

SIZES = {"tiny10": Sizes(10_000, 2_000, 4, batch=32, **SHORT), "resnet20": Sizes(3_000, 1_000, 1, batch=16, **SHORT)}
STARTS = {"tiny10": (5, 10), "resnet20": (1, 50)}
"""Number of pairs, and of starts of each kind and pair."""
PLACES = {"tiny10": "bn3", "resnet20": "layer2.0"}
SHARE = 0.2
"""Share of the training images for the fit of a least-squares start."""
RANDOM, DIRECT, HALF = "random", "least squares", "random, half as long"
STUCK, REACHED = 0.1, 0.8
"""A start is stuck if it ends more than this below the median of its kind and pair. Training was long enough for a
kind if its median reaches ``REACHED``."""


def main() -> None:
    arguments = study.parser(__doc__, "data-dir", "published", "networks", required={"out"}).parse_args()
    record: dict[str, Any] = {"preset": SIZES, "networks": experiment.origin(arguments), "architectures": {}}
    for architecture, layer in PLACES.items():
        sizes, (count, starts) = SIZES[architecture], STARTS[architecture]
        networks = experiment.loaded(architecture, arguments)
        accuracies, pairs = dict[str, list[float]](), []
        for a, b in experiment.disjoint(networks, count):
            one = study.cached(
                arguments.out / "parts" / f"{architecture} {a} {b}.json",
                partial(measured, networks[a], networks[b], layer, starts, sizes, arguments.data_dir),
            )
            pairs.append(f"{a} → {b}")
            for kind, values in one.items():
                accuracies.setdefault(kind, []).extend(values)
            record["architectures"][architecture] = {
                "layer": layer, "setting": str(sizes), "asked": count, "pairs": pairs, "relative_accuracy": accuracies,
            }  # fmt: skip
            study.write_results("initialisations", record, page, arguments.out)


def measured(
    source: Adapter, target: Adapter, layer: str, count: int, sizes: Sizes, data_dir: str | None
) -> dict[str, list[float]]:
    """Train from random and least-squares starts; return the relative accuracies of all starts and ends."""
    train, test = sizes.samples(data_dir)
    random = [registries.matchers.build("random", seed=seed) for seed in range(count)]
    models = {
        RANDOM: stitching.direct(source, target, layer, random, train),
        DIRECT: [
            stitching.direct(source, target, layer, ["lstsq"], train.split(SHARE, seed)[1])[0] for seed in range(count)
        ],
    }
    layers = {f"{kind}, start": dict(enumerate(m.stitch for m in starts)) for kind, starts in models.items()}
    together = [model for starts in models.values() for model in starts]
    shorter = replace(sizes.task_loss, epochs=max(sizes.epochs // 2, 1))
    half = stitching.trained(shorter, models[RANDOM], target, train)
    ends = stitching.trained(sizes.task_loss, together, target, train)
    for kind, some in ((HALF, half), (RANDOM, ends[:count]), (DIRECT, ends[count:])):
        layers[kind] = dict(enumerate(some))
    curves = score_curves(together[0], test, "seed", layers, target=target, batch_size=stitching.BATCH, resamples=2)
    return {kind: [score.value for score in scores.values()] for kind, scores in curves.scores.items()}


(STARTS_CLAIM,) = study.stated(__file__)


def page(record: dict[str, Any]) -> str:
    header = (
        "start", "number", "at the start: mean (sd)", "at the end: mean (sd)", "median", "worst", "best", "stuck",
        f"reach {REACHED}",
    )  # fmt: skip
    sections = []
    for architecture, run in record["architectures"].items():
        scores, rows = run["relative_accuracy"], []
        for kind in (HALF, RANDOM, DIRECT):
            if kind not in scores:
                continue
            start, end = (np.array(scores[name]) for name in (f"{kind.partition(',')[0]}, start", kind))
            rows.append((
                kind, len(end), f"{start.mean():.3f} ({start.std(ddof=1):.3f})",
                f"{end.mean():.3f} ({end.std(ddof=1):.3f})", f"{np.median(end):.3f}", f"{end.min():.3f}",
                f"{end.max():.3f}", "" if kind == HALF else int(sum(stuck(run, kind))), int((end >= REACHED).sum()),
            ))  # fmt: skip
        title = f"## {TITLES[architecture]}, {run['layer']}, {study.counted(_pairs(run), 'pair')}"
        sections.append(f"{title}\n\n{run['setting']}.\n\n{study.markdown(header, rows)}")
    return experiment.written(
        __file__, record, claims(record), stuck=STUCK, least=REACHED,
        architectures="\n\n".join(sections), missing=_missing(record),
    )  # fmt: skip


def _missing(record: dict[str, Any]) -> str:
    """Name the pairs that are not measured yet; empty if all are measured."""
    missing = [
        f"{TITLES[architecture]}: {_pairs(run)} of {run['asked']} pairs"
        for architecture, run in record["architectures"].items() if _pairs(run) < run.get("asked", 1)
    ]  # fmt: skip
    return f" Measured so far: {', '.join(missing)}; the command below resumes." if missing else ""


def _by_pair(run: dict[str, Any], kind: str) -> list[np.ndarray]:
    return np.split(np.array(run["relative_accuracy"][kind]), _pairs(run))


def _pairs(run: dict[str, Any]) -> int:
    return len(run.get("pairs", ["one"]))


def stuck(run: dict[str, Any], kind: str) -> list[int]:
    """Count the stuck starts of a kind, by pair."""
    low = [values < np.median(values) - STUCK for values in _by_pair(run, kind)]
    if kind == RANDOM and HALF in run["relative_accuracy"]:
        halfway = (values < np.median(values) - STUCK for values in _by_pair(run, HALF))
        low = [end & half for end, half in zip(low, halfway, strict=True)]
    return [int(some.sum()) for some in low]


def parts(run: dict[str, Any]) -> list[bool | None]:
    """Return whether most starts are equally good, random starts are sometimes stuck, and least squares never is."""
    pairs = sum(map(bool, stuck(run, RANDOM)))
    gap = study.over(behind(run))
    trained = np.median(run["relative_accuracy"][RANDOM]) >= REACHED
    return [
        study.above(gap, -STUCK) if trained else None,
        (None if pairs == 1 else pairs > 1) if trained else None,
        not any(stuck(run, DIRECT)),
    ]


def behind(run: dict[str, Any]) -> list[float]:
    """Return the median of random starts less the median of least-squares starts, by pair."""
    random, direct = (_by_pair(run, kind) for kind in (RANDOM, DIRECT))
    return [float(np.median(starts) - np.median(best)) for starts, best in zip(random, direct, strict=True)]


def claims(record: dict[str, Any]) -> list[dict[str, str]]:
    rows = []
    for architecture, run in record["architectures"].items():
        random, direct = (np.array(run["relative_accuracy"][kind]) for kind in (RANDOM, DIRECT))
        units = _pairs(run)
        pairs = study.counted(units, "pair")
        gap = study.over(behind(run))
        ours = (
            f"medians, random less least squares: {study.shown(gap) if units > 1 else format(gap['value'], '.3f')};"
            f" random: {sum(stuck(run, RANDOM))} stuck in {sum(map(bool, stuck(run, RANDOM)))} of {pairs}, "
            f"{int((random >= REACHED).sum())} reach {REACHED}; "
            f"least squares: worst {direct.min():.3f}, {sum(stuck(run, DIRECT))} stuck"
        )
        n = f"{len(random)} + {len(direct)} starts, {pairs}"
        rows.append(STARTS_CLAIM.of(TITLES[architecture]).row(ours, n, parts(run), units))
    return rows
