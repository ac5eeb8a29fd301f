"""Options of everything public: a wrong value is named before any work."""

from __future__ import annotations

from public import Public, choices, outside, publics  # isort: skip

WRONG = "no such choice"
UNCHECKED: set[str] = set()
"""Enumerated options that are not checked, or too late. The list may only become shorter."""


def _complaint(each: Public, parameter: str) -> str:
    """What is wrong with the answer to a wrong choice; empty if nothing is."""
    try:
        found = each.run(**{parameter: outside(each.annotation(parameter), WRONG)})
    except ValueError as error:
        told = parameter in str(error) and repr(WRONG) in str(error)
        return "" if told else f"ValueError: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return f"it returned {type(found).__name__}"


def test_every_enumerated_option_is_checked_before_any_work() -> None:
    found = {
        f"{each.name}: {parameter}": _complaint(each, parameter)
        for each in publics()
        for parameter in each.parameters
        if choices(each.annotation(parameter))
    }
    assert len(found) > 80
    failed = {name: complaint for name, complaint in found.items() if complaint}
    assert failed.keys() == UNCHECKED, "\n".join(f"{name}  {why:.150}" for name, why in failed.items())
