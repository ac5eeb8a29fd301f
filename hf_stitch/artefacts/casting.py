"""Casting a stitched model to another dtype, in the way transformers casts its models when loading."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_stitch.adapters.rewriting import network_of
from hf_stitch.adapters.untrusted import weightless
from hf_stitch.stitches.base import as_dtype

if TYPE_CHECKING:
    from hf_stitch.artefacts.modeling import StitchedModel


def dtype_of(given: torch.dtype | str | None) -> torch.dtype | None:
    """Return a dtype by its name."""
    return None if given is None or given == "auto" else as_dtype(given)


def cast(model: StitchedModel, dtype: torch.dtype) -> None:
    """Cast the weights of a stitched model in place.

    As in transformers, buffers that a network computes itself (frequencies of rotary embeddings) and modules that it
    keeps in float32 are not cast, because a cast would change their values.
    """
    for side, half in (("source", model.source), ("target", model.target)):
        network: Any = half.model
        if getattr(network, "config_class", None) is type(model.config):  # a stitched model
            cast(network, dtype)
            continue
        stays = _stays(getattr(model.config, side)["blueprint"], half, dtype)
        for name, tensor in (*half.model.named_parameters(), *half.model.named_buffers()):
            if tensor.is_floating_point() and not stays(name):
                tensor.data = tensor.data.to(dtype)
    model.stitch.to(dtype)


def _stays(blueprint: Mapping[str, Any] | None, half: nn.Module, dtype: torch.dtype) -> Callable[[str], bool]:
    """Return a predicate on names of tensors that must not be cast; networks of user code are cast entirely."""
    if blueprint is None:
        return lambda name: False
    with weightless():
        network: Any = network_of(blueprint)
    computed = {name for name, _ in network.named_buffers()} - network.state_dict().keys()
    plan = network._get_dtype_plan(dtype) if isinstance(network, PreTrainedModel) else {}
    kept = [re.compile(rf"(^|\.){re.escape(module)}(\.|$)") for module in plan]
    return lambda name: name in computed or any(module.search(name) for module in kept)
