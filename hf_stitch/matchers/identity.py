"""The identity matcher: the baseline without a fitted map."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from hf_stitch.matchers._affine import recorded
from hf_stitch.matchers._solve import require
from hf_stitch.matchers.base import ClosedFormMatcher
from hf_stitch.statistics import Moments
from hf_stitch.stitches import IdentityStitch


@dataclass(frozen=True)
class Identity(ClosedFormMatcher):
    """Identity map; for unequal widths, features are cut or padded with zeros.

    Example:
        >>> import torch
        >>> x = torch.randn(20, 3)
        >>> Identity().fit(Moments(3, 3).update(x, x)).fitted
        {'n': 20, 'r2': 1.0}
    """

    name: ClassVar[str] = "identity"
    title: ClassVar[str] = "identity"

    def fit(self, moments: Moments, dtype: torch.dtype = torch.float32) -> IdentityStitch:
        """Create the identity map and compute its R²."""
        require(moments, 2)
        return recorded(IdentityStitch(moments.dx, moments.dy), moments)
