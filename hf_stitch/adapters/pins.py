"""Hashes of live objects: their values, and the code that they run.

Code of installed packages is pinned by its name, values by their bytes. Functions and classes of user code
are pinned by the code that Python has loaded: bytecode, defaults, closures, and the globals that they name. A change of
any of them changes the hash, also in a notebook; comments and positions in files do not. Imports inside of functions,
``getattr`` with a computed name and code in other languages are not followed.
"""

from __future__ import annotations

import copyreg
import hashlib
import site
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hf_stitch.reference import weights_hash

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(Ellipsis), range)
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)

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

UNREAD_OF_CONFIGS = frozenset(
    (
        *("_name_or_path", "_commit_hash", "transformers_version", "architectures", "auto_map", "model_type"),
        *("id2label", "label2id", "finetuning_task", "task_specific_params", "dtype", "torch_dtype"),
    )
)
"""Attributes of configs that no forward reads, and those that modules and weights have themselves."""

OF_CLASSES = frozenset(
    (
        *("__doc__", "__module__", "__dict__", "__weakref__", "__annotations__", "__annotate__", "__annotate_func__"),
        *("__annotations_cache__", "__firstlineno__", "__static_attributes__", "__qualname__", "__abstractmethods__"),
        *("_abc_impl", "__slotnames__", "__parameters__", "__orig_bases__", "__classdictcell__"),
    )
)
"""Entries of the namespace of a class that are no code of it."""


class Pins:
    """Hashes of objects, by their values and by the code that they run."""

    def __init__(self, without_weights: nn.Module | None = None) -> None:
        self._bare = set() if without_weights is None else set(map(id, without_weights.modules()))
        self._known: dict[int, bytes] = {}
        self._entered: dict[int, int] = {}
        self._alive: list[Any] = []  # an id is that of one object only while the object exists

    def hash(self, value: Any) -> str:
        """Hash an object."""
        try:
            return self._hash(value).hex()
        except RecursionError as error:
            raise ValueError(
                f"{type(value).__name__} cannot be hashed, because its objects or functions refer to each other in a "
                "chain that is too long"
            ) from error

    def _hash(self, value: Any) -> bytes:
        if isinstance(value, PLAIN):
            return _sha("plain", type(value).__name__, repr(value))
        if (found := self._known.get(id(value))) is not None:
            return found
        if (depth := self._entered.get(id(value))) is not None:
            return _sha("again", str(len(self._entered) - depth))
        self._entered[id(value)] = len(self._entered)
        self._alive.append(value)
        try:
            found = _sha(*self._parts(value))
        finally:
            del self._entered[id(value)]
        self._known[id(value)] = found
        return found

    def _parts(self, value: Any) -> Iterable[str | bytes]:
        """Yield what makes up a value."""
        if isinstance(value, Tensor):
            return _of_tensor(value)
        if isinstance(value, np.ndarray) and value.dtype != object:
            return ["array", str(value.dtype), repr(value.shape), np.ascontiguousarray(value).tobytes()]
        if isinstance(value, nn.Module):
            return self._of_module(value)
        if isinstance(value, types.ModuleType):
            return ["package", self._package(value.__name__) or value.__name__, value.__name__]
        if isinstance(value, (*FUNCTIONS, type)):
            return self._of_code(value)
        if isinstance(value, types.CodeType):
            consts = map(self._hash, value.co_consts)
            return ["code", value.co_code, value.co_exceptiontable, repr(value.co_names), *consts]
        if isinstance(value, types.MethodType):
            return ["method", self._hash(value.__func__), self._hash(value.__self__)]
        if type(value) in (tuple, list, torch.Size):
            return [type(value).__name__, *map(self._hash, value)]
        if type(value) in (set, frozenset):
            return [type(value).__name__, *sorted(map(self._hash, value))]
        if type(value) in (dict, types.MappingProxyType):
            return ["dict", *(self._hash(part) for item in value.items() for part in item)]
        if hasattr(type(value), "to_diff_dict"):  # a config of transformers
            values = {name: part for name, part in vars(value).items() if name not in UNREAD_OF_CONFIGS | UNREAD}
            attention = self._hash(_attention(value))
            return ["config", self._hash(type(value)), attention, *self._of_attributes(values)]
        return self._of_object(value)

    def _of_module(self, module: nn.Module) -> Iterator[str | bytes]:
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(f"{module.original_name} is a network of TorchScript, whose code cannot be read")
        yield "module"
        yield self._hash([type(module), type(module).forward])
        if isinstance(module, torch._dynamo.OptimizedModule):  # runs uncompiled
            yield self._hash(module._orig_mod)
            return
        yield from self._of_attributes(attributes_of(module))
        yield self._hash(module._modules)
        unsaved = {name: module._buffers[name] for name in sorted(module._non_persistent_buffers_set)}
        yield self._hash(unsaved if id(module) in self._bare else {**module._buffers, **module._parameters})
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for number, hook in hooks.items():
                flagged = number in {**module._forward_pre_hooks_with_kwargs, **module._forward_hooks_with_kwargs}
                yield self._hash([flagged, hook])

    def _of_attributes(self, values: Mapping[str, Any]) -> Iterator[str | bytes]:
        for name in sorted(values):
            yield from (name, self._hash(values[name]))

    def _of_code(self, value: Any) -> Iterator[str | bytes]:
        """Yield a function or class by its name, if that is all of it, or else by its code."""
        name = str(getattr(value, "__qualname__", value.__name__))
        module = getattr(value, "__module__", None) or getattr(getattr(value, "__objclass__", None), "__module__", "")
        module = str(module or "builtins")
        written = isinstance(value, (types.FunctionType, type))  # in Python, or else compiled
        if not written or (self._package(module) is not None and _is_at(value, module, name)):
            yield from ("named", self._package(module) or "", module, name)
            yield self._hash(getattr(value, "__self__", None))
        elif isinstance(value, type):
            yield from ("class", value.__name__, self._hash(value.__bases__))
            yield self._hash({key: part for key, part in sorted(vars(value).items()) if key not in OF_CLASSES})
        else:
            yield "function"
            yield self._hash([value.__code__, value.__defaults__, value.__kwdefaults__])
            yield self._hash([_contents(cell) for cell in value.__closure__ or ()])
            yield from self._of_names(value.__globals__, sorted(set(_names(value.__code__))))

    def _of_names(
        self, namespace: Mapping[str, Any], names: Sequence[str], within: tuple[types.ModuleType, ...] = ()
    ) -> Iterator[str | bytes]:
        """Yield what names stand for in a namespace, and in the modules of user code among them."""
        for name in names:
            if name in namespace:
                value = namespace[name]
                yield from (name, self._hash(value))
                written = isinstance(value, types.ModuleType) and self._package(value.__name__) is None
                if written and value not in within:
                    yield from self._of_names(vars(value), names, (*within, value))

    def _of_object(self, value: Any) -> Iterator[str | bytes]:
        """Yield the class of an object, and its state as a copy would take it."""
        yield from ("object", self._hash(type(value)))
        if isinstance(value, (staticmethod, classmethod)):
            yield self._hash(value.__func__)
            return
        if "__wrapped__" in getattr(value, "__dict__", ()):  # functools.lru_cache
            yield self._hash(value.__wrapped__)
        if isinstance(value, property):
            yield from (self._hash(part) for part in (value.fget, value.fset))
            return
        try:
            reduced = copyreg.dispatch_table.get(type(value), lambda value: value.__reduce_ex__(4))(value)
        except Exception:  # a lock, a file, a generator: nothing that a copy could take
            return
        if isinstance(reduced, str):
            yield reduced
            return
        make, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
        for part in (make, arguments, state, None if items is None else list(items)):
            yield self._hash(part)
        yield self._hash(None if pairs is None else list(pairs))

    def _package(self, module: str) -> str | None:
        """Return the installed package to which a module belongs; ``None`` for user code."""
        top = module.partition(".")[0]
        return top if _is_installed(top) else None


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


