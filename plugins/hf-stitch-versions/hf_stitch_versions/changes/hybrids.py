"""Hybrids of two networks: exchange parts between them, and replay recorded outputs of parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from hf_stitch import Adapter
from hf_stitch.adapters.cutting.surgery import alone
from hf_stitch_versions.changes.parts import Part
from hf_stitch_versions.changes.weights import Weights, dense, key_of, plain, tensors_of

ROUNDING = 64 * torch.finfo(torch.float32).eps
"""Minimum norm of noise relative to the norm of the weights: the float32 rounding error of merging an adapter."""

LEAST_VARIANCE = 0.1
"""Minimum share of a running variance that remains after noise."""


class Recording:
    """Recorded outputs of the parts of a network on a batch, as starting points of hybrids.

    Attributes:
        output: Output of the network.
        parts: Name -> output of each module that was called once, in order of completion.
    """

    def __init__(self, network: Adapter, arguments: Mapping[str, Any], modules: Sequence[str]) -> None:
        calls: dict[str, list[Any]] = {}

        def recorder_of(name: str) -> Any:
            return lambda module, args, output: calls.setdefault(name, []).append(_copied(output))

        with ExitStack() as hooks:
            for name in modules:
                hooks.callback(network.model.get_submodule(name).register_forward_hook(recorder_of(name)).remove)
            self.output = run(network, arguments)
        self.parts = {name: outputs[0] for name, outputs in calls.items() if len(outputs) == 1}


@torch.no_grad()
def run(network: Adapter, arguments: Mapping[str, Any]) -> Any:
    """Run a network on the whole batch; its random draws are the same in all forward passes."""
    devices = [network.device] if network.device.type == "cuda" else []
    with torch.random.fork_rng(devices), alone(network.model):
        torch.manual_seed(0)
        return network._run(network.inputs(arguments))


@contextmanager
def given(model: nn.Module, outputs: Mapping[str, Any]) -> Iterator[None]:
    """Make modules of a network return recorded outputs without computing them."""
    with ExitStack() as stack:
        for name, output in outputs.items():
            module = model.get_submodule(name)
            forward = vars(module).get("forward")  # of accelerate, or of user code
            stack.callback(_restore, module, forward)
            vars(module)["forward"] = lambda *args, recorded=output, **kwargs: _copied(recorded)
        yield


@contextmanager
def exchanged(model: nn.Module, modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Replace modules of a network."""
    with ExitStack() as stack:
        for name, module in modules.items():
            parent, _, attribute = name.rpartition(".")
            parent_module = model.get_submodule(parent)
            stack.callback(parent_module._modules.__setitem__, attribute, parent_module._modules[attribute])
            parent_module._modules[attribute] = module
        yield


@contextmanager
def valued(model: nn.Module, values: Weights) -> Iterator[None]:
    """Replace the values of parameters and buffers of a network, by their plain names."""
    tensors = tensors_of(model)
    with ExitStack() as stack:
        for name, value in values.items():
            stack.callback(setattr, tensors[name], "data", tensors[name].data)
            tensors[name].data = value.to(tensors[name].data)
        yield


def noise(a: Weights, b: Weights, part: Part, seed: int) -> dict[str, Tensor]:
    """Return the weights of a part of the first network plus noise with the norm of the change of each weight.

    The minimum norm is the float32 rounding error, the null of parts with equal weights. Tied weights get the same
    noise.
    """
    generator = torch.Generator().manual_seed(seed)
    norms: dict[Any, Tensor] = {}
    for name in part.weights:
        value = a[name].float()
        change = torch.linalg.vector_norm(b[name].to(value) - value)
        rounding = ROUNDING * torch.linalg.vector_norm(value)
        norms[key_of(a[name])] = torch.stack([norms.get(key_of(a[name]), rounding), change]).max()
    noisy_weights: dict[Any, Tensor] = {}
    for name in part.weights:
        if (key := key_of(a[name])) not in noisy_weights:
            value = a[name].float()
            random = torch.randn(value.shape, generator=generator).to(value.device)
            noisy = value + random * (norms[key] / torch.linalg.vector_norm(random))
            noisy_weights[key] = noisy.maximum(LEAST_VARIANCE * value) if name.endswith("running_var") else noisy
    return {name: noisy_weights[key_of(a[name])] for name in part.weights}


@torch.no_grad()
def with_weights(model: nn.Module, part: Part, values: Weights) -> dict[str, nn.Module]:
    """Return copies of the modules of a part with new weights."""
    copies = {}
    for name in part.modules:
        copied = dense(model.get_submodule(name))
        tensors = dict(copied.named_parameters()) | dict(copied.named_buffers())
        transposed = {key for key, module in copied.named_modules() if type(module).__name__ == "Conv1D"}
        for key, value in tensors.items():
            if (weight := values.get(f"{plain(name)}.{key}")) is not None:
                layer, _, attribute = key.rpartition(".")
                weight = weight.T if layer in transposed and attribute == "weight" else weight
                value.data = weight.to(value.data).contiguous()
        copies[name] = copied
    return copies


def _copied(output: Any) -> Any:
    """Return a copy of an output, because the network may overwrite it."""
    return tree_map_only(Tensor, Tensor.clone, output)


def _restore(module: nn.Module, forward: Any) -> None:
    """Restore the forward of a module."""
    if forward is None:
        vars(module).pop("forward", None)
    else:
        vars(module)["forward"] = forward
