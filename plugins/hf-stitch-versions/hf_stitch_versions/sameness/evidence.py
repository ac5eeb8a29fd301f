"""Causes of a difference between two modules: settings, weights, or the operation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from hf_stitch import Adapter
from hf_stitch_versions.changes.weights import dequantized, effective

SAYS_NOTHING = {
    "_name_or_path", "name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype", "model_type",
    "id2label", "label2id", "_attn_implementation", "use_cache", "return_dict", "output_attentions", "problem_type",
}  # fmt: skip
"""Config keys that do not change the outputs, or are reported separately."""

STATE = {"training", "layer_idx", "call_super_init", "dump_patches", "grad_checkpointing", "gradient_checkpointing"}
"""Attributes of modules that do not change their outputs in eval mode."""

FEW = 6
"""Maximum number of attributes reported per module."""

SAME = 1e-6
"""Maximum relative difference of equal weights under different names: conversion may round them."""


def settings(a: Adapter, b: Adapter | None) -> list[str]:
    """Return the settings that differ between two networks: configs, dtypes and attention implementations."""
    if b is None:
        return []
    config_a, config_b = (cast("Any", getattr(adapter.model, "config", None)) for adapter in (a, b))
    differences = []
    if all(hasattr(config, "to_dict") for config in (config_a, config_b)) and type(config_a) is type(config_b):
        differences += _unequal(_flat(config_a.to_dict()), _flat(config_b.to_dict()))
        kernels = [getattr(config, "_attn_implementation", None) for config in (config_a, config_b)]
        if kernels[0] != kernels[1]:
            differences.append(f"attention implementation {kernels[0]} against {kernels[1]}")
    dtypes = [
        sorted({str(value.dtype).removeprefix("torch.") for value in adapter.model.parameters()}) for adapter in (a, b)
    ]
    if dtypes[0] != dtypes[1]:
        differences.append(f"weights in {', '.join(dtypes[0]) or 'none'} against {', '.join(dtypes[1]) or 'none'}")
    return differences


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if key not in SAYS_NOTHING:
            flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + str(key): value}
    return flat


def _unequal(one: Mapping[str, Any], two: Mapping[str, Any]) -> list[str]:
    return [
        f"{key} {one.get(key)!r} against {two.get(key)!r}"
        for key in dict.fromkeys((*one, *two)) if one.get(key) != two.get(key)
    ]  # fmt: skip


def attributes(one: nn.Module, two: nn.Module) -> list[str]:
    """Return the numbers and strings that differ between two modules, submodules included."""
    differences = [] if type(one) is type(two) else [f"class {_against(one, two)}"]
    modules_b = dict(two.named_modules())
    for name, module in one.named_modules():
        if name in modules_b:
            texts = values(module, modules_b[name]) + _classes(module, modules_b[name])
            differences += [f"{name}.{text}" if name else text for text in texts]
    for name, module in one.named_modules():
        if name in modules_b and vars(module).get("forward") is not vars(modules_b[name]).get("forward"):
            differences.append(f"{name or 'it'} has a different forward")
    return differences[:FEW]


def _against(one: object, two: object) -> str:
    """Return the classes of two objects, with the Python modules of classes with equal names."""
    names = [type(instance).__name__ for instance in (one, two)]
    if names[0] == names[1]:
        names = [f"{type(instance).__module__}.{type(instance).__name__}" for instance in (one, two)]
    return f"{names[0]} against {names[1]}"


def _classes(one: nn.Module, two: nn.Module) -> list[str]:
    """Return the parameters with different classes, such as integers with scales."""
    pairs = ((name, value, two._parameters.get(name)) for name, value in one._parameters.items())
    return [
        f"{name} in the class {_against(value, second)}"
        for name, value, second in pairs
        if value is not None and second is not None and type(value) is not type(second)
    ]


def values(one: nn.Module, two: nn.Module) -> list[str]:
    """Return the numbers and strings that differ between two modules of one class, without their submodules."""
    if type(one) is not type(two):
        return []
    values_a, values_b = (
        {
            key: value for key, value in vars(module).items()
            if key not in STATE and not key.startswith("_") and _is_plain(value)
        }
        for module in (one, two)
    )  # fmt: skip
    return _unequal(values_a, values_b)


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if isinstance(value, tuple) else isinstance(value, (bool, int, float, str))


def weights(one: nn.Module, two: nn.Module, rounding: float = 0.0) -> list[str]:
    """Return the parameters and buffers that differ by more than rounding, relative to the norm of the first."""
    weights_a, weights_b = (_state(m) for m in (one, two))
    forms = [{name: (x.shape, x.is_floating_point()) for name, x in state.items()} for state in (weights_a, weights_b)]
    if forms[0] != forms[1]:  # adapted, parametrised, pruned, quantized or packed: compare effective weights
        weights_a, weights_b = (_effective(m) for m in (one, two))
    if not set(weights_a) & set(weights_b):
        return _unnamed(weights_a, weights_b, max(rounding, SAME))
    differences = [f"{name} is missing" for name in weights_a if name not in weights_b]
    differences += [f"{name} is new" for name in weights_b if name not in weights_a]
    return differences + unequal(weights_a, weights_b, rounding)


def unequal(weights_a: Mapping[str, Tensor], weights_b: Mapping[str, Tensor], rounding: float = 0.0) -> list[str]:
    """Return the weights of equal names that differ by more than rounding, relative to the norm of the first."""
    differences = []
    for name in weights_a:
        if name not in weights_b:
            continue
        x, y = weights_a[name], weights_b[name]
        if x.shape != y.shape:
            differences.append(f"{name} has shape {tuple(x.shape)} against {tuple(y.shape)}")
        elif (gap := _gap(x, y)) > rounding:
            transposed = x.dim() == 2 and x.shape[0] == x.shape[1] and torch.equal(x.T, y)
            differences.append(f"{name} is transposed" if transposed else f"{name} differs by {gap:.2g} of its norm")
    return differences


def _state(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters, buffers and other tensors under all their names; tied tensors have several."""
    named_tensors = module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
    state = {name: value for tensors in named_tensors for name, value in tensors}
    for path, submodule in module.named_modules(remove_duplicate=False):
        plain = {name: value for name, value in vars(submodule).items() if isinstance(value, Tensor)}
        state |= {f"{path}.{name}" if path else name: value for name, value in plain.items()}
    return {name: dequantized(value) for name, value in state.items()}


def _effective(module: nn.Module) -> dict[str, Tensor]:
    """Return the effective weights of a module, which may be a PEFT layer."""
    return {name.removeprefix("it."): value for name, value in effective(nn.ModuleDict({"it": module})).items()}


def _gap(x: Tensor, y: Tensor) -> float:
    x, y = x.double(), y.double().to(x.device)
    norm = float(x.norm())
    gap = float((x - y).norm())
    return 0.0 if gap == 0 else gap / norm if norm and math.isfinite(gap) else math.inf


def _unnamed(weights_a: Mapping[str, Tensor], weights_b: Mapping[str, Tensor], rounding: float) -> list[str]:
    """Compare weights under different names: each must exist in the second network, perhaps transposed."""
    remaining = list(weights_b.values())
    missing = []
    for name, value in weights_a.items():
        forms = (value, value.T) if value.dim() == 2 else (value,)
        found_at = (i for i, x in enumerate(remaining) for f in forms if x.shape == f.shape and _gap(f, x) <= rounding)
        index = next(found_at, None)
        if index is None:
            missing.append(f"{name} lacks an equal weight")
        else:
            del remaining[index]
    return missing
