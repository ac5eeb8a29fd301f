"""Conformance check for architecture overrides."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from hf_stitch.adapters import Adapter, Override, load
from hf_stitch.adapters.cutting.modes import evaluating
from hf_stitch.adapters.overrides.base import full_name, override_of
from hf_stitch.options import did_you_mean
from hf_stitch.registry import Entry, registries
from hf_stitch.testing._require import require, skip_unless
from hf_stitch.testing.adapters import check_adapter
from hf_stitch.testing.conformance import conformance


@conformance
def check_override(
    override: Override, model: nn.Module, *batches: Mapping[str, Any]
) -> Iterator[tuple[str, Callable[[], None]]]:
    """Check that an override satisfies the contract of ``Override`` on a network of its class.

    The parts:

    - ``config``: its class is a subclass of ``Override`` that needs no arguments.
    - ``stateless``: it stores nothing about a network.
    - ``pure``: it does not modify the network: modes, parameters and buffers.
    - ``options``: the options of every forward are a mapping of JSON values by their names.
    - ``example``: the example is a mapping with the same names, shapes and dtypes in every call, if it gives one.
    - ``runs``: the network runs on the example with the options.
    - ``special_ids``: token ids are a tuple of integers that are not negative.
    - ``blocks``: blocks are a tuple of different names of modules of the network, if it names any.
    - ``cuts``: with the override, the network has at least one cut.
    - ``exact``: its adapter passes ``check_adapter`` on the batches, or on the example if there are none.

    Args:
        override: The override. It need not be registered.
        model: A network of the class that it is for.
        *batches: Inputs, preferably of several sizes.

    Raises:
        AssertionError: The contract is violated; the message names the violation.

    Example:
        >>> class Pairs(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.first, self.second = nn.Linear(2, 8), nn.Linear(8, 3)
        ...     def forward(self, pairs):
        ...         return self.second(self.first(pairs).tanh())
        >>> class ForPairs(Override):
        ...     def example(self, model):
        ...         return {"pairs": torch.randn(2, 2)}
        >>> check_override(ForPairs(), Pairs(), {"pairs": torch.randn(5, 2)})
    """

    @cache
    def adapter() -> Adapter:
        with _registered(override, model):
            return load(model)

    def check_exact() -> None:
        made = adapter()
        check_adapter(made, *(batches or [made.example]))

    yield "config", lambda: _check_config(override)
    yield "stateless", lambda: _check_stateless(override, model)
    yield "pure", lambda: _check_pure(override, model)
    yield "options", lambda: _check_options(override)
    yield "example", lambda: _check_example(override, model)
    yield "runs", lambda: _check_runs(override, model)
    yield "special_ids", lambda: _check_special_ids(override, model)
    yield "blocks", lambda: _check_blocks(override, model)
    yield "cuts", lambda: require(len(adapter().layers) > 0, "with the override, the network must have a cut")
    yield "exact", check_exact


@contextmanager
def _registered(override: Override, model: nn.Module) -> Iterator[None]:
    """Register an override for the class of a network for some time, unless it is registered already."""
    if type(override_of(model)) is type(override):
        yield
        return
    entries, name = registries.overrides._entries, full_name(type(model))
    before = dict(entries)
    entries[name] = Entry.of(name, type(override))
    try:
        yield
    finally:
        entries.clear()
        entries.update(before)


def _check_config(override: Override) -> None:
    kind = type(override)
    require(issubclass(kind, Override), f"an override must be a subclass of Override, got {kind.__name__}")
    try:
        kind()
    except TypeError as error:
        raise AssertionError(f"{kind.__name__} must need no arguments: {error}") from error


def _call(override: Override, model: nn.Module) -> None:
    """Call all methods."""
    override.example(model)
    override.special_ids(model)
    override.blocks(model)


def _check_stateless(override: Override, model: nn.Module) -> None:
    before = set(vars(override)), set(vars(type(override)))
    _call(override, model)
    stored = (set(vars(override)) - before[0]) | (set(vars(type(override))) - before[1])
    require(not stored, f"one override serves all networks of a class, but it stores {', '.join(sorted(stored))}")


def _check_pure(override: Override, model: nn.Module) -> None:
    def state() -> list[Any]:
        tensors = model.state_dict(keep_vars=True).items()
        modes = [(name, id(module), module.training) for name, module in model.named_modules()]
        return [modes, [(name, id(tensor), tensor._version) for name, tensor in tensors]]

    before = state()
    _call(override, model)
    require(state() == before, "an override must not modify the network")


def _check_options(override: Override) -> None:
    options = override.options
    named = isinstance(options, Mapping) and all(isinstance(name, str) for name in options)
    require(named, f"options must be a mapping from names of arguments, got {options!r}")
    try:
        json.dumps(dict(options), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise AssertionError(f"options must be JSON values, got {dict(options)}: {error}") from error


def _check_example(override: Override, model: nn.Module) -> None:
    first, second = (override.example(model) for _ in range(2))
    skip_unless(first is not None or second is not None, "the override gives no example")
    require(
        isinstance(first, Mapping) and len(first) > 0, f"an example must be a mapping of inputs, got {first!r:.200}"
    )
    require(
        _outline(first) == _outline(second), f"examples must be alike, got {_outline(first)} and {_outline(second)}"
    )


def _check_runs(override: Override, model: nn.Module) -> None:
    example = override.example(model)
    skip_unless(example is not None, "the override gives no example")
    assert example is not None
    try:
        with torch.no_grad(), evaluating(model):
            model(**{**override.options, **example})
    except Exception as error:
        names = ", ".join({**override.options, **example})
        raise AssertionError(
            f"the network must run on the example and the options ({names}), got {type(error).__name__}: {error}"
        ) from error


def _outline(example: Mapping[str, Any] | None) -> dict[str, Any]:
    return {
        name: (tuple(value.shape), str(value.dtype)) if isinstance(value, Tensor) else type(value).__name__
        for name, value in dict(example or {}).items()
    }


def _check_special_ids(override: Override, model: nn.Module) -> None:
    ids = override.special_ids(model)
    right = isinstance(ids, tuple) and all(type(each) is int and each >= 0 for each in ids)
    require(right, f"special ids must be a tuple of integers >= 0, got {ids!r}")


def _check_blocks(override: Override, model: nn.Module) -> None:
    blocks = override.blocks(model)
    skip_unless(blocks is not None, "the override names no blocks")
    named = isinstance(blocks, tuple) and all(isinstance(name, str) for name in blocks)
    require(named, f"blocks must be a tuple of names, got {blocks!r}")
    assert blocks is not None
    require(len(set(blocks)) == len(blocks), f"blocks must be different names, got {blocks}")
    names = [name for name, _ in model.named_modules() if name]
    for name in blocks:
        hint = did_you_mean(name, names)
        require(name in names, f"the network has no module {name!r}" + (f"; did you mean {hint!r}?" if hint else ""))
