"""What is exported documents its parameters, with an example that runs; nothing else has sections."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import hf_stitch
from hf_stitch.registry import registries

ROOT = Path(hf_stitch.__file__).parents[1]
PACKAGES = ("hf_stitch", "hf_stitch_testing", "hf_stitch_transfer")
SECTION = re.compile(r"^(Args|Returns|Raises|Attributes|Yields):$", re.MULTILINE)


def exported(errors: bool = False) -> dict[str, Callable[..., Any]]:
    found = {}
    paths = {package: importlib.import_module(package).__path__ for package in PACKAGES}
    inner = [module.name for name, path in paths.items() for module in pkgutil.walk_packages(path, f"{name}.")]
    for name in (*PACKAGES, *inner):
        if any(part.startswith("_") for part in name.split(".")):
            continue
        module = importlib.import_module(name)
        for public in getattr(module, "__all__", ()):
            thing = getattr(module, public)
            if callable(thing) and getattr(thing, "__module__", "").startswith("hf_stitch"):
                found[f"{thing.__module__}.{thing.__qualname__}"] = thing
    return {
        name: thing
        for name, thing in sorted(found.items())
        if errors or not (inspect.isclass(thing) and issubclass(thing, BaseException))
    }


@pytest.mark.parametrize(("name", "thing"), exported().items(), ids=exported())
def test_it_is_documented(name: str, thing: Callable[..., Any]) -> None:
    text = inspect.getdoc(thing) or ""
    try:
        signature = inspect.signature(thing)
    except ValueError:
        signature = inspect.Signature()
    sections = {"Example": True, "Args": len(signature.parameters) > 1}  # one that the summary names is evident
    forms = {"Example": (">>>",), "Args": ("Args:", "Attributes:")}
    for section, needed in sections.items():
        has = any(form in text for form in forms[section])
        assert has or not needed, f"the docstring of {name} has no section {section}"


def public() -> set[str]:
    """Names of what ``__all__``, a registry or a page of the reference shows, and of the classes they derive from."""
    found = {*exported(errors=True).values()}
    for kind in (
        *("adapters", "anchors", "data", "detectors", "matchers", "metrics"),
        *("rewrites", "similarities", "stitches", "tasks"),
    ):
        registry = getattr(registries, kind)
        found |= {registry.get(name) for name in registry.names()}
    found |= {task.model_for(kind) for task in map(registries.tasks.build, registries.tasks) for kind in task.models}
    for page in (ROOT / "docs" / "reference").glob("*.md"):
        for kind, name in re.findall(r"auto(module|class|function):: (\S+)", page.read_text(encoding="utf-8")):
            module = importlib.import_module(name if kind == "module" else name.rpartition(".")[0])
            found |= (
                {thing for thing in vars(module).values() if getattr(thing, "__module__", None) == name}
                if kind == "module"
                else {getattr(module, name.rpartition(".")[2])}
            )
    classes = {base for each in found if inspect.isclass(each) for base in each.__mro__}
    return {f"{each.__module__}.{each.__qualname__}" for each in found | classes if hasattr(each, "__qualname__")}


def documented(node: ast.AST, name: str) -> Iterator[str]:
    """Yield the names of what has a docstring with sections."""
    for child in ast.iter_child_nodes(node):
        inner = name
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{name}.{child.name}"
            if SECTION.search(ast.get_docstring(child) or ""):
                yield inner
        yield from documented(child, inner)


def inherits(module: str, name: str) -> bool:
    """Whether a method overrides one of ours without further parameters."""
    kind, _, method = name.rpartition(".")
    owner = getattr(importlib.import_module(module), kind, None)
    if not inspect.isclass(owner):
        return False
    ours = [base for base in owner.__mro__ if method in vars(base) and base.__module__.startswith("hf_stitch")]
    found = [getattr(base, method) for base in ours]
    own, *others = (inspect.signature(each).parameters.keys() if callable(each) else set() for each in found)
    return bool(others) and own <= others[0]


def test_internal_names_have_one_sentence_and_overrides_inherit() -> None:
    """Sections are for public names: elsewhere a docstring says what, and why where the code does not show it."""
    known, wrong = public(), []
    packages = [Path(importlib.import_module(package).__file__ or "").parent for package in PACKAGES]
    for root, path in sorted((package.parent, path) for package in packages for path in package.rglob("*.py")):
        module = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        for name in documented(ast.parse(path.read_text(encoding="utf-8")), module):
            inside = name.removeprefix(f"{module}.")
            outer, *rest = inside.split(".")
            internal = f"{module}.{outer}" not in known or any(part.startswith("_") for part in rest)
            if internal or inherits(module, inside):
                wrong.append(name)
    assert not wrong, f"{len(wrong)} internal docstrings have sections: {', '.join(wrong)}"
