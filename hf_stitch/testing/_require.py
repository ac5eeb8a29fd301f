"""Assertions that also run under ``python -O`` and always have a message."""

from __future__ import annotations

from collections.abc import Callable
from unittest import SkipTest


def require(condition: bool, message: str) -> None:
    """Raise AssertionError with the message unless the condition is true."""
    if not condition:
        raise AssertionError(message)


def require_error(error: type[Exception], action: Callable[[], object], what: str) -> str:
    """Run the action, which must raise ``error``, and return its message; ``what`` describes the action."""
    try:
        action()
    except error as raised:
        return str(raised)
    raise AssertionError(f"{what} must raise {error.__name__}; nothing was raised")


def skip_unless(condition: bool, reason: str) -> None:
    """Raise SkipTest with the reason why a part does not apply unless the condition is true."""
    if not condition:
        raise SkipTest(reason)
