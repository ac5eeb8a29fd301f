"""Ridge regression matcher."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from hf_stitch.matchers._affine import affine_stitch, recorded
from hf_stitch.matchers._solve import require
from hf_stitch.matchers.base import ClosedFormMatcher
from hf_stitch.options import NonNegative
from hf_stitch.statistics import Moments
from hf_stitch.statistics.spectrum import EPS, Spectrum
from hf_stitch.stitches import LinearStitch

Penalty = NonNegative | Literal["gcv"]
"""A ridge penalty, or how it is chosen."""


@dataclass(frozen=True)
class Ridge(ClosedFormMatcher):
    """The affine map that minimises ``‖XW + b - Y‖² + ridge · ‖W‖²``; the intercept b is not penalised.

    The error is a sum over rows, not a mean, as in scikit-learn's ``Ridge(alpha=ridge)``. Works with fewer rows than
    features. Directions of x that are rounding do not count, as for :class:`Lstsq`.

    ``fitted`` contains ``n``, ``r2``, the ``ridge`` used and ``df``, the effective degrees of freedom per output.

    Attributes:
        ridge: Penalty >= 0 (0 is least squares, of minimum norm if the rows do not determine the map), or ``"gcv"``:
            the penalty with the least generalised cross-validation error (Golub, Heath and Wahba 1979, eq. 1.4), one
            for all outputs, from a grid with ten values per decade between ``dx · eps`` and 1000 times the largest
            eigenvalue of ``sxx``. GCV assumes independent rows. Positions of the same image or tokens of the same text
            are not independent, so the selected penalty is then too small.

    Example:
        >>> import torch
        >>> x = torch.randn(50, 3, dtype=torch.float64)
        >>> Ridge(ridge=1e3).fit(Moments(3, 3).update(x, x)).fitted["df"] < 2
        True
    """

    name: ClassVar[str] = "ridge"
    title: ClassVar[str] = "ridge regression"

    ridge: Penalty = "gcv"

    def fit(self, moments: Moments, dtype: torch.dtype = torch.float32) -> LinearStitch:
        """Compute the map."""
        require(moments, 2)
        weight, found = penalised(moments, self.ridge)
        return recorded(affine_stitch(LinearStitch, moments, {"weight": weight}, dtype), moments, **found)


def penalised(moments: Moments, ridge: float | Literal["gcv"]) -> tuple[Tensor, dict[str, float]]:
    """Solve ridge regression."""
    given = None if ridge == "gcv" else float(ridge)
    spectrum = Spectrum.of(moments, "x", sxy=moments.sxy)
    chosen = _least_gcv(moments, spectrum) if given is None else given
    df = 1 + (spectrum.values / (spectrum.values + chosen)).sum().item()
    return spectrum.solve(moments.sxy, chosen).T, {"ridge": chosen, "df": df}


def _least_gcv(moments: Moments, spectrum: Spectrum) -> float:
    """The penalty that minimises ``(RSS / n) / (1 - df / n)²``, computed from the moments.

    With u_i the left singular vectors of centred X, a penalty leaves the share ``s_i = ridge / (value_i + ridge)`` of
    ``u_iᵀY`` unexplained, hence ``RSS = RSS(0) + Σ s_i² ‖u_iᵀY‖²`` and ``n - df = n - 1 - rank + Σ s_i``.
    """
    explained = (spectrum.vectors.T @ moments.sxy).square().sum(1) / spectrum.values
    # Both differences are non-negative up to rounding. If X spans all rows, least squares leaves no residual.
    spare = max(moments.n - 1 - spectrum.rank, 0)
    residual = max((moments.syy.trace() - explained.sum()).item(), 0.0) if spare else 0.0
    least, most = math.log10(moments.dx * EPS), 3.0
    grid = torch.logspace(least, most, round(10 * (most - least)) + 1, dtype=torch.float64, device=moments.device)
    grid = (grid * spectrum.values[-1])[:, None]
    left = grid / (spectrum.values + grid)
    score = (residual + (left.square() * explained).sum(1)) / (spare + left.sum(1)).square()
    return grid[score.argmin()].item()
