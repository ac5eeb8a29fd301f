"""Representational similarity analysis: whether the same pairs of samples are far apart."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from hf_stitch.metrics._catalogue import built_in
from hf_stitch.metrics._neighbours import kept_by
from hf_stitch.metrics._pairwise import Distance, directions, pairwise, upper
from hf_stitch.metrics._rows import check_count, of_rows
from hf_stitch.metrics.base import FeaturesMetric, Operand
from hf_stitch.options import checked
from hf_stitch.papers import KRIEGESKORTE_2008


@of_rows
def rsa(
    x: Tensor, y: Tensor, *, distance: Distance = "correlation", compare: Literal["spearman", "pearson"] = "spearman"
) -> Tensor:
    """Representational similarity analysis: correlation of all pairwise distances (Kriegeskorte et al. 2008).

    Args:
        x: Activations of shape ``(n, dx)``, floating point. Row i of ``x`` and of ``y`` must be the same sample.
        y: Activations of shape ``(n, dy)``, floating point.
        distance: Distance between two rows: ``"correlation"`` (1 minus their correlation over the features),
            ``"cosine"`` (1 minus their cosine) or ``"euclidean"``.
        compare: How the ``n (n - 1) / 2`` distances are compared: ``"spearman"`` (rank correlation; ties share their
            mean rank) or ``"pearson"``.

    Returns:
        Similarity in [-1, 1]; a float for arrays, a 0-d float64 tensor for tensors.

    Raises:
        ValueError: There are fewer than 3 rows, a row has no direction (constant over the features, or 0), or all
            distances of a side are equal.

    Example:
        >>> import torch
        >>> x = torch.randn(30, 8)
        >>> round(rsa(x, 3 * x).item(), 6)
        1.0
    """
    check_count("rsa", len(x), 3)
    a, b = (_compared(side, rows, distance, compare) for side, rows in (("x", x), ("y", y)))
    return a @ b / (a.norm() * b.norm())


@built_in("rsa")
class RSA(FeaturesMetric):
    """Streaming ``rsa``."""

    papers = (KRIEGESKORTE_2008,)
    function = staticmethod(rsa)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if self.options["distance"] != "correlation":
            self.invariances = kept_by(self.options["distance"])
        self.differentiable = self.options["compare"] == "pearson"

    @checked
    def min_rows(self, side: Operand, width: int) -> int:
        """3, because two rows have a single distance."""
        return 3

    def sample_matrix(self, rows: Tensor) -> Tensor:
        """The centred distances, or their ranks, with 0 on the diagonal."""
        found = rows.new_zeros(len(rows), len(rows))
        i, j = torch.triu_indices(len(rows), len(rows), 1, device=rows.device)
        found[i, j] = _compared("a side", rows, **self.options)
        return found + found.T


def _compared(side: str, rows: Tensor, distance: Distance, compare: str) -> Tensor:
    """What is correlated: the distances above the diagonal, or their ranks, about their mean."""
    distances = upper(pairwise(directions("rsa", side, rows, distance), distance))
    values = _ranks(distances) if compare == "spearman" else distances
    values = values - values.mean()
    if values.abs().max() <= 1e-12:
        raise ValueError(f"rsa: all rows of {side} are equally far apart, so the value is undefined; give more rows")
    return values


def _ranks(values: Tensor) -> Tensor:
    """Ranks from 1; equal values share the mean of their ranks."""
    _, place, counts = values.unique(return_inverse=True, return_counts=True)
    return (counts.cumsum(0) - (counts - 1) / 2).to(values)[place]
