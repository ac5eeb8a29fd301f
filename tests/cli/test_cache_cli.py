"""``hf-stitch cache`` lists and removes what ``extract_activations`` has cached."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_stitch_testing import check_command, parametrize_with_checks
from torch import nn
from typer.testing import CliRunner, Result

import hf_stitch
from hf_stitch.analysis import extract_activations
from hf_stitch.cli import app
from hf_stitch.cli.cache import cache
from hf_stitch.cli.networks import residual_network, save
from hf_stitch.storage.cache import Cache
from hf_stitch.storage.files import _MACHINE, UNFINISHED


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache with three layers and the list of layers."""
    monkeypatch.setenv("HF_STITCH_CACHE", str(tmp_path / "cache"))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    adapter = hf_stitch.load(net, example_inputs=torch.randn(2, 4))
    extract_activations(adapter, torch.randn(1500, 4), cache=True, progress=False)
    for number, entry in enumerate(Cache().entries()):
        os.utime(entry.path, (1e9 - number,) * 2)
    yield tmp_path / "cache"


def run(*arguments: str, answer: str = "") -> Result:
    return CliRunner().invoke(app, ["cache", *arguments], prog_name="hf-stitch", input=answer)


def recorded(*arguments: str) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@parametrize_with_checks(check_command, cache, "ls")
def test_it_conforms(check: Any) -> None:
    check()


def test_the_list_of_commands_describes_it() -> None:
    found = CliRunner().invoke(app, ["list", "commands", "--json"])
    (about,) = [each for each in json.loads(found.stdout) if each["name"] == "cache"]
    assert about["summary"] == "List and remove activations that are kept on the disk."


def test_the_table(folder: Path) -> None:
    result = run("ls")
    assert result.exit_code == 0
    names = [entry.about.get("layer", "(their names)") for entry in Cache().entries()]
    lines = [line for line in result.stdout.splitlines() if "Sequential" in line]
    assert len(lines) == len(names) > 3 and all(name in line for name, line in zip(names, lines, strict=True))
    layer = next(line for line in lines if "(their" not in line)
    (data,) = {entry.about["data"] for entry in Cache().entries() if "data" in entry.about}
    for part in (data[7:15], "1,500", "mean", "float32", " kB", "2001-09-"):
        assert part in layer, part
    assert "of at most 20 GB" in result.stdout.splitlines()[0].replace("\n", " ")


def test_the_record(folder: Path) -> None:
    found = recorded("ls")
    assert found["folder"] == str(folder) and found["limit"] == 20 * 10**9
    assert found["size"] == sum(path.stat().st_size for path in folder.iterdir())
    assert [each["key"] for each in found["entries"]] == [entry.key for entry in Cache().entries()]
    first = next(each for each in found["entries"] if each.get("layer") == "0")
    wanted = {"samples": 1500, "pooling": "mean", "dtype": "float32", "modality": "tensor", "batches": "of 64"}
    assert {name: first[name] for name in wanted} == wanted
    assert first["used"].startswith("2001-09-09T01:4") and first["used"].endswith("+00:00")


def test_one_entry_is_removed_by_its_first_digits(folder: Path) -> None:
    first, *others = Cache().entries()
    digits = next(n for n in range(1, 65) if not any(entry.key.startswith(first.key[:n]) for entry in others))
    assert recorded("rm", first.key[:digits].upper(), "--yes")["removed"] == [first.key]
    assert Cache().entries() == others
    result = run("rm", first.key)
    assert result.exit_code == 1 and "no entry: hf-stitch cache ls" in " ".join(result.stderr.split())
    result = run("rm", "", "--yes")
    assert result.exit_code == 1 and f"{len(others)} entries: give more digits" in " ".join(result.stderr.split())
    assert Cache().entries() == others


def test_it_asks_before_it_removes(folder: Path) -> None:
    before = Cache().entries()
    for answer in ("n\n", ""):
        result = run("rm", "--all", answer=answer)
        assert result.exit_code == 1 and f"Remove {len(before)} entries" in result.output
    assert Cache().entries() == before
    (folder / "notes.txt").write_text("of a person")
    assert run("rm", "--all", answer="y\n").exit_code == 0
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    assert recorded("rm", "--all")["removed"] == []  # nothing to ask about


@pytest.mark.parametrize("arguments", [(), ("ab", "--all")])
def test_what_to_remove_must_be_said(folder: Path, arguments: tuple[str, ...]) -> None:
    before = Cache().entries()
    result = run("rm", "--yes", *arguments)
    assert result.exit_code == 2 and "not both" in result.output
    assert Cache().entries() == before


def test_gc_keeps_what_was_used_last(folder: Path) -> None:
    before = Cache().entries()
    keep = before[0].size + before[1].size
    found = recorded("gc", "--max-size", f"{keep}B")
    assert found["removed"] == [entry.key for entry in before[:1:-1]] and found["size"] == keep
    assert Cache().entries() == before[:2]
    assert recorded("gc")["removed"] == []
    assert "removed 2 entries" in run("gc", "--max-size", "0").stdout


def test_a_size_must_be_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run("gc", "--max-size", "much")
    assert result.exit_code == 2 and "500MB, got 'much'" in result.output
    monkeypatch.setenv("HF_STITCH_CACHE_SIZE", "much")
    result = run("ls")
    assert result.exit_code == 1 and "HF_STITCH_CACHE_SIZE" in result.stderr and "Traceback" not in result.stderr


def test_other_folders_and_broken_entries(folder: Path, tmp_path: Path) -> None:
    entry = Cache().entries()[0]
    entry.path.write_bytes(b"broken")
    result = run("ls")
    assert result.exit_code == 0 and "(broken)" in " ".join(result.stdout.split())
    assert len(recorded("ls")["entries"]) == len(Cache().entries())
    assert "is empty" in run("ls", "--folder", str(tmp_path / "none")).stdout
    assert recorded("ls", "--folder", str(tmp_path / "none"))["entries"] == []
    assert recorded("rm", "--all", "--yes", "--folder", str(tmp_path / "none"))["removed"] == []
    assert len(Cache().entries()) > 1


def test_it_imports_nothing_heavy(folder: Path) -> None:
    code = (
        "import sys; from hf_stitch.cli import app\n"
        "try: app(['cache', 'ls', '--json'])\n"
        "except SystemExit as end: assert not end.code\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize("arguments", [("ls",), ("rm", "--all", "--yes"), ("gc",)])
def test_every_command_removes_what_a_killed_process_has_left(arguments: tuple[str, ...], folder: Path) -> None:
    (entry, *_) = Cache().entries()
    left = folder / f"{entry.path.name}.{_MACHINE}.{2**30}.1{UNFINISHED}"
    left.mkdir()
    (left / ".tmpAb12Cd").write_bytes(b"half")
    recorded(*arguments)
    assert not left.exists()


def test_a_list_of_layers_is_kept_for_a_network_that_has_not_changed(folder: Path, tmp_path: Path) -> None:
    before = len(Cache().entries())
    torch.manual_seed(0)
    save(residual_network(1, 10), tmp_path / "cnn")
    plain, kept, again = (
        CliRunner().invoke(app, ["layers", str(tmp_path / "cnn"), *more, "--json"])
        for more in ([], ["--cache"], ["--cache"])
    )
    assert plain.exit_code == 0 and plain.stdout == kept.stdout == again.stdout
    assert len(Cache().entries()) == before + 1
