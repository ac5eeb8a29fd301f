"""Assertions that also hold under ``python -O`` and always say what they found."""

from __future__ import annotations

from collections.abc import Callable


def require(condition: bool, message: str) -> None:
    """Raise AssertionError with the message unless the condition holds."""
    if not condition:
        raise AssertionError(message)


def require_error(error: type[Exception], action: Callable[[], object], what: str) -> str:
    """Run the action, which must raise ``error``; its message is returned. ``what`` says what the action does."""
    try:
        action()
    except error as raised:
        return str(raised)
    raise AssertionError(f"{what} must raise {error.__name__}; nothing was raised")
