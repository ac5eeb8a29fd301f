"""Keys of newer versions cause a warning that names their place, except options of a map, which are refused."""

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
from hf_stitch.artefacts.parents import warn_if_only_weights_are_pinned

from records import rewrite  # isort: skip

FUTURE: dict[str, tuple[str, list[Any], list[tuple[str, ...]]]] = {
    "stitcher": (
        "stitcher.json", [Stitcher], [(), ("stitch",), ("stitch", "source"), ("target", "reference")],
    ),
    "model": (
        "config.json",
        [StitchedModel, transformers.AutoModelForImageClassification],
        [(), ("source",), ("target", "plan"), ("target", "cut"), ("source", "interface"), ("source", "cut", "spec")],
    ),
}  # fmt: skip
"""Artefact -> its record, classes that load it, and places in the record where a newer version may add keys."""

VERSIONS = sorted(path.name for path in FIXTURES.iterdir() if (path / "stitcher").exists())
pytestmark = pytest.mark.parametrize("version", VERSIONS)


def test_a_stitcher_of_user_code_warns_once_that_only_weights_are_pinned(version: str) -> None:
    expected = load_file(FIXTURES / version / "stitcher.answer.safetensors")
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        stitcher = Stitcher.from_pretrained(FIXTURES / version / "stitcher")
        warn_if_only_weights_are_pinned.cache_clear()
        with pytest.warns(UserWarning, match="only the weights of its networks are compared with the record"):
            stitcher.attach(*networks())
        found = stitcher.attach(*networks())(input=expected["input"])  # warns no more
    torch.testing.assert_close(found, expected["output"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", FUTURE)
def test_keys_of_a_newer_version_are_named(version: str, kind: str, tmp_path: Path) -> None:
    record, loaders, ways = FUTURE[kind]
    folder = Path(shutil.copytree(FIXTURES / version / kind, tmp_path / kind))

    def add(values: dict[str, Any]) -> None:
        for number, way in enumerate(ways):
            holder = values
            for key in way:
                holder = holder[key]
            holder[f"of_the_future_{number}"] = 1

    rewrite(folder / record, add)
    for loader in loaders:
        with pytest.warns(UserWarning, match="which this version does not know") as warned:
            loader.from_pretrained(folder)
        told = " ".join(str(each.message) for each in warned)
        assert [number for number in range(len(ways)) if f"of_the_future_{number}" not in told] == []


def test_a_map_with_an_unknown_option_is_rejected(version: str, tmp_path: Path) -> None:
    """The option could change the output."""
    folder = Path(shutil.copytree(FIXTURES / version / "stitcher", tmp_path / "stitcher"))
    rewrite(folder / "stitcher.json", lambda record: record["stitch"]["body"].update(of_the_future=1))
    with pytest.raises(ValueError, match=r"was written by another version .*of_the_future"):
        Stitcher.from_pretrained(folder)
