"""Relative representations between networks: a head trained on one encoder's takes another encoder's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import hf_stitch
from hf_stitch.artefacts.joining import join
from hf_stitch.relative import AnchorSet, RelativeProjection, select_anchors
from hf_stitch.stitches import StitchingLayer

TURN = torch.linalg.qr(torch.randn(6, 6, generator=torch.Generator().manual_seed(0))).Q


@pytest.fixture
def encoders() -> tuple[hf_stitch.Adapter, hf_stitch.Adapter]:
    """Two encoders; the second rotates and scales the activations of the first."""
    torch.manual_seed(0)
    body = [nn.Linear(4, 6), nn.Tanh()]
    turn = nn.Linear(6, 6, bias=False)
    turn.weight.data = 3 * TURN
    one, other = nn.Sequential(*body, nn.Identity(), nn.Linear(6, 2)), nn.Sequential(*body, turn, nn.Linear(6, 2))
    a, b = (hf_stitch.load(net, example_inputs=torch.randn(2, 4)) for net in (one, other))
    return a, b


def test_a_relative_head_takes_another_encoder(encoders: tuple[hf_stitch.Adapter, ...], tmp_path: Path) -> None:
    chosen = select_anchors(torch.randn(40, 4), 10)
    anchors = AnchorSet.of(chosen)
    for encoder in encoders:
        anchors = anchors.encode(encoder, "2", chosen)
    head = hf_stitch.load(nn.Sequential(nn.LayerNorm(10), nn.Linear(10, 3)), example_inputs=torch.randn(2, 10))
    projection = RelativeProjection.of(anchors.values(encoders[0], "2"), center=True)
    exchanged = projection.with_anchors(anchors.values(encoders[1], "2"))
    models = []
    for encoder, body in zip(encoders, (projection, exchanged), strict=True):
        layer = StitchingLayer(encoder.spec("2"), head.spec("0"), "mean", body)
        models.append(join(encoder, "2", layer, head, "0", task=None))
    x = torch.randn(7, 4)
    torch.testing.assert_close(models[1](input=x), models[0](input=x), rtol=1e-4, atol=1e-5)
    models[1].stitcher.save_pretrained(tmp_path)
    again = hf_stitch.Stitcher.from_pretrained(tmp_path).attach(encoders[1], head)
    assert torch.equal(again(input=x), models[1](input=x))


def test_an_ordinary_head_takes_another_encoder_by_inverse_projection(encoders: tuple[hf_stitch.Adapter, ...]) -> None:
    b, a = encoders
    stitched = hf_stitch.stitch(
        a,
        b,
        torch.randn(100, 4),
        source_layer="2",
        target_layer="2",
        matcher="inverse_relative",
        rcond=1e-3,
        task=None,
        progress=False,
    )
    x = torch.randn(7, 4)
    torch.testing.assert_close(stitched(input=x), b.model(x), rtol=1e-3, atol=1e-4)


def test_relative_cosine_sees_no_difference_between_them(encoders: tuple[hf_stitch.Adapter, ...]) -> None:
    atlas = hf_stitch.compare(
        *encoders,
        torch.randn(50, 4),
        metrics=["relative_cosine"],
        layers_a=["2"],
        layers_b=["2"],
        rows="mean",
        progress=False,
    )
    assert atlas["relative_cosine"][0, 0] == pytest.approx(1, abs=1e-6)
