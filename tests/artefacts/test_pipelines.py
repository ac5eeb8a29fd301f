"""Auto classes and pipelines load a saved model together with the source's processor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import transformers
from PIL import Image
from transformers import AutoImageProcessor, AutoProcessor, pipeline

import hf_stitch
import hf_stitch.auto
from hf_stitch import StitchedModel
from hf_stitch.adapters.libraries.timm_images import TimmImageProcessor

from tiny_networks import BODY, CLASSES, LAYERS, SIZE, TEXT, build, plain_tokenizer, stitched  # isort: skip

CONFIGS: dict[str, dict[str, Any]] = {
    "center": {"input_size": (3, 32, 32), "crop_pct": 0.9},
    "bilinear": {"input_size": (3, 48, 32), "interpolation": "bilinear", "crop_pct": 0.8},
    "squash": {
        "input_size": (3, 32, 32), "crop_mode": "squash", "crop_pct": 1.0, "mean": (0.5,) * 3, "std": (0.5,) * 3,
    },
    "border": {"input_size": (3, 32, 32), "crop_mode": "border"},
    "grey": {"input_size": (1, 32, 32), "mean": (0.4,), "std": (0.3,)},
}  # fmt: skip


def picture(seed: int, size: tuple[int, ...] = (45, 60, 3)) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, size, dtype=np.uint8))


@pytest.fixture(scope="module")
def pictures() -> list[dict[str, Any]]:
    return [{"image": picture(seed), "label": seed % CLASSES} for seed in range(40)]


def vision(library: str, seed: int) -> hf_stitch.Adapter:
    if library == "timm":
        cfg = {"input_size": (3, SIZE, SIZE), "crop_pct": 0.9}
        torch.manual_seed(seed)
        net = timm.create_model("resnet10t", num_classes=CLASSES, channels=(16, 24, 32, 48), pretrained_cfg_overlay=cfg)
        return hf_stitch.load(net.eval())
    processor = transformers.ViTImageProcessor(size={"height": SIZE, "width": SIZE})
    return hf_stitch.load(build("vit", seed), processor=processor)


LAYER = {"timm": LAYERS["cnn"], "transformers": LAYERS["vit"]}


@pytest.mark.parametrize(("source", "target"), [("timm", "transformers"), ("transformers", "timm")])
def test_images_between_two_libraries(source: str, target: str, pictures: Any, tmp_path: Path) -> None:
    a, b = vision(source, 0), vision(target, 1)
    model = stitched(a, b, pictures, (LAYER[source], LAYER[target]))
    model.save_pretrained(tmp_path / "model")
    inputs = a.preprocess([sample["image"] for sample in pictures[:3]])
    with torch.no_grad():
        expected = model(**inputs).logits
        again = StitchedModel.from_pretrained(tmp_path / "model")
        assert torch.equal(again(**again.preprocess([s["image"] for s in pictures[:3]])).logits, expected)
    run = pipeline("image-classification", model=str(tmp_path / "model"))
    for sample, row in zip(pictures[:3], expected.softmax(-1), strict=True):
        found = {score["label"]: score["score"] for score in run(sample["image"])}
        torch.testing.assert_close(torch.tensor([found[model.config.id2label[i]] for i in range(CLASSES)]), row)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_saved_processor_equals_the_transform_of_timm(name: str, tmp_path: Path) -> None:
    given = CONFIGS[name]
    TimmImageProcessor(**given).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "hf_stitch"}')
    for kind in (AutoImageProcessor, AutoProcessor, TimmImageProcessor):
        processor = kind.from_pretrained(tmp_path)
        assert type(processor) is TimmImageProcessor
        transform = timm.data.create_transform(**timm.data.resolve_data_config(pretrained_cfg=given), is_training=False)
        mode = "L" if name == "grey" else "RGB"
        for image in (picture(0), picture(1, (32, 32, 3)), picture(2, (90, 20, 3)), picture(3, (40, 30))):
            assert torch.equal(processor(image, return_tensors="pt")["pixel_values"][0], transform(image.convert(mode)))
    array = np.asarray(picture(0))
    channels_first = torch.from_numpy(array.copy()).permute(2, 0, 1)
    assert torch.equal(processor(array)["pixel_values"][0], processor(channels_first)["pixel_values"][0])
    grey = np.asarray(picture(3, (40, 30)))
    assert torch.equal(processor(grey)["pixel_values"][0], processor(grey[..., None])["pixel_values"][0])
    batch = processor(np.stack([array, array]), return_tensors="np")["pixel_values"]
    assert isinstance(batch, np.ndarray) and np.array_equal(batch[1], processor(array)["pixel_values"][0].numpy())
    with pytest.raises(ValueError, match=r"requires 4 channels, but images have 1 \(grey\) or 3 \(RGB\)"):
        TimmImageProcessor((4, 8, 8), mean=(0.5,) * 4, std=(0.5,) * 4)(array)
    with pytest.raises(ValueError, match=r"requires images, or arrays or tensors of uint8, got float32"):
        processor(np.zeros((3, 3), dtype=np.float32))
    with pytest.raises(TypeError, match="does not accept 'do_resize'"):
        processor(array, do_resize=False)


def test_the_processor_of_a_timm_network_in_transformers_is_saved(pictures: Any, tmp_path: Path) -> None:
    """TimmWrapperImageProcessor cannot be saved, and a nested timm config loses the number of classes."""
    net = timm.create_model("resnet10t", num_classes=CLASSES, pretrained_cfg_overlay={"input_size": (3, SIZE, SIZE)})
    timm.models.save_for_hf(net.eval(), tmp_path / "parent", safe_serialization=True)
    config = json.loads((tmp_path / "parent" / "config.json").read_text())
    del config["model_args"]  # contains the number of classes again, which transformers does not accept twice
    (tmp_path / "parent" / "config.json").write_text(json.dumps(config))
    parent = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "parent")
    a = hf_stitch.load(parent, processor=AutoImageProcessor.from_pretrained(tmp_path / "parent"))
    assert type(a.processor) is TimmImageProcessor
    layer = next(name for name in a.layers if "layer2" in name)
    model = stitched(a, a, pictures, (layer, layer))
    model.save_pretrained(tmp_path / "model")
    assert type(AutoImageProcessor.from_pretrained(tmp_path / "model")) is TimmImageProcessor
    again = StitchedModel.from_pretrained(tmp_path / "model")
    images = [sample["image"] for sample in pictures[:2]]
    with torch.no_grad():
        logits = again(**again.preprocess(images)).logits
        assert logits.shape[1] == again.config.num_labels == CLASSES
        assert torch.equal(logits, model(**a.preprocess(images)).logits)


@pytest.mark.parametrize("kind", ["text", "image"])
def test_features_of_a_model_without_a_head(kind: str, net: Any, texts: Any, pictures: Any, tmp_path: Path) -> None:
    if kind == "text":
        body: Any = transformers.BertModel(transformers.BertConfig(**TEXT)).eval()
        a, processor, data = net("t5"), plain_tokenizer(), texts
        sample, task = "w1 w2 w3", "feature-extraction"
    else:
        body = transformers.ViTModel(transformers.ViTConfig(**BODY, image_size=SIZE, patch_size=8)).eval()
        a, processor, data = vision("timm", 0), vision("transformers", 0).processor, pictures
        sample, task = pictures[0]["image"], "image-feature-extraction"
    b = hf_stitch.load(body, processor=processor)
    model = stitched(a, b, data, (LAYERS["t5" if kind == "text" else "cnn"], b.layers[1]), task=None)
    model.save_pretrained(tmp_path)
    found = torch.tensor(pipeline(task, model=str(tmp_path))(sample))
    with torch.no_grad():
        torch.testing.assert_close(found, model(**model.preprocess([sample])).last_hidden_state)


def test_text_generation(net: Any, texts: Any, tmp_path: Path) -> None:
    a = net("gpt2")
    model = stitched(a, net("llama", 1), texts, (LAYERS["gpt2"], LAYERS["llama"]))
    model.save_pretrained(tmp_path)
    run = pipeline("text-generation", model=str(tmp_path))
    prompts = ["w1 w2 w3 w4", "w5"]
    out = run(prompts, max_new_tokens=4, do_sample=False, batch_size=2, return_full_text=False)
    for prompt, (found,) in zip(prompts, out, strict=True):
        ids = model.preprocess([prompt])["input_ids"]
        with torch.no_grad():
            alone = model.generate(ids, max_new_tokens=4, do_sample=False)[0, ids.shape[1] :]
        assert found["generated_text"] == a.processor.decode(alone, skip_special_tokens=True)
