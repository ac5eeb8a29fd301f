"""What the axes of a tensor in a network are: samples, tokens or a grid of positions, channels.

The tensor alone does not tell. What tells is what watched forwards did around it: which axes grow with the batch and
with the text; the layers that made this very tensor or were given it, some of which keep channels on a known axis; how
positions were folded into a grid, and joined to others that belong to none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from torch import nn
from torch.nn.modules import batchnorm, conv, pooling

from hf_stitch.adapters.cutting import tree
from hf_stitch.adapters.cutting.cut import NotACutError, Padding
from hf_stitch.adapters.discovery.operations import Arrangement, Fold, Join
from hf_stitch.adapters.discovery.trace import Call, Trace, TracedTensor
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
"""Layers that are given, and return, channels on the axis after the samples."""


@dataclass(frozen=True)
class Axes:
    """What the axes of a tensor are.

    Attributes:
        spec: Layout, width, grid and prefix tokens.
        order: Which of its axes are those of the layout, in its order; empty if they are in order.
        padding: What is known of padding among its positions.
    """

    spec: RepresentationSpec
    order: tuple[int, ...]
    padding: Padding


class Shapes:
    """Tells axes by what watched forwards did.

    Args:
        model: The model.
        traces: Of 2 and of 3 samples; of a text, two more of one token more.
        longer: Watches a forward of a text several times as long.
        content: Shape of the content in the first trace.
        modality: ``image``, ``text`` or ``tensor``.
    """

    def __init__(
        self,
        model: nn.Module,
        traces: Sequence[Trace],
        longer: Callable[[], Trace],
        content: tuple[int, ...],
        modality: str,
    ) -> None:
        """Nothing is looked at yet."""
        self.model, self.traces, self.content, self.modality = model, traces, content, modality
        self._longer = longer

    def axes(self, name: str, path: tree.Path, what: str) -> Axes:
        """What the axes of the tensor are that a module returns, by the module's name and the way to it there.

        Raises:
            NotACutError: Where axis 0 is not the samples, nothing tells where the channels are, or each token has a
                number and no vector.
        """
        call = self.traces[0].calls[name]
        seen = call.seen()[path]
        order = self._order(call, path, what)
        shape = tuple(seen.shape[axis] for axis in order)
        moved = () if order == tuple(sorted(order)) else order
        if len(shape) == 2:
            return Axes(RepresentationSpec("bd", shape[1]), moved, "absent")
        if len(shape) == 4:
            layout = self._grid_layout(call, seen, what)
            h, channels = (2, 1) if layout == "bchw" else (1, 3)
            spec = RepresentationSpec(layout, shape[channels], (shape[h], shape[h + 1]))
            return Axes(spec, moved, "unknown" if self.modality == "text" else "absent")
        if self.modality == "image":
            prefix, grid, behind = _token_split(shape[1], self._arranged(call), self._grid) or (0, None, 0)
            spec = (
                RepresentationSpec("bnd", shape[2])
                if grid is None or behind
                else RepresentationSpec("bnd", shape[2], grid, prefix)
            )
            return Axes(spec, moved, "absent")
        prefix, padding = self._tokens(name, path, order[1])
        return Axes(RepresentationSpec("bnd", shape[2], prefix_tokens=prefix), moved, padding)

    # -- what grows ---------------------------------------------------------------------------------------------------
    def _order(self, call: Call, path: tree.Path, what: str) -> tuple[int, ...]:
        """The axes in the order samples, positions, channels (of a grid, as they are)."""
        shape, more = self._sizes(call.name, path)[:2]
        samples = [axis for axis, sizes in enumerate(zip(shape, more, strict=True)) if sizes == (2, 3)]
        tokens = self._growing(call.name, path)
        if samples != [0]:
            if len(shape) != 3 or samples != [1] or tokens not in ([], [0]):
                raise NotACutError(
                    f"{what}: axis 0 of its output is not the samples (for 3 samples the shape is {more})"
                )
            return (1, 0, 2)
        if len(shape) == 2 and tokens:
            raise NotACutError(
                f"{what} returns a number for each token and no vectors: its shape, {shape}, grows with the text"
            )
        if len(shape) != 3:
            return tuple(range(len(shape)))
        across = tokens == [2] if self.modality == "text" else self._channels(call, call.seen()[path]) == 1
        return (0, 2, 1) if across else (0, 1, 2)

    def _sizes(self, name: str, path: tree.Path) -> list[tuple[int, ...]]:
        """The shape of a tensor in each trace."""
        return [trace.calls[name].seen()[path].shape for trace in self.traces]

    def _growing(self, name: str, path: tree.Path) -> list[int]:
        """The axes that are longer for a text of one token more."""
        if self.modality != "text":
            return []
        shape, _, longer, _ = self._sizes(name, path)
        return [axis for axis, (n, m) in enumerate(zip(shape, longer, strict=True)) if n != m]

    # -- where channels are -------------------------------------------------------------------------------------------
    def _grid_layout(self, call: Call, seen: TracedTensor, what: str) -> Layout:
        """Channels first or last: as layers say, or where none does, by the proportions of the image."""
        channels = self._channels(call, seen)
        if channels is None and self.modality == "image":
            _, i, j, k = seen.shape
            height, width = self.content[-2:]
            alike = [axis for axis, (h, w) in ((1, (j, k)), (3, (i, j))) if h * width == w * height]
            channels = alike[0] if len(alike) == 1 else None
        if channels is None:
            raise NotACutError(f"{what} returns four axes, {seen.shape}, and nothing tells where its channels are")
        return "bchw" if channels == 1 else "bhwc"

    def _channels(self, call: Call, seen: TracedTensor) -> int | None:
        """The axis of a tensor's channels.

        As the layers say that made this very tensor or were given it; else those nearest of what it was made of, or
        was made of it, without a change of shape; else the last layer before, or the first after, that saw its shape.
        """
        reached, near = {seen.value}, {seen.value}
        while near:
            said = {axis for value in near for axis in self._said_of[value]}
            if len(said) == 1:
                return said.pop()
            near = {other for value in near for other in self._kin[value]} - reached
            reached |= near
        of_shape = [(tick, axis) for tick, other, axis in self._statements if other.shape == seen.shape]
        before = [(tick, axis) for tick, axis in of_shape if tick <= call.exited]
        return max(before)[1] if before else min(of_shape)[1] if of_shape else None

    @cached_property
    def _statements(self) -> list[tuple[int, TracedTensor, int]]:
        """Which layers tell on which axis the channels of what they are given, and return, are; and when."""
        said = []
        for call in self.traces[0].calls.values():
            module = self.model.get_submodule(call.name)
            for given, made in _passes(call):
                for tick, seen in (*((call.entered, one) for one in given), *((call.exited, one) for one in made)):
                    if (axis := _says(module, seen.shape)) is not None:
                        said.append((tick, seen, axis))
        return said

    @cached_property
    def _said_of(self) -> defaultdict[int | None, set[int]]:
        """By tensor, the axes on which layers say that its channels are."""
        said = defaultdict(set)
        for _, seen, axis in self._statements:
            said[seen.value].add(axis)
        return said

    @cached_property
    def _kin(self) -> defaultdict[int | None, set[int | None]]:
        """By tensor, those of its shape that a module made it of or made of it: the axes stay where they are."""
        kin = defaultdict(set)
        for call in self.traces[0].calls.values():
            for given, made in _passes(call):
                for one, other in ((one, other) for one in given for other in made if one.shape == other.shape):
                    kin[one.value].add(other.value)
                    kin[other.value].add(one.value)
        return kin

    # -- what positions are -------------------------------------------------------------------------------------------
    def _arranged(self, call: Call, trace: int = 0) -> Sequence[Arrangement]:
        return self.traces[trace].arrangements[: self.traces[trace].calls[call.name].arranged]

    def _grid(self, positions: int, arranged: Sequence[Arrangement]) -> tuple[int, int] | None:
        """The grid that so many positions were last folded into, or made of."""
        for one in reversed(arranged):
            if not isinstance(one, Fold) or one.length != positions:
                continue
            if one.axis == 2 and one.shape not in self._grids:  # a width and its heads
                continue
            if positions == 1 or 1 not in one.sides:
                return one.sides or None
        return None

    @cached_property
    def _grids(self) -> set[tuple[int, ...]]:
        """The shapes of four axes of which a layer says that the last two are positions."""
        return {(), *(seen.shape for _, seen, axis in self._statements if axis == 1 and len(seen.shape) == 4)}

    def _tokens(self, name: str, path: tree.Path, axis: int) -> tuple[int, Padding]:
        """How many positions stand before the tokens, and what is known of padding among the positions."""
        call, sizes = self.traces[0].calls[name], self._sizes(name, path)[::2]
        if len(self.content) < 2:
            return 0, "unknown"

        def are(tokens: int) -> Callable[[int, Sequence[Arrangement]], bool | None]:
            return lambda positions, _: True if positions == tokens else None

        found = [
            _token_split(size[axis], self._arranged(call, 2 * more), are(self.content[1] + more))
            for more, size in enumerate(sizes)
        ]
        around = [(one[0], one[2]) for one in found if one]
        if len(around) == len(found) and len({before for before, _ in around}) == 1:
            return around[0][0], "behind" if any(behind for _, behind in around) else "masked"
        if self.modality == "text" and sizes[0] == sizes[1] == self._size_if_longer(name, path):
            return 0, "absent"
        return 0, "unknown"

    def _size_if_longer(self, name: str, path: tree.Path) -> tuple[int, ...] | None:
        """The shape of a tensor for a text several times as long; ``None`` if the model does not take one."""
        calls = self._trace_of_longer.calls if self._trace_of_longer else {}
        seen = calls[name].seen().get(path) if name in calls else None
        return seen.shape if seen else None

    @cached_property
    def _trace_of_longer(self) -> Trace | None:
        try:
            return self._longer()
        except Exception:  # the model's own code, which may refuse texts of that length
            return None


def _says(module: nn.Module, shape: tuple[int, ...]) -> int | None:
    """On which axis a layer of this kind has the channels of a tensor that it is given or returns."""
    last = len(shape) - 1
    if isinstance(module, FIRST):
        return 1
    if isinstance(module, nn.LayerNorm) and type(module).forward is not nn.LayerNorm.forward:
        # of other axes perhaps, as in timm's LayerNorm2d
        axes = [axis for axis in (1, last) if (shape[axis],) == tuple(module.normalized_shape)]
        return axes[0] if len(axes) == 1 else None
    return last if isinstance(module, (nn.Linear, nn.LayerNorm, nn.RMSNorm)) else None


def _passes(call: Call) -> list[tuple[list[TracedTensor], list[TracedTensor]]]:
    """For each call of a module, the tensors of three or four axes that it was given, and those that it returned."""

    def values(given: object) -> list[TracedTensor]:
        leaves = [leaf for _, leaf in tree.leaves(given) if isinstance(leaf, TracedTensor)]
        return [leaf for leaf in leaves if leaf.depends and len(leaf.shape) in (3, 4)]

    return [(values(given), values(made)) for given, made in zip(call.arguments, call.outputs, strict=True)]


def _token_split(
    positions: int,
    arranged: Sequence[Arrangement],
    whole: Callable[[int, Sequence[Arrangement]], Whole | None],
) -> tuple[int, Whole, int] | None:
    """How so many positions were joined of a whole and others: the number before it, the whole, the number behind.

    Args:
        positions: How many there are.
        arranged: What was done to positions so far.
        whole: What so many positions are, if they are one.
    """
    if (found := whole(positions, arranged)) is not None:
        return 0, found, 0
    for place, one in reversed(list(enumerate(arranged))):
        if isinstance(one, Join) and one.axis == 1 and sum(one.lengths) == positions:
            for part, length in reversed(list(enumerate(one.lengths))):
                inner = _token_split(length, arranged[:place], whole) if length < positions else None
                if inner is not None:
                    return sum(one.lengths[:part]) + inner[0], inner[1], inner[2] + sum(one.lengths[part + 1 :])
    return None
