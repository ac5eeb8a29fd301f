"""The operations of a forward: how much they compute, and how they rearrange positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


@dataclass(frozen=True)
class Fold:
    """A view that splits one axis of three into two, or merges two into one (tokens and grid, width and heads)."""

    axis: int  # index of the merged axis in the tensor of three axes
    length: int  # length of the merged axis
    sides: tuple[int, int] | tuple[()]  # lengths of the two axes; empty if the merged axes are not rows and columns
    shape: tuple[int, ...]  # shape of the tensor with split axes


@dataclass(frozen=True)
class Join:
    """A concatenation of tensors of two or three axes, or padding around one tensor."""

    axis: int  # axis of the concatenation
    lengths: tuple[int, ...]  # length of each part along this axis


Arrangement = Fold | Join
"""A change of the arrangement of positions by one operation."""


class Operations(TorchDispatchMode):
    """Count floating-point operations and record arrangements, without the module hooks that torch's counter needs."""

    def __init__(self) -> None:
        """Start at zero."""
        super().__init__()
        self.count = 0
        self.arrangements: list[Arrangement] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and count it if its number of floating-point operations is known."""
        out = func(*args, **(kwargs or {}))
        if formula := flop_registry.get(func.overloadpacket):
            self.count += formula(*args, **(kwargs or {}), out_val=out)
        if (reads := _ARRANGING.get(func.overloadpacket)) and (arranged := reads(*args, **(kwargs or {}), out=out)):
            self.arrangements.append(arranged)
        return out


def _viewed(values: Tensor, size: Any, *, out: Tensor) -> Fold | None:
    """Return a fold if a view splits an axis of three, or merges axes into one (a grid, or pixels of patches)."""
    before, after = tuple(values.shape), tuple(out.shape)
    flat, folded = (before, after) if len(before) == 3 else (after, before)
    if len(flat) != 3 or len(folded) < 4 or flat[0] != folded[0]:
        return None
    made = flat is after
    if folded[1] * folded[2] == flat[1] and (len(folded) == 4 or (made and len(folded) == 6)):
        return Fold(1, flat[1], (folded[1], folded[2]), folded)
    if folded[1] == flat[1]:
        return Fold(2, flat[2], (folded[2], folded[3]), folded) if len(folded) == 4 else None
    return Fold(1, flat[1], (), folded) if made else None


def _unfolded(
    values: Tensor, kernel: Sequence[int], dilation: Sequence[int], padding: Sequence[int], stride: Sequence[int], *,
    out: Tensor,
) -> Fold:  # fmt: skip
    """Return the grid of patches of ``torch.nn.functional.unfold``."""
    h, w = (
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, d, p, s in zip(values.shape[-2:], kernel, dilation, padding, stride, strict=True)
    )
    return Fold(2, h * w, (h, w), ())


def _concatenated(tensors: Sequence[Tensor], dim: int = 0, *, out: Tensor) -> Join | None:
    if out.dim() not in (2, 3):
        return None
    axis = dim % out.dim()
    return Join(axis, tuple(t.shape[axis] for t in tensors if t.dim() == out.dim()))


def _padded(values: Tensor, pad: Sequence[int], value: float = 0, *, out: Tensor) -> Join | None:
    """Return a join if the padding is along one axis."""
    sides = {values.dim() - 1 - i // 2: (pad[i], pad[i + 1]) for i in range(0, len(pad), 2) if pad[i] or pad[i + 1]}
    if len(sides) != 1 or out.dim() not in (2, 3):
        return None
    ((axis, (before, after)),) = sides.items()
    return Join(axis, (before, values.shape[axis], after))


_ARRANGING: dict[Any, Callable[..., Arrangement | None]] = {
    torch.ops.aten.view: _viewed,
    torch.ops.aten._unsafe_view: _viewed,
    torch.ops.aten.im2col: _unfolded,
    torch.ops.aten.cat: _concatenated,
    torch.ops.aten.constant_pad_nd: _padded,
}
