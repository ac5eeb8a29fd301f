"""Stitching of two image networks, and rejected arguments."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from PIL import Image
from torch import nn
from torchvision import transforms as T

import hf_stitch
from hf_stitch import NotACutError, StitchedModelForImageClassification
from hf_stitch.adapters.cutting import tree as _tree
from hf_stitch.artefacts.cache import NAME
from hf_stitch.artefacts.joining import joined_to_itself
from hf_stitch.data import PairedSamples
from hf_stitch.pairs import CollectedPair, Pair
from hf_stitch.reference import weights_hash
from hf_stitch.running import Run
from hf_stitch.stitches.layer import paired_rows

from tiny_networks import LAYERS, LANGUAGE, VISION, adapted, build  # isort: skip


CNN_VIT = (LAYERS["cnn"], LAYERS["vit"])


def stitched(a: Any, b: Any, data: Any, layers: tuple[str, str], **options: Any) -> Any:
    return hf_stitch.stitch(
        a, b, data, source_layer=layers[0], target_layer=layers[1], progress=False, **{"matcher": "ridge", **options}
    )


def logits(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output.logits


# -- exactness -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "padding"),
    [*((f, "none") for f in VISION), *((f, side) for f in LANGUAGE for side in ("right", "left"))],
)
def test_a_network_stitched_to_itself_with_the_identity_is_unchanged(
    family: str, padding: str, net: Any, inputs: Any, images: Any, texts: Any
) -> None:
    a, layer = net(family), LAYERS[family]
    model = stitched(a, a, texts if family in LANGUAGE else images, (layer, layer), matcher="identity", task=None)
    batch = inputs(a, padding)
    with torch.no_grad():
        expected, got = _tree.tensors(a.model(**batch)), _tree.tensors(model(**batch))
    assert expected.keys() - got.keys() <= {path for path in expected if path[:1] == (NAME,)}
    for path, tensor in got.items():
        assert torch.equal(tensor, expected[path])


@pytest.mark.parametrize(
    ("source", "target", "options"),
    [
        ("cnn", "vit", {}),
        ("cnn", "vit", {"pooling": "mean"}),
        ("vit", "cnn", {"pooling": "flatten"}),
        ("vit", "deit", {"matcher": "procrustes"}),
        ("swin", "convnext", {"matcher": "low_rank", "rank": 3}),
    ],
)
def test_output_equals_its_parts(source: str, target: str, options: Any, net: Any, inputs: Any, images: Any) -> None:
    a, b, layers = net(source), net(target, 1), (LAYERS[source], LAYERS[target])
    model = stitched(a, b, images, layers, **options)
    batch = inputs(a)
    with torch.no_grad():
        expected = b.decode(model.stitch(a.encode(batch, layers[0])[layers[0]]), layers[1])
        assert torch.equal(model(**batch).logits, logits(expected))
        assert torch.equal(model(pixel_values=batch[a.interface.content[0]]).logits, logits(expected))


def test_only_layers_that_run_are_kept_and_the_networks_are_unchanged(net: Any, images: Any) -> None:
    a, b = adapted("vit", build("vit", 0).train()), adapted("cnn", build("cnn", 1))
    next(iter(b.model.parameters())).requires_grad_(False)

    def state(adapter: Any) -> Any:
        model = adapter.model
        hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks), m.training, type(m)) for m in model.modules()]
        return weights_hash(model), hooks, [(n, p.requires_grad, p.grad) for n, p in model.named_parameters()]

    before = state(a), state(b), torch.get_rng_state().tolist()
    model = stitched(a, b, images, (LAYERS["vit"], LAYERS["cnn"]))
    assert (state(a), state(b), torch.get_rng_state().tolist()) == before
    assert not {id(p) for parent in (a, b) for p in parent.model.parameters()} & {id(p) for p in model.parameters()}
    halves = [sum(p.numel() for p in half.parameters()) for half in (model.source, model.target)]
    wholes = [sum(p.numel() for p in parent.model.parameters()) for parent in (a, b)]
    assert all(0 < half < whole for half, whole in zip(halves, wholes, strict=True))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not any(m.training for m in model.modules())
    names = [name for name, _ in model.named_parameters()]
    assert not any("vit.layers.2" in name or "classifier" in name for name in names if name.startswith("source."))
    assert not any("layer1" in name or "conv1.0" in name for name in names if name.startswith("target.model.conv1"))


def test_the_config_contains_the_recipe(net: Any, images: Any) -> None:
    a, b = net("cnn"), net("vit", 1)
    model = stitched(a, b, images, CNN_VIT, ridge=2.0, test_size=0.25, seed=3)
    assert isinstance(model, StitchedModelForImageClassification)
    recipe = model.config.recipe
    assert recipe["matcher"] == {"name": "ridge", "ridge": 2.0}
    assert (recipe["pooling"], recipe["samples"], recipe["test_size"], recipe["seed"]) == ("none", 60, 0.25, 3)
    assert recipe["data"] == hf_stitch.Samples.of(images).fingerprint
    assert model.config.target["reference"]["weights_hash"] == weights_hash(b.model)
    assert model.config.num_labels == b.model.config.num_labels
    assert model.evaluation.n == 20
    assert model.config.scores == model.evaluation.for_card()
    apart = stitched(a, b, images[:60], CNN_VIT, test_data=images[60:])
    assert (apart.config.recipe["samples"], apart.evaluation.n) == (60, 20)
    assert "test_size" not in apart.config.recipe


def test_paired_data_need_no_labels_by_which_another_order_is_noticed(net: Any, images: Any) -> None:
    """The paired samples get the split of the source's samples, which are stratified by labels."""
    a, b = net("cnn"), net("vit", 1)
    model = stitched(a, b, images, CNN_VIT, paired_data=[sample["image"] for sample in images])
    twin = stitched(a, b, images, CNN_VIT)
    assert torch.equal(model.stitch.body.weight, twin.stitch.body.weight)
    assert model.evaluation.scores == twin.evaluation.scores
    assert model.config.recipe["paired_data"].startswith("sha256:")
    with pytest.warns(UserWarning, match="of 80 samples have a different label on the second side .first: 0"):
        stitched(a, b, images, CNN_VIT, paired_data=images[::-1])


