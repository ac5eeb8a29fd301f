"""Options of functions and methods: checks against annotations, and parsing of ``name:key=value``."""

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
"""Container types with checked entries -> description."""

F = TypeVar("F", bound=Callable[..., Any])


class OptionError(TypeError, ValueError):
    """Raised for an option with a value of the wrong type or out of range."""


class Constraint(ABC):
    """Constraint of ``Annotated`` in addition to the type: a test of values, and a description of valid values."""

    @abstractmethod
    def __contains__(self, value: Any) -> bool:
        """Return whether a value, of any type, is valid."""

    @abstractmethod
    def __str__(self) -> str:
        """Describe the valid values, as a continuation of "must be"."""

    def hint(self, value: Any) -> str:
        """Return a hint on a common mistake; empty for other values."""
        return ""


@dataclasses.dataclass(frozen=True)
class Within(Constraint):
    """Range of finite numbers: ``Annotated[float, Within(0, 1)]``; with ``int``, of integers.

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
            :class:`Within`, lists and dictionaries of these types, or a union. Other annotations accept all values.
        **values: Values by the name of the option.

    Example:
        >>> check(Count | None, rank=0)
        Traceback (most recent call last):
        ...
        hf_stitch.options.OptionError: rank must be an integer >= 1 or None, got 0
    """
    _check(dict.fromkeys(values, kind), values)


def check_call(function: Callable[..., Any], values: Mapping[str, Any], owner: str = "") -> None:
    """Check arguments of a function, by name, against its annotations; messages begin with ``owner``."""
    _check(_kinds(function), values, owner)


def checked(function: F) -> F:
    """Decorate a function or method to check its arguments against its annotations.

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
    names = [*inspect.signature(function).parameters]

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        torch = sys.modules.get("torch")  # not imported here, to keep `hf-stitch --help` fast
        if torch is None or not torch.compiler.is_compiling():  # dynamo cannot trace the checks
            check_call(function, {**dict(zip(names, args, strict=False)), **options})
        return function(*args, **options)

    return call  # type: ignore[return-value]


def check_fields(instance: Any) -> None:
    """Check the fields of a frozen dataclass against their annotations, and convert NumPy numbers, for JSON."""
    values = {option.name: getattr(instance, option.name) for option in dataclasses.fields(instance)}
    _check(_kinds(type(instance)), values)  # type: ignore[arg-type]
    for name, setting in values.items():
        if (number := plain(setting)) is not setting:
            object.__setattr__(instance, name, number)


def plain(value: Any) -> Any:
    """Convert NumPy numbers and arrays, also in lists and dictionaries, to Python numbers and tuples."""
    if isinstance(value, tuple | list):
        entries = [plain(entry) for entry in value]
        return value if all(a is b for a, b in zip(entries, value, strict=True)) else type(value)(entries)
    if isinstance(value, dict):
        return {plain(key): plain(entry) for key, entry in value.items()}
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        python_value = value.tolist()
        return tuple(python_value) if isinstance(python_value, list) else python_value
    return value


@cache
def defaults(function: Callable[..., Any]) -> Mapping[str, Any]:
    """Return the options of a function with their defaults; keyword-only parameters without a default are data."""
    parameters = inspect.signature(function).parameters.values()
    return MappingProxyType(
        {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is not p.empty}
    )


GONE = {"cache": "keep activations with extract_activations(…).save(path), and read them with Activations.load(path)"}
"""Removed options of functions -> replacement, for messages."""


def check_names(owner: str, options: Iterable[str], valid: Collection[str]) -> None:
    """Raise an error for unknown options of a function or method."""
    for option in options:
        if option not in valid:
            similar = did_you_mean(option, valid)
            hint = f"; {GONE[option]}." if option in GONE else f"; did you mean {similar!r}?" if similar else "."
            raise TypeError(
                f"{owner} got an unexpected option {option!r}{hint} Its options: {', '.join(valid) or 'none'}"
            )


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
    """Parse a name with options, ``name:key=value,…``, as on the command line.

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
        key, equals, text = (part.strip() for part in option.partition("="))
        if not equals or not key or not text:
            raise ValueError(f"options must have the form key=value, got {option!r}")
        if key in options:
            raise ValueError(f"option {key!r} is given twice")
        try:
            options[key] = json.loads({"True": "true", "False": "false", "None": "null"}.get(text, text))
        except json.JSONDecodeError:
            options[key] = text
    return name, options


