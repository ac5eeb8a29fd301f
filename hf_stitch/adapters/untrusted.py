"""Building networks from records that may be untrusted: without weights, connections, programs or foreign code."""

from __future__ import annotations

import copy
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

SEALED = frozenset(
    (
        "os.exec",
        "os.fork",
        "os.forkpty",
        "os.posix_spawn",
        "os.spawn",
        "os.startfile",
        "os.system",
        "socket.connect",
        "socket.getaddrinfo",
        "socket.gethostbyname",
        "socket.sendmsg",
        "socket.sendto",
        "subprocess.Popen",
    )
)
"""Audit events of Python that open a connection or start a program."""


class SealedError(ValueError):
    """Raised when code in :func:`sealed` opens a connection or starts a program."""


class _State(threading.local):
    depth = 0


_state = _State()


@contextmanager
def sealed() -> Iterator[None]:
    """Refuse connections and new processes in this thread.

    A config may contain a name that a constructor looks up on the Hub, and some constructors look for a compiler. This
    does not contain hostile code; no code of an artefact runs anyway.
    """
    _install()
    _state.depth += 1
    try:
        yield
    finally:
        _state.depth -= 1


@cache
def _install() -> None:
    """Add the audit hook, once: hooks cannot be removed."""
    sys.addaudithook(_refuse)


def _refuse(event: str, args: Any) -> None:
    if event in SEALED and _state.depth:
        raise SealedError(
            f"loading a saved artefact may not cause the event {event}: its files must contain everything, so they are "
            "damaged or name something else to fetch or run"
        )


ELSEWHERE = ("checkpoint_path", "pretrained", "pretrained_cfg_overlay", "backbone_kwargs", "quantization_config")
"""Keys in a config, at any depth, that refer to weights or code from elsewhere."""

IMPLEMENTATIONS = ("None", "batched_mm", "eager", "flex_attention", "grouped_mm", "sdpa")
"""Implementations of attention and of experts that are part of transformers and torch."""


class AttentionError(ValueError):
    """Raised when a config names an attention that the installed transformers does not have for its network."""


def own_code_only(values: Any, key: str = "", holder: Any = None) -> Any:
    """Return a copy of a config with which no constructor downloads weights or configs, opens files or runs code."""
    if (values and key in ELSEWHERE) or ("_implementation" in key and not is_installed(values)):
        raise _foreign(key, values)
    if isinstance(values, Mapping):
        # transformers asks whether to run the code that auto_map names, even though it has a class of its own
        return {name: own_code_only(value, str(name), values) for name, value in values.items() if name != "auto_map"}
    if isinstance(values, (list, tuple)):
        return [own_code_only(value, key, holder) for value in values]
    if key == "use_pretrained_backbone":
        return False
    if values is not None and key in ("architecture", "backbone"):
        of_timm = key == "architecture" or (holder or {}).get("model_type") == "timm_backbone"
        if not (of_timm and is_in_timm(values)):  # transformers would look up other backbones on the Hub
            raise _foreign(key, values)
    return copy.deepcopy(values)


def is_installed(implementation: Any) -> bool:
    """Return whether an implementation of attention or of experts is installed."""
    from transformers import utils

    if isinstance(implementation, Mapping):
        return all(map(is_installed, implementation.values()))
    name = str(implementation).removeprefix("paged|")
    if version := re.fullmatch(r"flash_attention_(\d)", name):  # if missing, transformers downloads a kernel instead
        package = getattr(utils, f"is_flash_attn_{version[1]}_available", lambda: False)
        return bool(package())
    return name in IMPLEMENTATIONS


def is_in_timm(name: Any) -> bool:
    """Return whether a name is that of an architecture of timm, possibly with the tag of its weights."""
    import timm

    architecture, _, tag = str(name).partition(".")
    return timm.is_model(architecture) and tag in ("", *timm.models.get_arch_pretrained_cfgs(architecture))


def _foreign(key: str, value: Any) -> ValueError:
    return ValueError(
        f"a config may refer only to components of transformers and timm that are installed, got {key}={value!r}"
    )


ROOM, SMALL = 2**26, 2**10
"""Bytes of the largest tensor that is computed while building; and of those that may have values although nothing was
written into them, because constructors read them (drop rates per layer)."""


@contextmanager
def weightless(*, online: bool = False) -> Iterator[None]:
    """Build networks without weights: without memory for them, and unless online without connections and programs.

    Tensors without values are on the meta device. The state of the random number generator does not change.
    """
    with nullcontext() if online else sealed(), torch.random.fork_rng(devices=[]), _WithoutMemory():
        yield


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
