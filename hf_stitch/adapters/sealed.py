"""Keeping library code that reads untrusted files from other machines and programs."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

SEALED = frozenset(
    (
        "os.exec",
        "os.fork",
        "os.forkpty",
        "os.posix_spawn",
        "os.spawn",
        "os.startfile",
        "os.system",
        "socket.connect",
        "socket.getaddrinfo",
        "socket.gethostbyname",
        "socket.sendmsg",
        "socket.sendto",
        "subprocess.Popen",
    )
)
"""Audit events of Python that open a connection or start a program."""


class SealedError(ValueError):
    """Raised when code in :func:`sealed` opens a connection or starts a program."""


class _State(threading.local):
    depth = 0


_state = _State()


@contextmanager
def sealed() -> Iterator[None]:
    """Refuse connections and new processes in this thread.

    A config may contain a name that a constructor looks up on the Hub, and some constructors look for a compiler. This
    does not contain hostile code; no code of an artefact runs anyway.
    """
    _install()
    _state.depth += 1
    try:
        yield
    finally:
        _state.depth -= 1


@cache
def _install() -> None:
    """Add the audit hook, once: hooks cannot be removed."""
    sys.addaudithook(_refuse)


def _refuse(event: str, args: Any) -> None:
    if event in SEALED and _state.depth:
        raise SealedError(
            f"loading a saved artefact may not cause the event {event}: its files must contain everything, so they are "
            "damaged or name something else to fetch or run"
        )
