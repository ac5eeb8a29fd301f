"""Attributes of modules: those that a forward reads, and whether a network has those that its record gives.

Code of installed packages is compared by identity, values by their bytes. Functions of user code are compared by what
Python has loaded: bytecode, defaults, closures, and the globals that they name; comments and positions in files do not
count. Imports inside of functions, ``getattr`` with a computed name and code in other languages are not followed.
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
"""Attributes of every module. Weights are hashed apart; hooks and buffers are read by name."""

UNREAD = frozenset(
    (
        *("name_or_path", "generation_config", "warnings_issued", "pretrained_cfg", "default_cfg", "_traits"),
        *("hf_device_map", "_hf_hook", "_old_forward", "_original_forward", "_is_hf_initialized", "_use_kernels"),
        *("_weight_conversions", "pooling_mult", "rope_deltas"),
        *("grad_checkpointing", "gradient_checkpointing", "_gradient_checkpointing_func"),
        *("drop_prob", "dropout", "attention_dropout", "activation_dropout", "layerdrop", "momentum", "inplace"),
    )
)
"""Attributes that no forward in eval mode reads: how modules were loaded and are trained, what the last run left."""

REPLACED = frozenset(("forward", "to", "cuda", "npu", "xpu", "mlu", "sdaa", "musa"))
"""Methods that accelerate replaces in offloaded networks: the forward loads weights first, moves are refused."""


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that a forward in eval mode may read, apart from weights and submodules."""
    own = {name: value for name, value in vars(module).items() if name not in INTERNAL}
    for kept in ("_original_forward", "_old_forward"):  # where accelerate casts, and where it moves weights
        if kept in own:
            patched, own = own[kept], {name: value for name, value in own.items() if name not in REPLACED}
            if getattr(patched, "__func__", None) is not type(module).forward:
                own["forward"] = patched
    unread = (*UNREAD, "p") if isinstance(module, _DropoutNd) else UNREAD
    return {name: value for name, value in own.items() if name not in unread}


class Alike:
    """Compares values of two networks; weights of their own modules do not count."""

    def __init__(self, *networks: nn.Module) -> None:
        self._own = set(map(id, chain.from_iterable(network.modules() for network in networks)))
        self._known: dict[tuple[int, int], bool] = {}
        self._alive: list[Any] = []  # an id is that of one object only while the object exists

    def __call__(self, one: Any, two: Any) -> bool:
        """Return whether two values are alike."""
        key = id(one), id(two)
        if one is two or key in self._known:
            return self._known.get(key, True)
        self._known[key] = True  # of values that refer to themselves, until the rest is compared
        self._alive += [one, two]
        self._known[key] = found = self._compare(one, two)
        return found

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
            yield unsaved if id(value) in self._own else {**value._buffers, **value._parameters}
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
            yield from _copied(value)


def _copied(value: Any) -> tuple[Any, ...]:
    """Return what a copy of an object would be made of."""
    try:
        found = copyreg.dispatch_table.get(type(value), lambda value: value.__reduce_ex__(4))(value)
    except Exception:  # a lock, a file, a generator: nothing that a copy could take
        return ()
    if isinstance(found, str):
        return found, getattr(value, "__wrapped__", None)  # of functools.lru_cache
    make, arguments, state, items, pairs = (*found, None, None, None)[:5]
    return make, arguments, state, list(items or ()), list(pairs or ())


