"""Every exported function and class documents its parameters, result and errors, and has an example that runs."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import pkgutil
import textwrap
from collections.abc import Callable
from typing import Any

import pytest

import hf_stitch


def exported() -> dict[str, Callable[..., Any]]:
    found = {}
    for name in ("hf_stitch", *(module.name for module in pkgutil.walk_packages(hf_stitch.__path__, "hf_stitch."))):
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
        if not (inspect.isclass(thing) and issubclass(thing, BaseException))
    }


def raises(function: Any) -> bool:
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    return any(isinstance(node, ast.Raise) and node.exc is not None for node in ast.walk(tree))


@pytest.mark.parametrize(("name", "thing"), exported().items(), ids=exported())
def test_it_is_documented(name: str, thing: Callable[..., Any]) -> None:
    text, of_class = inspect.getdoc(thing) or "", inspect.isclass(thing)
    try:
        signature = inspect.signature(thing)
    except ValueError:
        signature = inspect.Signature()
    constructor = "__post_init__" if dataclasses.is_dataclass(thing) else "__init__"
    own = [vars(thing)[constructor]] if of_class and constructor in vars(thing) else []
    sections = {"Example": True, "Args": bool(signature.parameters)}
    sections["Returns"] = not of_class and signature.return_annotation not in (None, "None", inspect.Signature.empty)
    sections["Raises"] = any(map(raises, own if of_class else [thing]))
    forms = {"Example": (">>>",), "Args": ("Args:", "Attributes:"), "Returns": ("Returns:", "Yields:")}
    for section, needed in sections.items():
        has = any(form in text for form in forms.get(section, (f"{section}:",)))
        assert has or not needed, f"the docstring of {name} has no section {section}"
