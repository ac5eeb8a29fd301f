"""Copies of networks without the modules that a half does not need."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor, inference_mode, nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from hf_stitch.adapters.cutting.surgery import is_bookkeeping, swapped
from hf_stitch.offloading import State, hooks_of, is_offloaded, shared

MAKING_WEIGHTS = (BasePruningMethod, SpectralNorm, WeightNorm)
"""Hooks of torch that compute a weight from others before each forward."""


def is_compiled(model: nn.Module) -> bool:
    """Return whether a module of a network was compiled in place."""
    return any(module._compiled_call_impl is not None for module in model.modules())


WITHOUT_WEIGHTS: dict[str, Any] = {
    name: getattr(nn.Module, name)
    for name in ("__getattr__", "__setstate__", "state_dict", "_save_to_state_dict", "get_extra_state")
} | {"__deepcopy__": None, "__getstate__": object.__getstate__, "__reduce_ex__": object.__reduce_ex__}
"""What a copy uses of a module: a class of its own (quantised layers, PEFT) may read weights or children there."""


def hollow(module: nn.Module) -> nn.Module:
    """Return a shallow copy of a module with its plain attributes, but without parameters, buffers and children."""
    kind: Any = type(module)  # a subclass, because transformers finds by their classes which modules it collects from
    twin: nn.Module = object.__new__(type(kind)(kind.__name__, (kind,), dict(WITHOUT_WEIGHTS)))
    vars(twin).update(vars(module))
    for name in ("_hf_hook", "_old_forward", "forward"):  # set by accelerate, which moves weights
        vars(twin).pop(name, None)
    twin._modules, twin._parameters, twin._buffers = {}, {}, {}
    return twin


def copy_without(model: nn.Module, without: Mapping[str, nn.Module]) -> nn.Module:
    """Copy a model in eval mode, with some modules replaced before the copy, and without hooks but those of weights.

    A copy of a model whose weights accelerate has offloaded shares them, and the hooks that load them.
    """
    with swapped(model, without):
        offloaded = is_offloaded(model)
        state = State(model)
        if empty := [name for name in state if state.lacks(name)]:
            raise ValueError(
                f"{len(empty)} weights of {type(model).__name__} are not loaded, e.g. {empty[0]}: they are on the meta "
                "device, and no hook of accelerate loads them; load the model first"
            )
        kept = [value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor)]
        made: dict[int, Any] = {id(value): value.detach().clone() for value in kept if not value.is_leaf}  # by hooks
        try:
            with inference_mode(False):  # tensors of this mode could not be trained, and kernels take them differently
                twin = copy.deepcopy(model, made | (shared(model) if offloaded else {}))
        except Exception as error:
            raise ValueError(_why_not_copied(model, error)) from error
    if not offloaded and (moving := [module for module in twin.modules() if hooks_of(module)]):
        from accelerate.hooks import remove_hook_from_module

        for module in moving:
            remove_hook_from_module(module)
    for name, module in twin.named_modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            others = {key: hook for key, hook in hooks.items() if not is_bookkeeping(hook)}
            if foreign := [hook for hook in others.values() if not isinstance(hook, MAKING_WEIGHTS)]:
                raise ValueError(
                    f"module {name!r} of {type(twin).__name__} has a hook ({foreign[0]!r}), but halves "
                    "of a network have no hooks: remove it, or compute in the module"
                )
            hooks.clear()
            hooks.update(others)
        vars(module).pop("_output_capturing_hooks_installed", None)  # transformers installs them again on demand
        module._backward_hooks.clear()
        module._backward_pre_hooks.clear()
    return twin.eval()


def _why_not_copied(model: nn.Module, error: Exception) -> str:
    """Return a message that names the first innermost module that cannot be copied."""
    found = ""
    for name, module in model.named_modules():
        if not any(True for _ in module.children()):
            try:
                copy.deepcopy(module)
            except Exception:
                found = f" because of its module {name!r}, {type(module).__name__}"
                break
    return (
        f"{type(model).__name__} cannot be copied{found} ({type(error).__name__}: {error}), and a half of a network is "
        "a copy: stitch another form of the network, for example before it is quantised; comparing needs no copy"
    )
