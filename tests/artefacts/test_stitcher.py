"""Stitchers that are attached to their networks; test_saving.py has every matcher."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_stitch
from hf_stitch import Stitcher

from records import rewrite  # isort: skip
from tiny_networks import LAYERS, adapted, build, stitched  # isort: skip


def test_a_local_folder_is_passed_to_attach(images: Any, inputs: Any, net: Any, tmp_path: Path) -> None:
    build("vit", 0).save_pretrained(tmp_path / "vit")
    a = hf_stitch.load(str(tmp_path / "vit"))
    model = stitched(a, net("cnn", 1), images, (LAYERS["vit"], LAYERS["cnn"]))
    model.stitcher.save_pretrained(tmp_path / "stitcher")
    attached = Stitcher.from_pretrained(tmp_path / "stitcher").attach(str(tmp_path / "vit"), net("cnn", 1))
    with torch.no_grad():
        assert torch.equal(attached(**inputs(a)).logits, model(**inputs(a)).logits)


def test_attaching_changes_neither_the_stitcher_nor_the_networks(saved_stitcher: Path, net: Any) -> None:
    stitcher = Stitcher.from_pretrained(saved_stitcher)
    assert sum(path.stat().st_size for path in saved_stitcher.iterdir()) < 22_000
    attached = stitcher.attach(net("cnn"), net("vit", 1))
    assert attached.parents == (net("cnn"), net("vit", 1))
    with torch.no_grad():
        for parameter in attached.parameters():
            parameter.zero_()
    assert bool(stitcher.stitch.body.weight.any())
    assert all(bool(p.any()) for p in net("vit", 1).model.vit.layers[2].mlp.parameters() if p.dim() > 1)
    other: Any = build("vit", 1)
    with torch.no_grad():
        list(other.parameters())[-1][0] += 1e-3  # a single weight
    with pytest.raises(ValueError, match=r"the target .* has other weights than the stitch was fitted to"):
        stitcher.attach(net("cnn"), adapted("vit", other))


def test_an_unknown_task_is_rejected(saved_stitcher: Path, net: Any) -> None:
    rewrite(saved_stitcher / "stitcher.json", lambda c: c.update(task="image-clasification"))
    with pytest.raises(ValueError, match="no 'image-clasification' among tasks; did you mean"):
        Stitcher.from_pretrained(saved_stitcher).attach(net("cnn"), net("vit", 1))


def test_a_synchronised_save_waits_for_the_names_of_new_folders(
    saved_stitcher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: set[int] = set()
    monkeypatch.setattr(os, "fsync", lambda file: flushed.add(os.fstat(file).st_ino))
    Stitcher.from_pretrained(saved_stitcher).save_pretrained(tmp_path / "new" / "below", sync=True)
    assert {path.stat().st_ino for path in (tmp_path, tmp_path / "new", tmp_path / "new" / "below")} <= flushed
