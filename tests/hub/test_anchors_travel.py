"""Anchors are pushed with an artefact, so that another process can swap the encoder without samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from parents import serve
from safetensors.torch import load_file, save_file
from server import Hub
from test_sharing import in_a_fresh_process

import hf_stitch
from hf_stitch.artefacts import Head, HeadConfig
from hf_stitch.data import Samples
from hf_stitch.relative import AnchorSet

PULL = """
import sys
import torch, hf_stitch
from safetensors.torch import load_file, save_file
folder = sys.argv[1]
inputs, found = load_file(f"{folder}/inputs"), {}
for name, model in (
    ("relative", hf_stitch.Stitcher.from_pretrained("alice/relative").attach()),
    ("relative-model", hf_stitch.StitchedModel.from_pretrained("alice/relative-model")),
    ("inverse", hf_stitch.Stitcher.from_pretrained("alice/inverse").attach()),
    ("inverse-model", hf_stitch.StitchedModel.from_pretrained("alice/inverse-model")),
):
    swapped = hf_stitch.swap(model, encoder="alice/vit-2", encoder_layer="vit.layers.2", pooling="cls")
    with torch.no_grad():
        found[name] = model(**inputs).logits
        found[f"{name} swapped"] = swapped(**inputs).logits
save_file(found, f"{folder}/found")
"""


@pytest.fixture
def folder(hub: Hub, images: Any, tmp_path: Path) -> Path:
    """Push both artefacts of two models; write their outputs and those after a swap, here and in a new process."""
    serve(hub, "timm/cnn", "alice/vit", "alice/vit-2")
    cnn, vit, other = (hf_stitch.load(id) for id in ("timm/cnn", "alice/vit", "alice/vit-2"))
    chosen, last = Samples.of(images).take(12), "vit.layers.2"
    anchors = AnchorSet.of(chosen).encode(cnn, "layer4.0", chosen)
    for network in (vit, other):
        anchors = anchors.encode(network, last, chosen, "cls")
    Head(HeadConfig(in_features=12, num_labels=5)).push_to_hub("alice/head")
    relative = hf_stitch.relative_model(cnn, anchors, layer="layer4.0", center=True, head="alice/head", progress=False)
    inverse = hf_stitch.swap(vit, target_layer=last, encoder=cnn, encoder_layer="layer4.0", anchors=anchors)
    inputs = {"pixel_values": torch.stack([sample["image"] for sample in images[:5]])}
    expected = {}
    for name, model in (("relative", relative), ("inverse", inverse)):
        model.stitcher.push_to_hub(f"alice/{name}")
        model.push_to_hub(f"alice/{name}-model")
        swapped = hf_stitch.swap(model, encoder=other, encoder_layer=last, pooling="cls")
        with torch.no_grad():
            for which, made in ((name, model), (f"{name} swapped", swapped)):
                expected[which] = made(**inputs).logits
    save_file(expected, tmp_path / "expected")
    save_file(inputs, tmp_path / "inputs")
    in_a_fresh_process(hub, PULL, tmp_path, cache=tmp_path / "other-cache")
    return tmp_path


def test_outputs_after_a_swap_in_a_new_process_are_equal(folder: Path, hub: Hub) -> None:
    expected, found = load_file(folder / "expected"), load_file(folder / "found")
    for name, values in found.items():
        assert torch.equal(values, expected[name.replace("-model", "")]), name
    assert len(found) == 8
    assert set(hub.files("alice/relative")) >= {"stitcher.json", "anchors.json", "anchors.safetensors"}
    card = hub.files("alice/relative")["README.md"].decode()
    assert "similarities to anchors" in card
    assert "2209.15430" in card
    assert str(Path.home()) not in hub.files("alice/relative")["anchors.json"].decode()
