"""Building a network from an untrusted config without weights, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

ROOM = 2**26
"""Maximum number of bytes of live tensors while building; further tensors are put on the meta device."""

SMALL = 2**10
"""Tensors up to this many bytes are not counted, because constructors read values from them (drop rates per layer)."""

MOST = 200_000
"""Maximum number of tensor operations while building, which stops a config with a billion layers."""


@contextmanager
def weightless() -> Iterator[None]:
    """Build networks with parameters on the meta device; other tensors too once they exceed 64 MiB.

    The state of the random number generator does not change.

    Yields:
        Nothing; networks are built in the body of the ``with`` statement.

    Raises:
        ValueError: If more tensor operations run than any network needs.

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
    """Runs an operation on the meta device if there is no memory left for its result."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.filled, self.full = 0, 0, False
        self.made: list[tuple[StorageWeakRef, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self.count > MOST:
            raise ValueError(f"the config describes a network of more than {MOST} tensors: it is damaged")
        mixed = any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in _pytree.tree_leaves((args, kwargs)))
        if func._schema.is_mutable:  # in place, no new tensor
            if mixed and isinstance(args[0], Tensor) and not args[0].is_meta:  # from values that do not exist
                return args[0].fill_(torch.nan) if args[0].is_floating_point() else args[0]
            return func(*args, **(kwargs or {}))
        try:
            planned = func(*_on_meta(args), **_on_meta({**(kwargs or {}), **_device(func)}))
        except (NotImplementedError, RuntimeError):  # depends on values
            return func(*args, **(kwargs or {}))
        if mixed:
            return planned
        size = 0 if _is_view(func) else sum(_size(leaf) for leaf in _pytree.tree_leaves(planned))
        if size <= SMALL:
            return func(*args, **(kwargs or {}))
        if not self._room(size):
            return planned
        result = func(*args, **(kwargs or {}))
        self.filled += size
        self.made += [
            (StorageWeakRef(leaf.untyped_storage()), _size(leaf))
            for leaf in _pytree.tree_leaves(result)
            if isinstance(leaf, Tensor)
        ]
        return result

    def _room(self, size: int) -> bool:
        """Return whether this many bytes fit, after subtracting tensors that have been freed."""
        if size <= ROOM < self.filled + size and not self.full:
            there = [(memory, each) for memory, each in self.made if not memory.expired()]
            self.full = len(there) == len(self.made) > 0  # permanently, to avoid a long scan each time
            self.made, self.filled = there, sum(each for _, each in there)
        return self.filled + size <= ROOM


def _is_view(func: Any) -> bool:
    return any(result.alias_info is not None for result in func._schema.returns)


def _on_meta(tree: Any) -> Any:
    return _pytree.tree_map_only(Tensor, lambda t: t if t.is_meta else torch.empty_like(t, device="meta"), tree)


def _device(func: Any) -> dict[str, Any]:
    takes = any(argument.name == "device" for argument in func._schema.arguments)
    return {"device": torch.device("meta")} if takes else {}


def _size(leaf: Any) -> int:
    return leaf.numel() * leaf.element_size() if isinstance(leaf, Tensor) else 0
