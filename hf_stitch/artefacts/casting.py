"""Another dtype for a stitched model, as transformers casts networks of its own on loading."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from hf_stitch.artefacts.skeleton import weightless
from hf_stitch.registry import registries

if TYPE_CHECKING:
    from hf_stitch.artefacts.modeling import StitchedModel


def dtype_of(given: torch.dtype | str | None) -> torch.dtype | None:
    """A dtype by its name.

    Returns:
        ``None`` where weights stay as they were saved (``None`` or ``"auto"``).

    Raises:
        ValueError: If it is no floating-point dtype of torch.

    Example:
        >>> dtype_of("bfloat16")
        torch.bfloat16
    """
    if given is None or given == "auto":
        return None
    found = getattr(torch, given, None) if isinstance(given, str) else given
    if not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise ValueError(f"dtype must be a floating-point dtype of torch ('bfloat16', …) or 'auto', got {given!r}")
    return found


def cast(model: StitchedModel, dtype: torch.dtype) -> None:
    """Cast the weights of a stitched model in place.

    As in transformers, buffers that a network computes for itself (the frequencies of rotary embeddings) and modules
    that it keeps in float32 stay as they are: cast, they would give other numbers.
    """
    for side, half in (("source", model.source), ("target", model.target)):
        stays = _stays(getattr(model.config, side)["blueprint"], dtype)
        for name, tensor in (*half.model.named_parameters(), *half.model.named_buffers()):
            if tensor.is_floating_point() and not stays(name):
                tensor.data = tensor.data.to(dtype)
    model.stitch.to(dtype)


def _stays(blueprint: Mapping[str, Any] | None, dtype: torch.dtype) -> Callable[[str], bool]:
    """Whether a tensor of the network of a blueprint stays as it is, by its name; all of user code is cast."""
    if blueprint is None:
        return lambda name: False
    with weightless():
        network: Any = registries.adapters.get(blueprint["library"]).build(blueprint)
    computed = {name for name, _ in network.named_buffers()} - network.state_dict().keys()
    plan = network._get_dtype_plan(dtype) if hasattr(network, "_get_dtype_plan") else {}
    kept = [re.compile(rf"(^|\.){re.escape(module)}(\.|$)") for module in plan]
    return lambda name: name in computed or any(module.search(name) for module in kept)