def _names(code: types.CodeType) -> Iterator[str]:
    """Yield the names that a function and the functions inside of it use."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)


NOT_SET = ...
"""Value of an attribute that a module does not have."""

HOOKS = "hooks"
"""Name among the attributes of a module of the forward hooks that may change what it computes."""

WATCHING = ("accelerate", "deepspeed", "hf_stitch", "peft", "torch", "transformers", "wandb")
"""Packages whose hooks move, distribute, record or watch values, but change none."""

NAMESPACES = ("argparse", "types")
"""Modules of Python with classes of which configs are."""

MOST_NAMED = 4
"""Number of differences between a network and its record that an error names."""


def differences(model: nn.Module, weights: Mapping[str, Tensor], skeleton: nn.Module) -> list[str]:
    """Compare a network with the one that its record gives: names and shapes of tensors, and what modules compute."""
    own, recorded = changed(model, skeleton)
    found = recorded.changes(own)
    expected = skeleton.state_dict()
    for name, tensor in weights.items():
        if name not in expected:
            found.append(f"the architecture has no tensor {name!r}")
        elif tensor.shape != (shape := expected[name].shape):
            found.append(f"{name!r} has the shape {tuple(tensor.shape)}, in the architecture {tuple(shape)}")
        elif tensor.is_floating_point() != expected[name].is_floating_point():
            found.append(f"{name!r} has the dtype {tensor.dtype}, in the architecture {expected[name].dtype}")
    found += [f"the tensor {name!r} of the architecture is missing" for name in expected if name not in weights]
    return found if len(found) <= MOST_NAMED else [*found[:MOST_NAMED], f"{len(found) - MOST_NAMED} more"]


def changed_by_hand(model: nn.Module, build: Callable[[], nn.Module]) -> tuple[Settings, Settings] | None:
    """Compare a network with the one that its record gives, as :func:`changed` does, if that can be built."""
    try:
        with weightless():
            skeleton = build()
    except Exception:  # user code, or what its library cannot build: saving it whole raises the error
        return None
    return changed(model, skeleton)


def attributes(model: nn.Module) -> Settings:
    """Return the classes of all modules and their plain attributes, which pin user code beside its weights.

    What methods other than the constructor assign, and lists, are left out, because forwards keep values in them.

    Returns the names of the modules of each class, what hides a method of a class, and as ``defaults`` every other
    attribute: its value in all modules of a class, or the list of their values.
    """
    modules = {name: each for name, each in model.named_modules() if not type(each).__module__.startswith("hf_stitch.")}
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
    defaults = {key: each if any(v != each[0] for v in each) else each[0] for key, each in values.items()}
    return Settings.of(chosen, defaults)


def _plain(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a module of user code, and those of configs in it, as a record contains them."""
    if hooks := _hooks(module):
        yield HOOKS, hooks
    unsaved = {key: module._buffers[key] for key in module._non_persistent_buffers_set}
    for key, value in (attributes_of(module) | unsaved).items():
        found = {"": value}
        if hasattr(value, "to_diff_dict"):
            found = _read(value)
        elif hasattr(value, "__dict__") and not isinstance(value, Tensor) and not callable(value):
            package = type(value).__module__.partition(".")[0]  # a logger is no config
            found = vars(value) if package in NAMESPACES or package not in sys.stdlib_module_names else {}
        for inner, part in found.items():
            if (told := _told(part)) is not NOT_SET:
                yield f"{key}.{inner}".rstrip("."), told


@cache
def _assigned(kind: type) -> frozenset[str]:
    """Return the names of the attributes that methods of a class other than its constructor assign."""
    written = [each for each in kind.__mro__ if each.__module__.partition(".")[0] not in ("builtins", "torch")]
    methods = [inspect.unwrap(part) for each in written for name, part in vars(each).items() if name != "__init__"]
    codes, found = [method.__code__ for method in methods if hasattr(method, "__code__")], set()
    while codes:
        code = codes.pop()
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
        found |= {each.argval for each in dis.get_instructions(code) if each.opname == "STORE_ATTR"}
    return frozenset(found)


def _told(value: Any) -> Any:
    """Return an attribute as a record contains it, the same on every machine; ``NOT_SET`` if it is not plain."""
    if isinstance(value, Tensor) and not value.is_meta and value.numel():  # computed values differ in the last bits
        if value.layout is not torch.strided or value.is_quantized:
            return f"{tuple(value.shape)} of {value.dtype}"
        real = (torch.view_as_real(value.resolve_conj()) if value.is_complex() else value).detach().double()
        return f"{tuple(value.shape)} of norm {real.norm():.4g}, sum {real.sum() / (real.abs().sum() + 1e-300):.3f}"
    if isinstance(value, tuple):
        return list(map(_told, value))
    if hasattr(value, "__qualname__"):
        return getattr(value, "__name__", NOT_SET)  # which the packed weights of torch.ao lack
    return value if isinstance(value, (type(None), bool, int, float, str)) else NOT_SET


def _hooks(module: nn.Module) -> list[str]:
    """Return the names of the forward hooks of a module that may change what it computes."""
    found = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    return [
        getattr(hook, "__qualname__", type(hook).__qualname__)
        for hook in found
        if (getattr(hook, "__module__", None) or type(hook).__module__).partition(".")[0] not in WATCHING
    ]


