"""Public names of the package and their lazy import."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

import hf_stitch


def test_every_public_name_can_be_imported():
    assert all(getattr(hf_stitch, name) is getattr(hf_stitch, name) for name in hf_stitch.__all__)
    assert set(hf_stitch.__all__) <= set(dir(hf_stitch))


def test_stub_lists_exactly_the_public_names():
    stub = ast.parse(Path(hf_stitch.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    names = {alias.asname for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert names == set(hf_stitch.__all__)


def test_unknown_attribute_raises():
    with pytest.raises(AttributeError, match="lode"):
        hf_stitch.lode  # noqa: B018


def test_installed_version_equals_version_attribute():
    try:
        installed = importlib.metadata.version("hf-stitch")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("hf-stitch is not installed but imported from its folder")
    assert installed == hf_stitch.__version__


def test_every_name_of_a_room_can_be_imported() -> None:
    for room in ("analysis", "relative", "workflows"):
        module = importlib.import_module(f"hf_stitch.{room}")
        assert module.__all__ and set(module.__all__) <= set(dir(module))
        assert not [name for name in module.__all__ if getattr(module, name).__name__ != name]


def test_a_job_imports_no_other_job_and_no_library_that_it_may_not_need() -> None:
    unused = (
        *("hf_stitch.workflows._stitch", "hf_stitch.analysis.auditing", "hf_stitch.relative.selection"),
        *("datasets", "matplotlib", "pandas", "scipy.stats", "sentence_transformers", "sklearn", "timm"),
    )
    program = f"import sys, hf_stitch.workflows._compare\nprint([name for name in {unused} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
