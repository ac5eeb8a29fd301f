"""The house: how large six verbs are, what they cross, where code asks for kinds, and lines by room.

``python benchmarks/house.py [--json FILE]`` looks at the ``hf_stitch`` that Python finds first. A test of a kind is
``isinstance``, ``issubclass`` or a pattern of ``match`` with a class of the package; a test of a task compares one with
a string. Functions and files are those that a tiny job crosses after all cuts are verified; comprehensions,
lambdas and generator expressions are not counted.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import logging
import sys
import tokenize
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import hf_stitch

if not __package__:  # run as a script: this folder's networks, whichever hf_stitch was found
    sys.path[0] = str(Path(__file__).parents[1])

from benchmarks.networks import build, data

ROOT = Path(hf_stitch.__file__).parent
RUN = ("batch_size", "seed", "progress", "accelerator", "checkpoint_dir")
"""Parameters of every run, which are not a verb's own."""
MATCHERS = {"ClosedFormMatcher", "RowsMatcher", "TrainedMatcher", "UnpairedMatcher"}
WATCHED = ("workflows/", "analysis/")
"""Rooms that should neither name a kind of matcher nor compare a task with a string."""
ASKED = {"kinds": "tests of kinds", "tasks": "tests of tasks", "matchers": "places that name a kind of matcher"}
LINES = ("code", "docstring", "blank, comment")
SILENT = (tokenize.ENCODING, tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENDMARKER)


# -- what stands in the files ---------------------------------------------------------------------------------------
def sources(place: Path) -> list[Path]:
    """Return the Python files of a folder, or a file itself."""
    return (
        [place] if place.is_file() else sorted(path for path in place.rglob("*.py*") if path.suffix in (".py", ".pyi"))
    )


def lines(path: Path) -> Counter[str]:
    """Count the lines of a file: code, docstrings, and the rest."""
    text = path.read_text(encoding="utf-8")
    documented = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or 0) + 1)
    }
    with path.open("rb") as file:
        tokens = [each for each in tokenize.tokenize(file.readline) if each.type not in SILENT and each.string.strip()]
    coded = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)} - documented
    rest = len(text.splitlines()) - len(documented) - len(coded)
    return Counter(dict(zip(LINES, (len(coded), len(documented), rest), strict=True)))


def names(*nodes: ast.AST) -> Iterator[str]:
    """Yield the names in expressions and imports."""
    for part in (part for node in nodes for part in ast.walk(node)):
        if isinstance(part, ast.Name | ast.Attribute | ast.alias):
            yield part.id if isinstance(part, ast.Name) else part.attr if isinstance(part, ast.Attribute) else part.name


def tests_kind(node: ast.AST, kinds: set[str]) -> bool:
    """Return whether a node tests one of some classes."""
    if isinstance(node, ast.MatchClass):
        return not kinds.isdisjoint(names(node.cls))
    if not isinstance(node, ast.Call) or {"isinstance", "issubclass"}.isdisjoint(names(node.func)):
        return False
    return not kinds.isdisjoint(names(*node.args[1:]))


def holds(node: ast.AST, tasks: set[str]) -> bool:
    """Return whether an expression is the name of a task, a constant that stands for some, or a list of these."""
    parts = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node]
    named = names(*(part for part in parts if isinstance(part, ast.Name | ast.Attribute | ast.Starred)))
    return not tasks.isdisjoint({*named, *(part.value for part in parts if isinstance(part, ast.Constant))})


def tests_task(node: ast.AST, tasks: set[str]) -> bool:
    """Return whether a node compares something with the name of a task, or a task with a string."""
    if isinstance(node, ast.MatchValue):
        return holds(node.value, tasks)
    sides = (node.left, *node.comparators) if isinstance(node, ast.Compare) else ()
    text = any(isinstance(side, ast.Constant) and isinstance(side.value, str) for side in sides)
    return any(holds(side, tasks) or (text and next(names(side), "") == "task") for side in sides)


