"""Artefacts are the old ones or the new ones after a kill; storage/test_files.py has full disks and several writers."""

from __future__ import annotations

import os
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


@pytest.mark.parametrize("kind", ["stitcher", "anchors"])
def test_a_kill_at_any_operation_leaves_the_old_artefact_or_the_new_one(kind: str, images: Any, tmp_path: Path) -> None:
    """A model is written by the same function as a stitcher, which takes a tenth of its time."""
    a, b, layers = network("cnn"), network("vit", 1), (LAYERS["cnn"], LAYERS["vit"])
    if kind == "stitcher":
        old, new = (stitched(a, b, images, layers, matcher=matcher).stitcher for matcher in ("lstsq", "random"))
    else:
        anchors = AnchorSet.of(hf_stitch.Samples.of(torch.randn(5, 3)))
        old, new = (anchors.add(torch.randn(5, 4), a.pinned, "a") for _ in range(2))

    def content(loaded: Any) -> list[Any]:
        """The values of anchors, or the stitch with what the record states about it."""
        if kind == "anchors":
            return [loaded.encoded[0].values.tolist()]
        return [loaded.recipe["matcher"], *(value.tolist() for value in loaded.stitch.state_dict().values())]

    folder = tmp_path / "saved"
    seen: list[str] = []
    old.save_pretrained(folder)
    (folder / "optimizer.pt").write_text("of a trainer")
    for _ in killed_at_every_operation(lambda: new.save_pretrained(folder)):
        found = content(type(old).from_pretrained(folder))
        seen.append("old" if found == content(old) else "new")
        assert found == content(old if seen[-1] == "old" else new)
        assert (folder / "optimizer.pt").read_text() == "of a trainer"
        old.save_pretrained(folder)
        assert not (folder / ASIDE).exists()
    assert {"old", "new"} == set(seen)


def test_files_of_the_previous_artefact_do_not_outlive_it_and_those_of_others_stay(
    cnn_vit: StitchedModel, texts: Any, tmp_path: Path
) -> None:
    """A stale processor would change the inputs of the model."""
    bert = network("bert")
    text = stitched(bert, bert, texts, (LAYERS["bert"],) * 2, matcher="identity")
    (tmp_path / "config.json").write_text('{"lr": 0.1}')  # of another program
    text.save_pretrained(tmp_path, max_shard_size="50KB")
    assert (tmp_path / "tokenizer.json").exists() and len(list(tmp_path.glob("model*.safetensors"))) > 1
    others = ("optimizer.pt", "vocab_notes.txt", "w2v.model", "model_best.safetensors")
    for name in others:
        (tmp_path / name).write_text("of others")
    cnn_vit.save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "README.md", "config.json", "model.safetensors", "model_best.safetensors", "modeling_hf_stitch.py",
        "optimizer.pt", "preprocessor_config.json", "vocab_notes.txt", "w2v.model",
    ]  # fmt: skip
    assert all((tmp_path / name).read_text() == "of others" for name in others)


def test_a_synchronised_save_waits_for_the_names_of_new_folders(
    saved_stitcher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: set[int] = set()
    monkeypatch.setattr(os, "fsync", lambda file: flushed.add(os.fstat(file).st_ino))
    Stitcher.from_pretrained(saved_stitcher).save_pretrained(tmp_path / "new" / "below", sync=True)
    assert {path.stat().st_ino for path in (tmp_path, tmp_path / "new", tmp_path / "new" / "below")} <= flushed
