"""Metrics of relations between samples: all distances (RSA), and similarities to anchors."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from hf_stitch.metrics._catalogue import built_in
from hf_stitch.metrics._neighbours import TIED, invariances_of
from hf_stitch.metrics._rows import (
    Distance,
    RowMoments,
    check_count,
    check_variation,
    directions,
    of_rows,
    pairwise,
    upper,
)
from hf_stitch.metrics.base import FeaturesMetric, Operand
from hf_stitch.options import checked
from hf_stitch.papers import KRIEGESKORTE_2008, MOSCHELLA_2023
from hf_stitch.relative.similarities import Cosine


@of_rows
def rsa(
    x: Tensor, y: Tensor, *, distance: Distance = "correlation", compare: Literal["spearman", "pearson"] = "spearman"
) -> Tensor:
    """Representational similarity analysis: correlation of all distances, in [-1, 1] (Kriegeskorte et al. 2008).

    Args:
        x: Activations of shape ``(n, dx)``, floating point. Row i of ``x`` and of ``y`` must be the same sample.
        y: Activations of shape ``(n, dy)``, floating point.
        distance: Distance between two rows: ``"correlation"`` (1 minus their correlation over the features),
            ``"cosine"`` (1 minus their cosine) or ``"euclidean"``.
        compare: How the ``n (n - 1) / 2`` distances are compared: ``"spearman"`` (rank correlation; ties share their
            mean rank) or ``"pearson"``.

    Example:
        >>> import torch
        >>> x = torch.randn(30, 8)
        >>> round(rsa(x, 3 * x).item(), 6)
        1.0
    """
    check_count("rsa", len(x), 3)
    a, b = (_centred_distances(side, rows, distance, compare) for side, rows in (("x", x), ("y", y)))
    return a @ b / (a.norm() * b.norm())


@built_in("rsa")
class RSA(FeaturesMetric):
    """Streaming ``rsa``."""

    papers = (KRIEGESKORTE_2008,)
    function = staticmethod(rsa)
    counts_rows = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if self.options["distance"] != "correlation":
            self.invariances = invariances_of(self.options["distance"])
        self.differentiable = self.options["compare"] == "pearson"

    @checked
    def min_rows(self, side: Operand, width: int) -> int:
        """Return 3, because two rows have a single distance."""
        return 3

    def sample_matrix(self, rows: Tensor) -> Tensor:
        """Return the centred distances, or their ranks, with 0 on the diagonal."""
        matrix = rows.new_zeros(len(rows), len(rows))
        i, j = torch.triu_indices(len(rows), len(rows), 1, device=rows.device)
        matrix[i, j] = _centred_distances("a side", rows, **self.options)
        return matrix + matrix.T


def _centred_distances(side: str, rows: Tensor, distance: Distance, compare: str) -> Tensor:
    """Return the values to correlate: the centred distances above the diagonal, or their ranks."""
    distances = upper(pairwise(directions("rsa", side, rows, distance), distance))
    values = _ranks(distances) if compare == "spearman" else distances
    values = values - values.mean()
    if values.abs().max() <= 1e-12:
        raise ValueError(f"rsa: all rows of {side} have equal distances, so the value is undefined; pass more rows")
    return values


def _ranks(values: Tensor) -> Tensor:
    """Return ranks from 1; values that are equal up to rounding share the mean of their ranks."""
    ordered, order = values.sort()
    is_new = ordered.diff(prepend=ordered[:1]) > TIED * ordered[-1].abs()
    _, rank_index, counts = is_new.cumsum(0).unique_consecutive(return_inverse=True, return_counts=True)
    ranks = torch.empty_like(values)
    ranks[order] = (counts.cumsum(0) - (counts - 1) / 2).to(values)[rank_index]
    return ranks


# Rows per chunk that is compared with all rows.
_PAIRS = 512


@of_rows
def relative_cosine(x: Tensor, y: Tensor, *, center: bool = True) -> Tensor:
    """Mean cosine between the relative representations of each sample (Moschella et al. 2023, "performance proxy").

    All rows serve as anchors, so the value does not depend on a choice of anchors. It is the mean over i of
    ``cos(r(xᵢ), r(yᵢ))`` with ``r(xᵢ) = (cos(xᵢ, x₁), …, cos(xᵢ, xₙ))``. The cosine of a row with itself is 1 on both
    sides, which raises the value for few rows. To use other anchors, apply ``paired_cosine`` to the outputs of two
    ``RelativeProjection``.

    Args:
        x: Activations of shape ``(n, dx)``, floating point. Row i of ``x`` and of ``y`` must be the same sample.
        y: Activations of shape ``(n, dy)``, floating point.
        center: Whether to subtract the mean of the rows first. If not, activations with a common part, for example
            after a ReLU, have cosines near 1 with each other; the value is then near 1 even for unrelated samples. The
            paper does not centre.

    Example:
        >>> import torch
        >>> x = torch.randn(30, 8)
        >>> round(relative_cosine(x, 3 * x.flip(1)).item(), 6)
        1.0
    """
    if center:
        check_variation("relative_cosine", RowMoments(x, y))
        x, y = x - x.mean(0), y - y.mean(0)
    x, y = directions("relative_cosine", "x", x), directions("relative_cosine", "y", y)
    to_x, to_y = Cosine().against(x), Cosine().against(y)
    cosines = [
        torch.cosine_similarity(to_x(chunk_x), to_y(chunk_y), dim=1, eps=0.0)
        for chunk_x, chunk_y in zip(x.split(_PAIRS), y.split(_PAIRS), strict=True)
    ]
    return torch.cat(cosines).mean()


@built_in("relative_cosine")
class RelativeCosine(FeaturesMetric):
    """Streaming ``relative_cosine``."""

    papers = (MOSCHELLA_2023,)
    function = staticmethod(relative_cosine)
    differentiable = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if not self.options["center"]:
            self.invariances = ("orthogonal", "scaling", "permutation")
