"""Artefacts are the old ones or the new ones after a kill; storage/test_files.py has full disks and several writers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_stitch
from hf_stitch import StitchedModel, Stitcher
from hf_stitch.relative import AnchorSet
from hf_stitch.storage.files import ASIDE

from killing import killed_at_every_operation  # isort: skip
from tiny_networks import LAYERS, network, stitched  # isort: skip

LOAD: dict[str, Callable[..., Any]] = {
    "model": StitchedModel.from_pretrained,
    "stitcher": Stitcher.from_pretrained,
    "anchors": AnchorSet.from_pretrained,
}
KINDS = ["model", "stitcher", "anchors"]
"""A model is written by the same function as a stitcher, which takes a tenth of its time."""


@pytest.fixture(scope="module")
def versions(images: Any) -> dict[str, tuple[Any, Any]]:
    """An old and a new artefact of each kind; the models have other weights in the stitch, scores and recipes."""
    a, b, layers = network("cnn"), network("vit", 1), (LAYERS["cnn"], LAYERS["vit"])
    models = tuple(stitched(a, b, images, layers, matcher=matcher) for matcher in ("lstsq", "random"))
    anchors = AnchorSet.of(hf_stitch.Samples.of(torch.randn(5, 3)))
    return {
        "model": models,
        "stitcher": (models[0].stitcher, models[1].stitcher),
        "anchors": tuple(anchors.add(torch.randn(5, 4), a.pinned, "a") for _ in range(2)),
    }


def content(loaded: Any) -> list[Any]:
    """What identifies an artefact: the stitch with what the record states about it; the values of anchors."""
    if isinstance(loaded, AnchorSet):
        return loaded.encoded[0].values.tolist()
    recipe = loaded.config.recipe if isinstance(loaded, StitchedModel) else loaded.recipe
    return [recipe["matcher"], *(value.tolist() for value in loaded.stitch.state_dict().values())]


@pytest.mark.parametrize("kind", KINDS)
def test_a_kill_at_any_operation_leaves_the_old_artefact_or_the_new_one(
    kind: str, versions: Any, tmp_path: Path
) -> None:
    old, new = versions[kind]
    folder = tmp_path / "saved"
    old.save_pretrained(folder)
    (folder / "optimizer.pt").write_text("of a trainer")
    seen = []
    for number in killed_at_every_operation(lambda: new.save_pretrained(folder)):
        if kind == "model" and number % 4:  # each fourth is loaded, which takes longest
            continue
        found = content(LOAD[kind](folder))
        seen.append("old" if found == content(old) else "new")
        assert found == content(old if seen[-1] == "old" else new)
        assert (folder / "optimizer.pt").read_text() == "of a trainer"
        old.save_pretrained(folder)
        assert not (folder / ASIDE).exists()
    assert {"old", "new"} == set(seen)


def test_files_of_other_people_stay(cnn_vit: StitchedModel, tmp_path: Path) -> None:
    others = {"config.json": '{"lr": 0.1}', "vocab_notes.txt": "x", "w2v.model": "x", "model_best.safetensors": "x"}
    for name, text in others.items():
        (tmp_path / name).write_text(text)
    cnn_vit.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} >= others.keys()


def test_files_of_the_previous_artefact_do_not_outlive_it(cnn_vit: StitchedModel, texts: Any, tmp_path: Path) -> None:
    """A stale processor would change the inputs of the model."""
    bert = network("bert")
    text = stitched(bert, bert, texts, (LAYERS["bert"],) * 2, matcher="identity")
    text.save_pretrained(tmp_path, max_shard_size="50KB")
    assert (tmp_path / "tokenizer.json").exists() and len(list(tmp_path.glob("model*.safetensors"))) > 1
    (tmp_path / "optimizer.pt").write_text("of a trainer")
    cnn_vit.save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "README.md", "config.json", "model.safetensors", "modeling_hf_stitch.py", "optimizer.pt",
        "preprocessor_config.json",
    ]  # fmt: skip
