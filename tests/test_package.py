"""Public names of the package and their lazy import."""

from __future__ import annotations

import ast
import importlib.metadata
from pathlib import Path

import pytest

import hf_stitch


@pytest.mark.parametrize("name", hf_stitch.__all__)
def test_every_public_name_can_be_imported(name):
    assert getattr(hf_stitch, name) is getattr(hf_stitch, name)


def test_stub_lists_exactly_the_public_names():
    stub = ast.parse(Path(hf_stitch.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    names = {alias.asname for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert names == set(hf_stitch.__all__)


def test_unknown_attribute_raises():
    with pytest.raises(AttributeError, match="lode"):
        hf_stitch.lode  # noqa: B018


def test_dir_lists_names_that_are_not_imported_yet():
    assert {"load", "stitch", "Moments", "matchers"} <= set(dir(hf_stitch))


def test_installed_version_equals_version_attribute():
    try:
        installed = importlib.metadata.version("hf-stitch")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("hf-stitch is not installed but imported from its folder")
    assert installed == hf_stitch.__version__
