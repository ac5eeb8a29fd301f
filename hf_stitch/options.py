"""Options: declared by annotations, checked in one place, read from one notation."""

from __future__ import annotations

import builtins
import dataclasses
import difflib
import inspect
import json
import math
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from functools import cache, wraps
from itertools import islice
from numbers import Integral, Real
from os import PathLike
from types import MappingProxyType, NoneType, SimpleNamespace, UnionType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

__all__ = [
    "Configured",
    "Count",
    "Fraction",
    "Natural",
    "NonNegative",
    "OptionError",
    "Positive",
    "Several",
    "Within",
    "check",
    "checked",
    "did_you_mean",
    "options_in",
]

CONTAINERS: dict[Any, str] = {
    **dict.fromkeys((Sequence, Iterable, Collection, list), "a list"),
    **dict.fromkeys((Mapping, dict), "a dictionary"),
    tuple: "a tuple",
    set: "a set",
    frozenset: "a set",
}
"""Types of which the entries are checked, in words."""

F = TypeVar("F", bound=Callable[..., Any])


class OptionError(TypeError, ValueError):
    """Raised for a value that an option does not take, be it of the wrong type or out of its range."""


class Constraint(ABC):
    """What ``Annotated`` says beyond the type: which values are valid, in a test and in words."""

    @abstractmethod
    def __contains__(self, value: Any) -> bool:
        """Whether the value is valid; of any type."""

    @abstractmethod
    def __str__(self) -> str:
        """Describe what is valid, as it follows "must be"."""

    def hint(self, value: Any) -> str:
        """Say what to do about a value that is often given by mistake; empty for others."""
        return ""


@dataclasses.dataclass(frozen=True)
class Within(Constraint):
    """A range of finite numbers: ``Annotated[float, Within(0, 1)]``; with ``int``, of whole numbers.

    Args:
        low: Lower bound.
        high: Upper bound; infinity by default.
        above: Whether the lower bound is exclusive.
        below: Whether the upper bound is exclusive.

    Example:
        >>> 0.5 in Within(0, 1), 0 in Within(0, 1, above=True), str(Within(0, 1, above=True))
        (True, False, '> 0 and <= 1')
    """

    low: float
    high: float = math.inf
    above: bool = False
    below: bool = False

    def __contains__(self, value: Any) -> bool:
        low = self.low < value if self.above else self.low <= value
        high = value < self.high if self.below or self.high == math.inf else value <= self.high
        return bool(low and high)

    def __str__(self) -> str:
        lower = f"{'>' if self.above else '>='} {self.low:g}"
        return lower if self.high == math.inf else f"{lower} and {'<' if self.below else '<='} {self.high:g}"


Count = Annotated[int, Within(1)]
Several = Annotated[int, Within(2)]
Natural = Annotated[int, Within(0)]
Fraction = Annotated[float, Within(0, 1)]
NonNegative = Annotated[float, Within(0)]
Positive = Annotated[float, Within(0, above=True)]


def check(kind: Any, /, **values: Any) -> None:
    """Check values against an annotation.

    Args:
        kind: A type: ``bool``, ``int``, ``float``, ``str``, a class, ``Literal[…]``, ``Annotated[…]`` with
            :class:`Within`, lists and dictionaries of those, or a union. Anything else takes all values.
        **values: What was given, by the name of the option.

    Example:
        >>> check(Count | None, rank=0)
        Traceback (most recent call last):
        ...
        hf_stitch.options.OptionError: rank must be an integer >= 1 or None, got 0
    """
    _check(dict.fromkeys(values, kind), values)


def check_call(function: Callable[..., Any], values: Mapping[str, Any], owner: str = "") -> None:
    """Check arguments of a function, by name, against its annotations; ``owner`` begins the message."""
    _check(_kinds(function), values, owner)


