"""The untrained twin of a network, against which results of the trained one are compared."""

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
"""Methods with which modules of torch and timm initialise their own weights; the second is that of attention."""


def untrained(adapter: Adapter, seed: int = 0) -> Adapter:
    """Return a network of the same architecture, device and dtype with random weights, as its library makes them.

    What a stitch, a probe or a similarity finds in it owes nothing to training: the gain of the trained network is the
    difference. A large stitch, for example, may learn the work of the front half itself.

    Networks of transformers and timm are made anew from their records. In user code and stitched models, each module
    that can initialise its weights does so. The entries of all other weights (position embeddings, class tokens) are
    permuted, which keeps their scale and loses what they have learned.

    Args:
        adapter: A network.
        seed: Seed of the weights. The global random state stays as it is.

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
        # A network that was built after torch.manual_seed(0) began with the weights that this seed gives.
        torch.manual_seed(int.from_bytes(hashlib.sha256(f"untrained {seed}".encode()).digest()[:4]))
        model = _anew(adapter)
    reference = ModelReference(None, adapter.library)
    library, interface = adapter._library, adapter.interface
    return type(adapter)(
        model.to(device, dtype).eval(), library, interface, adapter.example, reference, adapter.processor
    )


def _anew(adapter: Adapter) -> nn.Module:
    """Build the network again, or initialise the weights of a copy where no record can build it."""
    blueprint = None
    if adapter.library != "hf_stitch":  # the halves of a stitched model are parts of networks
        with suppress(ValueError):  # user code has no record
            blueprint = adapter.blueprint()
    if blueprint is not None:
        return network_of(blueprint)
    copied = copy.deepcopy(adapter.model)
    with torch.no_grad():
        for module in reversed(list(copied.modules())):  # a module may initialise its children in another way
            initialise(module)
    return copied


def initialise(module: nn.Module) -> None:
    """Initialise the weights of a module itself, without those of its children."""
    reset = next((getattr(module, name) for name in RESETS if hasattr(module, name)), None)
    if reset is not None:
        reset()
        return
    for weight in module.parameters(recurse=False):
        weight.copy_(weight.flatten()[torch.randperm(weight.numel(), device="cpu").to(weight.device)].view_as(weight))
