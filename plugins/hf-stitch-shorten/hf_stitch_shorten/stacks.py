"""Stacks of blocks, and where a block adds its last projection to the stream of activations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers.pytorch_utils import Conv1D

from hf_stitch import Adapter
from hf_stitch.representation import Representation, RepresentationSpec

PROJECTIONS = (nn.Linear, Conv1D, nn.Conv2d)
"""Modules whose weights can be refitted."""

TOLERANCE = 1e-3
"""Greatest relative error of what a projection adds to the stream, in float32."""

DEAD = 1e-6
"""Channels whose factor is below this share of the greatest one are left as they are."""

RELU = "relu"
"""Name of a rectifier that is no module, as the end of a block."""

RECTIFIERS = (functional.relu, functional.relu_, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_)
"""Functions without weights with which a block may end."""


@dataclass(frozen=True)
class Stack:
    """Blocks of a network that follow each other and whose outputs have one shape.

    Attributes:
        name: Name of the list of modules that contains them.
        blocks: Names of the blocks, in order; the first one always stays.
        offset: Place of the first block in the list.
    """

    name: str
    blocks: tuple[str, ...]
    offset: int

    def places(self, first: int, last: int) -> range:
        """Return the places in the list of the blocks after ``first`` up to ``last``."""
        return range(self.offset + first + 1, self.offset + last + 1)


@dataclass(frozen=True)
class Joint:
    """Where a block adds the output of a projection to its stream, times a factor for each channel.

    Attributes:
        projection: Name of the module whose weights can be refitted.
        scale: Factor of each channel, (width,): a residual multiplier, a LayerScale, a batch norm; 0 where it is too
            small to be seen.
        tail: What follows the stream in the block: the name of a norm or an activation, ``relu`` for the function, or
            ``None`` if the block outputs the stream.
    """

    projection: str
    scale: Tensor
    tail: str | None


def stacks(network: Adapter) -> tuple[Stack, ...]:
    """Return the stacks of a network, from its verified cuts.

    Args:
        network: The network.

    Returns:
        The stacks with at least two blocks, in their order.
    """
    groups: dict[tuple[str, RepresentationSpec], list[str]] = {}
    for layer in network.layers:
        parent, _, place = layer.rpartition(".")
        if (
            parent
            and place.isdecimal()
            and isinstance(network.model.get_submodule(parent), nn.ModuleList | nn.Sequential)
        ):
            groups.setdefault((parent, network.spec(layer)), []).append(layer)
    found = []
    for (parent, _), blocks in groups.items():
        places = [int(block.rpartition(".")[2]) for block in blocks]
        if len(blocks) > 1 and places == list(range(places[0], places[0] + len(places))):
            found.append(Stack(parent, tuple(blocks), places[0]))
    return tuple(found)


# -- what passes through ----------------------------------------------------------------------------------------------
@dataclass
class Taps:
    """What was seen of blocks in one forward: their outputs, their streams, and what their projections read."""

    outputs: dict[str, Representation] = field(default_factory=dict)
    streams: dict[str, Tensor] = field(default_factory=dict)
    inputs: dict[str, Tensor] = field(default_factory=dict)
    output: Any = None


class _Rectified(TorchFunctionMode):
    """Keep what the last rectifier read, and what it returned."""

    def __init__(self, calls: dict[str, tuple[Any, Any]]) -> None:
        super().__init__()
        self.calls = calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = args[0].clone() if func in RECTIFIERS else None
        found = func(*args, **(kwargs or {}))
        if read is not None:
            self.calls.pop(RELU, None)  # its place is that of the last call
            self.calls[RELU] = (read,), found
        return found


def run(
    network: Adapter, inputs: Mapping[str, Any], joints: Mapping[str, Joint], blocks: Sequence[str], *,
    complete: bool = True,
) -> Taps:  # fmt: skip
    """Run a network once, and keep outputs and streams of blocks, and what the projections of their joints read.

    Args:
        network: The network.
        inputs: Inputs of the model.
        joints: Block -> its joint; streams are those of these blocks.
        blocks: Blocks whose outputs are kept.
        complete: Whether to run the network to its end.

    Returns:
        What was seen.
    """
    taps, rectified = Taps(), dict[str, Any]()

    def keep(name: str, found: Representation) -> None:
        values = found.values
        taps.outputs[name] = found.replace(values=values.clone())
        joint = joints.get(name)
        if joint is not None and joint.tail is None:
            taps.streams[name] = taps.outputs[name].values
        elif joint is not None and joint.tail == RELU:
            taps.streams[name] = rectified[RELU][0][0]

    with ExitStack() as stack:
        if any(joint.tail == RELU for joint in joints.values()):
            stack.enter_context(_Rectified(rectified))
        for name, joint in joints.items():
            read = network.model.get_submodule(joint.projection)
            stack.callback(read.register_forward_pre_hook(_reading(taps.inputs, name)).remove)
            if joint.tail not in (None, RELU):
                tail = network.model.get_submodule(str(joint.tail))
                stack.callback(tail.register_forward_pre_hook(_reading(taps.streams, name)).remove)
        taps.output = network.run_with_callback(inputs, blocks, keep, complete=complete)
    return taps


def _reading(found: dict[str, Tensor], name: str) -> Any:
    """Return a hook that keeps what a module reads."""

    def hook(module: nn.Module, args: Any) -> None:
        found[name] = args[0].clone()

    return hook


def ended(network: Adapter, joint: Joint, stream: Tensor) -> Tensor:
    """Return what a block outputs for a stream: what the end of the block makes of it."""
    if joint.tail is None:
        return stream
    if joint.tail == RELU:
        return stream.relu()
    found: Tensor = network.model.get_submodule(joint.tail)(stream.clone())
    return found


def rows_of(values: Tensor, layout: str = "") -> Tensor:
    """Return activations as rows, one for each position of each sample: (rows, channels)."""
    return (values.movedim(1, -1) if layout == "bchw" else values).flatten(0, -2)


# -- joints -----------------------------------------------------------------------------------------------------------
@torch.no_grad()
def joint_of(network: Adapter, block: str, inputs: Mapping[str, Any]) -> Joint | None:
    """Find where a block adds the output of a projection to its stream, by a trial.

    Noise is added to the output of each projection of the width of the stream. If the stream changes by this noise,
    times one factor for each channel, the joint is there. The projection that reads most is taken.

    Args:
        network: The network.
        block: Name of the block.
        inputs: Inputs of a few samples.

    Returns:
        The joint, or ``None`` if the block has none: behind a norm, or in experts.
    """
    seen: dict[str, tuple[Any, Any]] = {}
    tails: list[str] = []
    linear: list[str] = []
    module = network.model.get_submodule(block)

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if name not in seen and _is_projection(module, args, output, network.spec(block).width):
                linear.append(name)
            elif name in linear:  # it runs more than once
                linear.remove(name)
            seen[name] = (args, output) if name not in seen else (None, None)

        return hook

    def keep(name: str, found: Representation) -> None:
        for inner, (args, output) in seen.items():
            same = isinstance(output, Tensor) and output.data_ptr() == found.values.data_ptr()
            alone = args and len(args) == 1 and isinstance(args[0], Tensor) and args[0].shape == found.values.shape
            inside = None if inner == RELU else network.model.get_submodule(inner)
            if same and alone and not isinstance(inside, (*PROJECTIONS, nn.Dropout)):
                tails.append(inner)

    with ExitStack() as stack, _Rectified(seen):
        for name, inner in module.named_modules(prefix=block):
            if inner is not module and not list(inner.children()):
                stack.callback(inner.register_forward_hook(note(name)).remove)
        network.run_with_callback(inputs, [block], keep)
    streams: dict[str | None, Tensor | None] = {}
    for name in sorted(reversed(linear), key=lambda n: -reads(network.model, n)):
        for tail in (None, *tails[-1:]):  # what is called last; others may have worked in place
            if tail not in streams:
                streams[tail] = _stream(network, Joint(name, torch.ones(()), tail), block, inputs)
            scale = _scale(network, block, name, tail, inputs, streams[tail])
            if scale is not None:
                return Joint(name, scale, tail)
    return None


def _is_projection(module: Any, args: Any, output: Any, width: int) -> bool:
    """Return whether a module writes the width of the stream, and what its weights say, as subclasses may not."""
    kind = next((kind for kind in PROJECTIONS if isinstance(module, kind)), None)
    if kind is None or len(args) != 1 or not module.weight.is_floating_point() or getattr(module, "groups", 1) != 1:
        return False
    if module.weight.shape[1 if kind is Conv1D else 0] != width:
        return False
    if type(module) is kind:
        return True
    own = kind.forward(module, *args)
    return isinstance(output, Tensor) and own.shape == output.shape and torch.allclose(own, output, 1e-4, 1e-6)


def _stream(network: Adapter, joint: Joint, block: str, inputs: Mapping[str, Any]) -> Tensor | None:
    """Return the stream of a block with some joint."""
    return run(network, inputs, {block: joint}, [block], complete=False).streams.get(block)


def reads(model: nn.Module, name: str) -> int:
    """Return how many numbers a projection reads for each that it writes."""
    module: Any = model.get_submodule(name)
    return module.weight.numel() // (module.weight.shape[1] if isinstance(module, Conv1D) else module.weight.shape[0])


def _scale(
    network: Adapter, block: str, name: str, tail: str | None, inputs: Mapping[str, Any], before: Tensor | None
) -> Tensor | None:  # fmt: skip
    """Return the factor of each channel with which the output of a projection enters the stream, if it does."""
    noise: list[Tensor] = []

    def disturb(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        draw = torch.Generator().manual_seed(0)
        drawn = torch.randn(output.shape, generator=draw).to(output) * output.detach().std().clamp(min=1e-3)
        noise.append(drawn)
        return output + drawn

    with _hooked(network.model.get_submodule(name), disturb):
        after = _stream(network, Joint(name, torch.ones(()), tail), block, inputs)
    if before is None or after is None or len(noise) != 1:
        return None
    convolves = isinstance(network.model.get_submodule(name), nn.Conv2d)
    added = rows_of(noise[0].double(), "bchw" if convolves else "")
    change = rows_of(after.double() - before.double(), network.spec(block).layout)
    if added.shape != change.shape:
        return None
    scale = (added * change).sum(0) / added.square().sum(0)
    scale = scale.where(scale.abs() > DEAD * scale.abs().max(), 0)
    eps = torch.finfo(before.dtype).eps
    rounding = eps * rows_of(before.double(), network.spec(block).layout).norm(dim=0)
    error = ((change - scale * added).norm(dim=0) - rounding).clamp(min=0).norm() / change.norm().clamp(min=1e-30)
    size = min(eps / torch.finfo(torch.float32).eps * TOLERANCE, 0.1)
    return scale if bool(scale.any()) and float(error) < size else None


@contextmanager
def _hooked(module: nn.Module, hook: Any) -> Iterator[None]:
    """Hook a module."""
    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()
