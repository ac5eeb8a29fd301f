"""Which parts of a conformance check an entry fails."""

from __future__ import annotations

import re
from typing import Any
from unittest import SkipTest

from hf_stitch.testing import conformance


def failing(check: conformance[...], *args: Any, **options: Any) -> dict[str, str]:
    """Run every part by itself and return the messages of those that fail, by their names."""
    found = {}
    for part in check.parts(*args, **options):
        try:
            part()
        except SkipTest:
            continue
        except AssertionError as error:
            found[part.name] = str(error)
    return found


def assert_fails_only(part: str, message: str, check: conformance[...], *args: Any, **options: Any) -> None:
    """Assert that an entry fails one part, with a message that matches, and that the whole check says the same."""
    found = failing(check, *args, **options)
    assert list(found) == [part], found
    assert re.search(message, found[part]), found
    try:
        check(*args, **options)
    except AssertionError as error:
        assert re.search(message, str(error)), error
    else:
        raise AssertionError("the whole check must fail, too")


def names(check: conformance[...], *args: Any) -> set[str]:
    """Names of all parts of a check."""
    return {part.name for part in check.parts(*args)}
