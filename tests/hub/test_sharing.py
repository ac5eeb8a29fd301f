"""Artefacts pushed and pulled in a new process: bitwise equal outputs, and cards with code that runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from parents import PARENTS, serve
from safetensors.torch import load_file, save_file
from server import Hub

import hf_stitch
from hf_stitch import StitchedModel, Stitcher
from hf_stitch.artefacts import Head, HeadConfig
from hf_stitch.data import Samples
from hf_stitch.relative import AnchorSet

from tiny_networks import LAYERS, stitched  # isort: skip
from two_tokenizers import LAYER as OWN_LAYERS, SENTENCES  # isort: skip

CASES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "lstsq": ("timm/cnn", "alice/vit", "lstsq", {}),
    "on-itself": ("alice/vit", "alice/vit", "lstsq", {}),
    "text": ("alice/bert", "alice/bert-2", "lstsq", {}),
    "decoder": ("alice/gpt2", "alice/llama", "ridge", {"ridge": 1.0}),
    "own-tokens": ("alice/own-llama", "alice/own-gpt2", "ridge", {"ridge": 1.0, "align": "prefix", "own": True}),
}
"""Name -> source, target, matcher and its options. tests/artefacts has all matchers."""
LAYER_OF = {**LAYERS, **{f"own {family}": layer for family, layer in OWN_LAYERS.items()}}
ANCHORED = ("relative", "inverse")
"""Models with anchors, so that another process can swap the encoder without samples."""

PULL = """
import sys
import torch, hf_stitch
from safetensors.torch import load_file, save_file
folder, names, anchored = sys.argv[1], sys.argv[3:], sys.argv[2].split()
for name in names:
    inputs = load_file(f"{folder}/{name}.inputs")
    found = {}
    for what, model in (
        ("stitcher", hf_stitch.Stitcher.from_pretrained(f"alice/{name}").attach()),
        ("model", hf_stitch.StitchedModel.from_pretrained(f"alice/{name}-model")),
    ):
        with torch.no_grad():
            found[what] = model(**inputs).logits.contiguous()
            if name in anchored:
                swapped = hf_stitch.swap(model, encoder="alice/vit-2", encoder_layer="vit.layers.2", pooling="cls")
                found[f"{what} swapped"] = swapped(**inputs).logits
    save_file(found, f"{folder}/{name}.found")
"""


@pytest.fixture(scope="module")
def pushed(shared_hub: Hub, images: Any, texts: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Push both artefacts of all cases; return the folder with inputs, outputs, and outputs of a new process."""
    folder = tmp_path_factory.mktemp("outputs")
    serve(shared_hub, *PARENTS)
    adapters = {id: hf_stitch.load(id) for id in PARENTS}
    for name, (source, target, matcher, options) in CASES.items():
        a, b = adapters[source], adapters[target]
        sentences = [{"text": sentence} for sentence in SENTENCES]
        data = images if a.interface.modality == "image" else sentences if name == "own-tokens" else texts
        first, second = (LAYER_OF[PARENTS[id][0]] for id in (source, target))
        model = stitched(a, b, data, (first, second), matcher=matcher, **options)
        inputs = model.preprocess([s["image"] if "image" in s else s["text"] for s in data[:5]])
        with torch.no_grad():
            save_file({"logits": model(**inputs).logits.contiguous()}, folder / f"{name}.expected")
        save_file(dict(inputs), folder / f"{name}.inputs")
        model.evaluation = None  # each push would draw its pictures, which no test here reads
        push(model, name)
    cnn, vit, other = (adapters[id] for id in ("timm/cnn", "alice/vit", "alice/vit-2"))
    chosen, last = Samples.of(images).take(12), "vit.layers.2"
    anchors = AnchorSet.of(chosen).encode(cnn, "layer4.0", chosen)
    for network in (vit, other):
        anchors = anchors.encode(network, last, chosen, "cls")
    Head(HeadConfig(in_features=12, num_labels=5)).push_to_hub("alice/head")
    relative = hf_stitch.relative_model(cnn, anchors, layer="layer4.0", center=True, head="alice/head", progress=False)
    inverse = hf_stitch.swap(vit, target_layer=last, encoder=cnn, encoder_layer="layer4.0", anchors=anchors)
    inputs = {"pixel_values": torch.stack([sample["image"] for sample in images[:5]])}
    for name, model in zip(ANCHORED, (relative, inverse), strict=True):
        push(model, name)
        swapped = hf_stitch.swap(model, encoder=other, encoder_layer=last, pooling="cls")
        with torch.no_grad():
            found = {"logits": model(**inputs).logits, "swapped": swapped(**inputs).logits}
        save_file(found, folder / f"{name}.expected")
        save_file(inputs, folder / f"{name}.inputs")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")} | {
        "HF_ENDPOINT": shared_hub.url, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(folder / "cache"),
        "HF_TOKEN": "alice-token",
    }  # fmt: skip
    command = [sys.executable, "-c", PULL, str(folder), " ".join(ANCHORED), *CASES, *ANCHORED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def push(model: StitchedModel, name: str) -> None:
    model.stitcher.push_to_hub(f"alice/{name}")
    model.push_to_hub(f"alice/{name}-model")


@pytest.mark.parametrize("what", ["stitcher", "model"])
@pytest.mark.parametrize("name", [*CASES, *ANCHORED])
def test_outputs_in_a_new_process_are_equal(name: str, what: str, pushed: Path) -> None:
    expected, found = (load_file(pushed / f"{name}.{which}") for which in ("expected", "found"))
    assert torch.equal(found[what], expected["logits"])
    assert name in CASES or torch.equal(found[f"{what} swapped"], expected["swapped"])


def test_anchors_and_tokenizers_travel_with_a_model_no_larger_than_its_parts(shared_hub: Hub, pushed: Path) -> None:
    assert {"tokenizer.json", "source_tokenizer.json"} <= set(shared_hub.files("alice/own-tokens-model"))
    weights = StitchedModel.from_pretrained("alice/lstsq-model").state_dict()
    parts = sum(t.numel() * t.element_size() for t in weights.values())
    assert len(shared_hub.files("alice/lstsq-model")["model.safetensors"]) <= parts + 150 * len(weights)
    stitcher = Stitcher.from_pretrained("alice/lstsq")
    assert stitcher.source.revision == shared_hub.models["timm/cnn"].refs["main"]
    assert stitcher.target.revision == shared_hub.models["alice/vit"].refs["main"]
    files = shared_hub.files("alice/relative")
    assert set(files) >= {"stitcher.json", "anchors.json", "anchors.safetensors"}
    card = files["README.md"].decode()
    assert "similarities to anchors" in card
    assert "2209.15430" in card
    assert str(Path.home()) not in files["anchors.json"].decode()


@pytest.mark.parametrize("name", [f"{case}{kind}" for case in CASES if case != "on-itself" for kind in ("", "-model")])
def test_the_code_of_a_card_runs(name: str, shared_hub: Hub, pushed: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", shared_hub.files(f"alice/{name}")["README.md"].decode(), re.DOTALL)
    exec(compile(code, name, "exec"), {})
