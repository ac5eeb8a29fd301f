"""Axes of tensors follow from the operations of a forward, never from lengths that happen to be equal."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import timm
import torch
import transformers as hf
from families import Block, Code
from timm.layers import LayerNorm2d
from torch import Tensor, nn
from torch.nn import functional

import hf_stitch
from hf_stitch.representation import POOLINGS


def blocks() -> nn.Sequential:
    return nn.Sequential(Block(16), Block(16))


class Patches(nn.Module):
    """Patches of 8 × 8 pixels between ``before`` and ``behind`` learned tokens, followed by blocks."""

    def __init__(self, how: str, before: int = 0, behind: int = 0) -> None:
        super().__init__()
        self.how = how
        self.proj = nn.Conv2d(3, 16, 8, 8) if how == "conv" else nn.Linear(3 * 64, 16)
        self.before = nn.Parameter(torch.randn(1, before, 16)) if before else None
        self.behind = nn.Parameter(torch.randn(1, behind, 16)) if behind else None
        self.blocks = blocks()

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        if self.how == "conv":
            x = self.proj(x).flatten(2).transpose(1, 2)
        elif self.how == "unfold":
            x = self.proj(functional.unfold(x, 8, stride=8).transpose(1, 2))
        else:
            x = x.reshape(b, c, h // 8, 8, w // 8, 8).permute(0, 2, 4, 3, 5, 1)
            x = self.proj(x.reshape(b, (h // 8) * (w // 8), -1))
        learned = [one if one is None else one.expand(b, -1, -1) for one in (self.before, self.behind)]
        x = torch.cat([one for one in (learned[0], x, learned[1]) if one is not None], 1)
        return self.blocks(x).mean(1)


def specs(model: nn.Module, *size: int, layer: str | None = None) -> dict[str, str]:
    """Specs at all cuts, or at one, for a batch of two samples of a size."""
    adapter = hf_stitch.load(model.eval(), example_inputs=torch.randn(2, *size))
    return {name: str(adapter.spec(name)) for name in ([layer] if layer else adapter.layers)}


def of_vit(name: str, **options: Any) -> str:
    model = timm.create_model(name, **{"patch_size": 8, "depth": 2, "embed_dim": 48, "num_classes": 5, **options})
    height, width = model.patch_embed.img_size
    return specs(model, 3, height, width)["blocks.0"]


# -- the grid of tokens -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("heads", [1, 3])
def test_heads_and_widths_are_no_grid(heads: int) -> None:
    assert of_vit("vit_tiny_patch16_224", img_size=32, num_heads=heads) == "bnd 48 4x4 +1"
    assert of_vit("vit_small_patch16_dinov3", img_size=32, num_heads=heads) == "bnd 48 4x4 +5"
    # a width that is the number of patches
    assert of_vit("vit_tiny_patch16_224", img_size=(16, 64), embed_dim=16, num_heads=4) == "bnd 16 2x8 +1"


@pytest.mark.parametrize(
    ("how", "size", "before"),
    [
        ("conv", (32, 48), 1), ("conv", (32, 32), 0), ("unfold", (32, 32), 5), ("unfold", (24, 40), 0),
        ("reshape", (24, 40), 1), ("reshape", (32, 48), 5),
    ],
)  # fmt: skip
def test_patches_form_a_grid_for_each_kind_of_embedding(how: str, size: tuple[int, int], before: int) -> None:
    adapter = hf_stitch.load(Patches(how, before).eval(), example_inputs=torch.randn(2, 3, *size))
    h, w = (n // 8 for n in size)
    assert str(adapter.spec("blocks.0")) == f"bnd 16 {h}x{w}" + (f" +{before}" if before else "")
    assert adapter.encode(torch.randn(4, 3, *size), "blocks.0")["blocks.0"].rows().shape == (4 * h * w, 16)


class Latents(Patches):
    """Latents with cross-attention to 4 × 4 patches."""

    def __init__(self, count: int) -> None:
        super().__init__("conv")
        self.latents = torch.randn(count, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.proj(x).flatten(2).transpose(1, 2)
        return self.blocks((self.latents @ x.transpose(1, 2)).softmax(-1) @ x).mean(1)


class Windows(Patches):
    """The order of patches in Hiera: window by window."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.proj(x).flatten(2).transpose(1, 2).reshape(len(x), 2, 2, 2, 2, 16)
        return self.blocks(x.permute(0, 1, 3, 2, 4, 5).reshape(len(x), 16, 16)).mean(1)


