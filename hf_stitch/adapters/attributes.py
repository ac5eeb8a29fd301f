"""Attributes that the forward of a module reads, and their comparison with a record of the network.

Code of installed packages is compared by identity, values by their bytes. Functions of user code are compared by their
bytecode, defaults, closures and the globals that they name; comments and positions in files do not count. Imports
inside functions, ``getattr`` with a computed name and code in other languages are not followed.
"""

from __future__ import annotations

import copyreg
import dis
import inspect
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from hf_stitch.adapters.pinning import is_read
from hf_stitch.adapters.untrusted import weightless
from hf_stitch.reference import Settings, weights_hash

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(Ellipsis), range)

INTERNAL = frozenset(vars(nn.Module())) | {"_compiled_call_impl"}
"""Attributes of every module. Weights are hashed separately; hooks and buffers are read by name."""

UNREAD = frozenset(
    (
        *("name_or_path", "generation_config", "warnings_issued", "pretrained_cfg", "default_cfg", "_traits"),
        *("hf_device_map", "_hf_hook", "_old_forward", "_original_forward", "_is_hf_initialized", "_use_kernels"),
        *("_weight_conversions", "pooling_mult", "rope_deltas"),
        *("grad_checkpointing", "gradient_checkpointing", "_gradient_checkpointing_func"),
        *("drop_prob", "dropout", "attention_dropout", "activation_dropout", "layerdrop", "momentum", "inplace"),
    )
)
"""Attributes that no forward in eval mode reads: settings of loading and training, and state of the last run."""

REPLACED = frozenset(("forward", "to", "cuda", "npu", "xpu", "mlu", "sdaa", "musa"))
"""Methods that accelerate replaces in offloaded networks, to load weights before a forward and to forbid moves."""


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that a forward in eval mode may read, except weights and submodules."""
    attrs = {name: value for name, value in vars(module).items() if name not in INTERNAL}
    for replaced in ("_original_forward", "_old_forward"):  # where accelerate casts, and where it moves weights
        if replaced in attrs:
            original, attrs = attrs[replaced], {name: value for name, value in attrs.items() if name not in REPLACED}
            if getattr(original, "__func__", None) is not type(module).forward:
                attrs["forward"] = original
    unread = (*UNREAD, "p") if isinstance(module, _DropoutNd) else UNREAD
    return {name: value for name, value in attrs.items() if name not in unread}


class Alike:
    """Comparison of values of two networks, without the weights of their own modules."""

    def __init__(self, *networks: nn.Module) -> None:
        self._module_ids = set(map(id, chain.from_iterable(network.modules() for network in networks)))
        self._cache: dict[tuple[int, int], bool] = {}
        self._alive: list[Any] = []  # an id is unique only while its object exists

    def __call__(self, one: Any, two: Any) -> bool:
        """Return whether two values are alike."""
        key = id(one), id(two)
        if one is two or key in self._cache:
            return self._cache.get(key, True)
        self._cache[key] = True  # for values that refer to themselves, until the comparison is complete
        self._alive += [one, two]
        self._cache[key] = equal = self._compare(one, two)
        return equal

    def _compare(self, one: Any, two: Any) -> bool:
        if isinstance(one, Tensor) and isinstance(two, Tensor):
            if one.is_meta or two.is_meta or one.layout is not torch.strided:
                return repr(one) == repr(two)
            return weights_hash({"": one}) == weights_hash({"": two})
        if type(one) is not type(two) and not self(type(one), type(two)):
            return False
        if isinstance(one, PLAIN):
            return repr(one) == repr(two)
        if isinstance(one, (set, frozenset, types.ModuleType)):
            return bool(one == two)
        if isinstance(one, np.ndarray) and one.dtype != object:
            return (one.dtype, one.shape, one.tobytes()) == (two.dtype, two.shape, two.tobytes())
        first, second = list(self._parts(one)), list(self._parts(two))
        return len(first) == len(second) and all(map(self, first, second))

    def _parts(self, value: Any) -> Iterator[Any]:
        if isinstance(value, nn.Module):
            yield from (type(value).forward, sorted(attributes_of(value).items()), value._modules)
            unsaved = {name: value._buffers[name] for name in sorted(value._non_persistent_buffers_set)}
            yield unsaved if id(value) in self._module_ids else {**value._buffers, **value._parameters}
            yield from (*value._forward_pre_hooks.values(), ..., *value._forward_hooks.values())
        elif isinstance(value, types.FunctionType):
            yield from (value.__code__, value.__defaults__, value.__kwdefaults__)
            yield from (cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType())
            yield from (value.__globals__.get(name) for name in _names(value.__code__))
        elif isinstance(value, types.CodeType):
            yield from (value.co_code, value.co_exceptiontable, value.co_names, *value.co_consts)
        elif isinstance(value, types.MethodType):
            yield from (value.__func__, value.__self__)
        elif isinstance(value, types.BuiltinFunctionType):
            yield from (value.__name__, value.__module__, value.__self__)
        elif isinstance(value, type):
            yield from (value.__qualname__, value.__bases__)
            for name, part in vars(value).items():
                if isinstance(part, types.FunctionType) or (isinstance(part, PLAIN) and not name.startswith("__")):
                    yield from (name, part)
        elif type(value) in (tuple, list, torch.Size):
            yield from value
        elif type(value) in (dict, types.MappingProxyType):
            yield from chain.from_iterable(value.items())
        else:
            yield from _reduced(value)


def _reduced(value: Any) -> tuple[Any, ...]:
    """Return the parts of an object that ``copy`` uses to rebuild it."""
    try:
        reduced = copyreg.dispatch_table.get(type(value), lambda value: value.__reduce_ex__(4))(value)
    except Exception:  # a lock, a file, a generator: cannot be copied
        return ()
    if isinstance(reduced, str):
        return reduced, getattr(value, "__wrapped__", None)  # set by functools.lru_cache
    constructor, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
    return constructor, arguments, state, list(items or ()), list(pairs or ())


def _names(code: types.CodeType) -> Iterator[str]:
    """Yield the names that a function and its nested functions use."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)


