"""Everything public that can be called, for tests that sweep over the parameters of all of it."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import hf_stitch
from hf_stitch.registry import registries

PLUGINS = sorted(each.parent.name for each in Path(__file__).parents[1].glob("plugins/*/hf_stitch_*/__init__.py"))
"""Packages of the plugins of this project."""


class Untouched:
    """An argument that no call may use before its options are checked."""

    def __init__(self, name: str) -> None:
        self.name = name

    def _touch(self, *_: Any, **__: Any) -> Any:
        raise AssertionError(f"{self.name} was used before the options were checked")

    __getattr__ = __iter__ = __len__ = __getitem__ = __call__ = __eq__ = __bool__ = __array__ = _touch
    __hash__ = object.__hash__


@dataclass(frozen=True)
class Public:
    """A function, constructor or method, how it is called, and the function with its signature."""

    name: str
    call: Callable[..., Any]
    function: Callable[..., Any]

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        found = inspect.signature(self.function).parameters.values()
        several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        return {each.name: each for each in found if each.name not in ("self", "cls") and each.kind not in several}

    def annotation(self, parameter: str) -> Any:
        """The type of a parameter; ``Any`` if it is imported for type checkers only."""
        found = self.parameters[parameter].annotation
        try:
            return eval(found, vars(sys.modules[self.function.__module__])) if isinstance(found, str) else found
        except NameError:
            return Any

    def run(self, **given: Any) -> Any:
        """Call with these arguments; the other required ones may not be touched."""
        values = {
            name: given.get(name, Untouched(name))
            for name, each in self.parameters.items()
            if name in given or each.default is each.empty
        }
        # of_rows makes the first two parameters of a formula positional-only
        places = [name for name in values if name in ("x", "y")] if self.call is not self.function else []
        return self.call(*[values.pop(name) for name in places], **values)


def publics() -> Iterator[Public]:
    """Every public function, constructor of a method, and public method of a class; of plugins too."""
    rooms = [f"hf_stitch.{room}" for room in hf_stitch.__all__ if inspect.ismodule(getattr(hf_stitch, room))]
    found: dict[Any, str] = {}
    for room in (*rooms, *PLUGINS, "hf_stitch"):
        module = importlib.import_module(room)
        names = getattr(module, "__all__", ())
        found |= {each: f"{room}.{name}" for name in names if callable(each := getattr(module, name))}
    registered = {
        registries[kind].get(name): f"registries.{kind}[{name}]"
        for kind in registries
        if kind not in ("commands", "results")
        for name in registries[kind]
    }
    for each, name in {**registered, **found}.items():
        if not each.__module__.startswith("hf_stitch"):
            continue
        if not inspect.isclass(each):
            yield Public(name, each, inspect.unwrap(each))
            continue
        made_by_verbs = is_dataclass(each) and each not in registered  # records and results
        if inspect.isfunction(each.__init__) and not made_by_verbs:
            yield Public(name, _without_state(each.__init__) if inspect.isabstract(each) else each, each.__init__)
        for key, member in vars(each).items():
            inner = getattr(member, "__func__", member)
            if key.startswith("_") or not inspect.isfunction(inner):
                continue
            bound = getattr(each, key) if inner is not member else _without_state(inner)
            yield Public(f"{name}.{key}", bound, inspect.unwrap(inner))


def _without_state(method: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: method(Untouched("self"), *args, **kwargs)


def choices(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Literal:
        return [each for each in get_args(annotation) if isinstance(each, str)]
    return [choice for part in get_args(annotation) for choice in choices(part)]


def outside(annotation: Any, wrong: str) -> Any:
    """A value of the form that the annotation asks for, with a choice that it does not have."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if not choices(annotation):
        return Untouched("another part")
    if origin is Literal:
        return wrong
    if origin is tuple:
        return tuple(outside(part, wrong) for part in parts)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {wrong: outside(parts[1], wrong)}
    if isinstance(origin, type) and issubclass(origin, Iterable):
        return [outside(parts[0], wrong)]
    return outside(next(part for part in parts if choices(part)), wrong)
