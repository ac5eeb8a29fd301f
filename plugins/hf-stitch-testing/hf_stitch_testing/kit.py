"""What checks share: kits, whose public methods are the parts, and assertions, which hold under ``python -O`` too."""

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
    """A check of one entry: the public methods are its parts, inherited ones first, then in the order of the class.

    A part without parameters runs once, one with parameters on each of the ``_cases``. Making a kit computes nothing:
    what parts need is built when one runs, and kept in cached properties.
    """

    def _cases(self) -> Iterable[tuple[Any, ...]]:
        raise NotImplementedError

    def __iter__(self) -> Iterator[tuple[str, Callable[[], object]]]:
        found = {name: each for kind in reversed(type(self).__mro__) for name, each in vars(kind).items()}
        for name, each in found.items():
            if inspect.isfunction(each) and not name.startswith("_"):
                yield name, partial(self._run, name)

    def _run(self, name: str) -> None:
        part = getattr(self, name)
        for case in self._cases() if inspect.signature(part).parameters else [()]:
            part(*case)


class Configuration(Kit, Generic[C]):
    """A check of a method whose options are its record."""

    def __init__(self, registry: Registry[Any], given: str | C, options: dict[str, Any] | None = None) -> None:
        self._registry, self._given, self._options = registry, given, options or {}

    @cached_property
    def entry(self) -> C:
        """The method, built once."""
        return self._registry.build(self._given, **self._options)

    def config(self) -> None:
        """It is frozen, and can be built again from its own record, after this went through JSON."""
        described = json.loads(json.dumps(self.entry.to_dict(), allow_nan=False))
        again = self._registry.build(described)
        wrong = f"built from its own record, it is {again!r}, not {self.entry!r}: {described} must rebuild it"
        require(again == self.entry, wrong)
        frozen = "setting an attribute of a frozen config"
        require_error(AttributeError, lambda: setattr(self.entry, "name", "other"), frozen)


def require(condition: bool, message: str) -> None:
    """Raise AssertionError with the message unless the condition is true."""
    if not condition:
        raise AssertionError(message)


def require_close(got: Tensor, expected: Tensor, message: str, rtol: float = 1e-10, atol: float = 1e-12) -> None:
    """Numbers must be the same, up to rounding."""
    require(torch.allclose(got, expected, rtol=rtol, atol=atol), message)


def require_error(
    errors: type[Exception] | tuple[type[Exception], ...], action: Callable[[], object], what: str, *words: str
) -> None:
    """Run the action, which must raise one of the errors with all words in its message."""
    names = " or ".join(each.__name__ for each in (errors if isinstance(errors, tuple) else (errors,)))
    try:
        action()
    except errors as raised:
        named = all(word in str(raised) for word in words)
        require(named, f"the error on {what} must name {' and '.join(words)}: {raised}")
    except Exception as raised:
        raise AssertionError(f"{what} must raise {names}, got {type(raised).__name__}: {raised}") from raised
    else:
        raise AssertionError(f"{what} must raise {names}; nothing was raised")


def require_registered(registry: Registry[Any], entry: Any) -> None:
    """The registry must have the class of an entry under its name."""
    found, kind = registry.get(entry.name), type(entry)
    require(found is kind, f"{entry.name!r} is registered as {found}, not as {kind}")


@contextmanager
def must(what: str) -> Iterator[None]:
    """Any error in the block is one of the entry: raise AssertionError with what must work, and the error."""
    try:
        yield
    except Exception as raised:
        raise AssertionError(f"{what}, got {type(raised).__name__}: {raised}") from raised


def generators() -> list[Tensor]:
    """Return the states of the generators that all share, but that of Python, from which an import may draw."""
    keys: Any = np.random.get_state(legacy=False)["state"]["key"]
    return [torch.get_rng_state(), torch.from_numpy(keys.astype(np.int64))]


@contextmanager
def kept(message: str, read: Callable[[], Iterable[Tensor]] = generators) -> Iterator[None]:
    """Tensors, by default the states of random generators, must be the same after the block as before."""
    before = [tensor.clone() for tensor in read()]
    yield
    require(all(map(torch.equal, before, read())), message)


def skip_unless(condition: bool, reason: str) -> None:
    """Raise SkipTest with the reason why a part does not apply unless the condition is true."""
    if not condition:
        raise SkipTest(reason)


def unknown_invariances(declared: Iterable[str]) -> None:
    """Refuse invariances that have no name among those that can be tested."""
    unknown = set(declared) - set(INVARIANCES)
    require(not unknown, f"invariances must be among {INVARIANCES}, got {sorted(unknown)}")


def moved(rows: Tensor, invariance: str, seed: int) -> Tensor:
    """Apply a random transformation of the class that an invariance names."""
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
    """Standard normal numbers in float64, the same in every run."""
    generator = torch.Generator().manual_seed(seed) if isinstance(seed, int) else seed
    return torch.randn(*shape, generator=generator, dtype=torch.float64)
