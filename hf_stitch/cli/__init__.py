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
    pull,
    push,
    quickstart,
    stitch,
    swap,
)

__all__ = ["app", "main"]


class _ErrorGroup(TyperGroup):
    """A command group that prints warnings and errors as one line; an error as a traceback with ``--debug``."""

    def invoke(self, ctx: Any) -> Any:
        try:
            with warnings.catch_warnings():
                warnings.showwarning = _show_warning  # type: ignore[assignment]  # by position, as warnings calls it
                return super().invoke(ctx)
        except (ValueError, OSError, ImportError) as error:
            if ctx.params["debug"]:
                raise
            message = " ".join(str(error).split()) or type(error).__name__
            typer.secho(f"error: {message}", fg="red", err=True)
            raise typer.Exit(1) from error


def _show_warning(message: Warning | str, *_: Any) -> None:
    typer.secho(f"warning: {' '.join(str(message).split())}", fg="yellow", err=True)


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
