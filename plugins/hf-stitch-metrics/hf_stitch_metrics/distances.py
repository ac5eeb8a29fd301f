"""Distance correlation: dependence between the pairwise distances of both sides."""

from __future__ import annotations

from torch import Tensor

from hf_stitch.metrics import FeaturesMetric, of_rows
from hf_stitch.metrics._rows import RowMoments, centred, check_variation, nonnegative, pairwise
from hf_stitch.papers import arxiv

SZEKELY_2007 = arxiv("Székely et al.: Measuring and testing dependence by correlation of distances", "0803.4101")


@of_rows
def distance_correlation(x: Tensor, y: Tensor) -> Tensor:
    """Compute the distance correlation, in [0, 1]: ``√(⟨A, B⟩ / (‖A‖ ‖B‖))`` (Székely et al. 2007).

    A and B are the doubly centred Euclidean distance matrices. In the limit of many rows the value is 0 only for
    independent sides; for a finite number of rows it is positive.

    Args:
        x: Activations of shape ``(n, dx)``, floating point. Row i of ``x`` and of ``y`` must be the same sample.
        y: Activations of shape ``(n, dy)``, floating point.

    Example:
        >>> import torch
        >>> x = torch.randn(30, 8)
        >>> round(distance_correlation(x, 2 * x + 1).item(), 6)
        1.0
    """
    check_variation("distance_correlation", RowMoments(x, y))
    a, b = (centred(pairwise(rows, "euclidean")) for rows in (x, y))
    norms = (a.square().sum() * b.square().sum()).sqrt()
    return (nonnegative("distance_correlation", (a * b).sum(), norms.detach(), len(x)) / norms).sqrt()


class DistanceCorrelation(FeaturesMetric):
    """Streaming ``distance_correlation``."""

    name = "distance_correlation"
    title = "distance correlation"
    papers = (SZEKELY_2007,)
    function = staticmethod(distance_correlation)
    invariances = ("orthogonal", "scaling", "permutation", "translation")
    differentiable = True