NOT_SET = ...
"""Stands for the value of an attribute that a module does not have."""

HOOKS = "hooks"
"""Key of the forward hooks among the attributes of a module, if they may change its outputs."""

HARMLESS = ("accelerate", "deepspeed", "hf_stitch", "peft", "torch", "transformers", "wandb")
"""Packages with hooks that do not change values: they only move, distribute, record or log them."""

NAMESPACES = ("argparse", "types")
"""Modules of Python with classes that are used as configs."""

MOST_NAMED = 4
"""Maximum number of differences between a network and its record in an error message."""


def differences(model: nn.Module, weights: Mapping[str, Tensor], skeleton: nn.Module) -> list[str]:
    """Return the differences between a network and its record, in words: tensors, modules and their attributes."""
    actual, recorded = changed(model, skeleton)
    reasons = recorded.changes(actual)
    expected = skeleton.state_dict()
    for name, tensor in weights.items():
        if name not in expected:
            reasons.append(f"the architecture does not contain the tensor {name!r}")
        elif tensor.shape != (shape := expected[name].shape):
            reasons.append(f"{name!r} has the shape {tuple(tensor.shape)}, in the architecture {tuple(shape)}")
        elif tensor.is_floating_point() != expected[name].is_floating_point():
            reasons.append(f"{name!r} has the dtype {tensor.dtype}, in the architecture {expected[name].dtype}")
    reasons += [f"the tensor {name!r} of the architecture is missing" for name in expected if name not in weights]
    return reasons if len(reasons) <= MOST_NAMED else [*reasons[:MOST_NAMED], f"{len(reasons) - MOST_NAMED} more"]


def changed_by_hand(model: nn.Module, build: Callable[[], nn.Module]) -> tuple[Settings, Settings] | None:
    """Compare a network with its record by :func:`changed`; return ``None`` if the record cannot be built."""
    try:
        with weightless():
            skeleton = build()
    except Exception:  # user code, or its library cannot build it: saving the whole network raises the error
        return None
    return changed(model, skeleton)


