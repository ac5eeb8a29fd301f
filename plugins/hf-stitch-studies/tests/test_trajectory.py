"""Figures recorded during the training of a stitching layer."""

from __future__ import annotations

import pytest
import torch
from hf_stitch_studies.trajectory import Trajectory, TrajectoryRecorder
from torch.nn import Linear, ReLU, Sequential

import hf_stitch
from hf_stitch.registry import registries
from hf_stitch.training import TaskLoss


def model() -> hf_stitch.StitchedModel:
    torch.manual_seed(0)
    nets = [Sequential(Linear(6, 12), ReLU(), Linear(12, 3)) for _ in range(2)]
    a, b = (hf_stitch.load(net, example_inputs=torch.randn(2, 6)) for net in nets)
    return hf_stitch.stitch(
        a, b, torch.randn(300, 6), source_layer="1", target_layer="1", task="image-classification", progress=False
    )


def test_figures_match_the_stitching_layer_at_each_step() -> None:
    stitched, probe = model(), torch.randn(100, 6, generator=torch.Generator().manual_seed(1))
    metrics = ["linear_cka", "direct_matching", registries.metrics.build("cca", ridge=1e-6)]
    recorder = TrajectoryRecorder(stitched, probe, metrics, every=5, batch_size=30)
    training = TaskLoss(max_steps=20, lr=1e-2, batch_size=30)
    layer = training.fit(stitched, torch.randn(90, 6), callback=recorder, progress=False)
    found = recorder.trajectory
    assert found.steps == (0, 5, 10, 15, 20) and found.n == 100
    assert set(found.figures) == {
        "relative_accuracy", "cross_entropy", "linear_cka", "direct_matching", "cca(ridge=1e-06)"
    }  # fmt: skip
    a, b = stitched.parents  # type: ignore[misc]
    with torch.no_grad():
        x, y = (net.encode(net.preprocess([*probe]), "1")["1"] for net in (a, b))
        for place, which in ((0, stitched.stitch), (-1, layer)):
            rows = which(x).values
            assert found["linear_cka"][place] == pytest.approx(hf_stitch.metrics.linear_cka(rows, y.values).item())
            logits, expected = stitched.head(which(x)).logits, b.decode(y, "1")
            loss = torch.nn.functional.cross_entropy(logits, expected.softmax(-1)).item()
            assert found["cross_entropy"][place] == pytest.approx(loss, rel=1e-5)
            agreed = (logits.argmax(1) == expected.argmax(1)).double().mean().item()
            assert found["relative_accuracy"][place] == pytest.approx(agreed)
    # CCA is invariant to invertible maps, so it does not change during training
    assert max(found["cca(ridge=1e-06)"]) - min(found["cca(ridge=1e-06)"]) < 1e-3
    assert Trajectory.from_dict(found.to_dict()) == found
    assert list(found.to_pandas()["step"]) == list(found.steps)


def test_bad_input_is_rejected() -> None:
    with pytest.raises(ValueError, match="every must be an integer >= 1, got 0"):
        TrajectoryRecorder(model(), torch.randn(10, 6), every=0)
    with pytest.raises(ValueError, match="disagreement compares outputs"):
        TrajectoryRecorder(model(), torch.randn(10, 6), ["disagreement"])
    stitched = model()
    headless = hf_stitch.stitch(
        *stitched.parents, torch.randn(100, 6), source_layer="1", target_layer="1", task=None, progress=False
    )
    with pytest.raises(ValueError, match="requires a classification head"):
        TrajectoryRecorder(headless, torch.randn(10, 6))
