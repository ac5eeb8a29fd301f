"""Chains and swaps of networks of user code."""

from __future__ import annotations

import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

import hf_stitch
from hf_stitch import Samples
from hf_stitch.artefacts import Head, HeadConfig
from hf_stitch.relative import AnchorSet, RelativeProjection

# -- chains ------------------------------------------------------------------------------------------------------------
WIDTHS = (8, 10, 12)


class Images(nn.Module):
    """A network for images of 16 x 16 pixels, whose argument has a name of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Conv2d(i, width, 3, padding=1), nn.ReLU()) for i in (3, width, width))
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(width, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x).mean((2, 3)))


@pytest.fixture(scope="module")
def chain() -> tuple[list[Any], hf_stitch.StitchedModel, hf_stitch.StitchedModel, torch.Tensor]:
    """Three networks, the stitched model of the first two and that of all three, and images."""
    torch.manual_seed(0)
    pixels, nets = torch.randn(60, 3, 16, 16), [Images(width).eval() for width in WIDTHS]
    a, b, c = (hf_stitch.load(net, example_inputs=pixels[:2]) for net in nets)
    options: dict[str, Any] = {"matcher": "ridge", "ridge": 1.0, "task": None, "progress": False}
    ab = hf_stitch.stitch(a, b, pixels, source_layer="blocks.0", target_layer="blocks.0", **options)
    abc = hf_stitch.stitch(ab, c, pixels, source_layer="target.blocks.1", target_layer="blocks.1", **options)
    return nets, ab, abc, pixels


def test_a_chain_of_user_code_is_loaded_again_and_again_without_an_example(chain: Any) -> None:
    _, ab, abc, pixels = chain
    with torch.no_grad():
        expected = abc(x=pixels[:3])
        for _ in range(2):
            adapter = hf_stitch.load(ab)
            assert adapter.example["x"].shape[1:] == pixels.shape[1:] and adapter.interface.content == ("x",)
            assert adapter.layers == ("source.blocks.0", "target.blocks.0", "target.blocks.1", "target.blocks.2")
            ab.parents = None  # as in a copy, or after loading
        again = hf_stitch.load(abc)
        names = ("source.source.blocks.0", "source.target.blocks.0", "source.target.blocks.1")
        assert again.layers == (*names, "target.blocks.1", "target.blocks.2")
        assert torch.equal(again.forward(pixels[:3]), expected)


def test_a_chain_of_user_code_is_saved_in_one_folder(chain: Any, tmp_path: Path) -> None:
    nets, ab, abc, pixels = chain
    abc.stitcher.save_pretrained(tmp_path / "chain")
    stitcher, example = hf_stitch.Stitcher.from_pretrained(tmp_path / "chain"), {"example_inputs": pixels[:2]}
    a, b, c = (hf_stitch.load(net, **example) for net in nets)
    with torch.no_grad():
        expected = abc(x=pixels)
        for ends, options in (
            (((a, b), c), {}), ((tuple(nets[:2]), nets[2]), example), (((a, b), nets[2]), example), ((ab, c), {}),
        ):  # fmt: skip
            assert torch.equal(stitcher.attach(*ends, **options)(x=pixels), expected)
    timm: Any = ("timm:resnet10t", b)  # is loaded with the option
    for given, error, message in (
        ({"source": timm, "target": c, "pretrained": False}, ValueError, r"the source Images, .* has other weights"),
        (
            {"source": (a, b), "target": c, "pretrained": False},
            TypeError,
            "pretrained: options of loading, but no netw",
        ),
        ({"target": c}, ValueError, r"the source is stitched itself, .* as source=\(source, target\)"),
        ({"source": (b, a), "target": c}, ValueError, r"the network given as the source, Images, 4.* are swapped"),
        ({"source": (a, b), "target": (b, c)}, TypeError, "the target is one network, got a tuple of 2"),
        ({"source": (a, b, c), "target": c}, TypeError, r"the source is stitched from two networks, .*, got 3"),
    ):
        with pytest.raises(error, match=message):
            stitcher.attach(**given)
    for changed in ("stitch.source.safetensors", "stitcher.json"):
        copied = Path(shutil.copytree(tmp_path / "chain", tmp_path / changed))
        content = bytearray((copied / changed).read_bytes())
        content[-20] ^= 1
        (copied / changed).write_bytes(bytes(content))
        with pytest.raises(ValueError, match=re.escape(changed)):
            hf_stitch.Stitcher.from_pretrained(copied)
    stitcher.save_pretrained(tmp_path / "again")
    assert {p.name for p in (tmp_path / "again").iterdir()} == {p.name for p in (tmp_path / "chain").iterdir()}
    ab.stitcher.save_pretrained(tmp_path / "again")  # over the chain, of which no file remains
    assert [p.name for p in (tmp_path / "again").glob("*.safetensors")] == ["stitch.safetensors"]


def test_a_chain_is_the_new_encoder_of_a_network(chain: Any) -> None:
    nets, ab, _, pixels = chain
    a = hf_stitch.load(nets[0], example_inputs=pixels[:2])
    with pytest.raises(
        TypeError, match=r"the layer at which .* one of source.blocks.0, target.blocks.0, target.blocks.1"
    ):
        hf_stitch.swap(a, ab, pixels, target_layer="blocks.1")
    swapped = hf_stitch.swap(
        a, ab, pixels, encoder_layer="target.blocks.2", target_layer="blocks.2", matcher="lstsq", task=None
    )
    with torch.no_grad():
        hidden = hf_stitch.load(ab).encode(pixels, "target.blocks.2")["target.blocks.2"].rows("mean")
        body: Any = swapped.stitch.body
        expected = nets[0].head(hidden @ body.weight.T + body.bias)
        torch.testing.assert_close(swapped(x=pixels), expected, rtol=1e-4, atol=1e-5)


# -- anchors -----------------------------------------------------------------------------------------------------------


def encoder(seed: int = 0, width: int = 12) -> hf_stitch.Adapter:
    """An encoder of vectors of four features, with a head of three classes."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3))
    return hf_stitch.load(net, example_inputs=torch.randn(2, 4))


