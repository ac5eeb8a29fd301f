"""Conformance check for commands."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import typing
from collections.abc import Callable, Iterator
from functools import cache
from types import FunctionType
from typing import Any
from unittest import SkipTest

import typer
from typer.testing import CliRunner, Result

from hf_stitch.testing._require import require
from hf_stitch.testing.conformance import conformance

IMPORT = """
import importlib, sys
name, heavy = sys.argv[1], ("torch", "transformers")
try:
    importlib.import_module(name)
except ModuleNotFoundError as error:
    if error.name is not None and (name + ".").startswith(error.name + "."):
        print("absent")
        sys.exit()
    raise
print("imported", *(module for module in heavy if module in sys.modules))
"""


@conformance
def check_command(
    command: Callable[..., Any] | typer.Typer, *arguments: str
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Check that a function, or a typer app of several, satisfies the contract of commands of ``hf-stitch``.

    The parts:

    - ``typed``: it is a function whose parameters have types that typer accepts, or an app of such functions.
    - ``described``: the first line of the docstring describes it; the help text of an app, and all its functions.
    - ``parameters``: every parameter has a help text.
    - ``help``: ``--help`` exits with 0 and shows the description.
    - ``light``: importing its module imports neither torch nor transformers, which is tested in a process of its own.
    - ``runs``: with the arguments, it exits with 0.
    - ``unknown_option``: an option that it does not have exits with 2.

    Args:
        command: The function, or the app.
        *arguments: Arguments with which it runs, as on a command line.

    Raises:
        AssertionError: The contract is violated; the message names the violation.

    Example:
        >>> from hf_stitch.cli.listing import listing
        >>> check_command(listing, "metrics")
    """

    @cache
    def app() -> typer.Typer:
        if isinstance(command, typer.Typer):
            return command
        made = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        made.command()(command)
        return made

    yield "typed", lambda: _check_typed(_functions(command), app())
    yield "described", lambda: _check_described(command)
    yield "parameters", lambda: _check_parameters(app())
    yield "help", lambda: _check_help(command, app())
    yield "light", lambda: _check_light(_functions(command)[0])
    yield "runs", lambda: _check_exit(app(), list(arguments), 0)
    yield "unknown_option", lambda: _check_exit(app(), [*arguments, "--no-such-option"], 2)


def _functions(command: Callable[..., Any] | typer.Typer) -> list[Callable[..., Any]]:
    """Return the function, or those of an app."""
    if not isinstance(command, typer.Typer):
        return [command]
    found = [each.callback for each in command.registered_commands if each.callback is not None]
    require(bool(found), "a typer app must have commands")
    return found


def _check_typed(functions: list[Callable[..., Any]], app: typer.Typer) -> None:
    for function in functions:
        got = type(function).__name__
        require(isinstance(function, FunctionType), f"a command must be a function or a typer app, got {got}")
        known = typing.get_type_hints(function)
        untyped = [name for name in inspect.signature(function).parameters if name not in known]
        require(not untyped, f"parameters must have types, but not {', '.join(untyped)}")
    try:
        typer.main.get_command(app)
    except Exception as error:
        got = f"{type(error).__name__}: {error}"
        raise AssertionError(f"typer must accept the types of all parameters, got {got}") from error


def _first_line(command: Callable[..., Any] | typer.Typer) -> str:
    if not isinstance(command, typer.Typer):
        return (inspect.getdoc(command) or "").partition("\n")[0].strip()
    return (command.info.help if isinstance(command.info.help, str) else "").partition("\n")[0].strip()


def _check_described(command: Callable[..., Any] | typer.Typer) -> None:
    what = "help text" if isinstance(command, typer.Typer) else "docstring"
    require(_first_line(command) != "", f"the first line of the {what} must describe the command")
    without = [function.__name__ for function in _functions(command) if not _first_line(function)]
    require(not without, f"the first line of every docstring must describe the command, but not of {without}")


def _check_parameters(app: typer.Typer) -> None:
    command: Any = typer.main.get_command(app)
    listed = [each for one in (command, *getattr(command, "commands", {}).values()) for each in one.params]
    without = [str(each.name) for each in listed if not (getattr(each, "help", None) or "").strip()]
    require(not without, f"every parameter must have a help text, but not {', '.join(without)}")


def _check_help(command: Callable[..., Any] | typer.Typer, app: typer.Typer) -> None:
    output = _check_exit(app, ["--help"], 0).output
    words = _first_line(command).split()
    shown = " ".join(output.replace("│", " ").split())
    require(" ".join(words[:3]) in shown, f"--help must show {' '.join(words)!r}, got {shown}")


def _check_light(function: Callable[..., Any]) -> None:
    module = function.__module__
    if module in (None, "__main__"):  # a session
        raise SkipTest("the command is not in a module that can be imported")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    call = [sys.executable, "-c", IMPORT, module]
    child = subprocess.run(call, capture_output=True, text=True, check=False, env=environment)
    require(child.returncode == 0, f"importing {module} must not fail: {child.stderr.strip()[-500:]}")
    status, *heavy = child.stdout.splitlines()[-1].split()
    if status == "absent":
        raise SkipTest(f"{module} cannot be imported by its name")
    require(not heavy, f"importing {module} must not import {' and '.join(heavy)}: import them in the function")


def _check_exit(app: typer.Typer, arguments: list[str], code: int) -> Result:
    result = CliRunner().invoke(app, arguments)
    unexpected = result.exception if not isinstance(result.exception, SystemExit | None) else None
    require(
        unexpected is None and result.exit_code == code,
        f"with {' '.join(arguments) or 'no arguments'}, the command must exit with {code}, got "
        + (f"{type(unexpected).__name__}: {unexpected}" if unexpected else f"{result.exit_code}: {result.output}"),
    )
    return result
