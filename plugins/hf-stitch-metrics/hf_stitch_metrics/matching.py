"""Metrics that match features: one-to-one by correlation, and by optimal transport."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import torch
from scipy import sparse
from scipy.optimize import linear_sum_assignment, linprog
from torch import Tensor

from hf_stitch.metrics import MomentsMetric, of_rows
from hf_stitch.metrics._rows import RowMoments, check_count, check_variation, nonnegative, variances
from hf_stitch.metrics.base import Invariances
from hf_stitch.papers import LI_2015, arxiv
from hf_stitch.statistics.spectrum import EPS, SecondMoments

KHOSLA_2024 = arxiv(
    "Khosla & Williams: Soft Matching Distance: A metric on neural representations that captures single-neuron tuning",
    "2311.09466",
)


@of_rows
def correlation_matching(x: Tensor, y: Tensor, *, assignment: Literal["hard", "soft"] = "hard") -> Tensor:
    """Compute the mean correlation between matched features, in [-1, 1] (Li et al. 2016).

    Args:
        x: Activations of shape ``(n, dx)``, floating point. Row i of ``x`` and of ``y`` must be the same sample.
        y: Activations of shape ``(n, dy)``, floating point.
        assignment: ``"hard"``: the one-to-one assignment with the maximum sum of correlations; for unequal widths it
            matches ``min(dx, dy)`` features. ``"soft"``: each feature is matched with the most correlated feature of
            the opposite side, and both directions are averaged.

    Example:
        >>> import torch
        >>> x = torch.randn(30, 8)
        >>> round(correlation_matching(x, x.flip(1)).item(), 6)
        1.0
    """
    return _correlation_matching(RowMoments(x, y), assignment=assignment)


def _correlation_matching(moments: SecondMoments, *, assignment: str) -> Tensor:
    correlations = _correlations("correlation_matching", moments)
    if assignment == "soft":
        return (correlations.amax(0).mean() + correlations.amax(1).mean()) / 2
    return correlations[_assign(-correlations)].mean()


class CorrelationMatching(MomentsMetric):
    """Streaming ``correlation_matching``."""

    name = "correlation_matching"
    title = "correlation of matched features"
    papers = (LI_2015,)
    function = staticmethod(correlation_matching)
    formula = staticmethod(_correlation_matching)
    range = (-1.0, 1.0)
    invariances = ("scaling", "permutation", "translation")
    differentiable = True


@of_rows
def soft_matching(x: Tensor, y: Tensor, *, compare: Literal["correlation", "distance"] = "correlation") -> Tensor:
    """Compute soft matching: optimal transport between the features of both sides (Khosla & Williams 2024).

    The features of each side have uniform masses that sum to 1. For equal widths the optimal plan is a permutation.

    Args:
        x: Activations of shape ``(n, dx)``, floating point. Row i of ``x`` and of ``y`` must be the same sample.
        y: Activations of shape ``(n, dy)``, floating point.
        compare: ``"correlation"``: the maximum of ``Σᵢⱼ Pᵢⱼ corr(xᵢ, yⱼ)`` over transport plans P, in [-1, 1].
            ``"distance"``: the square root of the minimum of ``Σᵢⱼ Pᵢⱼ ‖xᵢ - yⱼ‖²`` over centred features, a metric.

    Example:
        >>> import torch
        >>> x = torch.randn(30, 8)
        >>> round(soft_matching(x, x.repeat(1, 2)).item(), 6)
        1.0
    """
    return _soft_matching(RowMoments(x, y), compare=compare)


def _soft_matching(moments: SecondMoments, *, compare: str) -> Tensor:
    if compare == "correlation":
        correlations = _correlations("soft_matching", moments)
        return (_transport_plan(-correlations) * correlations).sum()
    check_variation("soft_matching", moments)
    x_variances, y_variances = variances(moments)
    costs = x_variances[:, None] + y_variances - 2 * moments.sxy
    scale = (x_variances.mean() + y_variances.mean()).detach()
    total = nonnegative("soft_matching", (_transport_plan(costs) * costs).sum(), scale, costs.numel())
    return total.sqrt()


class SoftMatching(MomentsMetric):
    """Streaming ``soft_matching``."""

    name = "soft_matching"
    title = "soft matching of features"
    papers = (KHOSLA_2024,)
    function = staticmethod(soft_matching)
    formula = staticmethod(_soft_matching)
    range = (-1.0, 1.0)
    invariances: Invariances = ("scaling", "permutation", "translation")
    differentiable = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if self.options["compare"] == "distance":
            self.counts_rows = True
            self.higher_is_better, self.triangle_inequality = False, True
            self.range, self.invariances = (0.0, math.inf), ("permutation", "translation")


def _correlations(name: str, moments: SecondMoments) -> Tensor:
    check_count(name, moments.n, 2)
    x_variances, y_variances = variances(moments)
    for side, variance, mean in (("x", x_variances, moments.mean_x), ("y", y_variances, moments.mean_y)):
        constant = variance <= moments.n * (8 * EPS * mean) ** 2
        if constant.any():
            features = constant.nonzero()[:, 0].tolist()
            raise ValueError(
                f"{name}: {len(features)} of {len(mean)} features of {side} are constant (the first: {features[0]}), "
                "so that the value is undefined; drop constant features"
            )
    return moments.sxy / torch.outer(x_variances.sqrt(), y_variances.sqrt())


def _assign(costs: Tensor) -> tuple[Tensor, Tensor]:
    """Return row and column indices of the one-to-one assignment with the minimum cost."""
    rows, columns = linear_sum_assignment(costs.detach().cpu().numpy())
    return torch.from_numpy(rows).to(costs.device), torch.from_numpy(columns).to(costs.device)


def _transport_plan(costs: Tensor) -> Tensor:
    """Return the optimal transport plan between uniform masses, constant with respect to gradients."""
    p, q = costs.shape
    if p == q:  # a vertex of the polytope of plans is then a permutation (Birkhoff)
        return torch.zeros_like(costs, requires_grad=False).index_put(_assign(costs), costs.new_tensor(1 / p))
    marginals = sparse.vstack(
        [sparse.kron(sparse.eye_array(p), np.ones((1, q))), sparse.kron(np.ones((1, p)), sparse.eye_array(q))]
    )
    masses = np.concatenate([np.full(p, 1 / p), np.full(q, 1 / q)])
    solution = linprog(costs.detach().cpu().numpy().ravel(), A_eq=marginals.tocsr(), b_eq=masses, method="highs")
    if solution.status != 0:
        raise ArithmeticError(f"soft_matching: optimal transport of {p} to {q} features failed: {solution.message}")
    return torch.from_numpy(solution.x).to(costs).view(p, q)
