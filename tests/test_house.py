"""The measures of the house: lines, circles of imports, what asks for kinds and tasks, and mutations."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import hf_stitch
from benchmarks import house

from mutants import ROOT, mutations  # isort: skip
from public import PLUGINS  # isort: skip

SOURCE = '''"""A module.

With a docstring of three lines."""

from hf_stitch.matchers import Lstsq, RowsMatcher  # kinds
from torch.nn import Linear

TEXT = """
two lines"""


def look(each, task):
    """One line."""
    if isinstance(each, Linear) or task == "auto" or each.task in CLASSIFIES:
        return task is None
    match each:
        case Lstsq():
            return task
    return isinstance(each, (int, RowsMatcher)), each.name == "auto"
'''


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(house, "ROOT", tmp_path)
    path = tmp_path / "file.py"
    path.write_text(SOURCE)
    return path


def test_lines_are_code_docstring_or_the_rest(file: Path) -> None:
    assert tuple(house.lines(file)[kind] for kind in house.LINES) == (11, 4, 4)


def test_kinds_are_classes_of_the_package_and_tasks_compared_with_strings(file: Path) -> None:
    assert house.places(file, {"CLASSIFIES", "text-generation"}) == {
        "kinds": ["file.py:17", "file.py:19"], "tasks": ["file.py:14", "file.py:14"],
        "matchers": ["file.py:5", "file.py:19"],
    }  # fmt: skip


def test_a_verb_has_the_body_after_its_docstring_and_its_own_parameters() -> None:
    path, body, own = house.shape(house.table)
    assert (path, body, own) == (Path(house.__file__), 5, 3)


def test_named_functions_are_counted_once_and_others_not() -> None:
    names = [code.co_qualname for code in house.crossed(lambda: [hf_stitch.Samples.of(["a", "b"]) for _ in range(2)])]
    assert names.count("Samples.of") == 1 and not any("<lambda>" in name or "comp>" in name for name in names)


def test_every_mutation_changes_one_text_and_names_tests() -> None:
    tests = {test for each in mutations() for test in each["tests"]}
    assert not [test for test in tests if not (ROOT / "tests" / test).is_file()]


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
