"""Fixtures of the attacks: no connections, no programs, and small artefacts to change."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator

import pytest

from contact import Contact  # isort: skip


@pytest.fixture
def contact(monkeypatch: pytest.MonkeyPatch) -> Iterator[Contact]:
    """Fail a test that opens a connection or starts a process."""
    found = Contact()
    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, found.prevent(name))
    for name in ("getaddrinfo", "create_connection"):
        monkeypatch.setattr(socket, name, found.prevent(name))
    for name in ("system", "posix_spawn", "fork"):
        monkeypatch.setattr(os, name, found.prevent(name))
    monkeypatch.setattr(subprocess, "_fork_exec", found.prevent("fork_exec"))
    yield found
    assert not found.made
