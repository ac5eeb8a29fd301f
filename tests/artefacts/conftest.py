"""A stitched model that many tests read, saved once: each test gets copies that it may change."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest

from hf_stitch import StitchedModel

from tiny_networks import LAYERS, stitched  # isort: skip


@pytest.fixture(scope="session")
def of_images(net: Any, images: Any) -> StitchedModel:
    """A stitched model of images, which no test changes."""
    model: StitchedModel = stitched(net("cnn"), net("vit", 1), images, (LAYERS["cnn"], LAYERS["vit"]))
    return model


@pytest.fixture(scope="session")
def folders(of_images: StitchedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with that model and its stitcher, which no test changes."""
    folder = tmp_path_factory.mktemp("of_images")
    of_images.save_pretrained(folder / "model")
    of_images.stitcher.save_pretrained(folder / "stitcher")
    return folder


@pytest.fixture
def cnn_vit(of_images: StitchedModel) -> StitchedModel:
    return copy.deepcopy(of_images)


@pytest.fixture
def saved(folders: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folders / "model", tmp_path / "model"))


@pytest.fixture
def saved_stitcher(folders: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folders / "stitcher", tmp_path / "stitcher"))
