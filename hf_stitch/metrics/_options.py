"""Options of metrics: keyword-only parameters of the function, validated by their annotations."""

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
    """A range of valid numbers for an option of a metric, used in ``Annotated``.

    Args:
        low: Lower bound.
        high: Upper bound, inclusive; infinity by default.
        above: Whether the lower bound is exclusive.

    Example:
        >>> from hf_stitch.metrics import Within
        >>> 0.5 in Within(0, 1), 0 in Within(0, 1, above=True), str(Within(0, 1, above=True))
        (True, False, '> 0 and <= 1')
    """

    low: float
    high: float = math.inf
    above: bool = False

    def __contains__(self, value: float) -> bool:
        """Whether the number is finite and in the range."""
        return math.isfinite(value) and (self.low < value if self.above else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        """Describe the range, for example ``> 0 and <= 1``."""
        lower = f"{'>' if self.above else '>='} {self.low:g}"
        return lower if self.high == math.inf else f"{lower} and <= {self.high:g}"


Count = Annotated[int, Within(1)]
Fraction = Annotated[float, Within(0, 1)]
NonNegative = Annotated[float, Within(0)]
Positive = Annotated[float, Within(0, above=True)]


@cache
def defaults(function: Callable[..., Any]) -> Mapping[str, Any]:
    """Options of a function and their defaults; keyword-only parameters without a default are data."""
    parameters = inspect.signature(function).parameters.values()
    return MappingProxyType(
        {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is not p.empty}
    )


def check_names(name: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Check that the function has these options."""
    known = defaults(function)
    for option in options.keys() - known.keys():
        hint = did_you_mean(option, known)
        raise TypeError(
            f"{name} has no option {option!r}{f'; did you mean {hint!r}?' if hint else '.'} "
            f"Its options: {', '.join(known) or 'none'}"
        )


def check_values(name: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Check values against the annotations of their options."""
    annotations = _annotations(function)
    for option, value in options.items():
        expected = _unmet(annotations.get(option), value)
        if expected:
            raise ValueError(f"{name}: {option} must be {expected}, got {value!r}")


@cache
def _annotations(function: Callable[..., Any]) -> Mapping[str, Any]:
    return MappingProxyType(get_type_hints(function, include_extras=True))


def _unmet(annotation: Any, value: Any) -> str:
    """What the annotation requires if the value is invalid; empty if it is valid."""
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
