"""Each page of docs/errors quotes the message that people meet: here the errors are raised and compared with it."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from scenes import TEXT, Scene, errors, vit, vit_processor

import hf_stitch
from hf_stitch import Stitcher
from hf_stitch.printing import ADDRESS, Page

FOLDER = Path(__file__).parents[2] / "docs" / "errors"
QUOTED = re.compile(r"^```text\n(\w+Error: .*?)^```", re.DOTALL | re.MULTILINE)
LAYERS = {"source_layer": "layer3.0", "target_layer": "vit.layers.3", "progress": False}
BERT = dict.fromkeys(("source_layer", "target_layer"), "bert.encoder.layer.0")


def other_processor(scene: Scene) -> object:
    processor = vit_processor()
    processor.image_mean = [0.1, 0.1, 0.1]
    return Stitcher.from_pretrained("stitcher").attach(scene["source"], hf_stitch.load(vit(), processor=processor))


def damaged(scene: Scene) -> object:
    """Load a model after a bit of its weights has changed."""
    path = Path("model/model.safetensors")
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    return hf_stitch.StitchedModel.from_pretrained("model")


def other_order(scene: Scene) -> object:
    ids = [f"s{place}" for place in range(60)]
    one, two = (hf_stitch.Samples.of(scene["dataset"], id=each) for each in (ids, ids[::-1]))
    return hf_stitch.compare(scene["source"], scene["target"], one, paired_data=two)


def too_large(scene: Scene) -> object:
    nn, images = torch.nn, torch.rand(8, 3, 224, 224)
    features = nn.Sequential(nn.Conv2d(3, 64, 1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(64, 128, 1), nn.ReLU())
    ends = {"pooled": nn.AdaptiveAvgPool2d(1), "flat": nn.Flatten(), "head": nn.Linear(128, 2)}
    wide = hf_stitch.load(nn.Sequential(OrderedDict(features=features, **ends)), example_inputs=images[:2])
    layers = {"source_layer": "features.3", "target_layer": "features.3", "pooling": "flatten"}
    return hf_stitch.stitch(wide, wide, images, progress=False, **layers)


def not_a_cut(scene: Scene) -> object:
    """Run a network, of which the cuts are known, to a layer that is none."""
    assert scene["source"].layers
    return scene["source"].encode(torch.randn(2, 3, 32, 32), "layer2.1.conv1")


def incomplete(scene: Scene) -> object:
    """Load a network of which the files lack a weight."""
    path = Path("encoder/model.safetensors")
    weights = load_file(path)
    del weights["encoder.layer.0.output.dense.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    return hf_stitch.load("encoder")


def new_head(scene: Scene) -> object:
    transformers.BertModel(transformers.BertConfig(**TEXT)).save_pretrained("encoder")
    network = hf_stitch.load("encoder", task="text-classification")
    return hf_stitch.stitch(scene["bert"], network, scene["texts"], **BERT)


def few(scene: Scene) -> Any:
    return scene["dataset"].select(range(12))


RAISES: dict[str, list[Callable[[Scene], object]]] = {
    "not-a-cut": [not_a_cut],
    "no-example": [lambda s: hf_stitch.load(s["net"])],
    "other-weights": [lambda s: Stitcher.from_pretrained("stitcher").attach(s["seed_1"], s["target"]), other_processor],
    "no-name": [lambda s: Stitcher.from_pretrained("stitcher").attach()],
    "other-tokens": [lambda s: hf_stitch.compare(s["llama"], s["gpt2_small"], s["texts"], rows="positions")],
    "too-few-samples": [
        lambda s: hf_stitch.stitch(s["source"], s["target"], few(s), pooling="mean", matcher="lstsq", **LAYERS),
        lambda s: hf_stitch.compare(s["seed_0"], s["seed_1"], few(s), metrics=["cca"], rows="mean"),
    ],
    "other-order": [other_order],
    "other-labels": [
        lambda s: hf_stitch.stitch(s["source"], s["target"], [(row["image"], 7) for row in s["dataset"]], **LAYERS)
    ],
    "heads": [lambda s: hf_stitch.stitch(s["bert"], s["answers"], s["texts"], **BERT)],
    "missing-weights": [incomplete, new_head],
    "damaged-file": [damaged],
    "not-saved": [lambda s: s["stitched"].save_pretrained("whole")],
    "too-large": [too_large],
}
"""Page -> what raises the errors that it quotes, in their order."""


def test_every_page_of_errors_is_raised_here_and_listed() -> None:
    names = {path.stem for path in FOLDER.glob("*.md")} - {"index"}
    assert names == set(RAISES) == set(get_args(Page))
    index = (FOLDER / "index.md").read_text()
    assert all(f"]({name}.md)" in index and f"\n{name}\n" in index for name in names)


@pytest.mark.parametrize("page", RAISES)
def test_the_quoted_message_is_that_of_the_error(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scene, quoted = Scene(errors()), QUOTED.findall((FOLDER / f"{page}.md").read_text())
    assert len(quoted) == len(RAISES[page])
    for message, raises in zip(quoted, RAISES[page], strict=True):
        with pytest.raises(Exception) as caught:
            raises(scene)
        # Sizes that depend on the machine are quoted as they were on one.
        pattern = ".*".join(map(re.escape, re.split(r"…|[\d.,]+ TB|[\d.,]+ GB", " ".join(message.split()))))
        assert re.search(pattern, f"{caught.type.__name__}: {' '.join(str(caught.value).split())}"), caught.value
        assert str(caught.value).endswith(f"\nSee {ADDRESS.format(page)}")
