"""Checks in named parts: :class:`conformance` runs all of them, :func:`parametrize_with_checks` one per test."""

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
        name: What it checks, for example ``symmetric``.
        entry: What is checked, for example ``linear_cka(debiased=True)``.
        run: Raises an ``AssertionError`` if the entry violates the contract.

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
        """Return entry and name, the id of the test of this part."""
        return f"{self.entry}-{self.name}"


class conformance(Generic[P]):
    """Decorator that makes a check of a function that lists its named parts, for example a generator.

    The function gives pairs of a name and a function without parameters, which raises an ``AssertionError`` that
    names the violation, or ``unittest.SkipTest`` with a reason if the part does not apply. It only lists the parts:
    nothing is built or computed before one runs. Calling the check runs all parts in order.

    Args:
        function: The function; its parameters are those of the check.

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
        # What is called returns nothing, although the function lists parts.
        self.__signature__ = inspect.signature(function).replace(return_annotation=None)

    def __call__(self, *args: P.args, **options: P.kwargs) -> None:
        """Run all parts that apply, in order; the first one that fails raises its error."""
        for part in self.parts(*args, **options):
            try:
                part()
            except SkipTest:
                continue

    def __repr__(self) -> str:
        """Return for example ``<conformance check_metric>``."""
        return f"<conformance {self.__name__}>"

    def parts(self, *args: P.args, **options: P.kwargs) -> tuple[Part, ...]:
        """Return the parts of the check of an entry, in order, without running any.

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
    """Make one test of pytest for each part of a conformance check.

    The test has a parameter ``check``, which it calls. The id of each test is that of the entry and the name of the
    part, for example ``linear_cka-symmetric``. Parts that do not apply to the entry are skipped with the reason. For
    many entries, pass the parts of all of them to ``pytest.mark.parametrize(…, ids=str)``.

    Args:
        check: The check, for example ``check_metric``.
        *args: Arguments of the check.
        expected_failures: From name of a part to the reason why it must fail with an ``AssertionError``. Such a test is
            marked ``xfail``, and fails as soon as the part passes.
        **options: Options of the check.

    Returns:
        The decorator of the test.

    Raises:
        ImportError: If pytest is not installed.
        ValueError: If an expected failure names no part of the check, or has no reason.

    Example:
        >>> from hf_stitch_testing import check_metric
        >>> @parametrize_with_checks(check_metric, "pwcca", expected_failures={})
        ... def test_conforms(check):
        ...     check()
        >>> parametrize_with_checks(check_metric, "pwcca", expected_failures={"symetric": "it weights one side"})
        Traceback (most recent call last):
        ValueError: check_metric has no part 'symetric'; did you mean 'symmetric'? Its parts: declarations, range,
        symmetric, triangle, pure, types, streamed, moments, invariances, order, repeated, dead, degenerate,
        too_few_rows, unequal_widths, identity, gradient
    """
    try:
        import pytest
    except ImportError as error:
        raise ImportError("parametrize_with_checks makes tests of pytest: pip install pytest") from error
    parts, expected = check.parts(*args, **options), dict(expected_failures or {})
    names = [part.name for part in parts]
    for name, reason in expected.items():
        if name not in names:
            hint = f"; did you mean {found!r}?" if (found := did_you_mean(name, names)) else "."
            raise ValueError(f"{check.__name__} has no part {name!r}{hint} Its parts: {', '.join(names)}")
        if not reason.strip():
            raise ValueError(f"the expected failure of {name!r} needs a reason")
    marks = {
        name: [pytest.mark.xfail(reason=reason, raises=AssertionError, strict=True)]
        for name, reason in expected.items()
    }  # fmt: skip
    cases = [pytest.param(part, id=str(part), marks=marks.get(part.name, [])) for part in parts]
    return pytest.mark.parametrize("check", cases)


def _label(args: tuple[Any, ...], options: Mapping[str, Any]) -> str:
    """Return the entry, which is the first argument, with its options, in one line."""
    written = ", ".join(f"{name}={_shown(value)}" for name, value in options.items())
    return (_shown(args[0]) if args else "") + (f"({written})" if written else "")


def _shown(value: Any) -> str:
    """Return a short text for a value, the same in every run: itself, its name with its options, or its class."""
    if isinstance(value, str | bool | int | float | list | tuple | None):
        return str(value)
    if isinstance(value, Configured):
        return value.label
    for attribute in ("name", "__name__"):
        found = getattr(value, attribute, None)
        if isinstance(found, str) and found:
            return found
    return type(value).__name__
