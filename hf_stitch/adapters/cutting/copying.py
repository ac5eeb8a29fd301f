"""Copies of networks without the modules that a half has no need of."""

from __future__ import annotations

import copy
from collections.abc import Mapping

from torch import nn

from hf_stitch.adapters.cutting.surgery import is_bookkeeping, swapped

WRAPPED = "._orig_mod"
"""How the name of a module ends which torch.compile has wrapped."""


def compiled_modules(model: nn.Module) -> list[str]:
    """Names of the modules that torch.compile has wrapped or marked."""
    modules = model.named_modules()
    return [name for name, module in modules if name.endswith(WRAPPED) or module._compiled_call_impl is not None]


def hollow(module: nn.Module) -> nn.Module:
    """The module without parameters and children, for a copy that has no need of them: its plain attributes only."""
    twin = object.__new__(type(module))  # a parametrized module refuses to be copied
    vars(twin).update(vars(module))
    for name in ("_hf_hook", "_old_forward", "forward"):  # by which accelerate moves its weights
        vars(twin).pop(name, None)
    twin._modules, twin._parameters, twin._buffers = {}, {}, {}
    return twin


def copy_without(model: nn.Module, without: Mapping[str, nn.Module]) -> nn.Module:
    """A copy of a model in eval mode, without hooks, some modules replaced before anything is copied.

    Raises:
        ValueError: If weights are on the meta device (there is nothing to copy), modules are compiled, or a hook
            would be lost.
    """
    if wrapped := [name for name in compiled_modules(model) if name.endswith(WRAPPED)]:
        raise ValueError(
            f"module {wrapped[0].removesuffix(WRAPPED)!r} of {type(model).__name__} is compiled, and a half "
            "would hold another name for it: cut the network in two before torch.compile"
        )
    with swapped(model, without):
        if any(value.is_meta for value in model.state_dict().values()):
            raise ValueError(
                f"weights of {type(model).__name__} are offloaded or not loaded: "
                "load it onto one device to cut it in two"
            )
        twin = copy.deepcopy(model)
    if hasattr(twin, "hf_device_map"):
        from accelerate.hooks import remove_hook_from_module

        remove_hook_from_module(twin, recurse=True)
    for name, module in twin.named_modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            foreign = [hook for hook in hooks.values() if not is_bookkeeping(hook)]
            if foreign:
                raise ValueError(
                    f"module {name!r} of {type(twin).__name__} has a hook ({foreign[0]!r}), and the halves of a "
                    "network have none: remove it, or fold what it does into the module"
                )
            hooks.clear()
        vars(module).pop("_output_capturing_hooks_installed", None)  # transformers does it again where it needs to
        module._backward_hooks.clear()
        module._backward_pre_hooks.clear()
    return twin.eval()
