"""Commands in a module that is light, for the tests of ``check_command``."""

from __future__ import annotations

from typing import Annotated

import typer

Name = Annotated[str, typer.Argument(help="A name.")]


def greet(name: Name, loud: Annotated[bool, typer.Option(help="In capitals.")] = False) -> None:
    """Greet somebody by name."""
    typer.echo(name.upper() if loud else name)


def undescribed(name: Name) -> None:
    typer.echo(name)


def without_help(name: str) -> None:
    """Greet somebody by name."""
    typer.echo(name)


def of_no_type(name: Annotated[str | int, typer.Argument(help="A name.")]) -> None:
    """Greet somebody by name."""
    typer.echo(name)


def failing(name: Name) -> None:
    """Greet somebody by name."""
    raise ValueError(f"{name} is not at home")


def helpless(name: Name, help: Annotated[bool, typer.Option("--help", help="Ask for more.")] = False) -> None:
    """Greet somebody by name."""
    raise typer.Exit(3 if help else 0)


def farewell(name: Name) -> None:
    """Say goodbye to somebody by name."""
    typer.echo(f"goodbye {name}")


several = typer.Typer(help="Greet and say goodbye.", add_completion=False, pretty_exceptions_enable=False)
several.command()(greet)
several.command()(farewell)

several_undescribed = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
several_undescribed.command()(greet)
several_undescribed.command()(farewell)
