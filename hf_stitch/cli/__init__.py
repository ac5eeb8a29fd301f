"""The command ``hf-stitch``.

Commands import torch, transformers and timm when they run, so that ``--help`` stays fast.
"""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from hf_stitch import __version__
from hf_stitch.built_ins import BUILT_INS
from hf_stitch.cli.signatures import GIVEN, in_options
from hf_stitch.plugins import PluginError, hint_for, load_plugin
from hf_stitch.printing import visible
from hf_stitch.registry import registries

__all__ = ["app", "main"]


class _Listed(TyperCommand):
    """Entry in the list of commands: a summary until the command runs and is imported."""

    def __init__(self, name: str) -> None:
        entry = registries.commands.entry(name)
        summary = entry.summary or "A command."
        if entry.origin != "built-in":
            summary = f"{summary.removesuffix('.')} ({entry.origin})."
        super().__init__(name, callback=None, help=summary)

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        return command_of(str(self.name)).make_context(info_name, args, parent=parent, **extra)


def command_of(name: str) -> Any:
    """Import a registered command and return it for ``click``."""
    registered: Any = registries.commands.get(name)
    registries.commands.check_kind(name, registered)
    application = registered
    if not isinstance(registered, typer.Typer):
        application = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        paragraphs = (inspect.getdoc(registered) or "").split("\n\n")  # each is wrapped to the terminal width
        application.command(name, help="\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs))(registered)
    command: Any = get_command(application)
    command.name = name
    return command


class _Group(TyperGroup):
    """Command group of all registered commands, which only imports the command to run.

    It prints warnings and errors as one line; with ``--debug``, errors as a traceback.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        return list(dict.fromkeys([*BUILT_INS["commands"], *registries.commands]))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return _Listed(cmd_name) if cmd_name in registries.commands else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in registries.commands and (hint := hint_for("commands", args[0])):
            ctx.fail(f"Unknown command {args[0]!r}; {hint}.")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        def line(message: object) -> str:
            text = visible(" ".join(str(message).replace("\nSee ", ". See ").split()))
            return in_options(text, command_of(ctx.invoked_subcommand)) if ctx.invoked_subcommand else text

        def show_warning(message: Warning | str, *_: Any) -> None:
            typer.secho(f"warning: {line(message)}", fg="yellow", err=True)

        GIVEN.set(ctx.args)  # read by messages and results
        try:
            with warnings.catch_warnings():
                warnings.showwarning = show_warning  # type: ignore[assignment]  # by position, as warnings calls it
                return super().invoke(ctx)
        except (ValueError, OSError, ImportError, FloatingPointError) as error:
            if ctx.params["debug"]:
                raise
            typer.secho(f"error: {line(error) or type(error).__name__}", fg="red", err=True)
            raise typer.Exit(1) from error


app = typer.Typer(cls=_Group, no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)


def _show_version(requested: bool) -> None:
    if requested:
        typer.echo(f"hf-stitch {__version__}")
        raise typer.Exit


def _load_plugins(paths: list[Path] | None) -> None:
    for path in paths or ():
        try:
            load_plugin(path)
        except (OSError, PluginError) as error:
            raise typer.BadParameter(str(error)) from error


@app.callback()
def hf_stitch(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
    plugin: Annotated[
        list[Path] | None,
        typer.Option(
            "--plugin",
            callback=_load_plugins,
            is_eager=True,
            help="Python file that registers methods, run before the command. Repeatable. It can run any code: pass "
            "only files that you trust.",
        ),
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Compare, stitch and exchange neural networks at their layers."""


def main() -> None:
    """Run the command line interface on ``sys.argv``.

    The process exits with code 0 on success, 1 after an error and 2 for wrong usage.

    Example:
        >>> import sys
        >>> sys.argv = ["hf-stitch", "list", "wrong"]
        >>> try:
        ...     main()
        ... except SystemExit as end:
        ...     print(end.code)
        2
    """
    app(prog_name="hf-stitch")
