"""A command in a module that imports torch."""

from __future__ import annotations

import torch
import typer


def seeded() -> None:
    """Show the seed of torch."""
    typer.echo(torch.initial_seed())
