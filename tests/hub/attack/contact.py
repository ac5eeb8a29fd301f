"""Recording and preventing connections and programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Contact:
    """Records and prevents connections and new processes, at the last step before the operating system."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def prevent(self, what: str) -> Callable[..., Any]:
        """Return a function that records its call and fails."""

        def fail(*args: Any, **options: Any) -> Any:
            self.made.append(f"{what}{args[:2]}")
            raise OSError(f"{what} in a test that allows none")

        return fail
