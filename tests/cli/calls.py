"""Calls of the command line within the process of a test."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner, Result

from hf_stitch.cli import app

DIGITS = ("--data", "sklearn:digits", "--split", "test", "--max-samples", "120")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(each) for each in arguments], prog_name="hf-stitch")


def words(text: str) -> str:
    return " ".join(text.replace("│", " ").split())


def error_line(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 1 and not result.stdout, result.output
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in result.stderr
    return line


def usage_error(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    return words(result.stderr)


def recorded(*arguments: object) -> Any:
    """Run a command with ``--json`` and parse stdout, which contains nothing but JSON."""
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)
