"""Figures of all stitches of a grid, with intervals, from the measures of its samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy.special import ndtr

from hf_stitch.analysis.detection.evidence import Cell
from hf_stitch.analysis.grid.result import StitchGrid, cell_name
from hf_stitch.pairs import Pair
from hf_stitch.printing import warn
from hf_stitch.scoring.measured import Measured, not_beaten, with_interval
from hf_stitch.stitches import StitchingLayer
from hf_stitch.tasks.base import Answers, Array
from hf_stitch.tasks.heads import task_named


def mean_name(layer: str) -> str:
    """Return the name of the predictor that outputs the mean of a layer of the target."""
    return f"mean_only {layer}"


def grid_of(
    pair: Pair, measured: Measured, stitches: Mapping[Cell, StitchingLayer], undefined: Mapping[str, str],
    recipe: Mapping[str, Any], n: int, resamples: int, seed: int,
) -> StitchGrid:  # fmt: skip
    """Return the grid of what was measured of stitches and of the target's means, with a warning of its cautions."""
    task, (rows, columns) = task_named(pair.task), (pair.layers_a, pair.layers_b)
    drawn = {
        who: {name: row[name] for name in (*task.compared, "structural_error") if name in row}
        for who, row in task.drawn(_measures(pair, measured, stitches, seed), resamples=resamples, seed=seed).items()
    }
    cells: dict[str, dict[str, Array]] = {matcher: {} for matcher, _, _ in stitches}
    no_better = []
    for place, (matcher, la, lb) in enumerate(stitches):
        own = {figure: values[:, place] for figure, values in drawn["stitched"].items()}
        for figure, values in own.items():
            of = cells[matcher].setdefault(figure, np.full((len(values), len(rows), len(columns)), np.nan))
            of[:, rows.index(la), columns.index(lb)] = values
        mean = {figure: values[:, columns.index(lb)] for figure, values in drawn["mean_only"].items()}
        if not_beaten(task, {"stitched": own, "mean_only": mean, "chance": drawn["chance"]}):
            no_better.append(cell_name(matcher, la, lb))
    grid = StitchGrid(
        {matcher: {figure: with_interval(values) for figure, values in of.items()} for matcher, of in cells.items()},
        {
            who: {figure: with_interval(values) for figure, values in row.items()}
            for who, row in drawn.items()
            if who != "stitched"
        },
        {
            matcher: {
                figure: differences_from_best(values, task.figures.get(figure, False)) for figure, values in of.items()
            }
            for matcher, of in cells.items()
        },
        rows, columns, str(pair.task), pair.pooling, n, undefined=undefined, recipe=recipe, no_better=tuple(no_better),
        stitches=stitches, networks=(pair.source, pair.target),
    )  # fmt: skip
    if no_better:
        warn(grid.cautions[0])
    return grid


def _measures(pair: Pair, measured: Measured, stitches: Iterable[Cell], seed: int) -> dict[str, Answers]:
    """Return the measures by kind of predictor, those of stitches and means with a column for each."""
    task, found, seen = task_named(pair.task), measured.answers[""], measured.seen

    def stacked(rows: Sequence[Answers]) -> dict[str, Array]:
        return {name: np.stack([row[name] for row in rows], 1) for name in rows[0]}

    errors = [seen["error", pair.pooling, "", cell_name(*cell)] for cell in stitches]
    norms = np.stack([seen["norm", pair.pooling, layer] for layer in pair.layers_b], 1)
    apart = {"error": np.stack(errors, 1), "norm": norms[:, [pair.layers_b.index(lb) for _, _, lb in stitches]]}
    measures: dict[str, Answers] = {
        "stitched": {**stacked([found[cell_name(*cell)] for cell in stitches]), **apart},
        "mean_only": stacked([found[mean_name(layer)] for layer in pair.layers_b]),
        **{who: found[who] for who in ("source", "target") if who in found},
    }
    chance = task.chance(measures, seed)
    return {**measures, "chance": {name: chance[name] for name in task.kept if name in chance}}


def differences_from_best(drawn: Array, higher_is_better: bool) -> Array:
    """Compute p-values of the difference of each stitch from the best of its row and of its column.

    The p-value is that of a normal distribution with the standard deviation of the difference over the resamples: a
    share of resamples could not be small enough for a Holm test of many layers. The best stitch is chosen on the same
    samples, so that p-values of close rivals are somewhat too small.
    """
    better = drawn if higher_is_better else -drawn
    found = []
    for axis in (2, 1):
        values = np.where(np.isnan(better[:1]), -np.inf, better[:1])
        best = np.take_along_axis(better, values.argmax(axis, keepdims=True), axis)
        apart = best - better
        spread = np.nanstd(apart[1:], 0, ddof=1) if len(apart) > 1 else np.nan
        with np.errstate(divide="ignore", invalid="ignore"):  # 0 / 0 for equal ones, of which the p-value is 1
            p = 2 * ndtr(-np.nan_to_num(apart[0] / spread, nan=0.0))
        found.append(np.where(np.isnan(better[0]), np.nan, np.where((best == better)[0], 1.0, p)))
    return np.stack(found)