def labelled(n: int, seed: int = 0) -> hf_stitch.Samples:
    rows = torch.randn(n, 4, generator=torch.Generator().manual_seed(seed))
    return hf_stitch.Samples.of(rows, label=(rows.argmax(1) % 3).tolist())


TASK = "image-classification"
PLACE: dict[str, Any] = {"target_layer": "3", "encoder_layer": "3", "task": TASK, "progress": False}


def test_a_swap_is_not_scored_on_some_of_its_anchors() -> None:
    data = labelled(200)
    anchors, held_out = data.take(50), data.select(range(50, 200))
    alone = hf_stitch.swap(encoder(), encoder(1), anchors, data=held_out, **PLACE).evaluation
    for samples, some in ((data, "50 of 200"), (data.select(range(49, 200)), "1 of 151")):
        with pytest.warns(UserWarning, match=rf"{some} samples are anchors, the first is \d+: they are left out"):
            swapped = hf_stitch.swap(encoder(), encoder(1), anchors, data=samples, **PLACE)
        assert swapped.evaluation.n == 150
        assert swapped.evaluation.scores == alone.scores


def test_a_saved_model_knows_its_anchors_by_their_contents(tmp_path: Path) -> None:
    data = labelled(200)
    anchors = data.take(50)
    model = hf_stitch.relative_model(encoder(), anchors, layer="3", num_labels=3, task=TASK, progress=False)
    swapped = hf_stitch.swap(model, encoder(1), anchors, encoder_layer="3")
    swapped.anchors.save_pretrained(tmp_path)
    swapped.anchors = hf_stitch.relative.AnchorSet.from_pretrained(tmp_path)
    renamed = hf_stitch.Samples.of(torch.randn(9, 4), label=[0] * 9)
    mixed = hf_stitch.Samples.of(
        [*next(renamed.batches(9)).samples, *next(anchors.take(1).batches(1)).samples], label=[0] * 10
    )
    for scored in (model, swapped):
        with pytest.warns(UserWarning, match="1 of 10 samples are anchors, the first is 9"):
            assert hf_stitch.evaluate(scored, mixed, target=model, progress=False).n == 9
        assert hf_stitch.evaluate(scored, renamed, target=model, progress=False).n == 9
    assert swapped.anchors.among(mixed) == [9]


