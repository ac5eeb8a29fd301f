"""What misled newcomers, as they ran it: each test is a snippet, and the answer that it should give."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import hf_stitch
from hf_stitch import Adapter
from hf_stitch.training import StitchabilityCallback


# -- a stitch that is better than its target ---------------------------------------------------------------------------
def test_a_stitch_above_its_target_is_scored_beside_its_source(tmp_path: Path) -> None:
    """The first layer of the target confuses two classes, that of the source none: 1.33 of the target's accuracy."""
    torch.manual_seed(0)
    labels = torch.arange(600) % 4
    images = torch.eye(4)[labels].reshape(-1, 1, 2, 2).repeat(1, 3, 1, 1) + 0.05 * torch.randn(600, 3, 2, 2)

    def network(mixing: torch.Tensor) -> Adapter:
        net = nn.Sequential(nn.Flatten(), nn.Linear(12, 4, bias=False), nn.ReLU(), nn.Linear(4, 4, bias=False))
        with torch.no_grad():
            net[1].weight.copy_(mixing @ torch.eye(4).repeat(1, 3) / 3)
            net[3].weight.copy_(torch.eye(4))
        return hf_stitch.load(net, example_inputs=images[:2])

    confused = torch.eye(4)
    confused[:2, :2] = 0.5
    source, target = network(torch.eye(4)), network(confused)
    data = hf_stitch.Samples.of(images, label=labels.tolist())
    stitched = hf_stitch.stitch(source, target, data, source_layer="2", target_layer="2", matcher="identity")
    scores = {who: row["accuracy"].value for who, row in stitched.evaluation.scores.items()}
    assert scores["stitched"] == scores["source"] == 1.0 and scores["target"] < 0.85
    stitched.stitcher.save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "source alone 1.000" in card and "not shown to be better than: no map, source alone." in card
    assert "| source |" in card and "source" in str(stitched.evaluation)

    wider = nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.ReLU(), nn.Linear(4, 7))
    of_seven = hf_stitch.load(wider, example_inputs=images[:2])
    across = hf_stitch.stitch(of_seven, target, data, source_layer="2", target_layer="2").evaluation
    assert "source" not in across.scores and across.left_out == {"source": "its head has other classes"}
    assert "no source: its head has other classes" in str(across)


# -- what a score during training means --------------------------------------------------------------------------------
def test_the_first_layer_of_an_untrained_network_is_scored_beside_another_untrained_one() -> None:
    """An untrained network scores well above chance at its first layer: no sign of what it has learned."""
    torch.manual_seed(1)
    images = torch.randn(300, 1, 4, 4)
    nets = [
        nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(16, 3))
        for _ in range(2)
    ]
    untrained, reference = (hf_stitch.load(net, example_inputs=images[:2]) for net in nets)
    data = hf_stitch.Samples.of(images, label=reference.forward(images).argmax(1).tolist())
    found = StitchabilityCallback(reference, data, layers=["1"]).measure(untrained, step=0)
    own, twin, mean = (found[f"stitchability/{kind}/1"] for kind in ("relative_accuracy", "untrained", "mean_only"))
    assert own > 0.7 > mean
    assert abs(own - twin) < 0.2
