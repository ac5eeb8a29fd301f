"""Distribution of the weights of frozen halves over processes (FSDP2)."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hf_stitch.artefacts.weights import whole_blocks


def blocks_of(half: nn.Module) -> list[nn.Module]:
    """Return the modules that gather all their weights for their forward pass."""
    whole = set(whole_blocks(half))
    blocks: dict[str, nn.Module] = {}
    for name, module in half.named_modules():
        if type(module).__name__ in whole and not any(name.startswith(f"{outer}.") for outer in blocks):
            blocks[name] = module
    if not blocks:
        for name, module in half.named_modules():
            if isinstance(module, nn.Sequential | nn.ModuleList) and not any(
                name == outer or name.startswith(f"{outer}.") for outer in blocks
            ):
                blocks |= {f"{name}.{key}".lstrip("."): child for key, child in module.named_children()}
    return [module for module in blocks.values() if any(True for _ in module.parameters())]


@contextmanager
def sharded(halves: Sequence[nn.Module], device: torch.device, processes: int) -> Iterator[None]:
    """Distribute the weights of frozen halves over processes, and restore the halves afterwards.

    Each process keeps an equal part of every weight, and gathers the weights of a block during its forward and backward
    pass. All processes must run the halves equally often. On a GPU, the whole weights are offloaded to the memory of
    the machine; on the CPU they stay in place, which saves no memory.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (processes,))
    modules = {id(module): module for half in halves for module in half.modules()}.values()
    originals = [(module, type(module), _copy_attributes(vars(module))) for module in modules]
    weights = list({id(p): p for half in halves for p in half.parameters()}.values())
    try:
        for half in halves:
            for block in blocks_of(half):
                fully_shard(block, mesh=mesh, reshard_after_forward=True)
            fully_shard(half, mesh=mesh, reshard_after_forward=True)
        _move(weights, torch.device("cpu"))
        yield
    finally:
        for module, module_class, attributes in originals:
            module.__class__ = module_class
            vars(module).clear()
            vars(module).update(attributes)
        _move(weights, device)


def _copy_attributes(attributes: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of a module, with its dicts of hooks, weights and modules copied."""
    return {name: copy.copy(value) if isinstance(value, dict) else value for name, value in attributes.items()}


def _move(weights: Sequence[Tensor], device: torch.device) -> None:
    for weight in weights:
        weight.data = weight.data.to(device)
