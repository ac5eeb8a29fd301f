"""Installed plugins on the command line: commands of their own, and broken ones that harm nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = '''
import typer
def count(name: str, twice: bool = False) -> None:
    """Count the letters of a name."""
    typer.echo(len(name) * (2 if twice else 1))
def fails() -> None:
    """Fail."""
    raise ValueError("no letters")
'''
METRIC = '''
from hf_stitch.metrics._cka import LinearCKA
class {name}(LinearCKA):
    """Alike."""
    name = "{entry}"
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


def run(folder: Path | None, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``hf-stitch`` in a process of its own, with the distributions in a folder."""
    path = {"PYTHONPATH": str(folder)} if folder else {}
    return subprocess.run(
        [sys.executable, "-m", "hf_stitch", *map(str, arguments)],
        env={**os.environ, "COLUMNS": "200", **path, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A metric that raises on import, one that hangs, one for a newer contract, and two of one name; and a good one."""
    folder = tmp_path_factory.mktemp("bad")
    install(folder, "raising-plugin", {"metrics": {"raising": "raising:Raising"}}, raising="1 / 0")
    install(
        folder, "hanging-plugin", {"metrics": {"hanging": "hanging:Hanging"}}, hanging="import time\ntime.sleep(600)"
    )
    newer = {"metrics": {"newer": "newer:Newer"}, "contracts": {"metrics": "contract_7"}}
    install(folder, "newer-plugin", newer, newer="raise SystemError('imported')")
    for name in ("first", "second"):
        code = METRIC.format(name="Double", entry="double")
        install(folder, f"{name}-plugin", {"metrics": {"double": f"{name}:Double"}}, **{name: code})
    install(folder, "good-plugin", {"metrics": {"good": "good:Good"}}, good=METRIC.format(name="Good", entry="good"))
    return folder


def test_bad_plugins_are_named_and_the_others_work(bad: Path) -> None:
    found = run(bad, "list", "metrics", "--json")  # imports none of them, or it would hang
    assert found.returncode == 0, found.stderr
    listed = {each["name"]: each for each in json.loads(found.stdout)}
    assert {"first-plugin/double", "second-plugin/double", "raising", "hanging", "newer", "good"} <= listed.keys()
    assert "double" not in listed and listed["good"]["origin"] == "plugin good-plugin 1.0"
    assert listed["newer"]["source"] == "broken" and "built for contract_7 of metrics" in listed["newer"]["summary"]
    assert listed["raising"]["source"] == "raising:Raising"


def test_list_check_shows_what_is_broken_and_why(tmp_path: Path) -> None:
    for name, code in (("raising", "1 / 0"), ("hanging", "import time; time.sleep(600)"), ("good", COMMAND)):
        install(tmp_path, f"{name}-plugin", {"commands": {name: f"{name}:count"}}, **{name: code})
    code = "from hf_stitch.cli import listing, main; listing.SECONDS = 6; main()"
    call = [sys.executable, "-c", code, "list", "commands", "--check", "--json"]
    found = subprocess.run(
        call, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    listed = {each["name"]: each for each in json.loads(found.stdout)}
    assert listed["raising"]["source"] == "broken" and "ZeroDivisionError" in listed["raising"]["summary"]
    assert listed["raising"]["origin"] == "plugin raising-plugin 1.0"
    assert listed["hanging"]["summary"] == "importing it takes more than 6 seconds"
    assert listed["good"]["summary"] == "Count the letters of a name." and listed["good"]["source"] == "good:count"


def test_the_chosen_one_of_two_is_recorded(bad: Path) -> None:
    code = """
import numpy as np
from hf_stitch import registries
for name in ("first-plugin/double", "second-plugin/double"):
    built = registries.metrics.build(name)
    print(type(built).__module__, built.name, registries.metrics.entry(built.name).distribution[0])
try:
    registries.metrics.build("double")
except ValueError as error:
    print(error)
"""
    call = [sys.executable, "-c", code]
    found = subprocess.run(
        call, env={**os.environ, "PYTHONPATH": str(bad)}, capture_output=True, text=True, check=False
    )
    lines = found.stdout.splitlines()
    assert lines[0] == "first first-plugin/double first-plugin", found.stderr
    assert lines[1] == "second second-plugin/double second-plugin"
    assert "choose one in full, 'first-plugin/double' or 'second-plugin/double'" in lines[2]


def test_commands_of_plugins_run_and_are_not_imported_for_help(tmp_path: Path) -> None:
    install(tmp_path, "count-plugin", {"commands": {"count": "count_plugin:count", "fails": "count_plugin:fails"}},
            count_plugin=COMMAND)  # fmt: skip
    install(
        tmp_path, "slow-plugin", {"commands": {"slow": "slow_plugin:slow"}}, slow_plugin="import time; time.sleep(600)"
    )
    install(tmp_path, "list-plugin", {"commands": {"list": "count_plugin:count"}})
    install(tmp_path, "wrong-plugin", {"commands": {"wrong": "count_plugin:typer"}})
    shown = run(tmp_path, "--help").stdout
    assert "About count-plugin (plugin count-plugin 1.0)." in shown and "slow" in shown
    assert "Count the letters of a name." in run(tmp_path, "count", "--help").stdout
    assert run(tmp_path, "count", "seven", "--twice").stdout == "10\n"
    failed = run(tmp_path, "fails")
    assert failed.returncode == 1 and failed.stderr == "error: no letters\n"
    assert run(tmp_path, "list-plugin/list", "four").stdout == "4\n"
    wrong = run(tmp_path, "wrong")
    assert wrong.returncode == 1 and "'wrong' among commands is <module 'typer'" in wrong.stderr
    assert "No such command 'absent'" in run(tmp_path, "absent").stderr


def test_a_file_is_named_as_an_option(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "from hf_stitch import registries\n" + METRIC.format(name="Own", entry="own")
        + "registries.metrics.register('own', Own)\n"
    )  # fmt: skip
    listed = json.loads(run(None, "--plugin", own, "list", "metrics", "--json").stdout)
    assert next(each for each in listed if each["name"] == "own")["origin"].startswith("file own.py (sha256 ")
    assert '"own"' in run(None, "list", "metrics", "--json", HF_STITCH_PLUGINS=str(own)).stdout
    missing = run(None, "--plugin", tmp_path / "absent.py", "list", "metrics")
    assert missing.returncode == 2 and "absent.py is no file" in missing.stderr
    own.write_text("1 / 0")
    broken = run(None, "--plugin", own, "list", "metrics")
    assert broken.returncode == 2 and "ZeroDivisionError: division by zero" in broken.stderr
