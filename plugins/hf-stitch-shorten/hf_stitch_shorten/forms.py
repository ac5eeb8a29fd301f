"""Check that the weights of a network can be changed."""

from __future__ import annotations

from torch.nn.utils import parametrize
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hf_stitch import Adapter
from hf_stitch.adapters.cutting.halves import MAKING_WEIGHTS
from hf_stitch.offloading import is_offloaded


def check_form(network: Adapter) -> None:
    """Check that the weights of a network are plain numbers.

    Args:
        network: The network.

    Raises:
        ValueError: If they are quantized, offloaded, computed by hooks or parametrisations, or combined with adapters.
    """
    kind = type(network.model).__name__
    if is_offloaded(network.model):
        raise ValueError(f"weights of {kind} are offloaded: load it into memory, without device_map")
    for name, module in network.model.named_modules():
        if hasattr(module, "base_layer") and type(module).__module__.startswith("peft."):
            raise ValueError(f"module {name!r} of {kind} has an adapter: pass the result of merge_and_unload()")
        if parametrize.is_parametrized(module):
            raise ValueError(f"module {name!r} of {kind} is parametrised: call remove_parametrizations on it first")
        if any(isinstance(hook, MAKING_WEIGHTS) for hook in module._forward_pre_hooks.values()):
            raise ValueError(
                f"a hook computes a weight of module {name!r} of {kind}: call prune.remove, remove_weight_norm or "
                "remove_spectral_norm on it first"
            )
        packed = [type(p).__name__ for p in module.parameters(False) if is_traceable_wrapper_subclass(p)]
        integers = [str(p.dtype) for p in module.parameters(False) if not p.is_floating_point()]
        if packed or integers or hasattr(module, "_packed_params"):
            storage = (packed or integers or ["packed weights"])[0]
            raise ValueError(
                f"module {name!r} of {kind} is quantized ({storage}): shorten the network before quantization, or "
                "dequantize() it"
            )
