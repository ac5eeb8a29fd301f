"""What a user runs: the same file with one process and under ``accelerate launch``; the argument is a folder."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

import hf_stitch


def main(folder: str) -> None:
    nets = []
    for seed in range(2):
        torch.manual_seed(seed)
        nets.append(nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 3)).double())
    torch.manual_seed(2)
    points = torch.randn(301, 6, dtype=torch.float64)
    a, b = (hf_stitch.load(net, example_inputs=points[:2]) for net in nets)
    with torch.no_grad():
        data = hf_stitch.Samples.of(points, label=nets[1](points).argmax(1).tolist())
    train, test = data.split(101)

    task = "image-classification"
    model = hf_stitch.stitch(a, b, train, source_layer="auto", target_layer="auto", matcher="ridge", task=task)
    results = {
        "compare": hf_stitch.compare(a, b, train, metrics=["linear_cka", "procrustes"], batch_size=16),
        "evaluate": hf_stitch.evaluate(model, test, batch_size=16, resamples=40),
        "audit": hf_stitch.audit(model, test, batch_size=16, resamples=40),
        "grid": hf_stitch.stitch_grid(a, b, train, test_data=test, task=task, batch_size=16, resamples=40),
    }
    for name, result in results.items():
        result.save(Path(folder) / f"{name}.json")


if __name__ == "__main__":
    main(sys.argv[1])
