"""Stacks of blocks, and joints: where a block adds its last projection to the stream of activations."""

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
"""Modules with weights that can be refitted."""

TOLERANCE = 1e-3
"""Maximum relative error of the contribution of a projection to the stream, in float32."""

DEAD = 1e-6
"""Channels with a factor below this share of the largest factor are not changed."""

RELU = "relu"
"""Name of a functional rectifier at the end of a block."""

RECTIFIERS = (functional.relu, functional.relu_, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_)
"""Functions that may end a block."""


@dataclass(frozen=True)
class Stack:
    """Consecutive blocks of a network with outputs of the same shape.

    Attributes:
        name: Name of the list of modules that contains them.
        blocks: Names of the blocks, in order; the first block always stays.
        offset: Index of the first block in the list.
    """

    name: str
    blocks: tuple[str, ...]
    offset: int

    def places(self, first: int, last: int) -> range:
        """Return the list indices of the blocks after ``first`` up to ``last``."""
        return range(self.offset + first + 1, self.offset + last + 1)


@dataclass(frozen=True)
class Joint:
    """Point at which a block adds the output of a projection to its stream, times a factor per channel.

    Attributes:
        projection: Name of the module to refit.
        scale: Factor of each channel, (width,): a residual multiplier, a LayerScale, a batch norm; 0 where it is
            negligible.
        tail: End of the block after the stream: the name of a norm or an activation, ``relu`` for the function, or
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
        The stacks with at least two blocks, in order.
    """
    groups: dict[tuple[str, RepresentationSpec], list[str]] = {}
    for layer in network.layers:
        parent, _, index = layer.rpartition(".")
        if (
            parent
            and index.isdecimal()
            and isinstance(network.model.get_submodule(parent), nn.ModuleList | nn.Sequential)
        ):
            groups.setdefault((parent, network.spec(layer)), []).append(layer)
    consecutive = []
    for (parent, _), blocks in groups.items():
        indices = [int(block.rpartition(".")[2]) for block in blocks]
        if len(blocks) > 1 and indices == list(range(indices[0], indices[0] + len(indices))):
            consecutive.append(Stack(parent, tuple(blocks), indices[0]))
    return tuple(consecutive)


# -- recording ----------------------------------------------------------------------------------------------
@dataclass
class Taps:
    """Records of blocks in one forward pass: their outputs, their streams, and the inputs of their projections."""

    outputs: dict[str, Representation] = field(default_factory=dict)
    streams: dict[str, Tensor] = field(default_factory=dict)
    inputs: dict[str, Tensor] = field(default_factory=dict)
    output: Any = None


class _Rectified(TorchFunctionMode):
    """Record the input and the output of the last rectifier."""

    def __init__(self, calls: dict[str, tuple[Any, Any]]) -> None:
        super().__init__()
        self.calls = calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = args[0].clone() if func in RECTIFIERS else None
        output = func(*args, **(kwargs or {}))
        if read is not None:
            self.calls.pop(RELU, None)  # move the entry to the end
            self.calls[RELU] = (read,), output
        return output


def run(
    network: Adapter, inputs: Mapping[str, Any], joints: Mapping[str, Joint], blocks: Sequence[str], *,
    complete: bool = True,
) -> Taps:  # fmt: skip
    """Run a network once, and record outputs and streams of blocks, and the inputs of the projections of their joints.

    Args:
        network: The network.
        inputs: Inputs of the model.
        joints: Block -> its joint; streams are recorded for these blocks.
        blocks: Blocks with outputs to record.
        complete: Whether to run the network to its end.

    Returns:
        The records.
    """
    taps, rectified = Taps(), dict[str, Any]()

    def record(name: str, representation: Representation) -> None:
        values = representation.values
        taps.outputs[name] = representation.replace(values=values.clone())
        joint = joints.get(name)
        if joint is not None and joint.tail is None:
            taps.streams[name] = taps.outputs[name].values
        elif joint is not None and joint.tail == RELU:
            taps.streams[name] = rectified[RELU][0][0]

    with ExitStack() as stack:
        if any(joint.tail == RELU for joint in joints.values()):
            stack.enter_context(_Rectified(rectified))
        for name, joint in joints.items():
            projection = network.model.get_submodule(joint.projection)
            stack.callback(projection.register_forward_pre_hook(_recorder(taps.inputs, name)).remove)
            if joint.tail not in (None, RELU):
                tail = network.model.get_submodule(str(joint.tail))
                stack.callback(tail.register_forward_pre_hook(_recorder(taps.streams, name)).remove)
        taps.output = network.run_with_callback(inputs, blocks, record, complete=complete)
    return taps


def _recorder(records: dict[str, Tensor], name: str) -> Any:
    """Return a hook that records the input of a module."""

    def hook(module: nn.Module, args: Any) -> None:
        records[name] = args[0].clone()

    return hook


