"""Ridge regression towards the identity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from hf_stitch.matchers._affine import affine_stitch, recorded
from hf_stitch.matchers._solve import require
from hf_stitch.matchers.base import ClosedFormMatcher
from hf_stitch.matchers.ridge import Penalty, penalised
from hf_stitch.statistics import Moments
from hf_stitch.stitches import LinearStitch


@dataclass(frozen=True)
class RidgeToIdentity(ClosedFormMatcher):
    """The affine map that minimises ``‖XW + b - Y‖² + ridge · ‖W - I‖²``; the intercept b is not penalised.

    It is the identity plus a ridge regression of ``Y - X``. Where two representations of equal width are near each
    other, as those of a network and of its fine-tuned copy, few rows suffice: what they do not determine stays as it
    is, whereas :class:`Ridge` removes it.

    ``fitted`` contains ``n``, ``r2``, the ``ridge`` used and ``df``, the effective degrees of freedom per output.

    Attributes:
        ridge: Penalty >= 0, or ``"gcv"``: that with the least generalised cross-validation error, as for
            :class:`Ridge`.

    Example:
        >>> import torch
        >>> x = torch.randn(5, 8, dtype=torch.float64)
        >>> stitch = RidgeToIdentity().fit(Moments(8, 8).update(x, x + 1), dtype=torch.float64)
        >>> torch.allclose(stitch(torch.ones(8).double()), torch.full((8,), 2.0).double())
        True
    """

    name: ClassVar[str] = "ridge_to_identity"
    title: ClassVar[str] = "ridge regression towards the identity"
    unequal_widths: ClassVar[bool] = False

    ridge: Penalty = "gcv"

    def fit(self, moments: Moments, dtype: torch.dtype = torch.float32) -> LinearStitch:
        """Compute the map."""
        if moments.dx != moments.dy:
            raise ValueError(f"ridge_to_identity needs equal widths, got {moments.dx} -> {moments.dy}; use 'ridge'")
        require(moments, 2)
        change = Moments.of(
            moments.n,
            moments.mean_x,
            moments.mean_y - moments.mean_x,
            moments.sxx,
            moments.sxx + moments.syy - moments.sxy - moments.sxy.T,
            moments.sxy - moments.sxx,
            moments.eps,
        )
        weight, found = penalised(change, self.ridge)
        weight = weight + torch.eye(moments.dx, dtype=weight.dtype, device=weight.device)
        return recorded(affine_stitch(LinearStitch, moments, {"weight": weight}, dtype), moments, **found)
