"""The store and the case of ``docs/plugins/store.md``, imported as the files that the page shows."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

PAGE = Path(__file__).parents[3] / "docs" / "plugins" / "store.md"


def file_of(name: str) -> str:
    """Return a file of the page, which begins with its name."""
    _, found, rest = PAGE.read_text().partition(f"\n# {name}\n")
    assert found, f"{PAGE} shows no file {name}"
    return rest.partition("```")[0]


def _module(name: str) -> ModuleType:
    sys.modules[name] = found = ModuleType(name)
    exec(compile(file_of(f"{name}.py"), f"{PAGE}: {name}.py", "exec"), vars(found))
    return found


SqliteStore = _module("sqlite_store").SqliteStore
Sqlite = _module("test_sqlite_store").Sqlite
