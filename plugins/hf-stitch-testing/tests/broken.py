"""Tables of entries that break one promise of a check each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import SkipTest

import pytest
from hf_stitch_testing import conformance

from hf_stitch.options import Configured
from hf_stitch.registry import Entry, Registry


@dataclass(frozen=True)
class WithDefect(Configured):
    """An option of a method: what is wrong with it; ``config`` is that its record forgets this option."""

    defect: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name} if self.defect == "config" else super().to_dict()


@dataclass(frozen=True)
class Broken:
    """What one check must find.

    ``make`` gives the arguments of the check for an entry with a defect, which is named like the part that finds it;
    without one, the entry conforms. Meanwhile, ``registry`` has its class, or ``kind``. ``also`` has the other parts
    that cannot but fail with a defect.
    """

    check: conformance[...]
    make: Callable[[str], tuple[Any, ...]]
    messages: dict[str, str]
    registry: Registry[Any] | None = None
    kind: type | None = None
    also: dict[str, set[str]] = field(default_factory=dict)

    def failing(self, defect: str) -> dict[str, str]:
        arguments = self.make(defect)
        with pytest.MonkeyPatch.context() as patch:
            if self.registry is not None:
                kind: Any = self.kind or type(arguments[0])
                patch.setitem(self.registry._entries, kind.name, Entry.of(kind.name, kind))
            return failing(self.check, *arguments)


def failing(check: conformance[...], *args: Any, **options: Any) -> dict[str, str]:
    """Run every part by itself; return what those that fail raise, an AssertionError by its message, by their names."""
    found = {}
    for part in check.parts(*args, **options):
        try:
            part()
        except SkipTest:
            continue
        except AssertionError as error:
            found[part.name] = str(error)
        except Exception as error:  # of a part that cannot run
            found[part.name] = repr(error)
    return found