def changed(model: nn.Module, skeleton: nn.Module) -> tuple[Settings, Settings]:
    """Compare modules and their attributes, apart from weights, with those of the network that a record gives.

    Attributes that the record does not give count only if they hide what the class has, as a ``forward`` does.
    """
    found: dict[str, tuple[Any, Any]] = {}
    recorded, alike, compared = dict(skeleton.named_modules()), Alike(model, skeleton), set()
    for name, module in model.named_modules():
        if (other := recorded.get(name)) is None:
            continue
        if not _computes_like(module, other):
            found[name or "network"] = _kind(module), _kind(other)
            continue
        if _lacks(module, other):
            found[name or "network"] = _children(module), _children(other)
        for key in module._non_persistent_buffers_set:
            computed, built = module._buffers[key], other._buffers.get(key)
            if computed is not None and built is not None and not built.is_meta and not _close(computed, built):
                found[f"{name}.{key}".lstrip(".")] = _told(computed), NOT_SET
        if hooks := _hooks(module):
            found[f"{name or 'network'}.{HOOKS}"] = hooks, NOT_SET
        own, theirs = attributes_of(module), attributes_of(other)
        hiding = {key for key in own if hasattr(type(module), key)}
        if type(module).__module__.startswith("hf_stitch"):  # its record gives its values, also of a plugin
            hiding, theirs = {key for key in hiding if callable(getattr(type(module), key))}, {}
            if module is model and _is_of_trl(own.get("forward"), type(module)):
                hiding.discard("forward")
        for key in sorted(theirs.keys() | hiding):
            place, values = f"{name}.{key}".lstrip("."), (own.get(key, NOT_SET), theirs.get(key, NOT_SET))
            if all(hasattr(type(value), "to_diff_dict") for value in values):  # configs, which modules share
                if (ids := tuple(map(id, values))) not in compared:
                    compared.add(ids)
                    first, second = (_read(type(values[1]).from_dict(value.to_dict())) for value in values)
                    both = {each: (first[each], second[each]) for each in sorted(first.keys() & second.keys())}
                    found |= {f"{place}.{each}": pair for each, pair in both.items() if pair[0] != pair[1]}
            elif values[1] != {} and not alike(*map(_listed, values)):  # or a cache, which forwards fill
                found[place] = values
    own, theirs = ({name: pair[side] for name, pair in found.items() if pair[side] is not NOT_SET} for side in (0, 1))
    return Settings.of(own), Settings.of(theirs)


def _is_of_trl(forward: Any, kind: type[nn.Module]) -> bool:
    """Return whether a trainer of TRL has wrapped the forward of a whole model, as it does to compute the loss."""
    wrapper = getattr(forward, "__func__", None)
    wraps = getattr(wrapper, "__wrapped__", None) is kind.forward
    return wraps and wrapper.__globals__["__name__"].startswith("trl.")  # type: ignore[union-attr]


def _close(computed: Tensor, built: Tensor) -> bool:
    """Return whether a buffer has the values that a constructor gives it, on another device or in another dtype too."""
    if computed.dtype == built.dtype and computed.device == built.device and torch.equal(computed, built):
        return True
    rtol = 1e-4 if computed.dtype.itemsize > 2 else 1e-2
    return computed.shape == built.shape and torch.allclose(
        computed.cpu().to(torch.complex128), built.to(torch.complex128), rtol=rtol, equal_nan=True
    )


def _read(config: Any) -> dict[str, Any]:
    """Return what a forward reads of a config as a record keeps it, and of those inside it, by flat names."""
    values = Settings.of(config.to_dict()).chosen
    values.pop("down_ops", None)  # to which the constructor of LeViT appends
    return {name: value for name, value in values.items() if all(map(is_read, name.split(".")))}


def _listed(value: Any) -> Any:
    """Return a value with lists for tuples, as a record contains it."""
    if type(value) is dict:
        return {key: _listed(part) for key, part in value.items()}
    return list(map(_listed, value)) if type(value) in (list, tuple) else value


def _children(module: nn.Module) -> list[str]:
    return [name for name, child in module._modules.items() if child is not None]


def _lacks(module: nn.Module, other: nn.Module) -> bool:
    """Return whether a module lacks one of the other, or runs more of them, as a sequence does."""
    if type(module).__module__.startswith("torch.distributed."):  # holds the module that it distributes
        return False
    sequence = isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict))
    own, theirs = _children(module), _children(other)
    return own != theirs if sequence else not set(theirs) <= set(own)


def _computes_like(module: nn.Module, other: nn.Module) -> bool:
    """Return whether two modules have the same forward, or one only distributes the other over processes."""
    own, theirs = type(module), type(other)
    synchronised = isinstance(module, nn.SyncBatchNorm) and isinstance(other, _BatchNorm)
    return own.forward is theirs.forward or synchronised or own.__module__.startswith("torch.distributed.")


def _kind(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"
