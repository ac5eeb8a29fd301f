"""Writes ``hf_stitch/distributions.json``: which plugin of this project has a name. Run it from the root."""

from __future__ import annotations

import ast
import inspect
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import hf_stitch

TABLE = Path("hf_stitch/distributions.json")


def table() -> dict[str, dict[str, str]]:
    """Return registry, or ``names`` for what plugins export -> distribution -> names, as the plugins state them."""
    found: dict[str, dict[str, str]] = {}
    ours = {name for each in vars(hf_stitch)["__all__"] for name in [each, *_exported(each)]}
    core = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    for file in sorted(Path("plugins").glob("*/pyproject.toml")):
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        package = file.parent / project["name"].replace("-", "_")
        stub, module = package / "__init__.pyi", package / "__init__.py"
        exported = {"names": set(_all_of(stub if stub.exists() else module)) - ours}
        if "hf_stitch.adapters" in project.get("entry-points", {}):
            exported["packages"] = _required(project) - _required(core)
        groups = {group.removeprefix("hf_stitch."): names for group, names in project.get("entry-points", {}).items()}
        for kind, names in (exported | groups).items():
            if kind != "contracts" and names:
                found.setdefault(kind, {})[project["name"]] = " ".join(sorted(names))
    return dict(sorted(found.items()))


def _required(project: dict[str, Any]) -> set[str]:
    """The packages that a distribution requires, apart from those of this project."""
    names = {re.split(r"[\[<>=~! ]", text)[0] for text in project["dependencies"]}
    return {name for name in names if not name.startswith("hf-stitch")}


def _exported(name: str) -> list[str]:
    room = getattr(hf_stitch, name)
    return list(getattr(room, "__all__", ())) if inspect.ismodule(room) else []


def _all_of(file: Path) -> list[str]:
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]:
            names: list[str] = ast.literal_eval(node.value)
            return names
    raise ValueError(f"{file} has no __all__")


if __name__ == "__main__":
    TABLE.write_text(json.dumps(table(), indent=1) + "\n", encoding="utf-8")
