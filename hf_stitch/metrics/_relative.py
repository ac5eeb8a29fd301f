"""Similarity of the relative representations of both sides."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_stitch.metrics._catalogue import built_in
from hf_stitch.metrics._pairwise import directions
from hf_stitch.metrics._rows import of_rows
from hf_stitch.metrics.base import FeaturesMetric
from hf_stitch.papers import MOSCHELLA_2023
from hf_stitch.relative.similarities import Cosine

# Rows per chunk that is compared with all others.
_PAIRS = 512


@of_rows
def relative_cosine(x: Tensor, y: Tensor, *, center: bool = True) -> Tensor:
    """Mean cosine between the relative representations of each sample (Moschella et al. 2023, "performance proxy").

    All rows serve as anchors, so the value does not depend on a choice of anchors. It is the mean over i of
    ``cos(r(xᵢ), r(yᵢ))`` with ``r(xᵢ) = (cos(xᵢ, x₁), …, cos(xᵢ, xₙ))``. The cosine of a row with itself is 1 on both
    sides, which raises the value if there are few rows. To use other anchors, apply ``paired_cosine`` to the outputs of
    two ``RelativeProjection``.

    Args:
        x: Activations of shape ``(n, dx)``, floating point. Row i of ``x`` and of ``y`` must be the same sample.
        y: Activations of shape ``(n, dy)``, floating point.
        center: Whether to subtract the mean of the rows first. If not, activations with a common part, for example
            after a ReLU, have cosines near 1 with all others, and so does the value, even for unrelated samples. The
            paper does not centre.

    Returns:
        Similarity in [-1, 1]; a float for arrays, a 0-d float64 tensor for tensors.

    Raises:
        ValueError: A row is 0, or equals the mean if ``center``.

    Example:
        >>> import torch
        >>> x = torch.randn(30, 8)
        >>> round(relative_cosine(x, 3 * x.flip(1)).item(), 6)
        1.0
    """
    if center:
        x, y = x - x.mean(0), y - y.mean(0)
    x, y = directions("relative_cosine", "x", x), directions("relative_cosine", "y", y)
    to_x, to_y = Cosine().against(x), Cosine().against(y)
    cosines = [
        torch.cosine_similarity(to_x(some_x), to_y(some_y), dim=1, eps=0.0)
        for some_x, some_y in zip(x.split(_PAIRS), y.split(_PAIRS), strict=True)
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
