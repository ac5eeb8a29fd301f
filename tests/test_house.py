"""The house: no circles of imports, and mutations that change one text and name tests."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from mutants import ROOT, mutations  # isort: skip
from public import PLUGINS  # isort: skip


def test_every_mutation_changes_one_text_and_names_tests() -> None:
    for file, _, name in (test.partition("::") for test in {test for each in mutations() for test in each["tests"]}):
        assert f"def {name}(" in (ROOT / file).read_text("utf-8") or not name, f"{file} has no {name}"


def imported(path: Path, modules: set[str]) -> Iterator[str]:
    """Yield the modules among these that a file imports: at its head, inside functions and for types."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from modules & {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from modules & {name if name in modules else str(node.module) for name in names}


@pytest.mark.parametrize("package", ["hf_stitch", *PLUGINS])
def test_no_imports_run_in_a_circle(package: str) -> None:
    root = next(path for path in (ROOT, *ROOT.glob("plugins/*")) if (path / package).is_dir())
    files = {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
        for path in (root / package).rglob("*.py")
    }
    TopologicalSorter({name: {*imported(path, {*files})} - {name} for name, path in files.items()}).prepare()