def _sha(*parts: str | bytes) -> bytes:
    found = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        found.update(len(data).to_bytes(8, "little"))
        found.update(data)
    return found.digest()


def _of_tensor(value: Tensor) -> list[str | bytes]:
    about = ["tensor", str(value.dtype), repr(tuple(value.shape)), str(value.layout)]
    if value.is_quantized or is_traceable_wrapper_subclass(value):
        return ["tensor", weights_hash({"": value})]
    if value.is_meta or value.layout is not torch.strided:
        return [*about, "" if value.is_meta else repr(value)]
    return [*about, value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()]


def _is_at(value: Any, module: str, name: str) -> bool:
    """Return whether a module contains a function or class under its own name."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is value


def _attention(config: Any) -> list[Any]:
    """Return the functions that transformers calls by the name of an attention; users register their own."""
    from transformers import PreTrainedConfig
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = config._attn_implementation if isinstance(config, PreTrainedConfig) else None  # others: of quantization
    registered = (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)
    return [functions.get(name) for functions in registered] if isinstance(name, str) else []


def _contents(cell: types.CellType) -> Any:
    """Return the value of a variable of a closure; ``...`` before it has one."""
    try:
        return cell.cell_contents
    except ValueError:
        return ...


def _names(code: types.CodeType) -> Iterator[str]:
    """Yield the names that a function and the functions inside of it use."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)


@cache
def _is_installed(top: str) -> bool:
    """Return whether a package is part of Python, of hf-stitch, or of the installed packages."""
    if top in sys.stdlib_module_names or top == "hf_stitch":
        return True
    if top == "__main__":
        return False
    module = sys.modules.get(top)
    places = [getattr(module, "__file__", None) or "", *getattr(module, "__path__", ())]
    roots = (*(sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")), site.getusersitepackages())
    return any(place.startswith(roots) for place in places if place)
