"""``hf-stitch new-plugin``: what it writes is found, conforms, and passes its own tests."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hf_stitch_testing.new_plugin import Kind, files_of
from typer.testing import CliRunner

from hf_stitch.cli import app

from tests.killing import survives  # isort: skip


def write(folder: Path, kind: Kind) -> Path:
    """Write a plugin."""
    result = CliRunner().invoke(app, ["new-plugin", f"own-{kind.value}", "--kind", kind.value, "--folder", str(folder)])
    assert result.exit_code == 0, result.output
    return folder


def install(folder: Path) -> None:
    """Make a plugin known to processes that have its folder on their path."""
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    groups = project["entry-points"].items()
    entries = [
        f"[{group}]\n" + "\n".join(f"{name} = {value}" for name, value in each.items()) for group, each in groups
    ]
    info = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    (info / "entry_points.txt").write_text("\n".join(entries))


def test_what_it_writes_passes_its_own_tests(tmp_path: Path) -> None:
    """All kinds in one process, which starts in seconds; a plugin's doctests are tests with its package in the name."""
    folders = {kind: write(tmp_path / kind.value, kind) for kind in Kind}
    for folder in folders.values():
        install(folder)
    options = ["-q", "--doctest-modules", "-p", "no:cacheprovider", "--junitxml=report.xml"]
    call = [sys.executable, "-m", "pytest", *options, *Kind]
    path = os.pathsep.join([*map(str, folders.values()), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path}
    found = subprocess.run(call, cwd=tmp_path, capture_output=True, text=True, check=False, env=environment)
    assert found.returncode == 0, found.stdout + found.stderr
    cases = ElementTree.parse(tmp_path / "report.xml").iter("testcase")
    passed = {(case.get("classname", ""), case.get("name", "")) for case in cases if not len(case)}  # or it is skipped
    for kind, folder in folders.items():
        (file,) = (folder / "tests").glob("test_*.py")
        written = re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE)
        assert written and {(f"tests.{file.stem}", name) for name in written} <= passed, kind
        documented = any(name.startswith(f"hf_stitch_own_{kind.value}.") for _, name in passed)
        assert documented or kind is Kind.command, kind


def test_what_it_writes_has_no_lint(tmp_path: Path) -> None:
    for kind in Kind:
        write(tmp_path / kind.value, kind)
    for call in (["check"], ["format", "--check"]):
        ruff = [str(Path(sys.executable).with_name("ruff")), *call, "."]
        found = subprocess.run(ruff, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert found.returncode == 0, found.stdout + found.stderr


def test_what_it_writes_is_typed(tmp_path: Path) -> None:
    """All kinds in one process, which reads torch once; their settings of mypy are the same."""
    folders = [write(tmp_path / kind.value, kind) for kind in Kind]
    packages = [package for folder in folders for package in folder.glob("hf_stitch_own_*")]
    assert len(packages) == len(Kind)
    call = [sys.executable, "-m", "mypy", "--cache-dir", tmp_path / "cache", "--config-file"]
    found = subprocess.run(
        [*call, folders[0] / "pyproject.toml", *packages], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stdout + found.stderr


def test_every_kind_says_how_to_use_it() -> None:
    for kind in Kind:
        files = files_of("own_name", kind)
        assert "hf_stitch" in files["README.md"] and not any("$" in text for text in files.values())


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["linear-cka", "--kind", "metric"], "'linear_cka' already exists in metrics"),
        (["2d", "--kind", "metric"], "starting with a letter"),
        (["lambda", "--kind", "metric"], "got 'lambda'"),
        (["new-plugin", "--kind", "command"], "'new-plugin' already exists in commands"),
        (["own", "--kind", "metrics"], "is not one of"),
    ],
)
def test_bad_names(tmp_path: Path, arguments: list[str], why: str) -> None:
    result = CliRunner().invoke(app, ["new-plugin", *arguments, "--folder", str(tmp_path / "plugin")])
    assert result.exit_code == 2 and why in " ".join(result.output.replace("│", " ").split())
    assert not (tmp_path / "plugin").exists()


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    def attempt() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        result = CliRunner().invoke(app, ["new-plugin", "own", "--kind", "metric", "--folder", str(tmp_path / "new")])
        assert result.exit_code == 1 and "new could not be written (File too large)" in " ".join(result.output.split())

    assert survives(attempt)
    assert not [*tmp_path.iterdir()]


def test_a_folder_with_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    result = CliRunner().invoke(app, ["new-plugin", "own", "--kind", "metric", "--folder", str(tmp_path)])
    assert result.exit_code == 2 and [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
