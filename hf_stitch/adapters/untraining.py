"""The untrained twin of a network, against which results of the trained one are compared."""

from __future__ import annotations

import copy
import hashlib

import torch
from torch import nn

from hf_stitch.adapters.base import Adapter
from hf_stitch.adapters.preprocess import place_of
from hf_stitch.adapters.rewriting import blueprint_of, network_of
from hf_stitch.reference import ModelReference


def untrained(adapter: Adapter, seed: int = 0) -> Adapter:
    """Return a network of the same architecture with random weights, as its library initialises them.

    What a stitch, a probe or a similarity finds in it owes nothing to training: the gain of the trained network is the
    difference. A large stitch, for example, may learn the work of the front half itself.

    Args:
        adapter: A network.
        seed: Seed of the weights. The global random state stays as it is.

    Returns:
        The twin, on the same device and in the same dtype, with the same processor. It has no name.

    Raises:
        ValueError: If the network is user code, and one of its modules has weights but no ``reset_parameters``.

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
        try:
            blueprint = blueprint_of(adapter)
        except ValueError:  # user code
            model = _reset(adapter.model)
        else:
            model = network_of(blueprint)
    interface = adapter.interface
    return type(adapter).of(
        model.to(device, dtype).eval(),
        ModelReference(None, adapter.library),
        example_inputs=adapter.example,
        processor=adapter.processor,
        content=interface.content[0],
    )


def _reset(model: nn.Module) -> nn.Module:
    """Return a copy of a network of user code, each module of which is initialised again."""
    copied = copy.deepcopy(model)
    for name, module in copied.named_modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
        elif own:
            raise ValueError(
                f"module {name or '(the network itself)'} of {type(model).__name__} has weights or buffers, but no "
                "method reset_parameters: build an untrained network, and pass it to hf_stitch.load"
            )
    return copied
