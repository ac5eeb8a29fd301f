"""Untrained twins of networks, as baselines for results of trained networks."""

from __future__ import annotations

import copy
import hashlib
from contextlib import suppress

import torch
from torch import nn

from hf_stitch.adapters.base import Adapter
from hf_stitch.adapters.preprocess import place_of
from hf_stitch.adapters.rewriting import network_of
from hf_stitch.reference import ModelReference

RESETS = ("reset_parameters", "_reset_parameters")
"""Methods of torch and timm modules that initialise their weights; ``nn.MultiheadAttention`` has the second."""


def untrained(adapter: Adapter, seed: int = 0) -> Adapter:
    """Return a network of the same architecture, device and dtype with weights that its library initialises randomly.

    Use it as a baseline: results of a stitch, a probe or a similarity on this network do not depend on training, so the
    difference to the trained network is the effect of training. A large stitch, for example, may learn the work of the
    front half.

    Networks of transformers and timm are rebuilt from their records. In user code and stitched models, each module
    initialises its weights if it can. The entries of all other weights (position embeddings, class tokens) are
    permuted, which preserves their scale and removes learned structure.

    Args:
        adapter: A network.
        seed: Seed of the weights. The global random state does not change.

    Example:
        >>> import hf_stitch
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> adapter = hf_stitch.load(net, example_inputs=torch.randn(2, 4))
        >>> twin = untrained(adapter)
        >>> twin.layers == adapter.layers, torch.equal(twin.model[0].weight, net[0].weight)
        (True, False)
    """
    device, dtype = place_of(adapter.model)
    with torch.random.fork_rng():
        # A hash, because torch.manual_seed(0) may reproduce the initial weights of the trained network.
        torch.manual_seed(int.from_bytes(hashlib.sha256(f"untrained {seed}".encode()).digest()[:4]))
        model = _rebuild(adapter)
    reference = ModelReference(None, adapter.library)
    library, interface = adapter._library, adapter.interface
    return type(adapter)(
        model.to(device, dtype).eval(), library, interface, adapter.example, reference, adapter.processor
    )


def _rebuild(adapter: Adapter) -> nn.Module:
    """Rebuild the network from its record or, without a record, initialise the weights of a copy."""
    blueprint = None
    if adapter.library != "hf_stitch":  # the halves of a stitched model are parts of networks
        with suppress(ValueError):  # user code has no record
            blueprint = adapter.blueprint()
    if blueprint is not None:
        return network_of(blueprint)
    model = copy.deepcopy(adapter.model)
    with torch.no_grad():
        for module in reversed(list(model.modules())):  # parents last: they may initialise their children differently
            initialise(module)
    return model


def initialise(module: nn.Module) -> None:
    """Initialise the direct weights of a module, without the weights of its children."""
    reset = next((getattr(module, name) for name in RESETS if hasattr(module, name)), None)
    if reset is not None:
        reset()
        return
    for weight in module.parameters(recurse=False):
        weight.copy_(weight.flatten()[torch.randperm(weight.numel(), device="cpu").to(weight.device)].view_as(weight))
