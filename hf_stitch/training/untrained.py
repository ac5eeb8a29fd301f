"""An untrained copy of a network in training: the baseline of what its architecture and its input alone achieve."""

from __future__ import annotations

import copy

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_stitch.adapters import Adapter
from hf_stitch.artefacts import StitchedModel
from hf_stitch.reference import ModelReference

RESETS = ("reset_parameters", "_reset_parameters")
"""Methods with which modules of torch and timm initialise their own weights; the second is that of attention."""


def untrained_copy(adapter: Adapter, seed: int) -> Adapter:
    """Return an adapter of an untrained copy of a network.

    Networks of transformers are made anew from their config. In other networks, and in stitched models, each module
    that can initialise its weights does so. The entries of all other weights (position embeddings, class tokens) are
    permuted, which keeps their scale and loses what they have learned.

    Args:
        adapter: Adapter of the network, which is not changed.
        seed: Seed of the weights. The random state of torch is restored afterwards.

    Returns:
        An adapter that takes the same samples.

    Example:
        >>> import hf_stitch
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> twin = untrained_copy(hf_stitch.load(net, example_inputs=torch.randn(2, 4)), seed=7)
        >>> torch.equal(twin.model[0].weight, net[0].weight), twin.layers
        (False, ('0', '1'))
    """
    model = adapter.model
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        if isinstance(model, PreTrainedModel) and not isinstance(model, StitchedModel):  # its config may have no code
            twin: nn.Module = type(model)(copy.deepcopy(model.config))
        else:
            twin = copy.deepcopy(model)
            for module in twin.modules():
                _initialise(module)
    weight = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    twin = twin.to(device=adapter.device, dtype=weight.dtype).eval()
    reference = ModelReference(id=None, library=adapter.reference.library)
    return type(adapter)(twin, adapter.interface, adapter.example, reference, adapter.processor)


def _initialise(module: nn.Module) -> None:
    """Initialise the weights of a module itself, without those of its children."""
    reset = next((getattr(module, name) for name in RESETS if hasattr(module, name)), None)
    if reset is not None:
        reset()
        return
    for weight in module.parameters(recurse=False):
        weight.copy_(weight.flatten()[torch.randperm(weight.numel(), device="cpu").to(weight.device)].view_as(weight))
