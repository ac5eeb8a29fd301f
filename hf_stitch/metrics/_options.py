"""The options of a metric are the keyword-only parameters of its function; their annotations constrain them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from hf_stitch.registry import did_you_mean


@dataclass(frozen=True)
class Within:
    """A number from ``low`` (left out if ``above``) to ``high``."""

    low: float
    high: float = math.inf
    above: bool = False

    def __contains__(self, value: float) -> bool:
        """Whether the number lies there and is finite."""
        return math.isfinite(value) and (self.low < value if self.above else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        """For example ``> 0 and <= 1``."""
        lower = f"{'>' if self.above else '>='} {self.low:g}"
        return lower if self.high == math.inf else f"{lower} and <= {self.high:g}"


Count = Annotated[int, Within(1)]
Fraction = Annotated[float, Within(0, 1)]
NonNegative = Annotated[float, Within(0)]
Positive = Annotated[float, Within(0, above=True)]


@cache
def defaults(function: Callable[..., Any]) -> Mapping[str, Any]:
    """The options of a metric's function and their defaults; keyword-only parameters without one (labels) are data."""
    parameters = inspect.signature(function).parameters.values()
    return MappingProxyType(
        {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is not p.empty}
    )


def check_names(name: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Refuse options that the function does not have.

    Raises:
        TypeError: An option is unknown; the message lists those there are.
    """
    known = defaults(function)
    for option in options.keys() - known.keys():
        hint = did_you_mean(option, known)
        raise TypeError(
            f"{name} has no option {option!r}{f'; did you mean {hint!r}?' if hint else '.'} "
            f"Its options: {', '.join(known) or 'none'}"
        )


def check_values(name: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Refuse values that are not what the annotation of their option says.

    Raises:
        ValueError: Naming the option, what it must be and what it is.
    """
    annotations = _annotations(function)
    for option, value in options.items():
        expected = _unmet(annotations.get(option), value)
        if expected:
            raise ValueError(f"{name}: {option} must be {expected}, got {value!r}")


@cache
def _annotations(function: Callable[..., Any]) -> Mapping[str, Any]:
    return MappingProxyType(get_type_hints(function, include_extras=True))


def _unmet(annotation: Any, value: Any) -> str:
    """What the annotation asks for and the value is not; empty if the value will do."""
    if annotation is bool:
        return "" if isinstance(value, bool) else "True or False"
    if get_origin(annotation) is Literal:
        choices = get_args(annotation)
        return "" if value in choices else f"one of {', '.join(map(repr, choices))}"
    if get_origin(annotation) is Annotated:
        kind, constraint = get_args(annotation)
        number = isinstance(value, int if kind is int else float | int) and not isinstance(value, bool)
        return "" if number and value in constraint else f"{'an integer' if kind is int else 'a number'} {constraint}"
    return ""
