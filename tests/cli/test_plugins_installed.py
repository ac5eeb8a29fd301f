"""Installed plugins on the command line: commands of their own, and broken ones that harm nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from hf_stitch.built_ins import BUILT_INS
from hf_stitch.cli import app, command_of
from hf_stitch.registry import registries

COMMAND = '''
import typer
def count(name: str, twice: bool = False) -> None:
    """Count the letters of a name."""
    typer.echo(len(name) * (2 if twice else 1))
def fails() -> None:
    """Fail."""
    raise ValueError("no letters")
'''


def install(folder: Path, distribution: str, groups: dict[str, dict[str, str]], **modules: str) -> None:
    """Put a distribution on the path, as an installer would."""
    info = folder / f"{distribution.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    info.joinpath("METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\nSummary: About {distribution}\n"
    )
    lines = [
        line for group, entries in groups.items()
        for line in (f"[hf_stitch.{group}]", *(f"{name} = {value}" for name, value in entries.items()))
    ]  # fmt: skip
    info.joinpath("entry_points.txt").write_text("\n".join([*lines, ""]))
    for name, code in modules.items():
        (folder / f"{name}.py").write_text(code)


def run(folder: Path, *calls: list[str], **environment: str) -> list[dict[str, Any]]:
    """Run commands in one process of its own, with the distributions in a folder; return code, stdout and stderr."""
    code = """
import json, sys
from typer.testing import CliRunner
from hf_stitch.cli import app, listing
listing.SECONDS = 6
done = [CliRunner().invoke(app, call, env={"COLUMNS": "200"}) for call in json.loads(sys.argv[1])]
told = [(each.exit_code, each.stdout, f"{each.stderr}{each.exception}") for each in done]
print(json.dumps([dict(zip(("code", "out", "err"), each)) for each in told]))
"""
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    call = [sys.executable, "-c", code, json.dumps(calls)]
    given = {**os.environ, "PYTHONPATH": path, **environment}
    found = subprocess.run(call, env=given, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    done: list[dict[str, Any]] = json.loads(found.stdout)
    return done


def test_list_check_shows_what_is_broken_and_why(tmp_path: Path) -> None:
    for name, code in (("raising", "1 / 0"), ("hanging", "import time; time.sleep(600)"), ("good", COMMAND)):
        install(tmp_path, f"{name}-plugin", {"commands": {name: f"{name}:count"}}, **{name: code})
    install(tmp_path, "missing-plugin", {"commands": {"missing": "no_such_module:count"}})
    (found,) = run(tmp_path, ["list", "commands", "--check", "--json"])
    listed = {each["name"]: each for each in json.loads(found["out"])}
    assert listed["missing"]["source"] == "broken" and "no_such_module" in listed["missing"]["summary"]
    assert listed["raising"]["source"] == "broken" and "ZeroDivisionError" in listed["raising"]["summary"]
    assert listed["raising"]["origin"] == "plugin raising-plugin 1.0"
    assert listed["hanging"]["summary"] == "import takes more than 6 seconds"
    assert listed["good"]["summary"] == "Count the letters of a name." and listed["good"]["source"] == "good:count"


def test_commands_of_plugins_run_and_are_not_imported_for_help(tmp_path: Path) -> None:
    install(tmp_path, "count-plugin", {"commands": {"count": "count_plugin:count", "fails": "count_plugin:fails"}},
            count_plugin=COMMAND)  # fmt: skip
    install(
        tmp_path, "slow-plugin", {"commands": {"slow": "slow_plugin:slow"}}, slow_plugin="import time; time.sleep(600)"
    )
    install(tmp_path, "wrong-plugin", {"commands": {"wrong": "count_plugin:typer"}})
    names = (["count", "seven", "--twice"], ["fails"], ["wrong"], ["absent"])
    shown, helped, counted, failed, wrong, absent = run(tmp_path, ["--help"], ["count", "--help"], *names)
    assert "Count the letters of a name (plugin count-plugin 1.0)." in shown["out"]
    assert "About slow-plugin (plugin slow-plugin 1.0)." in shown["out"]  # whose file does not define it
    assert "About wrong-plugin (plugin wrong-plugin 1.0)." in shown["out"]
    assert "Count the letters of a name." in helped["out"]
    assert counted["out"] == "10\n"
    assert failed["code"] == 1 and failed["err"].startswith("error: no letters\n")
    assert wrong["code"] == 1 and "got <module 'typer'" in wrong["err"]
    assert "No such command 'absent'" in absent["err"]


def test_each_command_is_listed_with_its_own_summary() -> None:
    group: Any = get_command(app)
    for name in registries.commands:
        summary, _, origin = group.get_command(None, name).help.removesuffix(").").partition(" (plugin ")
        own = command_of(name).help.partition("\n\n")[0]
        assert " ".join(own.split()).startswith(summary) and len(summary) > 20, name
        assert bool(origin) == (name not in BUILT_INS["commands"])
    assert {"swap", "same", "diff", "shorten", "embeddings"} <= {*registries.commands}


@pytest.mark.parametrize(
    "code", ["def count(:", "\x00", "from elsewhere import count", "count = len", "async def count(): ...", ""]
)
def test_a_file_without_a_summary_harms_no_list(tmp_path: Path, code: str) -> None:
    install(tmp_path, "odd-plugin", {"commands": {"odd": "odd:count"}}, odd=code)
    (shown,) = run(tmp_path, ["--help"])
    assert shown["code"] == 0 and "About odd-plugin (plugin odd-plugin 1.0)." in shown["out"]


def test_a_file_is_named_as_an_option(tmp_path: Path) -> None:
    own, broken = (tmp_path / f"{name}.py" for name in ("own", "broken"))
    own.write_text(f"from hf_stitch import registries\n{COMMAND}registries.commands.register('own', count)\n")
    broken.write_text("1 / 0")
    listing = ["list", "commands", "--json"]
    calls = [["--plugin", str(file), *listing] for file in (own, tmp_path / "absent.py", broken)]
    found, missing, failed = run(tmp_path, *calls, HF_STITCH_PLUGINS=str(own))
    origins = {each["name"]: each["origin"] for each in json.loads(found["out"])}
    assert origins["own"].startswith("file own.py (sha256 ")
    assert found["err"].count("HF_STITCH_PLUGINS is ignored: name each file in hf-stitch --plugin") == 1
    assert missing["code"] == 2 and "absent.py is not a file" in missing["err"]
    assert failed["code"] == 2 and "ZeroDivisionError: division by zero" in failed["err"]