@dataclasses.dataclass(frozen=True)
class Configured:
    """Base class of methods in registries: frozen dataclasses with their options as fields.

    The options are checked against the annotations of the fields. A subclass with a ``__post_init__``, for checks
    beyond annotations, must call ``super().__post_init__()``.

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
        """Return the name and all options as JSON values, for the ``build`` method of the registry."""
        return {"name": self.name, **dataclasses.asdict(self)}

    @property
    def label(self) -> str:
        """The name with all non-default options: ``ridge(ridge=0.5)``."""
        settings = []
        for option in dataclasses.fields(self):
            value = getattr(self, option.name)
            text = value.label if isinstance(value, Configured) else value
            factory = option.default_factory
            if text != (option.default if factory is dataclasses.MISSING else factory()):
                settings.append(f"{option.name}={text}")
        return self.name + (f"({', '.join(settings)})" if settings else "")


@cache
def _kinds(owner: Hashable) -> Mapping[str, Any]:
    """Return the evaluated annotations of the fields of a class, or of the parameters of a function.

    Annotations with names that only type checkers import cannot be evaluated: these options accept all values.
    """
    if isinstance(owner, type):
        names = {option.name for option in dataclasses.fields(owner)}
        bases = reversed(owner.__mro__)
        scopes = [(vars(sys.modules.get(base.__module__, builtins)), vars(base)) for base in bases]
        declared = [(scope, members.get("__annotations__", {})) for scope, members in scopes]
    else:
        inner: Any = inspect.unwrap(owner)  # type: ignore[arg-type]
        names, declared = {*inner.__annotations__} - {"return"}, [(inner.__globals__, inner.__annotations__)]
    kinds: dict[str, Any] = {}
    for scope, declared_types in declared:
        for name in names & declared_types.keys():
            holder = SimpleNamespace(__annotations__={name: declared_types[name]})
            try:
                kinds |= get_type_hints(holder, scope, include_extras=True)
            except NameError:
                kinds[name] = Any
    return MappingProxyType(kinds)


def _check(kinds: Mapping[str, Any], values: Mapping[str, Any], owner: str = "") -> None:
    messages = [_message(kinds[name], name, value) for name, value in values.items() if name in kinds]
    if problems := list(filter(None, messages)):
        raise OptionError(owner + "; ".join(problems))


def violated(kind: Any, value: Any) -> bool:
    """Return whether a value does not match an annotation."""
    return _problem(kind, "", value) is not None


def _message(kind: Any, name: str, value: Any) -> str:
    """Return the full error message for a value; empty for a valid value."""
    problem = _problem(kind, name, value)
    if problem is None:
        return ""
    return problem or f"{name} must be {described(kind)}, got {_formatted(value)}{_hint(kind, value)}"


def _problem(kind: Any, name: str, value: Any) -> str | None:
    """Return the error message for the entries of a value; empty for an invalid value, ``None`` for a valid one."""
    origin, arguments = get_origin(kind), get_args(kind)
    valid = True
    if origin in (Union, UnionType):
        problems = [_problem(part, name, value) for part in arguments]
        return None if None in problems else next(filter(None, problems), "")
    if origin is Annotated:
        inner, *metadata = arguments
        constraints = [constraint for constraint in metadata if isinstance(constraint, Constraint)]
        only_within = all(isinstance(constraint, Within) for constraint in constraints)
        if only_within and (problem := _problem(inner, name, value)) is not None:
            return problem
        valid = all(value in constraint for constraint in constraints)
    elif origin is Literal:
        number = plain(value)
        valid = any(
            isinstance(number, type(choice)) and isinstance(number, bool) is isinstance(choice, bool)
            and number == choice for choice in arguments
        )  # fmt: skip
    elif kind in (int, float):
        valid = isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    elif origin in CONTAINERS:
        is_indexable = origin is Sequence and hasattr(value, "__len__") and hasattr(value, "__getitem__")
        is_json = origin is tuple and isinstance(value, list)  # JSON does not have tuples
        wrong = isinstance(value, str | bytes) or (isinstance(value, Mapping) and CONTAINERS[origin] != "a dictionary")
        if wrong or not (is_indexable or is_json or isinstance(value, origin)):
            return ""
        return "; ".join(islice(filter(None, _inside(origin, arguments, name, value)), 5)) or None
    elif isinstance(kind := origin or kind, type) and kind is not Any:
        protocol = getattr(kind, "_is_protocol", False) and not getattr(kind, "_is_runtime_protocol", False)
        valid = protocol or isinstance(value, kind)
    return None if valid else ""


def _inside(origin: Any, parts: tuple[Any, ...], name: str, container: object) -> Iterable[str]:
    """Yield the error messages for the entries of a list or dictionary. Iterators are not read."""
    if not isinstance(container, Collection):
        return
    value: Any = container
    entries: Iterable[tuple[Any, str, Any]] = ()
    if origin in (Mapping, dict):
        keys = [(parts[0], f"key {key!r} of {name}", key) for key in value]
        entries = [*keys, *((parts[1], f"{name}[{key!r}]", entry) for key, entry in value.items())]
    elif origin is tuple and parts[1:] != (...,):
        if len(value) != len(parts):
            yield f"{name} must be a tuple of {len(parts)}, got one of {len(value)}"
        entries = [(part, f"{name}[{i}]", entry) for i, (part, entry) in enumerate(zip(parts, value, strict=False))]
    elif parts[0] is not Any:
        entries = ((parts[0], f"{name}[{i}]", entry) for i, entry in enumerate(value))
    yield from (_message(*entry) for entry in entries)


def described(kind: Any) -> str:
    """Describe the values of an annotation, as a continuation of "must be"."""
    origin, parts = get_origin(kind), get_args(kind)
    simple = {bool: "True or False", int: "an integer", float: "a number", str: "a text", PathLike: "a path"}
    if (origin or kind) in simple:
        return simple[origin or kind]
    if kind in (None, NoneType):
        return "None"
    if origin in (Union, UnionType):
        return " or ".join(map(described, parts))
    if origin is Annotated:
        inner, *constraints = parts
        texts = [str(constraint) for constraint in constraints if isinstance(constraint, Constraint)]
        without_type = texts and not isinstance(constraints[0], Within)
        return " ".join(texts if without_type else [described(inner), *texts])
    if origin is Literal:
        return ("one of " if len(parts) > 1 else "") + ", ".join(map(repr, parts))
    if origin in CONTAINERS:
        return CONTAINERS[origin]
    name = (origin or kind).__name__
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


def _formatted(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, str | Real | NoneType):
        return repr(value)
    package = type(value).__module__.partition(".")[0]
    return type(value).__name__ if package in ("builtins", "hf_stitch") else f"{package}.{type(value).__name__}"


def _hint(kind: Any, value: Any) -> str:
    parts = get_args(kind)
    for part in (kind, *parts):
        if isinstance(part, Constraint) and (hint := part.hint(value)):
            return f": {hint}"
    if get_origin(kind) in (Union, UnionType, Annotated):
        return next(filter(None, (_hint(part, value) for part in parts)), "")
    is_entry = CONTAINERS.get(get_origin(kind)) == "a list" and _problem(parts[0], "", value) is None
    return f"; write [{value!r}]" if is_entry else ""