@pytest.mark.parametrize(
    "model", [Latents(20), Latents(25), Windows("conv"), Patches("conv", 1, 3)],
    ids=["latents", "a square number of latents", "window by window", "tokens after the patches"],
)  # fmt: skip
def test_tokens_that_are_not_patches_in_row_major_order_are_no_grid(model: nn.Module) -> None:
    assert specs(model, 3, 32, 32)["blocks.0"] == "bnd 16"


def test_a_shrinking_grid_is_found_at_each_size() -> None:
    config = hf.PvtConfig(image_size=64, depths=[1, 1, 1, 1], hidden_sizes=[8, 16, 40, 64])
    adapter = hf_stitch.load(hf.PvtForImageClassification(config).eval())
    got = [str(adapter.spec(f"pvt.encoder.block.{stage}.0")) for stage in range(4)]
    assert got == ["bnd 8 16x16", "bnd 16 8x8", "bnd 40 4x4", "bnd 64 2x2 +1"]


# -- axis of the channels ----------------------------------------------------------------------------------------------
def test_layers_that_keep_the_shape_keep_the_axes() -> None:
    net = nn.Sequential(nn.Conv1d(3, 4, 3), nn.ReLU(), nn.Conv1d(4, 6, 3), nn.Tanh(), nn.Flatten(), nn.Linear(96, 2))
    assert specs(net, 3, 20) == {"0": "bnd 4", "1": "bnd 4", "2": "bnd 6", "3": "bnd 6", "4": "bd 96"}


@pytest.mark.parametrize(
    ("channels", "size", "middle"),
    [
        (16, (16, 20), "relu"), (8, (24, 20), "norm2d"), (16, (16, 16), "relu"), (16, (16, 16), "norm2d"),
        (16, (16, 16), "group norm"), (20, (16, 16), "relu"),
    ],
)  # fmt: skip
def test_adjacent_layers_determine_the_axis_of_the_channels(channels: int, size: tuple[int, int], middle: str) -> None:
    between: Callable[[], nn.Module] = {
        "relu": nn.ReLU, "norm2d": partial(LayerNorm2d, channels), "group norm": partial(nn.GroupNorm, 2, channels)
    }[middle]  # fmt: skip
    net = nn.Sequential(
        nn.ConvTranspose2d(3, channels, 3, padding=1), between(),
        nn.Conv2d(channels, channels, 3, padding=1), between(), nn.Dropout(), nn.AdaptiveAvgPool2d(1),
    )  # fmt: skip
    want = f"bchw {channels} {size[0]}x{size[1]}"
    assert {spec for name, spec in specs(net, 3, *size).items() if name != "5"} == {want}


def test_the_next_layer_determines_channels_last_of_a_cube() -> None:
    last = Code(
        lambda net, x: net.norm(net.blocks(net.stem(x).permute(0, 2, 3, 1))), stem=nn.Conv2d(3, 16, 3, padding=1),
        blocks=nn.Sequential(Block(16), nn.GELU(), Block(16), nn.GELU()), norm=nn.LayerNorm(16),
    )  # fmt: skip
    got = {layer: specs(last, 3, 16, 16, layer=layer)[layer] for layer in ("stem", "blocks.0", "blocks.3")}
    assert got == {"stem": "bchw 16 16x16", "blocks.0": "bhwc 16 16x16", "blocks.3": "bhwc 16 16x16"}


def test_without_layers_the_aspect_ratio_determines_the_channels_or_the_layer_is_refused() -> None:
    net = nn.Sequential(*(Code(lambda net, x: x * 2 + x.mean(1, keepdim=True)) for _ in range(3)))
    assert specs(net, 3, 16, 20)["1"] == "bchw 3 16x20"
    adapter = hf_stitch.load(net, example_inputs=torch.randn(2, 16, 16, 16))
    assert "an unknown axis of channels" in adapter.verify_cut("1").reason


# -- padding of texts --------------------------------------------------------------------------------------------------
class Reader(nn.Module):
    """A text model that pads, merges and extends the tokens before its blocks."""

    def __init__(self, before: int = 0, behind: int = 0, merge: int = 1, window: int = 1) -> None:
        super().__init__()
        self.merge, self.window = merge, window
        self.embedding = nn.Embedding(50, 16)
        self.learned = nn.Parameter(torch.randn(1, before + behind, 16))
        self.before = before
        self.blocks = blocks()

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        ids = functional.pad(ids, (0, -ids.shape[1] % self.window), value=0)
        x = self.embedding(ids)
        if self.merge > 1:
            x = functional.avg_pool1d(x.transpose(1, 2), self.merge, ceil_mode=True).transpose(1, 2)
        learned = self.learned.expand(len(x), -1, -1)
        return self.blocks(torch.cat([learned[:, : self.before], x, learned[:, self.before :]], 1)).mean(1)


