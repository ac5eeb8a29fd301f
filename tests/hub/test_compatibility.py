"""Artefacts of all earlier versions load with the same outputs; keys of newer versions cause a warning."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from fixture_networks import FIXTURES, networks
from safetensors.torch import load_file

import hf_stitch.auto  # noqa: F401
from hf_stitch import StitchedModel, Stitcher
from hf_stitch.artefacts.description import Description
from hf_stitch.artefacts.parents import warn_if_only_weights_are_pinned

from records import rewrite  # isort: skip

LOADERS = {
    "stitcher": [Stitcher],
    "model": [StitchedModel, transformers.AutoModelForImageClassification],
}

VERSIONS = sorted(path.name for path in FIXTURES.iterdir() if (path / "stitcher").exists())


@pytest.mark.parametrize("version", VERSIONS)
def test_an_artefact_of_an_earlier_version_has_the_same_outputs(version: str) -> None:
    expected = load_file(FIXTURES / version / "stitcher.answer.safetensors")
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        stitcher = Stitcher.from_pretrained(FIXTURES / version / "stitcher")
        warn_if_only_weights_are_pinned.cache_clear()
        with pytest.warns(UserWarning, match="only the weights of its networks are compared with the record"):
            stitcher.attach(*networks())
        found = stitcher.attach(*networks())(input=expected["input"])  # warns no more
    torch.testing.assert_close(found, expected["output"], rtol=1e-5, atol=1e-6)
    expected = load_file(FIXTURES / version / "model.answer.safetensors")
    for loader in LOADERS["model"]:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.filterwarnings("error", message=".*does not know")
            found = loader.from_pretrained(FIXTURES / version / "model")(pixel_values=expected["pixel_values"]).logits
        torch.testing.assert_close(found, expected["output"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("kind", "record", "way"),
    [
        ("stitcher", "stitcher.json", ()),
        ("stitcher", "stitcher.json", ("stitch",)),
        ("stitcher", "stitcher.json", ("stitch", "source")),
        ("stitcher", "stitcher.json", ("target", "reference")),
        ("model", "config.json", ()),
        ("model", "config.json", ("source",)),
        ("model", "config.json", ("target", "plan")),
        ("model", "config.json", ("target", "cut")),
        ("model", "config.json", ("source", "interface")),
        ("model", "config.json", ("source", "cut", "spec")),
    ],
)
def test_keys_of_a_newer_version_are_named(
    version: str, kind: str, record: str, way: tuple[str, ...], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(FIXTURES / version / kind, tmp_path / kind))

    def add(holder: Any) -> None:
        for key in way:
            holder = holder[key]
        holder["of_the_future"] = 1

    rewrite(folder / record, add)
    for loader in LOADERS[kind]:
        with pytest.warns(UserWarning, match=r"of_the_future.*which this version does not know"):
            loader.from_pretrained(folder)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_map_with_an_unknown_option_is_rejected(version: str, tmp_path: Path) -> None:
    """The option could change the output."""
    folder = Path(shutil.copytree(FIXTURES / version / "stitcher", tmp_path / "stitcher"))
    rewrite(folder / "stitcher.json", lambda record: record["stitch"]["body"].update(of_the_future=1))
    with pytest.raises(ValueError, match=r"was written by another version .*of_the_future"):
        Stitcher.from_pretrained(folder)


@pytest.mark.parametrize("version", VERSIONS)
def test_scores_have_the_present_names(version: str) -> None:
    found = Description.read(FIXTURES / version / "model")
    assert set(found.scores["scores"]) == {"stitched", "identity", "mean_only", "target", "chance"}
