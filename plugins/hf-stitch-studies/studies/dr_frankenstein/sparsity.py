"""Experiment 7: sparse stitching layers by least squares and by task loss (Csiszárik et al. 2021, section 8, figure 8).

Entries below 1e-4 are set to zero afterwards. Task loss is penalised by the L1 norm as part of the loss, as in the
paper, and by a soft threshold after each step, which sets entries exactly to zero. The penalty weights of the lasso
differ from the paper: the lasso squares the norm, unlike the paper's equation 3.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import study
from dr_frankenstein import experiment, frankenstein, stitching
from dr_frankenstein.experiment import SHORT, TASK, TITLES, Networks, Sizes
from hf_stitch_studies import score_curves, sparsify, zero_share
from matplotlib.figure import Figure

from hf_stitch import Adapter, Samples, StitchedModel, registries
from hf_stitch.artefacts.joining import join
from hf_stitch.plots import curves
from hf_stitch.stitches import StitchingLayer

SIZES = Sizes(4_000, 2_000, 3, batch=32, **SHORT)
PLACES = {"tiny10": ("bn3", 3), "resnet20": ("layer2.0", 2)}
"""Architecture -> layer, number of pairs."""
DIRECT, PROXIMAL = frankenstein.START, "task loss, soft threshold"
SUPPORT = "task loss, then on its support"
"""The sparsest maps of the soft threshold, trained further without a penalty; entries at zero stay there."""
CONTINUED = 2
"""Number of maps to train on their support."""
ALPHAS = (0.003, 0.01, 0.03, 0.1, 0.2, 0.3)
"""Weights of the lasso."""
PENALTIES = {TASK: ("l1", (0.1,)), PROXIMAL: ("proximal_l1", (0.1, 0.2, 0.4, 0.7))}
"""Method -> penalty, and its weights except 0."""
OWN_PAIRS, OWN_STEPS, OWN_WEIGHTS = 5, 6000, (0.05, 0.1, 0.2)
"""The paper's method, trained long enough: disjoint pairs of Tiny-10, steps, and weights of the L1 norm."""
SPARSE = 0.8
"""Sparsity for the comparison of direct matching and task loss."""
COLLAPSED = 0.5
"""A method has collapsed below this relative accuracy."""


def main() -> None:
    arguments = experiment.read(__doc__)
    record, samples = experiment.started(arguments, SIZES), SIZES.samples(arguments.data_dir)
    for architecture, (layer, count) in PLACES.items():
        networks = experiment.loaded(architecture, arguments)
        pairs = experiment.pairs_of(networks, count)
        runs = {f"{a} → {b}": measured(networks[a], networks[b], layer, *samples) for a, b in pairs}
        record["architectures"][architecture] = {"layer": layer, "runs": runs}
        if architecture == "tiny10":
            record["in the loss"] = in_the_loss(networks, layer, arguments.out / "parts", *samples)
    record = json.loads(json.dumps(study.plain(record)))
    study.write_results("sparsity", record, page, arguments.out, pictures(record))


def points(
    start: StitchedModel, stitches: Mapping[str, Mapping[float, StitchingLayer]], target: Adapter, test: Samples
) -> dict[str, list[dict[str, Any]]]:
    """Score stitches by method and penalty; return penalty, sparsity and accuracy of each stitch."""
    curves = score_curves(start, test, "penalty", stitches, target=target, batch_size=stitching.BATCH)
    return {
        method: [
            {"penalty": weight, "sparsity": zero_share(stitches[method][weight]), "score": score}
            for weight, score in scores.items()
        ]
        for method, scores in curves.scores.items()
    }


def lassos(
    source: Adapter, target: Adapter, layer: str, train: Samples
) -> tuple[StitchedModel, dict[float, StitchingLayer]]:
    """Return the least-squares stitched model, and weight of the lasso -> sparse stitching layer."""
    lasso = [registries.matchers.build("lasso", alpha=alpha) for alpha in ALPHAS]
    start, *sparse = stitching.direct(source, target, layer, ["lstsq", *lasso], train)
    return start, {alpha: sparsify(model.stitch) for alpha, model in zip(ALPHAS, sparse, strict=True)}


