"""The command ``hf-stitch``.

Commands import torch, transformers and timm when they run, so that ``--help`` stays fast.
"""

from __future__ import annotations

import warnings
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from hf_stitch import __version__
from hf_stitch.cli import (
    bench,
    compare,
    doctor,
    evaluate,
    grid,
    info,
    layers,
    listing,
    new_plugin,
    pull,
    push,
    quickstart,
    stitch,
    swap,
)
from hf_stitch.cli.messages import in_options

__all__ = ["app", "main"]


class _ErrorGroup(TyperGroup):
    """A command group that prints warnings and errors as one line; an error as a traceback with ``--debug``."""

    def invoke(self, ctx: Any) -> Any:
        def line(message: object) -> str:
            text = " ".join(str(message).split())
            command = self.get_command(ctx, ctx.invoked_subcommand or "")
            return text if command is None else in_options(text, command)

        def show_warning(message: Warning | str, *_: Any) -> None:
            typer.secho(f"warning: {line(message)}", fg="yellow", err=True)

        try:
            with warnings.catch_warnings():
                warnings.showwarning = show_warning  # type: ignore[assignment]  # by position, as warnings calls it
                return super().invoke(ctx)
        except (ValueError, OSError, ImportError, FloatingPointError) as error:
            if ctx.params["debug"]:
                raise
            typer.secho(f"error: {line(error) or type(error).__name__}", fg="red", err=True)
            raise typer.Exit(1) from error


app = typer.Typer(cls=_ErrorGroup, no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)


def _show_version(requested: bool) -> None:
    if requested:
        typer.echo(f"hf-stitch {__version__}")
        raise typer.Exit


@app.callback()
def hf_stitch(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Compare, stitch and exchange neural networks at their layers."""


app.command("quickstart")(quickstart.quickstart)
app.command("layers")(layers.layers)
app.command("doctor")(doctor.doctor)
app.command("compare")(compare.compare)
app.command("stitch")(stitch.stitch)
app.command("grid")(grid.grid)
app.command("bench")(bench.bench)
app.command("swap")(swap.swap)
app.command("evaluate")(evaluate.evaluate)
app.command("push")(push.push)
app.command("pull")(pull.pull)
app.command("info")(info.info)
app.command("list")(listing.listing)
app.command("new-plugin")(new_plugin.new_plugin)


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