def checked(function: F) -> F:
    """Check the arguments of a function, or of a method, against its annotations before it runs (decorator).

    Args:
        function: The function.

    Example:
        >>> @checked
        ... def tile(side: Literal["left", "right"], *, times: Count = 1) -> list[str]:
        ...     return [side] * times
        >>> tile("left", times=2)
        ['left', 'left']
        >>> tile("up")
        Traceback (most recent call last):
        ...
        hf_stitch.options.OptionError: side must be one of 'left', 'right', got 'up'
    """
    names = [each.name for each in inspect.signature(function).parameters.values()]

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        torch = sys.modules.get("torch")  # not imported here: `hf-stitch --help` needs none
        if torch is None or not torch.compiler.is_compiling():  # dynamo cannot trace the reading of annotations
            check_call(function, {**dict(zip(names, args, strict=False)), **options})
        return function(*args, **options)

    return call  # type: ignore[return-value]


def check_fields(instance: Any) -> None:
    """Check the fields of a frozen dataclass against their annotations, and convert numbers of NumPy, for JSON."""
    values = {option.name: getattr(instance, option.name) for option in dataclasses.fields(instance)}
    _check(_kinds(type(instance)), values)  # type: ignore[arg-type]
    for name, value in values.items():
        if (number := plain(value)) is not value:
            object.__setattr__(instance, name, number)


def plain(value: Any) -> Any:
    """Return numbers and arrays of NumPy, also inside of lists and dictionaries, as those of Python."""
    if isinstance(value, tuple | list):
        entries = [plain(each) for each in value]
        return value if all(a is b for a, b in zip(entries, value, strict=True)) else type(value)(entries)
    if isinstance(value, dict):
        return {plain(key): plain(each) for key, each in value.items()}
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        found = value.tolist()
        return tuple(found) if isinstance(found, list) else found
    return value


@cache
def defaults(function: Callable[..., Any]) -> Mapping[str, Any]:
    """Options of a function and their defaults; keyword-only parameters without a default are data."""
    parameters = inspect.signature(function).parameters.values()
    return MappingProxyType(
        {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is not p.empty}
    )


GONE = {"cache": "keep activations with extract_activations(…).save(path), and read them with Activations.load(path)"}
"""Options that functions had before -> what to do instead, for messages alone."""


def check_names(owner: str, given: Iterable[str], known: Collection[str]) -> None:
    """Refuse options that a function or a method does not have."""
    for option in given:
        if option not in known:
            similar = did_you_mean(option, known)
            hint = f"; {GONE[option]}." if option in GONE else f"; did you mean {similar!r}?" if similar else "."
            raise TypeError(f"{owner} has no option {option!r}{hint} Its options: {', '.join(known) or 'none'}")


def did_you_mean(name: str, options: Iterable[str]) -> str:
    """Find the valid name that is most similar to a mistyped one, ignoring case.

    Args:
        name: The mistyped name.
        options: The valid names.

    Example:
        >>> did_you_mean("procustes", ["lstsq", "procrustes", "ridge"])
        'procrustes'
        >>> did_you_mean("transformer", ["lstsq", "procrustes", "ridge"])
        ''
    """
    by_lower = {option.lower(): option for option in options}
    closest = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return by_lower[closest[0]] if closest else ""


def options_in(spec: str) -> tuple[str, dict[str, Any]]:
    """Split a name with its options, ``name:key=value,…``, as it is written on a command line.

    Args:
        spec: A name, or a name with options. Values are JSON (``true``, ``0.5``, ``[1,2]``), or ``True``, ``False``,
            ``None``; anything else is text.

    Example:
        >>> options_in("linear_cka:debiased=True")
        ('linear_cka', {'debiased': True})
        >>> options_in("mutual_knn:k=5,distance=euclidean")
        ('mutual_knn', {'k': 5, 'distance': 'euclidean'})
    """
    name, _, rest = spec.partition(":")
    options: dict[str, Any] = {}
    for option in filter(None, re.split(r",(?=[^,=\[\]{}\"]*=)", rest)):
        key, equals, value = (part.strip() for part in option.partition("="))
        if not equals or not key or not value:
            raise ValueError(f"options are written key=value, got {option!r}")
        if key in options:
            raise ValueError(f"option {key!r} is given twice")
        try:
            options[key] = json.loads({"True": "true", "False": "false", "None": "null"}.get(value, value))
        except json.JSONDecodeError:
            options[key] = value
    return name, options