def measured(
    source: Adapter, target: Adapter, layer: str, train: Samples, test: Samples
) -> dict[str, list[dict[str, Any]]]:
    """Fit and train with every penalty; return sparsity and accuracy by method and penalty."""
    start, sparse = lassos(source, target, layer, train)
    [free] = stitching.trained(SIZES.task_loss, [start], target, train)
    stitches: dict[str, dict[float, StitchingLayer]] = {DIRECT: {0.0: start.stitch, **sparse}}
    for method, (name, weights) in PENALTIES.items():
        stitches[method] = {0.0: free}
        for weight in weights:
            [end] = stitching.trained(replace(SIZES.task_loss, penalties={name: weight}), [start], target, train)
            stitches[method][weight] = sparsify(end)
    sparsest = dict(list(stitches[PROXIMAL].items())[-CONTINUED:])
    models = [join(source, layer, stitch, target, layer, task=target.task) for stitch in sparsest.values()]
    ends = stitching.trained(SIZES.task_loss, models, target, train)
    stitches[SUPPORT] = dict(zip(sparsest, ends, strict=True))
    return points(start, stitches, target, test)


def in_the_loss(networks: Networks, layer: str, parts: Path, train: Samples, test: Samples) -> dict[str, Any]:
    """Train with the L1 norm in the loss, and fit the lasso; return pair -> method -> points. Resumes in ``parts``."""

    def one(weight: float, start: Any, target: Any) -> dict[str, Any]:
        matcher = replace(SIZES.task_loss, max_steps=OWN_STEPS, penalties={"l1": weight})
        [end] = stitching.trained(matcher, [start], target, train)
        return points(start, {TASK: {weight: sparsify(end)}}, target, test)[TASK][0]

    runs = {}
    for a, b in experiment.disjoint(networks, OWN_PAIRS):
        start, direct = lassos(networks[a], networks[b], layer, train)
        runs[f"{a} → {b}"] = points(start, {DIRECT: direct}, networks[b], test) | {
            TASK: [
                study.cached(parts / f"{a} {b} {weight:g}.json", partial(one, weight, start, networks[b]))
                for weight in OWN_WEIGHTS
            ]
        }
    return {"steps": OWN_STEPS, "runs": runs}


def pictures(record: Mapping[str, Any]) -> dict[str, Figure]:
    figures = {}
    for architecture, one in record["architectures"].items():
        series: dict[str, dict[float, tuple[float, float, float]]] = {}
        for method, shares, values, _ in _by_penalty(one["runs"]):
            ends = float(np.mean(values)), min(values), max(values)
            series.setdefault(method, {})[float(np.mean(shares))] = ends
        title = f"{TITLES[architecture]}, {one['layer']}: mean, worst and best"
        figures[f"sparsity_{architecture}"] = curves(series, axis="sparsity", label="relative accuracy", title=title)
    return figures


def _by_penalty(runs: Mapping[str, Any]) -> Iterator[tuple[str, list[float], list[float], float]]:
    """Yield method, sparsities and relative accuracies of the pairs, and penalty."""
    for method in next(iter(runs.values())):
        for some in zip(*(run[method] for run in runs.values()), strict=True):
            yield method, [p["sparsity"] for p in some], [p["score"]["value"] for p in some], some[0]["penalty"]


DROPS, PAPERS_L1, OURS = study.stated(__file__)


