"""What the axes of a tensor in a network are: samples, tokens or a grid of positions, channels."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn

from ..representation import Form, Layout
from . import _tree
from .cut import NotACutError
from .trace import Call, Seen, Trace


class Shapes:
    """Tells axes by what grows with the batch and with the text, and by the kind of layers around.

    Args:
        model: The model.
        traces: Of 2 and of 3 samples; of a text, two more of one token more.
        tokens: Length of the text in the first trace.
        modality: ``image``, ``text`` or ``tensor``.
    """

    def __init__(self, model: nn.Module, traces: Sequence[Trace], tokens: int, modality: str) -> None:
        """Nothing is looked at yet."""
        self.model, self.traces, self.tokens, self.modality = model, traces, tokens, modality

    def form(self, call: Call, seen: Seen, axes: tuple[int, ...], what: str) -> Form:
        """The form of a tensor whose axes are in the order samples, positions, channels (or, of a grid, not yet)."""
        shape = tuple(seen.shape[axis] for axis in axes)
        if len(shape) == 2:
            return Form("bd", shape[1])
        if len(shape) == 4:
            layout = self._grid_layout(shape, *self._channels(call.name, shape), what)
            h = 2 if layout == "bchw" else 1
            return Form(layout, shape[1 if layout == "bchw" else 3], (shape[h], shape[h + 1]))
        grid = self._token_grid(call, shape[1]) if self.modality == "image" else None
        return Form("bnd", shape[2], grid, shape[1] - math.prod(grid) if grid else 0)

    def axes(self, name: str, path: _tree.Path, seen: Seen, what: str) -> tuple[tuple[int, ...], bool]:
        """The axes of a tensor in the order samples, positions, channels, and whether positions are a text's tokens.

        Samples and tokens are told by what grows with them, channels by the kind of layers inside the module.

        Raises:
            NotACutError: Where no axis is the samples, or channels lie before them.
        """
        order = list(range(len(seen.shape)))
        samples = self._grows(name, path, 1, 3)
        if samples != [0]:
            tokens = self._grows(name, path, -1, self.tokens + 1) if self.modality == "text" else []
            if len(order) != 3 or samples != [1] or tokens not in ([], [0]):
                shape = self.traces[1].calls[name].seen()[path].shape
                raise NotACutError(
                    f"{what}: axis 0 of its output is not the samples (for 3 samples the shape is {shape})"
                )
            order = [1, 0, 2]
        if len(order) != 3:
            return tuple(order), True
        if self.modality == "text":
            tokens = self._grows(name, path, -1, self.tokens + 1)
            if tokens == [2]:
                order = [0, 2, 1]
            return tuple(order), len(tokens) == 1
        first, last = self._channels(name, tuple(seen.shape[axis] for axis in order))
        return (tuple(order) if last or not first else (order[0], order[2], order[1])), True

    def _grows(self, name: str, path: _tree.Path, example: int, size: int) -> list[int]:
        """The axes that are as long in another example as that has samples, or tokens, and were not before."""
        before, after = (self.traces[n].calls[name].seen()[path].shape for n in (0, example))
        return [axis for axis, (a, b) in enumerate(zip(before, after, strict=True)) if b == size and a == size - 1]

    def _channels(self, name: str, shape: tuple[int, ...]) -> tuple[bool, bool]:
        """Whether layers inside a module speak for channels on axis 1, and for channels on the last axis."""
        first = last = False
        for module in self.model.get_submodule(name).modules():
            if isinstance(module, (nn.Conv1d, nn.Conv2d)):
                first |= module.out_channels == shape[1]
            elif isinstance(module, (nn.modules.batchnorm._BatchNorm, nn.InstanceNorm2d)):
                first |= module.num_features == shape[1]
            elif isinstance(module, nn.Linear):
                last |= module.out_features == shape[-1]
            elif isinstance(module, nn.LayerNorm):
                last |= module.normalized_shape == (shape[-1],)
        return first, last

    def _grid_layout(self, shape: tuple[int, ...], first: bool, last: bool, what: str) -> Layout:
        """Channels first or last: by the kind of layers in the block, or where that does not tell, by the square."""
        _, i, j, k = shape
        if first != last:
            return "bchw" if first else "bhwc"
        if (i == j) != (j == k):
            return "bhwc" if i == j else "bchw"
        if first:  # a cube, with layers of both kinds: those around a convolution are mostly channels first
            return "bchw"
        raise NotACutError(f"{what} returns four axes, {shape}, and nothing tells where its channels are")

    def _token_grid(self, call: Call, tokens: int) -> tuple[int, int] | None:
        """The grid that tokens form: that of the last 4-d output before which fits, else a square."""
        for earlier in sorted(self.traces[0].calls.values(), key=lambda c: -c.exited):
            if earlier.exited > call.exited:
                continue
            for seen in earlier.seen().values():
                if len(seen.shape) == 4 and seen.depends:
                    for h, w in (seen.shape[2:], seen.shape[1:3]):
                        if 0 <= tokens - h * w <= 16 and h * w > 1:
                            return (h, w)
        side = math.isqrt(tokens)
        return (side, side) if side * side == tokens else None
