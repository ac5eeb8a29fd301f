"""Building a network from an untrusted config without weights, and comparing networks with what they are built from."""

from __future__ import annotations

import dis
import inspect
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from hf_stitch.adapters.attributes import Alike, attributes_of
from hf_stitch.adapters.pinning import is_read
from hf_stitch.adapters.sealed import sealed
from hf_stitch.reference import Settings

ROOM, SMALL = 2**26, 2**10
"""Bytes of the largest tensor that is computed while building; and of those that may have values although nothing was
written into them, because constructors read them (drop rates per layer)."""

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


@contextmanager
def weightless(*, online: bool = False) -> Iterator[None]:
    """Build networks without weights: without memory for them, and unless online without connections and programs.

    Tensors without values are on the meta device. The state of the random number generator does not change.
    """
    with nullcontext() if online else sealed(), torch.random.fork_rng(devices=[]), _WithoutMemory():
        yield


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


class _WithoutMemory(TorchDispatchMode):
    """Runs an operation on the meta device if its result has no values, or is larger than any computed one.

    A mode concerns one thread only, in contrast to ``accelerate.init_empty_weights``, which changes ``nn.Module``.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        mixed = any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in _pytree.tree_leaves((args, kwargs)))
        if func._schema.is_mutable:  # in place, no new tensor
            if _fills(func) and args[0].is_meta:  # torch would compute shapes, slowly
                return args[0]
            if mixed and isinstance(args[0], Tensor) and not args[0].is_meta:  # from values that do not exist
                return args[0].fill_(torch.nan) if args[0].is_floating_point() else args[0]
            return func(*args, **(kwargs or {}))
        try:
            planned = func(*_on_meta(args), **_on_meta({**(kwargs or {}), **_device(func)}))
        except (NotImplementedError, RuntimeError):  # depends on values
            return func(*args, **(kwargs or {}))
        is_view = any(result.alias_info is not None for result in func._schema.returns)
        size = 0 if is_view else sum(_size(leaf) for leaf in _pytree.tree_leaves(planned))
        without = size > SMALL and func.overloadpacket is torch.ops.aten.empty
        return planned if mixed or without or size > ROOM else func(*args, **(kwargs or {}))


def _fills(func: Any) -> bool:
    """Return whether an operation changes the values of its first argument, and neither its shape nor its memory."""
    name = func.overloadpacket.__name__
    return name.endswith("_") and not name.startswith("_foreach") and torch.Tag.inplace_view not in func.tags


def _on_meta(tree: Any) -> Any:
    return _pytree.tree_map_only(Tensor, lambda t: t if t.is_meta else torch.empty_like(t, device="meta"), tree)


def _device(func: Any) -> dict[str, Any]:
    takes = any(argument.name == "device" for argument in func._schema.arguments)
    return {"device": torch.device("meta")} if takes else {}


def _size(leaf: Any) -> int:
    return leaf.numel() * leaf.element_size() if isinstance(leaf, Tensor) else 0