def page(record: dict[str, Any]) -> str:
    sections = []
    for architecture, results in record["architectures"].items():
        runs = results["runs"]
        rows = [(m, f"{weight:g}", study.spread(x), study.spread(y)) for m, x, y, weight in _by_penalty(runs)]
        at = {method: [_at(run[method]) for run in runs.values()] for method in next(iter(runs.values()))}
        cells = [(m, *("not reached" if np.isnan(v) else f"{v:.3f}" for v in values)) for m, values in at.items()]
        sections += [
            f"## {TITLES[architecture]}, {results['layer']}",
            f"![Relative accuracy over sparsity](sparsity_{architecture}.png)",
            study.markdown(("method", "penalty", "sparsity", "relative accuracy"), rows),
            f"Relative accuracy at a sparsity of {SPARSE:.0%}, by pair:",
            study.markdown(("method", *runs), cells),
        ]
    return experiment.written(
        __file__, record, claims(record), own=_own_text(record["in the loss"]), collapsed=COLLAPSED,
        architectures="\n\n".join(sections),
    )  # fmt: skip


def _own_text(own_runs: Mapping[str, Any]) -> str:
    rows = [
        (pair, f"{point['penalty']:g}", f"{point['sparsity']:.3f}", f"{point['score']['value']:.3f}")
        for pair, run in own_runs["runs"].items()
        for point in sorted(run[TASK], key=lambda point: float(point["penalty"]))
    ]
    table = study.markdown(("pair of Tiny-10", "weight", "sparsity", "relative accuracy"), rows)
    return study.text(__file__, "own").format(steps=own_runs["steps"], table=table)


def _at(some: Sequence[Mapping[str, Any]]) -> float:
    """Interpolate the relative accuracy of a method at the sparsity SPARSE; NaN if the method does not reach it."""
    shares, values = zip(*sorted((point["sparsity"], point["score"]["value"]) for point in some), strict=True)
    return float(np.interp(SPARSE, shares, values)) if shares[0] <= SPARSE <= shares[-1] else float("nan")


def compared(runs: Mapping[str, Any], method: str) -> dict[str, tuple[float, float]]:
    """Return the relative accuracy of direct matching and of a method at the sparsity SPARSE, by pair."""
    return {pair: (_at(run[DIRECT]), _at(run[method])) for pair, run in runs.items()}


def claims(record: dict[str, Any]) -> list[dict[str, str]]:
    rows, pairs = [], {}
    for architecture, results in record["architectures"].items():
        n, units = experiment.counted(results["runs"])
        values = [_at(run[DIRECT]) for run in results["runs"].values()]
        parts = [None if np.isnan(value) else value < COLLAPSED for value in values]
        rows.append(DROPS.of(TITLES[architecture]).row(study.spread(values), n, parts, units))
        pairs |= {f"{architecture} {pair}": run for pair, run in results["runs"].items()}
    rows.append(_papers_own(record["in the loss"]))
    for method in (PROXIMAL, SUPPORT):
        at = compared(pairs, method).values()
        parts = [None if np.isnan(lasso + task) else task > lasso for lasso, task in at]
        direct, ours = (study.spread(values) for values in zip(*at, strict=True))
        gain_text = f"more accurate in {parts.count(True)} of {len(parts)} pairs: {ours}; direct matching {direct}"
        rows.append(OURS.of(method).row(gain_text, f"{len(parts)} pairs, 2 architectures", parts, len(parts)))
    return rows


def _papers_own(own_runs: Mapping[str, Any]) -> dict[str, str]:
    """Return the row of L1 in the loss: accuracy at the sparsity SPARSE, and its gain over the lasso, over pairs."""
    at = compared(own_runs["runs"], TASK)
    n, units = experiment.counted(at)
    if np.isnan([*at.values()]).any():
        most = ", ".join(f"{max(p['sparsity'] for p in run[TASK]):.0%}" for run in own_runs["runs"].values())
        return PAPERS_L1.row(f"not reached in every pair: maximum sparsity {most}", n, [None], units)
    direct, ours = map(list, zip(*at.values(), strict=True))
    keeps, gain = study.over(ours), study.over(np.subtract(ours, direct))
    text = f"{study.shown(keeps)}; direct matching {study.spread(direct)}; difference {study.shown(gain)}"
    return PAPERS_L1.row(text, n, [study.above(keeps, COLLAPSED), study.above(gain, 0)], units)