def test_near_duplicates_are_told_and_other_images_are_not() -> None:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (40, 16, 16, 3), generator=generator, dtype=torch.uint8)
    one_pixel = pixels.clone()
    one_pixel[7] = pixels[3]
    one_pixel[7, 8, 8] = 255 - one_pixel[7, 8, 8]
    for made in (lambda x: Image.fromarray(x.numpy()), lambda x: x.float()):
        with pytest.warns(
            UserWarning, match=r"anchors (3 and 7|7 and 3) are nearly the same sample \(their distance is"
        ):
            AnchorSet.of(Samples.of([made(x) for x in one_pixel]))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            AnchorSet.of(Samples.of([made(x) for x in pixels]))


def test_few_anchors_and_missing_ids_are_told() -> None:
    anchors, ids = torch.randn(6, 4), tuple("abcdef")
    with pytest.warns(UserWarning, match="2 anchors describe a vector by two numbers"):
        RelativeProjection.of(anchors[:2])
    one = RelativeProjection.of(anchors, ids=ids)
    with pytest.warns(UserWarning, match="cannot tell whether these are the samples of the projection.* pass ids="):
        one.with_anchors(anchors)
    with pytest.raises(ValueError, match=r"these are not the anchors of the projection: .*another order"):
        one.with_anchors(anchors.flip(0), ids[::-1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        RelativeProjection.of(anchors[:3], center=True)
        assert one.with_anchors(2 * anchors, ids).ids == ids


def test_a_head_belongs_to_its_anchors(tmp_path: Path) -> None:
    data = labelled(200)
    first, second = data.take(20), data.select(range(20, 40))
    model = hf_stitch.relative_model(encoder(), first, layer="3", num_labels=3, task=TASK, progress=False)
    head = Head(HeadConfig(in_features=20, num_labels=3))
    hf_stitch.relative_model(encoder(), first, layer="3", head=head, progress=False)
    head.save_pretrained(tmp_path)
    for trained in (head, str(tmp_path)):
        with pytest.raises(ValueError, match=r"the head takes similarities to other anchors .*Use its anchors"):
            hf_stitch.relative_model(encoder(1), second, layer="3", head=trained, progress=False)
        hf_stitch.relative_model(encoder(1), first, layer="3", head=trained, progress=False)
    assert model.target.model.config.anchors_fingerprint == AnchorSet.of(first).fingerprint


def test_samples_that_are_preprocessed_otherwise_than_the_anchors_are_told() -> None:
    data = labelled(300)
    rows, labels = torch.stack(list(next(data.batches(300)).samples)), data.labels
    model = hf_stitch.relative_model(encoder(), data.take(60), layer="3", num_labels=3, task=TASK, progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        swapped = hf_stitch.swap(
            model, encoder(1), data.take(60), encoder_layer="3", data=data.select(range(60, 300)), progress=False
        )
    otherwise = Samples.of(rows * 0.25 + 0.5, label=labels).select(range(60, 300))
    for scored in (model, swapped):
        with pytest.warns(
            UserWarning, match=r"unlike those on its anchors \(their means are [\d.]+ standard deviations"
        ):
            hf_stitch.evaluate(scored, otherwise, target=model, progress=False)