@dataclasses.dataclass(frozen=True)
class Configured:
    """Base class of methods in registries: frozen dataclasses whose fields are their options.

    The options are checked against the annotations of the fields. A subclass with a ``__post_init__``, for what no
    annotation can say, calls that of this class.

    Attributes:
        name: Name in the registry.

    Example:
        >>> @dataclasses.dataclass(frozen=True)
        ... class Widest(Configured):
        ...     name = "widest"
        ...     k: int = 1
        >>> Widest(k=3).label, Widest().to_dict()
        ('widest(k=3)', {'name': 'widest', 'k': 1})
    """

    name: ClassVar[str]

    def __post_init__(self) -> None:
        check_fields(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the name and all options as JSON values, for ``build`` of the registry."""
        return {"name": self.name, **dataclasses.asdict(self)}

    @property
    def label(self) -> str:
        """The name with all options that differ from their defaults: ``ridge(ridge=0.5)``."""
        changed = []
        for option in dataclasses.fields(self):
            value = getattr(self, option.name)
            shown = value.label if isinstance(value, Configured) else value
            factory = option.default_factory
            if shown != (option.default if factory is dataclasses.MISSING else factory()):
                changed.append(f"{option.name}={shown}")
        return self.name + (f"({', '.join(changed)})" if changed else "")


@cache
def _kinds(owner: Hashable) -> Mapping[str, Any]:
    """The annotations of the fields of a class, or of the parameters of a function, that can be evaluated.

    Names that only type checkers import cannot: these options are taken as they are.
    """
    if isinstance(owner, type):
        names = {each.name for each in dataclasses.fields(owner)}
        scopes = [(vars(sys.modules.get(each.__module__, builtins)), vars(each)) for each in reversed(owner.__mro__)]
        declared = [(names_of, own.get("__annotations__", {})) for names_of, own in scopes]
    else:
        inner: Any = inspect.unwrap(owner)  # type: ignore[arg-type]
        names, declared = {*inner.__annotations__} - {"return"}, [(inner.__globals__, inner.__annotations__)]
    kinds: dict[str, Any] = {}
    for known, own in declared:
        for name in names & own.keys():
            one = SimpleNamespace(__annotations__={name: own[name]})
            try:
                kinds |= get_type_hints(one, known, include_extras=True)
            except NameError:
                kinds[name] = Any
    return MappingProxyType(kinds)


def _check(kinds: Mapping[str, Any], values: Mapping[str, Any], owner: str = "") -> None:
    messages = [_message(kinds[name], name, value) for name, value in values.items() if name in kinds]
    if wrong := list(filter(None, messages)):
        raise OptionError(owner + "; ".join(wrong))


def violated(kind: Any, value: Any) -> bool:
    """Whether a value does not fit an annotation."""
    return _problem(kind, "", value) is not None


def _message(kind: Any, name: str, value: Any) -> str:
    """What is wrong with a value, in full; empty if nothing is."""
    problem = _problem(kind, name, value)
    if problem is None:
        return ""
    return problem or f"{name} must be {described(kind)}, got {_shown(value)}{_hint(kind, value)}"


def _problem(kind: Any, name: str, value: Any) -> str | None:
    """What is wrong inside of a value; empty if the value itself is wrong, ``None`` if nothing is."""
    origin, parts = get_origin(kind), get_args(kind)
    valid = True
    if origin in (Union, UnionType):
        problems = [_problem(part, name, value) for part in parts]
        return None if None in problems else next(filter(None, problems), "")
    if origin is Annotated:
        inner, *constraints = parts
        alone = any(not isinstance(each, Within) for each in constraints if isinstance(each, Constraint))
        if not alone and (problem := _problem(inner, name, value)) is not None:
            return problem
        valid = all(value in each for each in constraints if isinstance(each, Constraint))
    elif origin is Literal:
        given = plain(value)
        valid = any(
            isinstance(given, type(choice)) and isinstance(given, bool) is isinstance(choice, bool) and given == choice
            for choice in parts
        )
    elif kind in (int, float):
        valid = isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    elif origin in CONTAINERS:
        indexed = origin is Sequence and hasattr(value, "__len__") and hasattr(value, "__getitem__")
        listed = origin is tuple and isinstance(value, list)  # as JSON has no tuples
        alone = isinstance(value, str | bytes) or (isinstance(value, Mapping) and CONTAINERS[origin] != "a dictionary")
        if alone or not (indexed or listed or isinstance(value, origin)):
            return ""
        return "; ".join(islice(filter(None, _inside(origin, parts, name, value)), 5)) or None
    elif isinstance(kind := origin or kind, type) and kind is not Any:
        protocol = getattr(kind, "_is_protocol", False) and not getattr(kind, "_is_runtime_protocol", False)
        valid = protocol or isinstance(value, kind)
    return None if valid else ""


def _inside(origin: Any, parts: tuple[Any, ...], name: str, given: object) -> Iterable[str]:
    """What is wrong with the entries of a list or a dictionary. Iterators are not read."""
    if not isinstance(given, Collection):
        return
    value: Any = given
    entries: Iterable[tuple[Any, str, Any]] = ()
    if origin in (Mapping, dict):
        keys = [(parts[0], f"key {key!r} of {name}", key) for key in value]
        entries = [*keys, *((parts[1], f"{name}[{key!r}]", each) for key, each in value.items())]
    elif origin is tuple and parts[1:] != (...,):
        if len(value) != len(parts):
            yield f"{name} must be a tuple of {len(parts)}, got one of {len(value)}"
        entries = [(part, f"{name}[{i}]", each) for i, (part, each) in enumerate(zip(parts, value, strict=False))]
    elif parts[0] is not Any:
        entries = ((parts[0], f"{name}[{place}]", each) for place, each in enumerate(value))
    yield from (_message(*entry) for entry in entries)


def described(kind: Any) -> str:
    """What an annotation takes, as it follows "must be"."""
    origin, parts = get_origin(kind), get_args(kind)
    plainly = {bool: "True or False", int: "an integer", float: "a number", str: "a text", PathLike: "a path"}
    if (origin or kind) in plainly:
        return plainly[origin or kind]
    if kind in (None, NoneType):
        return "None"
    if origin in (Union, UnionType):
        return " or ".join(map(described, parts))
    if origin is Annotated:
        inner, *constraints = parts
        told = [str(each) for each in constraints if isinstance(each, Constraint)]
        alone = told and not isinstance(constraints[0], Within)
        return " ".join(told if alone else [described(inner), *told])
    if origin is Literal:
        return ("one of " if len(parts) > 1 else "") + ", ".join(map(repr, parts))
    if origin in CONTAINERS:
        return CONTAINERS[origin]
    name = (origin or kind).__name__
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


def _shown(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, str | Real | NoneType):
        return repr(value)
    room = type(value).__module__.partition(".")[0]
    return type(value).__name__ if room in ("builtins", "hf_stitch") else f"{room}.{type(value).__name__}"


def _hint(kind: Any, value: Any) -> str:
    parts = get_args(kind)
    for part in (kind, *parts):
        if isinstance(part, Constraint) and (hint := part.hint(value)):
            return f": {hint}"
    if get_origin(kind) in (Union, UnionType, Annotated):
        return next(filter(None, (_hint(part, value) for part in parts)), "")
    single = CONTAINERS.get(get_origin(kind)) == "a list" and _problem(parts[0], "", value) is None
    return f"; write [{value!r}]" if single else ""