def attributes(model: nn.Module) -> Settings:
    """Return the classes of all modules and their plain attributes; together with the weights they pin user code.

    Lists and attributes that are assigned outside the constructor are excluded, because forwards store values in them.

    ``chosen`` has the names of the modules of each class, and attributes that hide a method of a class. ``defaults``
    has all other attributes: the common value in all modules of a class, or the list of their values.
    """
    modules = {n: m for n, m in model.named_modules() if not type(m).__module__.startswith("hf_stitch.")}
    assigned = {name for kind in set(map(type, modules.values())) for name in _assigned(kind)}
    chosen: dict[str, list[Any]] = defaultdict(list)
    values: dict[str, list[Any]] = defaultdict(list)
    for name, module in modules.items():
        kind = type(module)
        chosen[kind.__qualname__].append(name)
        for key, value in _plain(module):
            if not assigned & {*key.split(".")}:
                hides = key == HOOKS or callable(getattr(kind, key, None))
                (chosen if hides else values)[f"{kind.__qualname__}.{key}"].append(value)
    defaults = {key: column if any(v != column[0] for v in column) else column[0] for key, column in values.items()}
    return Settings.of(chosen, defaults)


def _plain(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a module of user code and of its configs, as a record contains them."""
    if hooks := _hooks(module):
        yield HOOKS, hooks
    unsaved = {key: module._buffers[key] for key in module._non_persistent_buffers_set}
    for key, value in (attributes_of(module) | unsaved).items():
        parts = {"": value}
        if hasattr(value, "to_diff_dict"):
            parts = _values_of_config(value)
        elif hasattr(value, "__dict__") and not isinstance(value, Tensor) and not callable(value):
            package = type(value).__module__.partition(".")[0]  # a logger is not a config
            parts = vars(value) if package in NAMESPACES or package not in sys.stdlib_module_names else {}
        for inner, part in parts.items():
            if (plain := _recordable(part)) is not NOT_SET:
                yield f"{key}.{inner}".rstrip("."), plain


@cache
def _assigned(kind: type) -> frozenset[str]:
    """Return the names of the attributes that are assigned by methods of a class, except its constructor."""
    classes = [c for c in kind.__mro__ if c.__module__.partition(".")[0] not in ("builtins", "torch")]
    methods = [inspect.unwrap(part) for c in classes for name, part in vars(c).items() if name != "__init__"]
    codes, assigned = [method.__code__ for method in methods if hasattr(method, "__code__")], set()
    while codes:
        code = codes.pop()
        codes += [inner for inner in code.co_consts if isinstance(inner, types.CodeType)]
        assigned |= {step.argval for step in dis.get_instructions(code) if step.opname == "STORE_ATTR"}
    return frozenset(assigned)


def _recordable(value: Any) -> Any:
    """Return an attribute as it is recorded, identical on every machine; ``NOT_SET`` if it is not plain."""
    if isinstance(value, Tensor) and not value.is_meta and value.numel():  # computed values differ in the last bits
        if value.layout is not torch.strided or value.is_quantized:
            return f"{tuple(value.shape)} of {value.dtype}"
        real = (torch.view_as_real(value.resolve_conj()) if value.is_complex() else value).detach().double()
        return f"{tuple(value.shape)} of norm {real.norm():.4g}, sum {real.sum() / (real.abs().sum() + 1e-300):.3f}"
    if isinstance(value, tuple):
        return list(map(_recordable, value))
    if hasattr(value, "__qualname__"):
        return getattr(value, "__name__", NOT_SET)  # packed weights of torch.ao have none
    return value if isinstance(value, (type(None), bool, int, float, str)) else NOT_SET


def _hooks(module: nn.Module) -> list[str]:
    """Return the names of the forward hooks of a module that may change its outputs."""
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    return [
        getattr(hook, "__qualname__", type(hook).__qualname__)
        for hook in hooks
        if (getattr(hook, "__module__", None) or type(hook).__module__).partition(".")[0] not in HARMLESS
    ]


def changed(model: nn.Module, skeleton: nn.Module) -> tuple[Settings, Settings]:
    """Compare modules and their attributes, except weights, with a network that was built from a record.

    Attributes that the record does not contain count only if they hide an attribute of the class, e.g. ``forward``.
    """
    changes: dict[str, tuple[Any, Any]] = {}
    recorded, alike, compared = dict(skeleton.named_modules()), Alike(model, skeleton), set()
    for name, module in model.named_modules():
        if (twin := recorded.get(name)) is None:
            continue
        if not _same_forward(module, twin):
            changes[name or "network"] = _class_path(module), _class_path(twin)
            continue
        if _children_differ(module, twin):
            changes[name or "network"] = _children(module), _children(twin)
        for key in module._non_persistent_buffers_set:
            computed, built = module._buffers[key], twin._buffers.get(key)
            if computed is not None and built is not None and not built.is_meta and not _close(computed, built):
                changes[f"{name}.{key}".lstrip(".")] = _recordable(computed), NOT_SET
        if hooks := _hooks(module):
            changes[f"{name or 'network'}.{HOOKS}"] = hooks, NOT_SET
        ours, theirs = attributes_of(module), attributes_of(twin)
        hiding_keys = {key for key in ours if hasattr(type(module), key)}
        if type(module).__module__.startswith("hf_stitch"):  # its record contains its values; plugins included
            hiding_keys, theirs = {key for key in hiding_keys if callable(getattr(type(module), key))}, {}
            if module is model and _is_wrapped_by_trl(ours.get("forward"), type(module)):
                hiding_keys.discard("forward")
        for key in sorted(theirs.keys() | hiding_keys):
            path, values = f"{name}.{key}".lstrip("."), (ours.get(key, NOT_SET), theirs.get(key, NOT_SET))
            if all(hasattr(type(value), "to_diff_dict") for value in values):  # configs are shared by modules
                if (ids := tuple(map(id, values))) not in compared:
                    compared.add(ids)
                    first, second = (_values_of_config(type(values[1]).from_dict(value.to_dict())) for value in values)
                    both = {inner: (first[inner], second[inner]) for inner in sorted(first.keys() & second.keys())}
                    changes |= {f"{path}.{inner}": pair for inner, pair in both.items() if pair[0] != pair[1]}
            elif values[1] != {} and not alike(*map(_with_lists, values)):  # {}: a cache that forwards fill
                changes[path] = values
    ours, theirs = ({n: pair[side] for n, pair in changes.items() if pair[side] is not NOT_SET} for side in (0, 1))
    return Settings.of(ours), Settings.of(theirs)


def _is_wrapped_by_trl(forward: Any, kind: type[nn.Module]) -> bool:
    """Return whether a TRL trainer has wrapped the forward of a whole model to compute the loss."""
    wrapper = getattr(forward, "__func__", None)
    wraps = getattr(wrapper, "__wrapped__", None) is kind.forward
    return wraps and wrapper.__globals__["__name__"].startswith("trl.")  # type: ignore[union-attr]


def _close(computed: Tensor, built: Tensor) -> bool:
    """Return whether a buffer has the values that the constructor computes, on any device and in any dtype."""
    if computed.dtype == built.dtype and computed.device == built.device and torch.equal(computed, built):
        return True
    rtol = 1e-4 if computed.dtype.itemsize > 2 else 1e-2
    return computed.shape == built.shape and torch.allclose(
        computed.cpu().to(torch.complex128), built.to(torch.complex128), rtol=rtol, equal_nan=True
    )


def _values_of_config(config: Any) -> dict[str, Any]:
    """Return the values of a config and its nested configs that a forward reads, as recorded, by flat names."""
    values = Settings.of(config.to_dict()).chosen
    values.pop("down_ops", None)  # the constructor of LeViT appends to it
    return {name: value for name, value in values.items() if all(map(is_read, name.split(".")))}


def _with_lists(value: Any) -> Any:
    """Convert tuples in a value to lists, as in a record."""
    if type(value) is dict:
        return {key: _with_lists(part) for key, part in value.items()}
    return list(map(_with_lists, value)) if type(value) in (list, tuple) else value


def _children(module: nn.Module) -> list[str]:
    return [name for name, child in module._modules.items() if child is not None]


def _children_differ(module: nn.Module, recorded: nn.Module) -> bool:
    """Return whether a module lacks children of the recorded one or, for a sequence, has different children."""
    if type(module).__module__.startswith("torch.distributed."):  # a wrapper of the distributed module
        return False
    sequence = isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict))
    names, recorded_names = _children(module), _children(recorded)
    return names != recorded_names if sequence else not set(recorded_names) <= set(names)


def _same_forward(module: nn.Module, recorded: nn.Module) -> bool:
    """Return whether two modules have the same forward, or the first only distributes the second over processes."""
    kind, recorded_kind = type(module), type(recorded)
    synchronised = isinstance(module, nn.SyncBatchNorm) and isinstance(recorded, _BatchNorm)
    return kind.forward is recorded_kind.forward or synchronised or kind.__module__.startswith("torch.distributed.")


def _class_path(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"
