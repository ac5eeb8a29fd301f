"""The identity stitch."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from hf_stitch.stitches.base import Stitch


class IdentityStitch(Stitch):
    """Identity map; for unequal widths it keeps the first ``out_features`` or appends zeros.

    It has no parameters and does no arithmetic: every value is passed on bit for bit, in any dtype.

    Args:
        in_features: Width of the input vectors, at least 1.
        out_features: Width of the output vectors, at least 1.

    Example:
        >>> import torch
        >>> IdentityStitch(2, 3)(torch.tensor([[1.0, 2.0]]))
        tensor([[1., 2., 0.]])
    """

    name: ClassVar[str] = "identity"
    title: ClassVar[str] = "no map"
    affine: ClassVar[bool] = True

    def transform(self, x: Tensor) -> Tensor:
        """Return the input itself for equal widths, otherwise a sliced or zero-padded copy."""
        surplus = self.out_features - self.in_features
        return functional.pad(x, (0, surplus)) if surplus else x

    def matrix(self) -> Tensor:
        """Return the map as ``(out_features, in_features)``, with ones on the diagonal."""
        return torch.eye(self.out_features, self.in_features)