def output_of(network: Adapter, joint: Joint, stream: Tensor) -> Tensor:
    """Return the output of a block for a stream, from the end of the block."""
    if joint.tail is None:
        return stream
    if joint.tail == RELU:
        return stream.relu()
    output: Tensor = network.model.get_submodule(joint.tail)(stream.clone())
    return output


def rows_of(values: Tensor, layout: str = "") -> Tensor:
    """Return activations as rows, one per position of each sample: (rows, channels)."""
    return (values.movedim(1, -1) if layout == "bchw" else values).flatten(0, -2)


# -- joints -----------------------------------------------------------------------------------------------------------
@torch.no_grad()
def joint_of(network: Adapter, block: str, inputs: Mapping[str, Any]) -> Joint | None:
    """Find the joint of a block by adding noise to its projections.

    Noise is added to the output of each projection with the width of the stream. The projection is a joint if the
    stream changes by this noise, times one factor per channel. The joint with the most inputs is returned.

    Args:
        network: The network.
        block: Name of the block.
        inputs: Inputs of a few samples.

    Returns:
        The joint, or ``None`` without a joint, as with a norm after the projection, or with experts.
    """
    calls: dict[str, tuple[Any, Any]] = {}
    tails: list[str] = []
    linear: list[str] = []
    module = network.model.get_submodule(block)

    def hook_of(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if name not in calls and _is_projection(module, args, output, network.spec(block).width):
                linear.append(name)
            elif name in linear:  # it runs more than once
                linear.remove(name)
            calls[name] = (args, output) if name not in calls else (None, None)

        return hook

    def find_tail(name: str, representation: Representation) -> None:
        for inner, (args, output) in calls.items():
            same = isinstance(output, Tensor) and output.data_ptr() == representation.values.data_ptr()
            single_input = (
                args and len(args) == 1 and isinstance(args[0], Tensor) and args[0].shape == representation.values.shape
            )
            inner_module = None if inner == RELU else network.model.get_submodule(inner)
            if same and single_input and not isinstance(inner_module, (*PROJECTIONS, nn.Dropout)):
                tails.append(inner)

    with ExitStack() as stack, _Rectified(calls):
        for name, inner in module.named_modules(prefix=block):
            if inner is not module and not list(inner.children()):
                stack.callback(inner.register_forward_hook(hook_of(name)).remove)
        network.run_with_callback(inputs, [block], find_tail)
    streams: dict[str | None, Tensor | None] = {}
    for name in sorted(reversed(linear), key=lambda n: -reads(network.model, n)):
        for tail in (None, *tails[-1:]):  # only the last call; earlier modules may work in place
            if tail not in streams:
                streams[tail] = _stream(network, Joint(name, torch.ones(()), tail), block, inputs)
            scale = _scale(network, block, name, tail, inputs, streams[tail])
            if scale is not None:
                return Joint(name, scale, tail)
    return None


def _is_projection(module: Any, args: Any, output: Any, width: int) -> bool:
    """Return whether a module is a plain projection to the width of the stream; subclasses may compute more."""
    kind = next((kind for kind in PROJECTIONS if isinstance(module, kind)), None)
    if kind is None or len(args) != 1 or not module.weight.is_floating_point() or getattr(module, "groups", 1) != 1:
        return False
    if module.weight.shape[1 if kind is Conv1D else 0] != width:
        return False
    if type(module) is kind:
        return True
    plain = kind.forward(module, *args)
    return isinstance(output, Tensor) and plain.shape == output.shape and torch.allclose(plain, output, 1e-4, 1e-6)


def _stream(network: Adapter, joint: Joint, block: str, inputs: Mapping[str, Any]) -> Tensor | None:
    """Return the stream of a block for a joint."""
    return run(network, inputs, {block: joint}, [block], complete=False).streams.get(block)


def reads(model: nn.Module, name: str) -> int:
    """Return the number of inputs of a projection for each output."""
    module: Any = model.get_submodule(name)
    return module.weight.numel() // (module.weight.shape[1] if isinstance(module, Conv1D) else module.weight.shape[0])


def _scale(
    network: Adapter, block: str, name: str, tail: str | None, inputs: Mapping[str, Any], before: Tensor | None
) -> Tensor | None:  # fmt: skip
    """Return the factor of each channel between the output of a projection and the stream; ``None`` if not a joint."""
    noise: list[Tensor] = []

    def disturb(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        values = torch.randn(output.shape, generator=generator).to(output) * output.detach().std().clamp(min=1e-3)
        noise.append(values)
        return output + values

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
    bound = min(eps / torch.finfo(torch.float32).eps * TOLERANCE, 0.1)
    return scale if bool(scale.any()) and float(error) < bound else None


@contextmanager
def _hooked(module: nn.Module, hook: Any) -> Iterator[None]:
    """Register a forward hook temporarily."""
    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()
