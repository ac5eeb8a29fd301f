"""Record the outputs of the modules of a network, in order of completion."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_stitch import Adapter
from hf_stitch.adapters.cutting.surgery import alone
from hf_stitch.adapters.discovery.verify import unchanged

Key = tuple[str, int]
"""Name of a module, and the number of its call in one forward pass, from 0."""

Values = Mapping[str, Tensor]
"""Place in an output or in the arguments -> tensor."""

HIDDEN = -1e4
"""Largest value with which an additive mask hides a position."""


@dataclass(frozen=True)
class Event:
    """One call of a module."""

    key: Key
    kind: str  # class of the module
    outputs: Values
    parent: Key | None = None  # the enclosing call
    inputs: Values = field(default_factory=dict)  # only on request
    masks: Values = field(default_factory=dict)  # true at visible positions; only on request


@torch.no_grad()
def watch(
    adapter: Adapter,
    arguments: Mapping[str, Any],
    see: Callable[[Event], None],
    *,
    with_inputs: Collection[Key] = (),
    put: Mapping[Key, Values] | None = None,
    computed: bool = False,
) -> None:
    """Run a network and report the calls of its modules; its state is restored afterwards.

    Args:
        adapter: The network.
        arguments: Its inputs.
        see: Receives the event of every call as it ends. Its tensors belong to the network, which may overwrite them.
        with_inputs: Calls with inputs and masks in their events.
        put: Call -> replacement of its outputs, at the places that both have.
        computed: Whether events contain the computed outputs, not their replacements.
    """
    running: list[tuple[Key, Values, Values]] = []
    calls: dict[str, int] = {}

    def begin(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            key = name, calls.get(name, 0)
            calls[name] = key[1] + 1
            tensors = dict(_tensors((args, kwargs))) if key in with_inputs else {}
            masks = {place: mask for place, value in tensors.items() if (mask := _as_mask(value)) is not None}
            running.append((key, {place: v.clone() for place, v in tensors.items() if place not in masks}, masks))

        return hook

    def end(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        key, inputs, masks = running.pop()
        returned = _replaced(output, put[key]) if put is not None and key in put else output
        parent = running[-1][0] if running else None
        reported = values_of(output if computed else returned, whole=not key[0])
        see(Event(key, type(module).__name__, reported, parent, inputs, masks))
        return returned

    device = adapter.device
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), alone(adapter.model), unchanged(adapter.model), ExitStack() as hooks:
        torch.manual_seed(0)  # noise is the same in all forwards, or it would be the null
        for name, module in adapter.model.named_modules():
            handles = (
                module.register_forward_pre_hook(begin(name), with_kwargs=True),
                module.register_forward_hook(end, with_kwargs=True),
            )
            for handle in handles:
                hooks.callback(handle.remove)
        adapter._run(adapter.inputs(arguments))  # all texts at once, even if padding changes activations


def values_of(output: Any, *, whole: bool = False) -> dict[str, Tensor]:
    """Return the floating-point and complex tensors of an output, without masks, by their place in it.

    For the whole network, return all tensors.
    """
    tensors = {place: value for place, value in _tensors(output) if value.numel()}
    return {place: v for place, v in tensors.items() if whole or (is_value(v) and _as_mask(v) is None)}


def is_value(tensor: Tensor) -> bool:
    """Return whether a tensor holds numbers, not ids or truth values."""
    return tensor.is_floating_point() and tensor.numel() > 0


def _tensors(value: Any, place: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in nested tuples, lists, mappings and dataclasses, but not in caches.

    Nested tensors are padded with zeros, and complex numbers become two real numbers.
    """
    if isinstance(value, Tensor):
        value = value.to_padded_tensor(0.0) if value.is_nested else value
        yield place, torch.view_as_real(value) if value.is_complex() else value
    elif is_dataclass(value) and not isinstance(value, (type, Mapping)):
        yield from _tensors({attribute.name: getattr(value, attribute.name) for attribute in fields(value)}, place)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, f"{place}.{key}".strip("."))
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from _tensors(item, f"{place}.{index}".strip("."))


def _as_mask(tensor: Tensor) -> Tensor | None:
    """Return the visible positions of a mask; ``None`` if a tensor is not a mask."""
    if tensor.dtype == torch.bool:
        return tensor.clone()
    if not tensor.is_floating_point() or tensor.dim() < 2 or not tensor.numel() or float(tensor.min()) > HIDDEN:
        return None
    hidden = tensor <= HIDDEN
    return ~hidden if bool((hidden | (tensor == 0)).all()) else None


def _replaced(output: Any, values: Values, place: str = "") -> Any:
    """Return an output with some of its tensors replaced."""
    if isinstance(output, Tensor):
        new = values.get(place)
        return output if new is None or output.is_nested or new.shape != output.shape else new.to(output)
    if isinstance(output, Mapping):
        replaced = {key: _replaced(item, values, f"{place}.{key}".strip(".")) for key, item in output.items()}
        return type(output)(**replaced) if type(output) is not dict else replaced
    if isinstance(output, (tuple, list)):
        parts = [_replaced(item, values, f"{place}.{index}".strip(".")) for index, item in enumerate(output)]
        return type(output)(*parts) if hasattr(output, "_fields") else type(output)(parts)
    return output


def dtype_of(model: nn.Module) -> torch.dtype:
    """Return the coarsest floating-point dtype of the weights of a network; float32 without such weights."""
    dtypes = {value.dtype for value in model.parameters() if value.is_floating_point()}
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)


@contextmanager
def in_dtype(model: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Convert the weights of a network in place, and restore their bits afterwards. ``None`` leaves them alone.

    Module attributes set by forward passes are restored as well. A copy would not work: a forward that user code has
    bound to a module would still run the original.
    """
    if dtype is None:
        yield
        return
    original = [
        (value, value.data) for value in {id(v): v for v in (*model.parameters(), *model.buffers())}.values()
        if value.is_floating_point()
    ]  # fmt: skip
    attributes = [(module, dict(vars(module)), dict(module._buffers)) for module in model.modules()]
    try:
        for value, data in original:
            value.data = data.to(dtype)
        yield
    finally:
        for value, data in original:
            value.data = data
        for module, saved, buffers in attributes:
            current = dict(vars(module))
            for name in (name for name, value in current.items() if isinstance(value, Tensor) and name not in saved):
                delattr(module, name)
            vars(module).update({
                name: value for name, value in saved.items()
                if isinstance(value, Tensor) or isinstance(current.get(name), Tensor) or not name.startswith("_")
            })  # fmt: skip
            module._buffers.update(buffers)
