"""The matcher that fits nothing: the baseline of doing nothing."""

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
    """Leaves representations as they are; unequal widths are cut or padded with zeros.

    Example:
        >>> import torch
        >>> x = torch.randn(20, 3)
        >>> Identity().fit(Moments(3, 3).update(x, x)).fitted
        {'n': 20, 'r2': 1.0}
    """

    name: ClassVar[str] = "identity"
    title: ClassVar[str] = "identity"

    def fit(self, moments: Moments, dtype: torch.dtype = torch.float32) -> IdentityStitch:
        """An ``IdentityStitch`` that knows its R² (below 0 where it is worse than the mean); it has no dtype.

        Raises:
            ValueError: There are fewer than 2 rows, or the rows of a side are all equal.
        """
        require(moments, 2)
        return recorded(IdentityStitch(moments.dx, moments.dy), moments)
