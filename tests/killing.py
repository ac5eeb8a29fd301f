"""Run functions in processes that are killed."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator

OPERATIONS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink")
"""Events of Python's audit hooks before which a process can be killed."""


def survives(function: Callable[[], object], before: Callable[[], object] = lambda: None) -> bool:
    """Run a function in a fork of this process, and return whether it was not killed.

    An exception in the function fails the test.
    """
    child = os.fork()
    if child == 0:
        status = 1
        try:
            before()
            function()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:  # also where the traceback cannot be written: a second process would go on with the tests
            os._exit(status)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL, f"killed by signal {os.WTERMSIG(status)}"
        return False
    assert os.WEXITSTATUS(status) == 0, "the process failed; its traceback is above"
    return True


def killed_at_every_operation(function: Callable[[], object], step: int = 1) -> Iterator[int]:
    """Run a function again and again, killed with SIGKILL before its first, second, … operation on files.

    Args:
        function: The function.
        step: Skip operations: kill before the first, the (1 + step)-th, ….

    Yields:
        The number of the operation, after the process was killed. Ends when the function survives.
    """
    number = 1
    while True:
        left = number

        def count(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal left
            if event in OPERATIONS:
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        if survives(function, lambda: sys.addaudithook(count)):
            return
        yield number
        number += step
