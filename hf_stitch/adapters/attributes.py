"""Attributes of modules: those that a forward reads, and whether the values of two networks are alike.

Code of installed packages is compared by identity, values by their bytes. Functions of user code are compared by what
Python has loaded: bytecode, defaults, closures, and the globals that they name; comments and positions in files do not
count. Imports inside of functions, ``getattr`` with a computed name and code in other languages are not followed.
"""

from __future__ import annotations

import copyreg
import types
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from hf_stitch.reference import weights_hash

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
        """Yield what makes up a value."""
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
