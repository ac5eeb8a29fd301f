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
def check_command(function: Callable[..., Any], *arguments: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """Check that a function satisfies the contract of commands of ``hf-stitch``.

    The parts:

    - ``typed``: it is a function whose parameters have types that typer accepts.
    - ``described``: the first line of its docstring describes it.
    - ``parameters``: every parameter has a help text.
    - ``help``: ``--help`` exits with 0 and shows the description.
    - ``light``: importing its module imports neither torch nor transformers, which is tested in a process of its own.
    - ``runs``: with the arguments, it exits with 0.
    - ``unknown_option``: an option that it does not have exits with 2.

    Args:
        function: The function.
        *arguments: Arguments with which it runs, as on a command line.

    Raises:
        AssertionError: The contract is violated; the message names the violation.

    Example:
        >>> from hf_stitch.cli.listing import listing
        >>> check_command(listing, "metrics")
    """

    @cache
    def app() -> typer.Typer:
        made = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        made.command()(function)
        return made

    yield "typed", lambda: _check_typed(function, app())
    yield "described", lambda: _check_described(function)
    yield "parameters", lambda: _check_parameters(app())
    yield "help", lambda: _check_help(function, app())
    yield "light", lambda: _check_light(function)
    yield "runs", lambda: _check_exit(app(), list(arguments), 0)
    yield "unknown_option", lambda: _check_exit(app(), [*arguments, "--no-such-option"], 2)


def _check_typed(function: Callable[..., Any], app: typer.Typer) -> None:
    require(isinstance(function, FunctionType), f"a command must be a function, got {type(function).__name__}")
    known = typing.get_type_hints(function)
    untyped = [name for name in inspect.signature(function).parameters if name not in known]
    require(not untyped, f"parameters must have types, but not {', '.join(untyped)}")
    try:
        typer.main.get_command(app)
    except Exception as error:
        got = f"{type(error).__name__}: {error}"
        raise AssertionError(f"typer must accept the types of all parameters, got {got}") from error


def _first_line(function: Callable[..., Any]) -> str:
    return (inspect.getdoc(function) or "").partition("\n")[0].strip()


def _check_described(function: Callable[..., Any]) -> None:
    require(_first_line(function) != "", "the first line of the docstring must describe the command")


def _check_parameters(app: typer.Typer) -> None:
    parameters = typer.main.get_command(app).params
    without = [str(each.name) for each in parameters if not (getattr(each, "help", None) or "").strip()]
    require(not without, f"every parameter must have a help text, but not {', '.join(without)}")


def _check_help(function: Callable[..., Any], app: typer.Typer) -> None:
    output = _check_exit(app, ["--help"], 0).output
    words = _first_line(function).split()
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