def places(path: Path, tasks: set[str]) -> dict[str, list[str]]:
    """Return the places (file:line) of a file that test a kind or a task, or name a kind of matcher."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    ours = [alias for node in imports if (node.module or "").startswith("hf_stitch") for alias in node.names]
    kinds = {alias.asname or alias.name for alias in ours}
    kinds |= {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    found: dict[str, list[int]] = {what: [] for what in ASKED}
    for node in ast.walk(tree):
        named = isinstance(node, ast.Name | ast.Attribute | ast.alias) and next(names(node)) in MATCHERS
        asked = {"kinds": tests_kind(node, kinds), "tasks": tests_task(node, tasks), "matchers": named}
        for what in (what for what, is_so in asked.items() if is_so):
            found[what].append(getattr(node, "lineno", 0))
    return {what: [f"{path.relative_to(ROOT)}:{line}" for line in sorted(at)] for what, at in found.items()}


# -- what the verbs are and cross -----------------------------------------------------------------------------------
def shape(verb: Callable[..., Any]) -> tuple[Path, int, int]:
    """Return the file of a verb, the lines of its body without the docstring, and the number of its own parameters."""
    path = Path(inspect.getsourcefile(inspect.unwrap(verb)) or "")
    defined = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    node = next(node for node in reversed(defined) if node.name == verb.__name__)  # overloads come before
    first = node.body[1 if ast.get_docstring(node) else 0]
    own = [each for each in inspect.signature(verb).parameters.values() if each.kind != each.VAR_KEYWORD]
    return path, (node.end_lineno or 0) - first.lineno + 1, sum(each.name not in RUN for each in own)


def jobs() -> dict[str, Callable[[], Any]]:
    """Prepare a tiny job for each verb: networks of its own, all cuts verified, and a stitched model."""
    a, b = build("vit", 0), build("vit", 1)
    quiet: Any = {"batch_size": 16, "progress": False}
    at: Any = {"source_layer": a.layers[1], "target_layer": b.layers[2], **quiet}
    layers: Any = {"layers_a": a.layers[:2], "layers_b": b.layers[:2], **quiet}
    swapping: Any = {"encoder_layer": b.layers[2], "target_layer": a.layers[1], "data": data(seed=3), **quiet}
    stitched = hf_stitch.stitch(a, b, data(), **at)
    return {
        "stitch": lambda: hf_stitch.stitch(a, b, data(), **at),
        "stitch_grid": lambda: hf_stitch.stitch_grid(a, b, data(), **layers),
        "compare": lambda: hf_stitch.compare(a, b, data(), **layers),
        "evaluate": lambda: hf_stitch.evaluate(stitched, data(seed=1), **quiet),
        "audit": lambda: hf_stitch.audit(stitched, data(seed=1), **quiet),
        "swap": lambda: hf_stitch.swap(a, b, data(n=30, seed=2), **swapping),
    }


def crossed(job: Callable[[], Any]) -> set[CodeType]:
    """Return the named functions of the package that run in a job."""
    seen: set[CodeType] = set()
    sys.setprofile(lambda frame, event, _: seen.add(frame.f_code) if event == "call" else None)
    try:
        job()
    finally:
        sys.setprofile(None)
    ours = {code for code in seen if code.co_filename.startswith(f"{ROOT}/") and code.co_flags & inspect.CO_OPTIMIZED}
    return {code for code in ours if not code.co_name.startswith("<")}


def measure() -> dict[str, Any]:
    """Measure the house."""
    tasks = set(hf_stitch.registries.tasks.names())
    for path in sources(ROOT):
        named = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Assign)]
        tasks |= {name for node in named if holds(node.value, tasks) for name in names(node.targets[0])}
    rooms: dict[str, Counter[str]] = {}
    asked: dict[str, dict[str, list[str]]] = {}
    for place in sorted(ROOT.iterdir(), key=lambda path: (path.is_file(), path)):
        for path in sources(place) if place.suffix in ("", ".py", ".pyi") else ():
            room = place.name if place.is_dir() else "single files"
            asked[str(path.relative_to(ROOT))] = found = places(path, tasks)
            counts = {ASKED[what]: len(where) for what, where in found.items()}
            rooms.setdefault(room, Counter()).update({**lines(path), **counts})
    warm, ready = jobs(), jobs()
    verbs = {}
    for name, job in ready.items():
        path, body, own = shape(getattr(hf_stitch, name))
        file = str(path.relative_to(ROOT))
        warm[name]()  # imports, and what is kept once for all networks, are no part of the job
        functions = crossed(job)
        verbs[name] = {
            "file": file, "body": body, "own parameters": own,
            **{ASKED[what]: len(asked[file][what]) for what in ("kinds", "tasks")},
            "both in the room": sum(rooms[file.split("/")[0]][ASKED[what]] for what in ("kinds", "tasks")),
            "functions": len(functions), "files": len({code.co_filename for code in functions}),
        }  # fmt: skip
    totals = {"hf_stitch": sum(rooms.values(), Counter()), "tests": Counter[str]()}
    for path in sources(ROOT.parent / "tests"):
        totals["tests"].update(lines(path))
    watched = {
        ASKED[what]: [place for file, found in asked.items() if file.startswith(WATCHED) for place in found[what]]
        for what in ASKED
    }
    columns = {
        room: {**count, "lines": sum(count[kind] for kind in LINES)} for room, count in {**rooms, **totals}.items()
    }
    return {"verbs": verbs, "rooms": columns, "places": watched}


def table(title: str, rows: dict[str, dict[str, Any]], columns: tuple[str, ...]) -> Table:
    """Return a table of figures."""
    made = Table("", *columns, title=title)
    for name, row in rows.items():
        figures = (row.get(column, "") for column in columns)
        made.add_row(name, *(figure if isinstance(figure, str) else f"{figure:,}" for figure in figures))
    return made


def main() -> None:
    """Print the tables, and write the figures to a file if one is given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="file of the figures, and of the places that ask for kinds and tasks")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    found = measure()
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    console = Console(width=140)
    console.print(table("verbs", found["verbs"], tuple(found["verbs"]["stitch"])))
    console.print(table("rooms", found["rooms"], (*LINES, "lines", *ASKED.values())))


if __name__ == "__main__":
    main()
