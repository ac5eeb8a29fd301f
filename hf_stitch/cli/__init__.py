"""The command ``hf-stitch``. Its help needs no torch: commands import what they use when they run."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from hf_stitch import __version__
from hf_stitch.cli import compare, doctor, evaluate, info, layers, listing, pull, push, quickstart, stitch, swap

__all__ = ["app", "main"]


class _Telling(TyperGroup):
    """Shows what went wrong as one line, and as a traceback under ``--debug``."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (ValueError, OSError, ImportError) as error:
            if ctx.params["debug"]:
                raise
            message = " ".join(str(error).split()) or type(error).__name__
            typer.secho(f"error: {message}", fg="red", err=True)
            raise typer.Exit(1) from error


app = typer.Typer(cls=_Telling, no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"hf-stitch {__version__}")
        raise typer.Exit


@app.callback()
def hf_stitch(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Compare, connect and exchange neural networks: what one knows inside, another can use."""


app.command("quickstart")(quickstart.quickstart)
app.command("layers")(layers.layers)
app.command("doctor")(doctor.doctor)
app.command("compare")(compare.compare)
app.command("stitch")(stitch.stitch)
app.command("swap")(swap.swap)
app.command("evaluate")(evaluate.evaluate)
app.command("push")(push.push)
app.command("pull")(pull.pull)
app.command("info")(info.info)
app.command("list")(listing.listing)


def main() -> None:
    """Run the command line: exit code 0 if all went well, 1 for an error that was told, 2 for wrong usage."""
    app(prog_name="hf-stitch")
