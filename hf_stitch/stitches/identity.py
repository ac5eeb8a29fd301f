"""The stitch that changes nothing."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from hf_stitch.stitches.base import Stitch


class IdentityStitch(Stitch):
    """Passes vectors on as they are; unequal widths keep the first ``out_features`` or append zeros.

    No parameters and no arithmetic: every value comes through bit for bit, in any dtype.

    Example:
        >>> import torch
        >>> IdentityStitch(2, 3)(torch.tensor([[1.0, 2.0]]))
        tensor([[1., 2., 0.]])
    """

    name: ClassVar[str] = "identity"
    title: ClassVar[str] = "no map"

    def transform(self, x: Tensor) -> Tensor:
        """The input itself for equal widths, else a sliced or zero-padded copy."""
        surplus = self.out_features - self.in_features
        return functional.pad(x, (0, surplus)) if surplus else x

    def matrix(self) -> Tensor:
        """The map as ``(out_features, in_features)``: ones on the diagonal."""
        return torch.eye(self.out_features, self.in_features)

    def config(self) -> dict[str, Any]:
        """The widths."""
        return {"in_features": self.in_features, "out_features": self.out_features}
