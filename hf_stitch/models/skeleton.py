"""Building a network from a config that cannot be trusted: without weights, and without memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

LARGEST = 2**26
"""Bytes of the largest tensor that is made while building: what is larger has no memory."""

MOST = 200_000
"""Operations on tensors while building, by which a config that asks for a billion layers is noticed."""


@contextmanager
def weightless() -> Iterator[None]:
    """What is built inside has parameters on the meta device and no large tensor at all; no random number is drawn.

    Raises:
        ValueError: If more is built than any network needs.

    Example:
        >>> with weightless():
        ...     layer = torch.nn.Linear(10**9, 10**9)
        >>> layer.weight.device.type
        'meta'
    """
    from accelerate import init_empty_weights

    with torch.random.fork_rng(devices=[]), init_empty_weights(include_buffers=False), _WithoutMemory():
        yield


class _WithoutMemory(TorchDispatchMode):
    """Lets an operation run on the meta device where its result would be large."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self.count > MOST:
            raise ValueError(f"the config asks for a network of more than {MOST} tensors: it is damaged")
        if func._schema.is_mutable:  # nothing new is made
            return func(*args, **(kwargs or {}))
        try:
            planned = func(*_on_meta(args), **_on_meta({**(kwargs or {}), **_device(func)}))
        except (NotImplementedError, RuntimeError):  # it looks at values
            return func(*args, **(kwargs or {}))
        large = any(_size(leaf) > LARGEST for leaf in _pytree.tree_leaves(planned))
        mixed = any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in _pytree.tree_leaves((args, kwargs)))
        return planned if large or mixed else func(*args, **(kwargs or {}))


def _on_meta(tree: Any) -> Any:
    return _pytree.tree_map_only(Tensor, lambda t: t if t.is_meta else torch.empty_like(t, device="meta"), tree)


def _device(func: Any) -> dict[str, Any]:
    takes = any(argument.name == "device" for argument in func._schema.arguments)
    return {"device": torch.device("meta")} if takes else {}


def _size(leaf: Any) -> int:
    return leaf.numel() * leaf.element_size() if isinstance(leaf, Tensor) else 0
