"""Low-rank approximations of a representation, in a basis computed from training rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from hf_stitch.matchers import ClosedFormMatcher, Matcher
from hf_stitch.statistics import Moments
from hf_stitch.stitches import LinearStitch, Stitch


def default_ranks(width: int) -> tuple[int, ...]:
    """Return the default ranks of the approximations of a layer, as in Balogh and Jelasity (2025) for their widths.

    The ranks are the width, the multiples of the largest power of 2 that is at most an eighth of the width, and the
    halves of that power down to 1.

    Args:
        width: Number of features, at least 1.

    Returns:
        The ranks, from the width down to 1.

    Raises:
        ValueError: If the width is below 1.

    Example:
        >>> default_ranks(512)
        (512, 448, 384, 320, 256, 192, 128, 64, 32, 16, 8, 4, 2, 1)
        >>> default_ranks(12)
        (12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1)
    """
    if width < 1:
        raise ValueError(f"width must be >= 1, got {width}")
    step = 1 << max((width // 8).bit_length() - 1, 0)
    multiples = [rank for rank in range(width, 0, -1) if rank % step == 0 or rank == width]
    halves = [step >> power for power in range(1, step.bit_length())]
    return (*multiples, *halves)


@dataclass(frozen=True)
class LowRankBasis:
    """Principal directions of training rows, for the projection of any rows.

    Attributes:
        mean: ``(d,)`` float64, the mean of the training rows.
        directions: ``(d, d)`` float64, orthonormal columns by decreasing variance of the training rows.

    Example:
        >>> rows = torch.randn(50, 4)
        >>> basis = LowRankBasis.of(rows)
        >>> torch.linalg.matrix_rank(basis.approximate(rows, 2) - basis.mean).item()
        2
    """

    mean: Tensor
    directions: Tensor

    @classmethod
    def of(cls, rows: Tensor) -> Self:
        """Compute the basis from the singular value decomposition of centred rows.

        Args:
            rows: ``(n, d)`` floating point, the training rows.

        Returns:
            The basis.

        Raises:
            ValueError: If there are at most d rows, so that the directions are undetermined.
        """
        n, width = rows.shape
        if n <= width:
            raise ValueError(
                f"the principal directions of {width} features require more than {width} training samples, got {n}; "
                "pass more samples"
            )
        rows = rows.double()
        mean = rows.mean(0)
        return cls(mean, torch.linalg.svd(rows - mean, full_matrices=False).Vh.T)

    def approximate(self, rows: Tensor, rank: int) -> Tensor:
        """Project rows onto the mean and the leading directions of the training rows.

        Args:
            rows: ``(n, d)`` floating point.
            rank: Number of directions, from 1 to d. At d, the rows are returned unchanged.

        Returns:
            ``(n, d)`` float64.

        Raises:
            ValueError: If the rank is out of range.
        """
        width = len(self.mean)
        if not 1 <= rank <= width:
            raise ValueError(f"rank must be from 1 to {width}, the number of features, got {rank}")
        if rank == width:
            return rows.double()
        directions = self.directions[:, :rank]
        return self.mean + (rows.double() - self.mean) @ directions @ directions.T


@dataclass(frozen=True)
class Approximated(ClosedFormMatcher):
    """Closed-form matcher for a low-rank approximation of the source.

    The stitch projects rows onto the mean and the leading principal directions of its training rows, then maps the
    projection (Balogh and Jelasity 2025, section 5).

    Attributes:
        matcher: The matcher to fit to the approximation. Its map must be linear.
        rank: Number of directions.

    Example:
        >>> from hf_stitch import registries
        >>> x = torch.randn(50, 4)
        >>> stitch = Approximated(registries.matchers.build("lstsq"), 2).fit(Moments(4, 4).update(x, x))
        >>> torch.linalg.matrix_rank(stitch.weight).item()
        2
    """

    name: ClassVar[str] = "approximated"
    title: ClassVar[str] = "map of a low-rank approximation"

    matcher: Matcher
    rank: int

    def fit(self, moments: Moments, dtype: torch.dtype = torch.float32) -> Stitch:
        """Fit the matcher to the moments of the approximation."""
        assert isinstance(self.matcher, ClosedFormMatcher)
        directions = torch.linalg.eigh(moments.sxx).eigenvectors[:, -self.rank :]
        projection = directions @ directions.T
        projected = Moments.of(
            moments.n, moments.mean_x, moments.mean_y, projection @ moments.sxx @ projection, moments.syy,
            projection @ moments.sxy, moments.eps,
        )  # fmt: skip
        stitch = self.matcher.fit(projected, torch.float64)
        if not isinstance(stitch, LinearStitch) or stitch.bias is None:
            raise ValueError(f"approximations require a matcher with an affine map, got {self.matcher.label}")
        weight = stitch.weight.detach()
        bias = stitch.bias.detach() + weight @ (moments.mean_x - projection @ moments.mean_x)
        return LinearStitch.of(weight=(weight @ projection).to(dtype), bias=bias.to(dtype))
