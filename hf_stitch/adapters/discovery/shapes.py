"""The meaning of the axes of a tensor in a network: samples, tokens or a grid of positions, channels.

The shape of the tensor is not sufficient. The meaning follows from traced forwards: axes that grow with the batch or
the text; layers with channels on a known axis that computed or received the tensor; and operations that split positions
into a grid or concatenate them with positions outside the grid.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from torch import nn
from torch.nn.modules import batchnorm, conv, pooling

from hf_stitch.adapters.cutting import tree
from hf_stitch.adapters.cutting.cut import NotACutError, Padding
from hf_stitch.adapters.discovery.trace import Arrangement, Call, Fold, Join, Trace, TracedTensor
from hf_stitch.representation import Layout, RepresentationSpec

Whole = TypeVar("Whole")

FIRST = (
    conv._ConvNd,
    batchnorm._NormBase,
    nn.GroupNorm,
    nn.Unfold,
    pooling._MaxPoolNd,
    pooling._AvgPoolNd,
    pooling._AdaptiveMaxPoolNd,
    pooling._AdaptiveAvgPoolNd,
)
"""Layers with channels on the axis after the samples, in input and output."""


@dataclass(frozen=True)
class Axes:
    """The meaning of the axes of a tensor."""

    spec: RepresentationSpec  # layout, width, grid and prefix tokens
    order: tuple[int, ...]  # permutation from the axes of the tensor to the layout; empty if they are in order
    padding: Padding  # positions of padding: masked, behind, absent or unknown
    fold: int | None = None  # positions in each row of the first axis, if a sample has several rows


class Shapes:
    """Meaning of axes, determined from traced forwards."""

    def __init__(
        self, model: nn.Module, traces: Sequence[Trace], longer: Callable[[], Trace], content: tuple[int, ...],
        tokens: int, modality: str, grids: Collection[tuple[int, int]] = (),
    ) -> None:  # fmt: skip
        """Store the traces; axes are determined on demand. ``grids`` belong to samples with several rows."""
        self.model, self.traces, self.content, self.modality = model, traces, content, modality
        self.tokens, self.grids = tokens, grids
        self._longer = longer

    def axes(self, name: str, path: tree.Path, subject: str) -> Axes:
        """Return the meaning of the axes of a tensor in the output of a module."""
        call = self.traces[0].calls[name]
        tensor = call.tensors()[path]
        multimodal = self.modality != "text" and len(self.traces) > 2  # a network with texts may divide its images
        if multimodal and len(tensor.shape) in (2, 3) and not self._axes_of_tokens(name, path):
            first, second = (sizes[1:] if sizes[0] == 1 else sizes for sizes in self._sizes(name, path)[:2])
            if first[0] > 2 and first[0] * 3 == second[0] * 2:
                fold = 0 if len(tensor.shape) == 2 else -1 if tensor.shape[0] == 1 else tensor.shape[1]
                positions = math.prod(tensor.shape[:-1]) // 2
                grid = next((candidate for candidate in self.grids if math.prod(candidate) == positions), None)
                return Axes(RepresentationSpec("bnd", tensor.shape[-1], grid), (), "absent", fold)
        order = self._axis_order(call, path, subject)
        shape = tuple(tensor.shape[axis] for axis in order)
        moved = () if order == tuple(sorted(order)) else order
        if len(shape) == 2:
            return Axes(RepresentationSpec("bd", shape[1]), moved, "absent")
        if len(shape) == 4:
            layout = self._grid_layout(call, tensor, subject)
            h, channels = (2, 1) if layout == "bchw" else (1, 3)
            spec = RepresentationSpec(layout, shape[channels], (shape[h], shape[h + 1]))
            return Axes(spec, moved, "unknown" if self.modality == "text" else "absent")
        if self.modality == "image" and not self._axes_of_tokens(name, path):
            prefix, grid, behind = _token_split(shape[1], self._arrangements(call), self._grid) or (0, None, 0)
            spec = (
                RepresentationSpec("bnd", shape[2])
                if grid is None or behind
                else RepresentationSpec("bnd", shape[2], grid, prefix)
            )
            return Axes(spec, moved, "absent")
        prefix, padding = self._tokens(name, path, order[1])
        return Axes(RepresentationSpec("bnd", shape[2], prefix_tokens=prefix), moved, padding)

    # -- which axes grow ----------------------------------------------------------------------------------------------
    def _axis_order(self, call: Call, path: tree.Path, subject: str) -> tuple[int, ...]:
        """Return the axes in the order samples, positions, channels; unchanged for a grid."""
        shape, more = self._sizes(call.name, path)[:2]
        samples = [axis for axis, sizes in enumerate(zip(shape, more, strict=True)) if sizes == (2, 3)]
        tokens = self._axes_of_tokens(call.name, path)
        if samples != [0]:
            if len(shape) != 3 or samples != [1] or tokens not in ([], [0]):
                raise NotACutError(
                    f"axis 0 of the output of {subject} is not the batch (the shape for 3 samples is {more}): cut at "
                    "another layer"
                )
            return (1, 0, 2)
        if len(shape) == 2 and tokens:
            raise NotACutError(
                f"{subject} returns a number for each token, not a vector (the shape {shape} grows with the text): "
                "cut at another layer"
            )
        if len(shape) != 3:
            return tuple(range(len(shape)))
        swap = tokens == [2] if tokens or self.modality == "text" else self._channels(call, call.tensors()[path]) == 1
        return (0, 2, 1) if swap else (0, 1, 2)

    def _sizes(self, name: str, path: tree.Path) -> list[tuple[int, ...]]:
        return [trace.calls[name].tensors()[path].shape for trace in self.traces]

    def _axes_of_tokens(self, name: str, path: tree.Path) -> list[int]:
        """Return the axes that grow if the text has one more token."""
        if len(self.traces) < 3:
            return []
        shape, _, longer = self._sizes(name, path)
        return [axis for axis, (n, m) in enumerate(zip(shape, longer, strict=True)) if n != m]

    # -- axis of the channels -----------------------------------------------------------------------------------------
    def _grid_layout(self, call: Call, tensor: TracedTensor, subject: str) -> Layout:
        """Return the layout of a grid, from the layers around it or from the aspect ratio of the image."""
        channels = self._channels(call, tensor)
        if channels is None and self.modality == "image":
            _, i, j, k = tensor.shape
            height, width = self.content[-2:]
            fitting = [axis for axis, (h, w) in ((1, (j, k)), (3, (i, j))) if h * width == w * height]
            channels = fitting[0] if len(fitting) == 1 else None
        if channels is None:
            raise NotACutError(f"{subject} returns a tensor of shape {tensor.shape} with an unknown axis of channels")
        return "bchw" if channels == 1 else "bhwc"

    def _channels(self, call: Call, tensor: TracedTensor) -> int | None:
        """Return the axis of the channels of a tensor, or ``None`` if it is unknown.

        Layers are used in this order: layers that computed or received the tensor; the nearest layers that
        shape-preserving modules connect to it; the last layer before it or the first layer after it with a tensor of
        the same shape.
        """
        reached, near = {tensor.value}, {tensor.value}
        while near:
            axes = {axis for value in near for axis in self._channels_of[value]}
            if len(axes) == 1:
                return axes.pop()
            near = {relative for value in near for relative in self._connected[value]} - reached
            reached |= near
        of_shape = [(tick, axis) for tick, relative, axis in self._known_channels if relative.shape == tensor.shape]
        before = [(tick, axis) for tick, axis in of_shape if tick <= call.exited]
        return max(before)[1] if before else min(of_shape)[1] if of_shape else None

    @cached_property
    def _known_channels(self) -> list[tuple[int, TracedTensor, int]]:
        """Tick, tensor and axis of channels, for the inputs and outputs of layers with a known axis."""
        channels = []
        for call in self.traces[0].calls.values():
            module = self.model.get_submodule(call.name)
            for received, returned in _inputs_and_outputs(call):
                for tick, tensor in (*((call.entered, x) for x in received), *((call.exited, y) for y in returned)):
                    if (axis := _channel_axis(module, tensor.shape)) is not None:
                        channels.append((tick, tensor, axis))
        return channels

    @cached_property
    def _channels_of(self) -> defaultdict[int | None, set[int]]:
        """For each tensor, the axes of its channels according to layers."""
        axes = defaultdict(set)
        for _, tensor, axis in self._known_channels:
            axes[tensor.value].add(axis)
        return axes

    @cached_property
    def _connected(self) -> defaultdict[int | None, set[int | None]]:
        """For each tensor, the tensors of the same shape that a single module connects to it."""
        connected = defaultdict(set)
        for call in self.traces[0].calls.values():
            for received, returned in _inputs_and_outputs(call):
                for x, y in ((x, y) for x in received for y in returned if x.shape == y.shape):
                    connected[x.value].add(y.value)
                    connected[y.value].add(x.value)
        return connected

    # -- positions ----------------------------------------------------------------------------------------------------
    def _arrangements(self, call: Call, trace: int = 0) -> Sequence[Arrangement]:
        return self.traces[trace].arrangements[: self.traces[trace].calls[call.name].arranged]

    def _grid(self, positions: int, arranged: Sequence[Arrangement]) -> tuple[int, int] | None:
        """Return the grid of the last split or merge of the positions."""
        for arrangement in reversed(arranged):
            if not isinstance(arrangement, Fold) or arrangement.length != positions:
                continue
            if arrangement.axis == 2 and arrangement.shape not in self._grids:  # a width and its heads
                continue
            if positions == 1 or 1 not in arrangement.sides:
                return arrangement.sides or None
        return None

    @cached_property
    def _grids(self) -> set[tuple[int, ...]]:
        """Shapes with four axes and channels on axis 1 in some layer, and the empty shape."""
        return {(), *(tensor.shape for _, tensor, axis in self._known_channels if axis == 1 and len(tensor.shape) == 4)}

    def _tokens(self, name: str, path: tree.Path, axis: int) -> tuple[int, Padding]:
        """Return the number of positions before the tokens, and the kind of padding."""
        call, sizes = self.traces[0].calls[name], self._sizes(name, path)[::2]
        if not self.tokens or (len(sizes) > 1 and self.modality == "tensor" and not self._axes_of_tokens(name, path)):
            return 0, "unknown"

        def is_tokens(tokens: int) -> Callable[[int, Sequence[Arrangement]], bool | None]:
            return lambda positions, _: True if positions == tokens else None

        splits = [
            _token_split(size[axis], self._arrangements(call, 2 * more), is_tokens(self.tokens + more))
            for more, size in enumerate(sizes)
        ]
        margins = [(split[0], split[2]) for split in splits if split]
        if len(margins) == len(splits) and len({before for before, _ in margins}) == 1:
            return margins[0][0], "behind" if any(behind for _, behind in margins) else "masked"
        if self.modality == "text" and sizes[0] == sizes[1] == self._size_if_longer(name, path):
            return 0, "absent"
        return 0, "unknown"

    def _size_if_longer(self, name: str, path: tree.Path) -> tuple[int, ...] | None:
        """Return the shape of a tensor for a much longer text; ``None`` if the model does not accept it."""
        calls = self._trace_of_longer.calls if self._trace_of_longer else {}
        tensor = calls[name].tensors().get(path) if name in calls else None
        return tensor.shape if tensor else None

    @cached_property
    def _trace_of_longer(self) -> Trace | None:
        try:
            return self._longer()
        except Exception:  # the code of the model may reject texts of this length
            return None


def _channel_axis(module: nn.Module, shape: tuple[int, ...]) -> int | None:
    """Return the axis of the channels in the input and output of a layer of this class."""
    last = len(shape) - 1
    if isinstance(module, FIRST):
        return 1
    if isinstance(module, nn.LayerNorm) and type(module).forward is not nn.LayerNorm.forward:
        # may normalise another axis, like timm's LayerNorm2d
        axes = [axis for axis in (1, last) if (shape[axis],) == tuple(module.normalized_shape)]
        return axes[0] if len(axes) == 1 else None
    return last if isinstance(module, (nn.Linear, nn.LayerNorm, nn.RMSNorm)) else None


def _inputs_and_outputs(call: Call) -> list[tuple[list[TracedTensor], list[TracedTensor]]]:
    """Return the input and output tensors of three or four axes for each call of a module."""

    def values(content: object) -> list[TracedTensor]:
        leaves = [leaf for _, leaf in tree.leaves(content) if isinstance(leaf, TracedTensor)]
        return [leaf for leaf in leaves if leaf.depends and len(leaf.shape) in (3, 4)]

    return [(values(x), values(y)) for x, y in zip(call.arguments, call.outputs, strict=True)]


def _token_split(
    positions: int, arranged: Sequence[Arrangement], whole: Callable[[int, Sequence[Arrangement]], Whole | None]
) -> tuple[int, Whole, int] | None:
    """Return the number of positions before a whole (a grid or the tokens), the whole, and the number after it."""
    if (middle := whole(positions, arranged)) is not None:
        return 0, middle, 0
    for step, join in reversed(list(enumerate(arranged))):
        if isinstance(join, Join) and join.axis == 1 and sum(join.lengths) == positions:
            for index, length in reversed(list(enumerate(join.lengths))):
                inner = _token_split(length, arranged[:step], whole) if length < positions else None
                if inner is not None:
                    return sum(join.lengths[:index]) + inner[0], inner[1], inner[2] + sum(join.lengths[index + 1 :])
    return None
