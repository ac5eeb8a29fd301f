"""Checks with named parts: :class:`conformance` runs all parts, :func:`parametrize_with_checks` one part per test."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar
from unittest import SkipTest

from hf_stitch.options import Configured, did_you_mean

P = ParamSpec("P")
Test = TypeVar("Test", bound=Callable[..., Any])


@dataclass(frozen=True)
class Part:
    """One part of a conformance check of one entry.

    Attributes:
        name: Name of the tested property, for example ``symmetric``.
        entry: The checked entry, for example ``linear_cka(debiased=True)``.
        run: Function that raises an ``AssertionError`` if the entry violates the contract.

    Example:
        >>> from hf_stitch_testing import check_similarity
        >>> part = check_similarity.parts("lp", p=3)[-1]
        >>> str(part)
        'lp(p=3)-gradient'
        >>> part()
    """

    name: str
    entry: str
    run: Callable[[], object]

    def __call__(self) -> None:
        """Check this part."""
        self.run()

    def __str__(self) -> str:
        """Return the test id of this part: entry and name."""
        return f"{self.entry}-{self.name}"


class conformance(Generic[P]):
    """Decorator that turns a function that lists named parts into a check.

    The function returns or yields pairs of a name and a function without parameters. The latter raises an
    ``AssertionError`` that describes the violation, or ``unittest.SkipTest`` with a reason if the part does not apply.
    Listing parts must not compute anything. Calling the check runs all parts in order.

    Args:
        function: The function; the check has the same parameters.

    Example:
        >>> @conformance
        ... def check_word(word: str):
        ...     def lower():
        ...         assert word == word.lower(), f"{word} must be in lower case"
        ...     yield "lower", lower
        >>> check_word("stitch")
        >>> check_word("Stitch")
        Traceback (most recent call last):
        AssertionError: Stitch must be in lower case
        >>> [part.name for part in check_word.parts("Stitch")]
        ['lower']
    """

    __name__: str

    def __init__(self, function: Callable[P, Iterable[tuple[str, Callable[[], object]]]]) -> None:
        self._function = function
        functools.update_wrapper(self, function)
        # The check returns None, although the function lists parts.
        self.__signature__ = inspect.signature(function).replace(return_annotation=None)

    def __call__(self, *args: P.args, **options: P.kwargs) -> None:
        """Run all applicable parts in order; the first failing part raises its error."""
        for part in self.parts(*args, **options):
            try:
                part()
            except SkipTest:
                continue

    def __repr__(self) -> str:
        """Return for example ``<conformance check_metric>``."""
        return f"<conformance {self.__name__}>"

    def parts(self, *args: P.args, **options: P.kwargs) -> tuple[Part, ...]:
        """Return the parts of the check of an entry in order, without running them.

        Args:
            *args: Arguments of the check.
            **options: Options of the check.

        Returns:
            The parts.
        """
        entry = _label(args, options)
        return tuple(Part(name, entry, run) for name, run in self._function(*args, **options))


def parametrize_with_checks(
    check: conformance[...], *args: Any, expected_failures: Mapping[str, str] | None = None, **options: Any
) -> Callable[[Test], Test]:
    """Create one pytest test for each part of a conformance check.

    The decorated test calls its parameter ``check``. The test id joins entry and part, for example
    ``linear_cka-symmetric``. Parts that do not apply to the entry are skipped with a reason. For many entries, pass all
    their parts to ``pytest.mark.parametrize(…, ids=str)``.

    Args:
        check: The check, for example ``check_metric``.
        *args: Arguments of the check.
        expected_failures: Part name -> reason for an expected ``AssertionError``. The test is marked as strict
            ``xfail``, so that it fails as soon as the part passes.
        **options: Options of the check.

    Returns:
        The decorator of the test.

    Raises:
        ImportError: If pytest is not installed.
        ValueError: If an expected failure does not name a part of the check, or lacks a reason.

    Example:
        >>> from hf_stitch_testing import check_metric
        >>> @parametrize_with_checks(check_metric, "pwcca", expected_failures={})
        ... def test_conforms(check):
        ...     check()
        >>> parametrize_with_checks(check_metric, "pwcca", expected_failures={"symetric": "it weights one side"})
        Traceback (most recent call last):
        ValueError: unknown part 'symetric' of check_metric; did you mean 'symmetric'? Its parts: declarations, range,
        symmetric, triangle, pure, types, streamed, moments, invariances, order, repeated, dead, degenerate,
        too_few_rows, unequal_widths, identity, gradient
    """
    try:
        import pytest
    except ImportError as error:
        raise ImportError("parametrize_with_checks requires pytest: pip install pytest") from error
    parts, expected = check.parts(*args, **options), dict(expected_failures or {})
    names = [part.name for part in parts]
    for name, reason in expected.items():
        if name not in names:
            hint = f"; did you mean {similar!r}?" if (similar := did_you_mean(name, names)) else "."
            raise ValueError(f"unknown part {name!r} of {check.__name__}{hint} Its parts: {', '.join(names)}")
        if not reason.strip():
            raise ValueError(f"expected_failures must have a reason for {name!r}, got {reason!r}")
    marks = {
        name: [pytest.mark.xfail(reason=reason, raises=AssertionError, strict=True)]
        for name, reason in expected.items()
    }  # fmt: skip
    cases = [pytest.param(part, id=str(part), marks=marks.get(part.name, [])) for part in parts]
    return pytest.mark.parametrize("check", cases)


def _label(args: tuple[Any, ...], options: Mapping[str, Any]) -> str:
    """Return the label of an entry (the first argument) with its options."""
    options_text = ", ".join(f"{name}={_value_label(value)}" for name, value in options.items())
    return (_value_label(args[0]) if args else "") + (f"({options_text})" if options_text else "")


def _value_label(value: Any) -> str:
    """Return a short reproducible label of a value: its text, its name with options, or its class name."""
    if isinstance(value, str | bool | int | float | list | tuple | None):
        return str(value)
    if isinstance(value, Configured):
        return value.label
    for attribute in ("name", "__name__"):
        name = getattr(value, attribute, None)
        if isinstance(name, str) and name:
            return name
    return type(value).__name__
