"""Callbacks with several training processes return the values of a single process."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_ranks
from torch import nn
from watched_networks import Net, balanced, images, net, trainer

import hf_stitch
from hf_stitch.training import DynamicsRecorder, SimilarityCallback, StitchabilityCallback

COUNT = 2
PROBE = images(41, seed=5).double()


def smooth(seed: int) -> Net:
    """Network without BatchNorm and dropout, so that two processes train like one."""
    model = net(seed)
    for block in model.blocks:
        block[1], block[3] = nn.Identity(), nn.Identity()
    return model.double()


def double(model: Net) -> hf_stitch.Adapter:
    return hf_stitch.load(model, example_inputs={"pixel_values": PROBE[:2]})


def train(folder: Path, batch: int) -> dict[str, Any]:
    """Logged values and dynamics of a training run."""
    reference = double(balanced(smooth(9), PROBE))
    data = hf_stitch.Samples.of(PROBE, label=reference.forward(PROBE)["logits"].argmax(1).tolist())
    run = trainer(folder, smooth(0), per_device_train_batch_size=batch, num_train_epochs=1)
    run.train_dataset = [{**row, "pixel_values": row["pixel_values"].double()} for row in run.train_dataset]
    own = double(run.model)
    for kind in ("start", "previous", reference):
        SimilarityCallback(kind, PROBE, every=1, batch_size=8).attach(run, own)
    StitchabilityCallback(reference, data, every=1, batch_size=8, matcher="ridge", ridge=1e-3).attach(run, own)
    recorder = DynamicsRecorder(folder / "recordings", PROBE, every=1, batch_size=8).attach(run, own)
    run.train()
    kept = [{k: v for k, v in e.items() if "/" in k or k == "step"} for e in run.state.log_history]
    return {"log": [e for e in kept if len(e) > 1], "dynamics": recorder.result().to_dict()["values"]}


def own_buffers() -> list[float]:
    """Values of a network whose BatchNorm statistics differ between processes; the statistics must not change."""
    rank = int(os.environ.get("RANK", 0))
    model = net().double()
    own, callback = double(model), SimilarityCallback(double(net(9).double()), PROBE, batch_size=8)
    model.blocks[0][1].running_mean += rank
    before = [buffer.clone() for buffer in model.buffers()]
    places = [buffer.data_ptr() for buffer in model.buffers()]
    figures = callback.measure(own, step=0)
    assert all(torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))
    assert places == [buffer.data_ptr() for buffer in model.buffers()]
    return list(figures.values())


def share(rank: int, folder: Path) -> None:
    (folder / f"{rank}.json").write_text(json.dumps({**train(folder, batch=4), "buffers": own_buffers()}))


def flat(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [number for key in sorted(value) for number in flat(value[key])]
    return [number for item in value for number in flat(item)] if isinstance(value, list) else [float(value)]


def test_two_processes_log_the_values_of_one(tmp_path: Path) -> None:
    (tmp_path / "both").mkdir()
    run_ranks(COUNT, share, tmp_path / "both")
    first, second = (json.loads((tmp_path / "both" / f"{rank}.json").read_text()) for rank in range(COUNT))
    assert first == second
    one = json.loads(json.dumps({**train(tmp_path / "one", batch=8), "buffers": own_buffers()}))
    assert [list(entry) for entry in first["log"]] == [list(entry) for entry in one["log"]]
    assert len(first["log"]) == 5 * 4 - 1  # five measurements of four callbacks; "previous" has no first value
    assert flat(first) == pytest.approx(flat(one), abs=1e-9)