# -- errors --------------------------------------------------------------------------------------------------------


@pytest.fixture
def uncollected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if invalid arguments are rejected only after the pass over the data."""

    def fail(*_: Any, **__: Any) -> Any:
        raise AssertionError("the data were read before the invalid argument was rejected")

    monkeypatch.setattr(hf_stitch.workflows._stitch, "CollectedPair", fail)


def with_label(images: Any, label: int) -> list[dict[str, Any]]:
    return [{**sample, "label": label if place == 9 else sample["label"]} for place, sample in enumerate(images)]


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize(
    ("error", "message", "given"),
    [
        (ValueError, "did you mean 'procrustes'", {"matcher": "procustes"}),
        (TypeError, "did you mean 'ridge'", {"matcher": "ridge", "rigde": 1.0}),
        (ValueError, "no 'image-clasification' among tasks; did you mean", {"task": "image-clasification"}),
        (NotACutError, r"'layer2\.O' of ResNet does not exist; did you mean 'layer2\.0'", {"source_layer": "layer2.O"}),
        (NotACutError, "'layer2.0.bn2': the output of '.*' bypasses it", {"source_layer": "layer2.0.bn2"}),
        (ValueError, "remove test_data", lambda x: {"paired_data": x, "test_data": x}),
        (ValueError, "remove one", lambda x: {"test_size": 0.2, "test_data": x}),
        (ValueError, "empty", {"data": []}),
        (ValueError, "sample 9 has label 7, .* predicts classes 0 to 4", lambda x: {"test_data": with_label(x, 7)}),
        (ValueError, "sample 9 has the label -1", lambda x: {"test_data": with_label(x, -1)}),
        (
            ValueError, r"layer 'layer2\.0' of the source outputs bchw 24 8x8 .* expected bchw 24 4x4",
            lambda x: {"data": [{**sample, "image": sample["image"].repeat(1, 2, 2)} for sample in x], "target": "cnn"},
        ),
        (
            ValueError, r"cannot run from layer 'blocks\.1' on activations with pooling='mean' "
            r"\(IndexError: .*use another", {"target": "deit", "pooling": "mean"},
        ),
        (ValueError, "the same kind of samples, got image and text", {"target": "bert"}),
    ],
)  # fmt: skip
def test_what_cannot_be_stitched_is_refused_before_the_data_are_read(
    error: type[Exception], message: str, given: Any, net: Any, images: Any
) -> None:
    options = {"data": images, "target": "vit", **(given(images) if callable(given) else given)}
    target, data = options.pop("target"), options.pop("data")
    layers = options.pop("source_layer", LAYERS["cnn"]), LAYERS[target]
    with pytest.raises(error, match=message):
        stitched(net("cnn"), net(target, 1), data, layers, **options)


def test_activations_that_are_not_finite(net: Any, images: Any) -> None:
    data = [{**sample, "image": sample["image"].clone()} for sample in images]
    data[7]["image"][:] = 3e38
    samples = hf_stitch.Samples.of(data, id=[f"n{place}" for place in range(80)])
    message = "layer 'layer2.0' of the source is NaN or infinite for 1 samples of a batch of 80; the first is 'n7'"
    with pytest.raises(ValueError, match=message):
        pair = Pair(net("cnn"), net("vit", 1)).at([CNN_VIT])
        CollectedPair(pair, PairedSamples.of(samples), Run(80, progress=False)).moments(CNN_VIT)


def test_missing_inputs_and_labels_without_a_head(net: Any, images: Any) -> None:
    model = stitched(net("cnn"), net("vit", 1), images, CNN_VIT, task=None)
    with pytest.raises(ValueError, match="the source requires x, got no inputs"):
        model()
    with pytest.raises(ValueError, match="StitchedModel does not have a head, so labels"):
        model(pixel_values=torch.zeros(1, 3, 32, 32), labels=torch.zeros(1).long())


def test_a_pooled_stitch_replaces_the_cls_token_of_the_target(net: Any, images: Any) -> None:
    """The head of a ViT reads only the CLS token, so a pooled self-stitch at the last block must agree."""
    a, layer = net("vit"), "vit.layers.2"
    assert stitched(a, a, images, (layer, layer), matcher="lstsq", pooling="cls").evaluation["agreement"].value == 1
    with torch.no_grad():
        representation = a.encode(images[0]["image"][None], layer)[layer]
    pooled = paired_rows(representation, representation, "mean")["body"]
    assert torch.equal(pooled[0], representation.rows("mean"))
    assert torch.equal(pooled[1], representation.rows("cls"))


def test_tokens_and_local_paths_are_not_saved(tmp_path: Path) -> None:
    build("vit", 0).save_pretrained(tmp_path / "parent")
    adapter = hf_stitch.load(str(tmp_path / "parent"), token="hf_secret", cache_dir=str(tmp_path / "cache"))
    stitched = joined_to_itself(adapter, adapter.layers[0], None)
    stitcher = stitched.stitcher
    stitcher.source = adapter.pinned  # as in a stitcher made by hand
    for name, artefact in (("model", stitched), ("stitcher", stitcher)):
        artefact.save_pretrained(tmp_path / name)
        for file in (tmp_path / name).iterdir():
            assert b"hf_secret" not in file.read_bytes() and str(tmp_path).encode() not in file.read_bytes(), file
    assert "a network that is not on the Hub" in (tmp_path / "stitcher" / "README.md").read_text()


def test_auto_selects_the_most_similar_layer_of_the_source() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)), nn.Linear(6, 3))
    a = hf_stitch.load(net, example_inputs=torch.randn(2, 6))
    data = torch.randn(300, 6)
    stitched = hf_stitch.stitch(a, a, data, source_layer="auto", target_layer="2", task=None, progress=False)
    assert stitched.stitcher.source_layer == "2"
    assert stitched.config.recipe["source_layer"] == "auto"


def test_classes_of_user_code_are_counted_by_its_logits_and_named_by_the_data() -> None:
    nets = [nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 10)) for _ in range(2)]
    prepare = T.Compose([T.Resize(2), T.ToTensor()])
    a, b = (hf_stitch.load(each, example_inputs=torch.randn(2, 3, 2, 2), processor=prepare) for each in nets)
    names = [f"digit {index}" for index in range(10)]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=names)})
    images = [Image.new("RGB", (4, 4), (random.randrange(256), random.randrange(256), 7 * k)) for k in range(30)]
    table = {"image": images, "label": [index % 10 for index in range(30)]}
    data = datasets.Dataset.from_dict(table, features=features)
    layers = {"source_layer": "2", "target_layer": "2", "progress": False, "matcher": "ridge"}
    unnamed = hf_stitch.stitch(a, b, images, **layers, task="image-classification")
    assert unnamed.config.num_labels == 10
    assert unnamed.config.id2label[9] == "LABEL_9"
    assert list(hf_stitch.stitch(a, b, data, **layers).config.id2label.values()) == names
