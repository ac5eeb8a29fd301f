"""No connections and no programs during the attacks."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest

STEPS: dict[Any, tuple[str, ...]] = {
    socket.socket: ("connect", "connect_ex", "sendto"),
    socket: ("getaddrinfo", "create_connection"),
    os: ("system", "posix_spawn", "fork"),
    subprocess: ("_fork_exec",),
}
"""The last steps before the operating system."""


@pytest.fixture
def contact(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Calls that would open a connection or start a process, which are prevented; any of them fails the test."""
    made: list[str] = []

    def preventing(what: str) -> Callable[..., Any]:
        def fail(*args: Any, **options: Any) -> Any:
            made.append(f"{what}{args[:2]}")
            raise OSError(f"{what} in a test that allows none")

        return fail

    for place, names in STEPS.items():
        for name in names:
            monkeypatch.setattr(place, name, preventing(name))
    yield made
    assert not made
