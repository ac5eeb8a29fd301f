"""Base classes of checks, and assertions that also work under ``python -O``."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any, Generic, TypeVar
from unittest import SkipTest

import numpy as np
import torch
from torch import Tensor

from hf_stitch.options import Configured
from hf_stitch.registry import Registry

INVARIANCES = ("orthogonal", "scaling", "invertible", "permutation", "translation")
C = TypeVar("C", bound=Configured)


class Kit:
    """Base class of a check of one entry: its public methods are the parts, inherited ones first.

    A part without parameters runs once; a part with parameters runs on each of the ``_cases``. A kit computes nothing
    on construction: parts compute shared objects on first use, in cached properties.
    """

    def _cases(self) -> Iterable[tuple[Any, ...]]:
        raise NotImplementedError

    def __iter__(self) -> Iterator[tuple[str, Callable[[], object]]]:
        parts = {name: part for base in reversed(type(self).__mro__) for name, part in vars(base).items()}
        for name, part in parts.items():
            if inspect.isfunction(part) and not name.startswith("_"):
                yield name, partial(self._run, name)

    def _run(self, name: str) -> None:
        part = getattr(self, name)
        for case in self._cases() if inspect.signature(part).parameters else [()]:
            part(*case)


class Configuration(Kit, Generic[C]):
    """Check of a method that is a config of its options."""

    def __init__(self, registry: Registry[Any], entry: str | C, options: dict[str, Any] | None = None) -> None:
        self._registry, self._entry, self._options = registry, entry, options or {}

    @cached_property
    def entry(self) -> C:
        """The method, built once."""
        return self._registry.build(self._entry, **self._options)

    def config(self) -> None:
        """Check that the entry is frozen and can be rebuilt from its JSON record."""
        record = json.loads(json.dumps(self.entry.to_dict(), allow_nan=False))
        rebuilt = self._registry.build(record)
        require(rebuilt == self.entry, f"the record {record} must rebuild {self.entry!r}, got {rebuilt!r}")
        case = "setting an attribute of a frozen config"
        require_error(AttributeError, lambda: setattr(self.entry, "name", "other"), case)


def require(condition: bool, message: str) -> None:
    """Raise ``AssertionError`` with the message if the condition is false."""
    if not condition:
        raise AssertionError(message)


def require_close(got: Tensor, expected: Tensor, message: str, rtol: float = 1e-10, atol: float = 1e-12) -> None:
    """Require equal numbers up to rounding error."""
    require(torch.allclose(got, expected, rtol=rtol, atol=atol), message)


def require_error(
    errors: type[Exception] | tuple[type[Exception], ...], action: Callable[[], object], case: str, *words: str
) -> None:
    """Require that the action raises one of the errors with all words in its message."""
    names = " or ".join(error.__name__ for error in (errors if isinstance(errors, tuple) else (errors,)))
    try:
        action()
    except errors as raised:
        has_words = all(word in str(raised) for word in words)
        require(has_words, f"the error on {case} must name {' and '.join(words)}: {raised}")
    except Exception as raised:
        raise AssertionError(f"{case} must raise {names}, got {type(raised).__name__}: {raised}") from raised
    else:
        raise AssertionError(f"{case} must raise {names}, got no error")


def require_registered(registry: Registry[Any], entry: Any) -> None:
    """Require that the registry has the class of an entry under its name."""
    registered, kind = registry.get(entry.name), type(entry)
    require(registered is kind, f"{entry.name!r} is registered as {registered}, not as {kind}")


@contextmanager
def must(requirement: str) -> Iterator[None]:
    """Convert errors in the block to an ``AssertionError`` with the requirement and the error."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{requirement}, got {type(error).__name__}: {error}") from error


def generator_states() -> list[Tensor]:
    """Return the states of the global generators of torch and numpy; imports may advance Python's generator."""
    keys: Any = np.random.get_state(legacy=False)["state"]["key"]
    return [torch.get_rng_state(), torch.from_numpy(keys.astype(np.int64))]


@contextmanager
def unchanged(message: str, read: Callable[[], Iterable[Tensor]] = generator_states) -> Iterator[None]:
    """Require that the block leaves tensors unchanged, by default the states of random generators."""
    before = [tensor.clone() for tensor in read()]
    yield
    require(all(map(torch.equal, before, read())), message)


def skip_unless(condition: bool, reason: str) -> None:
    """Raise ``SkipTest`` with a reason if the condition is false, because the part does not apply."""
    if not condition:
        raise SkipTest(reason)


def unknown_invariances(declared: Iterable[str]) -> None:
    """Raise an error for unknown invariances."""
    unknown = set(declared) - set(INVARIANCES)
    require(not unknown, f"invariances must be among {INVARIANCES}, got {sorted(unknown)}")


def transform(rows: Tensor, invariance: str, seed: int) -> Tensor:
    """Apply a random transformation of the class of an invariance."""
    generator, width = torch.Generator().manual_seed(seed), rows.shape[1]
    square = torch.randn(width, width, generator=generator, dtype=torch.float64)
    if invariance == "orthogonal":
        return rows @ torch.linalg.qr(square).Q
    if invariance == "invertible":
        return rows @ (square + 3 * torch.eye(width, dtype=torch.float64))
    if invariance == "permutation":
        return rows[:, torch.randperm(width, generator=generator)]
    return rows * (0.1 + 5 * seed) if invariance == "scaling" else rows + 10 * square[0]


def random(*shape: int, seed: int | torch.Generator = 0) -> Tensor:
    """Return reproducible standard normal numbers in float64."""
    generator = torch.Generator().manual_seed(seed) if isinstance(seed, int) else seed
    return torch.randn(*shape, generator=generator, dtype=torch.float64)
