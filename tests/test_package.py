"""The public names of the package, which are imported when first used."""

from __future__ import annotations

import ast
import importlib.metadata
import types
from pathlib import Path

import pytest

import hf_stitch


@pytest.mark.parametrize("name", hf_stitch.__all__)
def test_every_public_name_can_be_imported(name):
    assert getattr(hf_stitch, name) is getattr(hf_stitch, name)


@pytest.mark.parametrize("name", hf_stitch._ROOMS)
def test_every_room_can_be_reached(name):
    assert isinstance(getattr(hf_stitch, name), types.ModuleType)


def test_type_checkers_see_the_same_names():
    tree = ast.parse(Path(hf_stitch.__file__).read_text(encoding="utf-8"))
    [guarded] = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {
        (node.module, alias.name) for node in guarded.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    rooms = {("hf_stitch", room) for room in hf_stitch._ROOMS}
    assert seen == rooms | {(module, name) for name, module in hf_stitch._PUBLIC.items()}


def test_unknown_attribute():
    with pytest.raises(AttributeError, match="module 'hf_stitch' has no attribute 'lode'"):
        hf_stitch.lode  # noqa: B018


def test_dir_lists_what_is_not_imported_yet():
    assert {"load", "stitch", "Moments", "matchers", "__version__"} <= set(dir(hf_stitch))


def test_the_installed_version_is_the_package_s():
    try:
        installed = importlib.metadata.version("hf-stitch")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("hf-stitch is not installed, it is used from its folder")
    assert installed == hf_stitch.__version__
