"""Conformance check for commands."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import typing
from collections.abc import Callable
from functools import cached_property
from types import FunctionType
from typing import Any

import typer
from typer.testing import CliRunner

from hf_stitch_testing.kit import Kit, must, require, skip_unless
from hf_stitch_testing.parts import conformance

Function = Callable[..., Any]
HEAVY = {"torch", "transformers"}


@conformance
def check_command(command: Callable[..., Any] | typer.Typer, *arguments: str) -> _CommandKit:
    """Check that a function, or a typer app of several functions, satisfies the contract of ``hf-stitch`` commands.

    The parts:

    - ``typed``: the command is a function with parameter types that typer accepts, or an app of such functions.
    - ``described``: the first line of each docstring, and of the help text of an app, describes the command.
    - ``parameters``: every parameter has a help text.
    - ``help``: ``--help`` exits with 0 and shows the description.
    - ``light``: importing the module imports neither torch nor transformers (tested in a new process).
    - ``runs``: the command exits with 0 for the arguments.
    - ``unknown_option``: an unknown option exits with 2.

    Args:
        command: The function, or the app.
        *arguments: Command-line arguments to run the command with.

    Example:
        >>> from hf_stitch.cli.listing import listing
        >>> check_command(listing, "metrics")
    """
    return _CommandKit(command, arguments)


class _CommandKit(Kit):
    def __init__(self, command: Function | typer.Typer, arguments: tuple[str, ...]) -> None:
        self.command, self.arguments = command, arguments

    @cached_property
    def app(self) -> typer.Typer:
        if isinstance(self.command, typer.Typer):
            return self.command
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        app.command()(self.command)
        return app

    @cached_property
    def functions(self) -> list[Function]:
        """The function, or all functions of an app."""
        if not isinstance(self.command, typer.Typer):
            return [self.command]
        callbacks = [command.callback for command in self.command.registered_commands if command.callback is not None]
        require(bool(callbacks), "a typer app must have commands")
        return callbacks

    def typed(self) -> None:
        for function in self.functions:
            got = type(function).__name__
            require(isinstance(function, FunctionType), f"a command must be a function or a typer app, got {got}")
            hints = typing.get_type_hints(function)
            untyped = [name for name in inspect.signature(function).parameters if name not in hints]
            require(not untyped, f"all parameters must have types; missing for {', '.join(untyped)}")
        with must("typer must accept the types of all parameters"):
            typer.main.get_command(self.app)

    def described(self) -> None:
        text = "help text" if isinstance(self.command, typer.Typer) else "docstring"
        require(_first_line(self.command) != "", f"the first line of the {text} must describe the command")
        missing = [function.__name__ for function in self.functions if not _first_line(function)]
        require(not missing, f"the first line of every docstring must describe the command; missing for {missing}")

    def parameters(self) -> None:
        command: Any = typer.main.get_command(self.app)
        commands = (command, *getattr(command, "commands", {}).values())
        parameters = [parameter for subcommand in commands for parameter in subcommand.params]
        undocumented = [
            str(parameter.name) for parameter in parameters if not (getattr(parameter, "help", "") or "").strip()
        ]
        require(not undocumented, f"every parameter must have a help text; missing for {', '.join(undocumented)}")

    def help(self) -> None:
        output = " ".join(self._exit(["--help"], 0).replace("│", " ").split())
        words = _first_line(self.command).split()
        require(" ".join(words[:3]) in output, f"--help must show {' '.join(words)!r}, got {output}")

    def light(self) -> None:
        module = self.functions[0].__module__
        skip_unless(module not in (None, "__main__"), "the command is not in an importable module")
        code = f"import sys, {module}; print(*sorted({HEAVY} & sys.modules.keys()))"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        call = [sys.executable, "-c", code]
        child = subprocess.run(call, capture_output=True, text=True, check=False, env=environment)
        error = child.stderr.strip()
        missing = error.rpartition("ModuleNotFoundError: No module named ")[2].partition(";")[0].strip("'")
        skip_unless(not f"{module}.".startswith(f"{missing}."), f"{module} cannot be imported by its name")
        require(child.returncode == 0, f"importing {module} must not fail: {error[-500:]}")
        heavy = (child.stdout.splitlines() or [""])[-1].split()
        require(not heavy, f"importing {module} must not import {' and '.join(heavy)}: import them in the function")

    def runs(self) -> None:
        self._exit(self.arguments, 0)

    def unknown_option(self) -> None:
        self._exit([*self.arguments, "--no-such-option"], 2)

    def _exit(self, arguments: typing.Sequence[str], code: int) -> str:
        """Run the command, check its exit code, and return its output."""
        result = CliRunner().invoke(self.app, list(arguments))
        got = f"{result.exit_code}: {result.output}"
        if unexpected := not isinstance(error := result.exception, SystemExit | None):
            got = f"{type(error).__name__}: {error}"
        call = " ".join(arguments) or "no arguments"
        expected = result.exit_code == code and not unexpected
        require(expected, f"with {call}, the command must exit with {code}, got {got}")
        return result.output


def _first_line(command: Function | typer.Typer) -> str:
    text = command.info.help if isinstance(command, typer.Typer) else inspect.getdoc(command)
    return (text if isinstance(text, str) else "").partition("\n")[0].strip()
