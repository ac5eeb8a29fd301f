"""Construction of networks from untrusted records: without weights, connections, programs or foreign code."""

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
"""Audit events of Python for opening a connection or starting a program."""


class SealedError(ValueError):
    """Raised if code in :func:`sealed` opens a connection or starts a program."""


class _State(threading.local):
    depth = 0


_state = _State()


@contextmanager
def sealed() -> Iterator[None]:
    """Raise an error for connections and new processes in this thread.

    A config may contain a name that a constructor looks up on the Hub, and some constructors look for a compiler. This
    is not a sandbox for hostile code: code of an artefact never runs.
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
            f"loading a saved artefact may not cause the event {event}: its files are damaged or refer to something "
            "that would be downloaded or run"
        )


ELSEWHERE = ("checkpoint_path", "pretrained", "pretrained_cfg_overlay", "backbone_kwargs", "quantization_config")
"""Keys in a config, at any depth, that refer to external weights or code."""

IMPLEMENTATIONS = ("None", "batched_mm", "eager", "flex_attention", "grouped_mm", "sdpa")
"""Attention and expert implementations in transformers and torch."""


class AttentionError(ValueError):
    """Raised if a config names an attention implementation that transformers does not support for its network."""


def own_code_only(values: Any, key: str = "", holder: Any = None) -> Any:
    """Return a safe copy of a config: a constructor does not download weights or configs, open files or run code."""
    if (values and key in ELSEWHERE) or ("_implementation" in key and not is_installed(values)):
        raise _foreign(key, values)
    if isinstance(values, Mapping):
        # transformers asks whether to run the code in auto_map, even if it contains the class
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
    """Return whether an attention or expert implementation is installed."""
    from transformers import utils

    if isinstance(implementation, Mapping):
        return all(map(is_installed, implementation.values()))
    name = str(implementation).removeprefix("paged|")
    if version := re.fullmatch(r"flash_attention_(\d)", name):  # if missing, transformers downloads a kernel
        package = getattr(utils, f"is_flash_attn_{version[1]}_available", lambda: False)
        return bool(package())
    return name in IMPLEMENTATIONS


def is_in_timm(name: Any) -> bool:
    """Return whether a name is a timm architecture, possibly with a tag of weights."""
    import timm

    architecture, _, tag = str(name).partition(".")
    return timm.is_model(architecture) and tag in ("", *timm.models.get_arch_pretrained_cfgs(architecture))


def _foreign(key: str, value: Any) -> ValueError:
    return ValueError(f"a config may refer only to installed components of transformers and timm, got {key}={value!r}")


ROOM, SMALL = 2**26, 2**10
"""Maximum bytes of a tensor that is computed during construction; and of an uninitialised tensor with values, because
constructors read it (drop rates per layer)."""


@contextmanager
def weightless(*, online: bool = False) -> Iterator[None]:
    """Build networks without memory for weights and, except with ``online``, without connections and programs.

    Tensors without values are on the meta device. The state of the random number generator does not change.
    """
    with nullcontext() if online else sealed(), torch.random.fork_rng(devices=[]), _WithoutMemory():
        yield


class _WithoutMemory(TorchDispatchMode):
    """Mode that runs an operation on the meta device if its result does not have values or is larger than :data:`ROOM`.

    The mode affects only its thread, in contrast to ``accelerate.init_empty_weights``, which changes ``nn.Module``.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        mixed = any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in _pytree.tree_leaves((args, kwargs)))
        if func._schema.is_mutable:  # in place, no new tensor
            if _fills(func) and args[0].is_meta:  # torch would compute shapes, slowly
                return args[0]
            if mixed and isinstance(args[0], Tensor) and not args[0].is_meta:  # computed from missing values
                return args[0].fill_(torch.nan) if args[0].is_floating_point() else args[0]
            return func(*args, **(kwargs or {}))
        try:
            meta_result = func(*_on_meta(args), **_on_meta({**(kwargs or {}), **_device(func)}))
        except (NotImplementedError, RuntimeError):  # depends on values
            return func(*args, **(kwargs or {}))
        is_view = any(result.alias_info is not None for result in func._schema.returns)
        size = 0 if is_view else sum(_size(leaf) for leaf in _pytree.tree_leaves(meta_result))
        is_empty = size > SMALL and func.overloadpacket is torch.ops.aten.empty
        return meta_result if mixed or is_empty or size > ROOM else func(*args, **(kwargs or {}))


def _fills(func: Any) -> bool:
    """Return whether an operation changes only the values of its first argument, not its shape or memory."""
    name = func.overloadpacket.__name__
    return name.endswith("_") and not name.startswith("_foreach") and torch.Tag.inplace_view not in func.tags


def _on_meta(tree: Any) -> Any:
    return _pytree.tree_map_only(Tensor, lambda t: t if t.is_meta else torch.empty_like(t, device="meta"), tree)


def _device(func: Any) -> dict[str, Any]:
    accepts_device = any(argument.name == "device" for argument in func._schema.arguments)
    return {"device": torch.device("meta")} if accepts_device else {}


def _size(leaf: Any) -> int:
    return leaf.numel() * leaf.element_size() if isinstance(leaf, Tensor) else 0
