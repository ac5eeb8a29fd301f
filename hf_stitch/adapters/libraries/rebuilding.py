"""Building a network of transformers from a config that may be untrusted."""

from __future__ import annotations

import copy
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

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


_PATCHING = threading.RLock()


@contextmanager
def replaced(kind: type, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """Let calls of a method in this thread run another function, which gets the method and its arguments."""
    thread = threading.get_ident()

    def chosen(*args: Any, **options: Any) -> Any:
        here = threading.get_ident() == thread
        return method(original, *args, **options) if here else original(*args, **options)

    with _PATCHING:
        original = getattr(kind, name)
        setattr(kind, name, chosen)
        try:
            yield
        finally:
            setattr(kind, name, original)
