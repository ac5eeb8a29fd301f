"""Base class of statistics with a declared state, which determines merging, reducing and saving."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_stitch.options import checked
from hf_stitch.running import Processes

if TYPE_CHECKING:
    from accelerate import Accelerator

Rows = Tensor | NDArray[np.floating[Any]]
"""Rows of activations, (n, d)."""

Reduce = Literal["sum", "max", "cat", "same", "own"]
"""How a part of the state combines with the same part of another statistic.

``sum`` adds, ``max`` takes the elementwise maximum, ``cat`` concatenates lists of rows, ``same`` must be equal, and
``own`` is combined by :meth:`Statistic._combine` of the class.
"""

T = TypeVar("T")


def as_tensor(name: str, rows: Rows) -> Tensor:
    """Return rows as a tensor; arrays are copied."""
    if not isinstance(rows, Tensor | np.ndarray):
        raise TypeError(f"{name} must be a numpy array or a torch tensor, got {type(rows).__name__}")
    return rows if isinstance(rows, Tensor) else torch.from_numpy(np.array(rows, order="C"))


class Statistic(ABC):
    """Base class of statistics that are collected over batches, merged, reduced over processes and saved as tensors.

    A subclass declares each part of its state with :meth:`add_state` in its constructor, and adds a method to update
    it. This class implements reset, merge, all-reduce and saving.

    Example:
        >>> class Sum(Statistic):
        ...     def __init__(self, width):
        ...         super().__init__()
        ...         self.add_state("total", torch.zeros(width), "sum")
        ...     @classmethod
        ...     def _like(cls, state):
        ...         return cls(len(state["total"]))
        ...     def update(self, rows):
        ...         self.total += rows.sum(0)
        ...         return self
        >>> kept = Sum(2).update(torch.ones(3, 2))
        >>> kept.merge(Sum.from_state_dict(kept.state_dict())).total
        tensor([6., 6.])
    """

    def __init__(self) -> None:
        self._declared: dict[str, _Declared] = {}
        self._parts: dict[str, Statistic] = {}

    @checked
    def add_state(self, name: str, initial: Tensor | None, reduce: Reduce) -> None:
        """Declare a part of the state, which becomes an attribute.

        Args:
            name: Name of the attribute.
            initial: Initial value: zeros, or any value for ``same``. None for ``cat``: an empty list of tensors for
                rows.
            reduce: How the part combines with the same part of another statistic.
        """
        form = None if initial is None else (initial.shape, initial.dtype, initial.device)
        self._declared[name] = _Declared(reduce, form)
        setattr(self, name, [] if initial is None else initial)

    def add_part(self, name: str, part: Statistic) -> None:
        """Declare a nested statistic, which becomes an attribute and merges with the same part of another statistic."""
        self._parts[name] = part
        setattr(self, name, part)

    @classmethod
    @abstractmethod
    def _like(cls, state: Mapping[str, Tensor]) -> Self:
        """Create an empty statistic with the same shapes as a state dict, on its device."""

    def _settle(self) -> None:  # noqa: B027
        """Add buffered rows to the sums."""

    def _combine(self, other: Self) -> None:  # noqa: B027
        """Combine the parts declared as ``own``."""

    def reset(self) -> Self:
        """Remove all rows."""
        for name, declared in self._declared.items():
            if declared.form is None:
                setattr(self, name, [])
            elif declared.reduce != "same":
                getattr(self, name).zero_()
        for part in self._parts.values():
            part.reset()
        return self

    def merge(self, other: Self) -> Self:
        """Add the state of another statistic, which does not change."""
        self.check_mergeable(other)
        self._settle()
        other._settle()
        self._combine(other)
        for name in self._states_reduced_by("sum"):
            setattr(self, name, getattr(self, name) + getattr(other, name).to(getattr(self, name).device))
        for name in self._states_reduced_by("max"):
            setattr(self, name, torch.maximum(getattr(self, name), getattr(other, name).to(getattr(self, name).device)))
        for name in self._states_reduced_by("cat"):
            getattr(self, name).extend(getattr(other, name))
        for name, part in self._parts.items():
            part.merge(other._parts[name])
        return self

    def check_mergeable(self, other: Self) -> None:
        """Check that another statistic and all its parts can be merged, before anything changes."""
        kind = type(self).__name__
        if type(other) is not type(self):
            raise ValueError(f"{kind} must be merged with {kind}, got {type(other).__name__}")
        for name in self._states_reduced_by("same"):
            expected, actual = getattr(self, name), getattr(other, name)
            if expected.shape != actual.shape or not torch.equal(expected, actual.to(expected.device)):
                raise ValueError(f"{kind} must have equal {name} to merge, got {_short(expected)} and {_short(actual)}")
        for name, part in self._parts.items():
            part.check_mergeable(other._parts[name])

    def all_reduce(self, accelerator: Accelerator) -> Self:
        """Combine the statistics of all processes; every process then has the total.

        All processes must call this method once, after the last row. States are merged in the order of the ranks, so
        all processes have bit-identical results, and are sent one at a time, so memory does not grow with the number of
        processes. With one process, nothing happens. A loader that repeats samples to fill its last batch (accelerate's
        ``even_batches``) makes these rows count twice.
        """
        if accelerator.num_processes == 1:
            return self
        self._settle()
        processes, state, total = Processes(accelerator), self._tensors(), None
        for rank in range(processes.count):
            of_rank = type(self).from_state_dict(processes.from_rank(state, rank))
            total = of_rank if total is None else total.merge(of_rank)
        assert total is not None
        self._become(total)
        return self

    def _become(self, other: Self) -> None:
        for name in self._declared:
            setattr(self, name, getattr(other, name))
        for name, part in self._parts.items():
            part._become(other._parts[name])

    def state_dict(self) -> dict[str, Tensor]:
        """Return a copy of the state as contiguous tensors, ready for safetensors."""
        return {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in self._tensors().items()}

    def _tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name, without copies; tensors of a part are prefixed with its name."""
        states = {name: getattr(self, name) for name in self._declared}
        filled = {name: value for name, value in states.items() if not (isinstance(value, list) and not value)}
        tensors = {name: torch.cat(value) if isinstance(value, list) else value for name, value in filled.items()}
        inner = {f"{name}.{key}": value for name, part in self._parts.items() for key, value in part._tensors().items()}
        return tensors | inner

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Tensor]) -> Self:
        """Rebuild a statistic from :meth:`state_dict`, bit for bit, on the device of its tensors."""
        try:
            statistic = cls._like(state)
        except KeyError as error:
            raise ValueError(f"a state of {cls.__name__} lacks {error}; it has {', '.join(sorted(state))}") from error
        return statistic.load_state_dict(state)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> Self:
        """Load a state from :meth:`state_dict` of a statistic of the same shapes, bit for bit."""
        kind = type(self).__name__
        for name, part in self._parts.items():
            part.load_state_dict(within(f"{name}.", state))
        state = {key: value for key, value in state.items() if key.partition(".")[0] not in self._parts}
        fixed = {name for name, declared in self._declared.items() if declared.form is not None}
        if not fixed <= state.keys() <= self._declared.keys():
            raise ValueError(f"a state of {kind} must have the keys {sorted(self._declared)}, got {sorted(state)}")
        for name, value in state.items():
            form = self._declared[name].form
            is_finite = not value.is_floating_point() or bool(value.isfinite().all())
            if not is_finite or (form is not None and (value.shape, value.dtype) != form[:2]):
                expected = "" if form is None else f" {form[1]} of shape {tuple(form[0])}"
                raise ValueError(
                    f"{name} of a state of {kind} must be finite{expected}, got {value.dtype} of shape "
                    f"{tuple(value.shape)}{'' if is_finite else ' with NaN or infinity'}"
                )
            setattr(self, name, [value.clone()] if form is None else value.to(form[2], copy=True))
        return self

    def _states_reduced_by(self, reduce: Reduce) -> Iterator[str]:
        return (name for name, declared in self._declared.items() if declared.reduce == reduce)


class _Declared(NamedTuple):
    """Part of a state."""

    reduce: Reduce  # how it combines with the same part of another statistic
    form: tuple[torch.Size, torch.dtype, torch.device] | None  # shape, dtype and device; None for rows


def product(first: Tensor, second: Tensor) -> Tensor:
    """Multiply float64 matrices. On a CPU, NumPy takes less than half of torch's time, and a quarter for ``XᵀX``."""
    return torch.from_numpy(first.numpy() @ second.numpy()) if first.device.type == "cpu" else first @ second


def within(prefix: str, state: Mapping[str, T]) -> dict[str, T]:
    """Return the entries of a state with keys that begin with a prefix, without the prefix."""
    return {key.removeprefix(prefix): tensor for key, tensor in state.items() if key.startswith(prefix)}


def _short(value: Tensor) -> str:
    return str(value.tolist()) if value.numel() <= 4 else f"a tensor of shape {tuple(value.shape)}"
