"""Figures of all stitches of a grid, with intervals, from the measures of its samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm

from hf_stitch.analysis.grid.result import direction
from hf_stitch.analysis.scoring import resampled

Array = NDArray[Any]
Measured = Mapping[str, Array]


def figures(measures: Measured, own: str, weights: Array) -> dict[str, Array]:
    """Compute the figures of a predictor, or of several at once, for weights of the samples."""

    def total(name: str) -> Array:
        values = weights @ measures[name].astype(np.float64)
        return values if values.ndim == 2 else values[:, None]

    if f"{own}.tokens" in measures:
        tokens = total("target.tokens")
        loss, reference = (total(f"{who}.cross_entropy") / tokens for who in (own, "target"))
        found = {"relative_perplexity": np.exp(loss - reference), "perplexity": np.exp(loss)}
        found["agreement"] = total(f"{own}.agreement") / tokens
    elif f"{own}.right" not in measures:
        found = {"agreement": total(f"{own}.agreement") / weights.sum(1)[:, None]}
    else:
        n, right, reference = weights.sum(1)[:, None], total(f"{own}.right"), total("target.right")
        relative = np.full(np.broadcast(right, reference).shape, np.nan)
        np.divide(right, reference, out=relative, where=reference > 0)
        found = {"relative_accuracy": relative, "accuracy": right / n, "agreement": total(f"{own}.agreement") / n}
    single = measures[f"{own}.agreement"].ndim == 1
    return {name: values[:, 0] if single else values for name, values in found.items()}


def drawn_figures(
    measures: Measured, norms: Array, predictors: tuple[str, ...], *, resamples: int, seed: int
) -> dict[str, dict[str, Array]]:
    """Compute the figures of all predictors on all samples, and on resamples shared by all of them."""
    drawn: dict[str, list[dict[str, Array]]] = {name: [] for name in predictors}
    for weights in resampled(len(measures["target.agreement"]), resamples, seed):
        for name in predictors:
            found = figures(measures, name, weights)
            if name == "stitched":
                found["structural_error"] = (weights @ measures["error"]) / (weights @ norms)
            drawn[name].append(found)
    return {
        name: {figure: np.concatenate([chunk[figure] for chunk in chunks]) for figure in chunks[0]}
        for name, chunks in drawn.items()
    }


def with_interval(drawn: Array) -> Array:
    """Return values and both ends of their 95% intervals."""
    low, high = np.quantile(drawn[1:], [0.025, 0.975], axis=0)
    return np.stack([drawn[0], low, high], -1)


def differences_from_best(drawn: Array, figure: str) -> Array:
    """Compute p-values of the difference of each stitch from the best of its row and of its column.

    The p-value is that of a normal distribution with the standard deviation of the difference over the resamples: a
    share of resamples could not be small enough for a Holm test of many layers. The best stitch is chosen on the same
    samples, so that p-values of close rivals are somewhat too small.
    """
    better = drawn if direction(figure) == "higher" else -drawn
    found = []
    for axis in (2, 1):
        values = np.where(np.isnan(better[:1]), -np.inf, better[:1])
        best = np.take_along_axis(
            better, np.broadcast_to(values.argmax(axis, keepdims=True), _shape(better, axis)), axis
        )
        apart = best - better
        with np.errstate(divide="ignore", invalid="ignore"):  # 0 / 0 for equal ones, of which the p-value is 1
            p = 2 * norm.sf(np.nan_to_num(apart[0] / apart[1:].std(0, ddof=1), nan=0.0))
        found.append(np.where(np.isnan(better[0]), np.nan, np.where((best == better)[0], 1.0, p)))
    return np.stack(found)


def _shape(values: Array, axis: int) -> tuple[int, ...]:
    return tuple(1 if place == axis else length for place, length in enumerate(values.shape))
