"""``hf-stitch new-plugin``: what it writes is found, conforms, and passes its own tests."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hf_stitch.cli import app
from hf_stitch.cli.new_plugin import ABOUT, Kind, files_of

from killing import survives  # isort: skip

INSTALLED = """
import sys
from importlib import metadata
from pathlib import Path

class Plugin(metadata.Distribution):
    def read_text(self, name):
        if name == "METADATA":
            return "Metadata-Version: 2.1\\nName: {name}\\nVersion: 0.1.0\\n"
        return "[hf_stitch.{registry}]\\n{entry}\\n" if name == "entry_points.txt" else None
    def locate_file(self, path):
        return Path(path)

class Finder(metadata.DistributionFinder):
    def find_spec(self, *arguments):
        return None
    def find_distributions(self, context=metadata.DistributionFinder.Context()):
        return [Plugin()] if context.name in (None, "{name}") else []

sys.meta_path.append(Finder())
"""
"""A ``conftest.py`` that makes a plugin's entry point known without an installation."""


def write(folder: Path, kind: Kind) -> Path:
    """Write a plugin, and make it known to its tests without an installation."""
    result = CliRunner().invoke(app, ["new-plugin", f"own-{kind.value}", "--kind", kind.value, "--folder", str(folder)])
    assert result.exit_code == 0, result.output
    project = (folder / "pyproject.toml").read_text()
    entry = project.partition('[project.entry-points."hf_stitch.')[2].split("\n")[1].replace('"', "")
    names = {"name": f"hf-stitch-own-{kind.value}", "registry": ABOUT[kind].registry, "entry": entry}
    text = INSTALLED
    for key, value in names.items():
        text = text.replace(f"{{{key}}}", value)
    (folder / "conftest.py").write_text(text)
    return folder


@pytest.mark.parametrize("kind", Kind)
def test_what_it_writes_passes_its_own_tests(tmp_path: Path, kind: Kind) -> None:
    folder = write(tmp_path / "plugin", kind)
    call = [sys.executable, "-m", "pytest", "-q", "--doctest-modules", "-p", "no:cacheprovider", "tests"]
    call += [f"hf_stitch_own_{kind.value}"]
    found = subprocess.run(call, cwd=folder, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


def test_what_it_writes_has_no_lint(tmp_path: Path) -> None:
    for kind in Kind:
        write(tmp_path / kind.value, kind)
        (tmp_path / kind.value / "conftest.py").unlink()
    for call in (["check"], ["format", "--check"]):
        found = subprocess.run(
            [str(Path(sys.executable).with_name("ruff")), *call, "."],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.slow
def test_what_it_writes_is_typed(tmp_path: Path) -> None:
    for kind in Kind:
        call = [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path / "cache")]  # strict by its own pyproject
        folder = write(tmp_path / kind.value, kind)
        found = subprocess.run(call, cwd=folder, capture_output=True, text=True, check=False)
        assert found.returncode == 0, found.stdout + found.stderr


def test_every_kind_says_how_to_use_it() -> None:
    for kind in Kind:
        files = files_of("own_name", kind)
        assert "hf_stitch" in files["README.md"] and not any("$" in text for text in files.values())


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["linear-cka", "--kind", "metric"], "'linear_cka' is among the metrics already"),
        (["2d", "--kind", "metric"], "begins with a letter"),
        (["lambda", "--kind", "metric"], "got 'lambda'"),
        (["new-plugin", "--kind", "command"], "'new-plugin' is among the commands already"),
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