def read(model: nn.Module, *lengths: int, masked: bool = True) -> Any:
    """Activations at the first block for texts of some lengths, padded to the longest; the example has 6 tokens."""
    ids = torch.randint(1, 50, (2, 6))
    adapter = hf_stitch.load(model.eval(), example_inputs={"ids": ids, "attention_mask": torch.ones_like(ids)})
    assert adapter.layers == ("blocks.0", "blocks.1")
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    inputs = {"ids": torch.randint(1, 50, mask.shape), **({"attention_mask": mask} if masked else {})}
    representation = adapter.encode(inputs, "blocks.0")["blocks.0"]
    with torch.no_grad():
        assert torch.equal(adapter.decode(representation, "blocks.0"), model(**inputs))
    return representation


def test_a_prepended_class_token_is_a_prefix_and_padding_is_no_row() -> None:
    representation = read(Reader(before=2), 3, 9)
    assert representation.prefix_tokens == 2
    assert representation.mask.tolist() == [[True] * 5 + [False] * 6, [True] * 11]
    assert representation.rows().shape == (12, 16)
    assert torch.equal(representation.rows("last")[0], representation.values[0, 4])
    assert read(Reader(before=1, behind=2), 3, 9).rows().shape == (12, 16)  # learned tokens behind a text


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("window", [4, 32])
def test_padding_that_a_network_adds_is_no_row(window: int, masked: bool) -> None:
    representation = read(Reader(before=1, window=window), 3, 9, masked=masked)
    assert representation.values.shape[1] == 1 + -(-9 // window) * window
    assert representation.rows().shape == (12 if masked else 18, 16)
    assert torch.equal(representation.rows("mean")[1], representation.values[1, 1:10].mean(0))


def test_rows_are_refused_if_the_positions_of_padding_are_unknown() -> None:
    representation = read(Reader(merge=2), 3, 9)
    for policy in POOLINGS:
        if policy == "cls":
            assert representation.rows(policy).shape == (2, 16)
        else:
            with pytest.raises(ValueError, match="would include padding"):
                representation.rows(policy)
    with pytest.raises(ValueError, match="would include padding"):
        representation.row_samples("none")
    assert read(Reader(merge=2), 9, 9, masked=False).rows().shape == (10, 16)


def test_padding_of_longer_texts_only_is_unknown() -> None:
    class Chunked(Reader):
        def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            return super().forward(ids if ids.shape[1] < 8 else functional.pad(ids, (0, -ids.shape[1] % 8)))

    assert read(Chunked(), 3, 7).rows().shape == (10, 16)
    with pytest.raises(ValueError, match="would include padding"):
        read(Chunked(), 3, 13).rows("mean")


def test_latents_of_a_text_are_all_real() -> None:
    class Asking(Reader):
        def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
            x = self.embedding(ids)
            weights = (self.learned @ x.transpose(1, 2)).masked_fill(attention_mask[:, None] == 0, -1e9).softmax(-1)
            return self.blocks(weights @ x).mean(1)

    assert read(Asking(before=5), 3, 9).rows().shape == (10, 16)


def test_the_mask_of_a_sequence_of_vectors_counts() -> None:
    class Sequence(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cls, self.blocks = nn.Parameter(torch.randn(1, 1, 16)), blocks()

        def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
            x = torch.cat([self.cls.expand(len(x), -1, -1), x * attention_mask[..., None]], 1)
            return self.blocks(x)[:, 0]

    example = {"x": torch.randn(2, 6, 16), "attention_mask": torch.ones(2, 6)}
    adapter = hf_stitch.load(Sequence(), example_inputs=example)
    mask = torch.tensor([[1.0, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0]])
    representation = adapter.encode({"x": torch.randn(2, 6, 16), "attention_mask": mask}, "blocks.0")["blocks.0"]
    assert (representation.prefix_tokens, representation.rows().shape) == (1, (8, 16))


def test_a_number_for_each_token_is_no_representation() -> None:
    net = Code(
        lambda net, ids: net.blocks(net.score(net.embedding(ids)).squeeze(-1)).sum(1), embedding=nn.Embedding(50, 8),
        score=nn.Linear(8, 1), blocks=nn.Sequential(nn.Tanh(), nn.Sigmoid()),
    )  # fmt: skip
    adapter = hf_stitch.load(net, example_inputs=torch.randint(1, 50, (2, 6)))
    assert set(adapter.layers) == {"embedding", "score"}
    assert "a number for each token, not a vector" in adapter.verify_cut("blocks.0").reason
