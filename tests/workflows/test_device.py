"""What verbs copy between devices, and how often they wait for a device, by ``benchmarks/device.py``."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import exit_codes, start

import hf_stitch
from benchmarks import device, gpu
from benchmarks.networks import images, net

COUNTS: dict[str, tuple[float, ...]] = {
    "compare": (1, 0, 2, 0),  # all layers of a batch are asked at once whether they are finite
    "compare_all": (5, 2, 2, 0),  # and rows of each layer of both networks go to files, for the test
    "extract_activations": (2, 1, 1, 0),  # its result: each layer goes to the memory
    "stitch": (5, 0, 6, 0),  # 3 runs are asked; all predictors are scored: is the target finite, one copy of scores
    "stitch_grid": (12, 6, 5, 0),  # 4 runs; the same; distances of each cell
    "evaluate": (3, 0, 4, 0),  # 1 run; the same
    "audit": (42, 0, 12, 0),  # 4 runs; the same, and distances; detectors of 2 views, with noise
    "relative_model": (1, 0, 1, 0),  # vectors of anchors, which are kept in memory
    "swap": (8, 0, 4, 0),  # those, 1 run, the predictors, and whether each vector has a direction
    "TaskLoss.fit": (1, 0, 2, 0),  # the loss, to stop where it is not finite
}
"""Verb -> operations per batch that wait for the device with networks of 2 layers and further ones with a third layer,
and in the same way copies to the device: inputs of each network, labels, and of an audit also noise and places."""
ACTIVATIONS = 17 * 8
"""Numbers of a sample at a layer."""


def measured(path: str, kind: str, verbs: list[str]) -> None:
    """Write the slopes of verbs and the lines that wait."""
    Path(path).write_text(json.dumps({verb: [device.slopes(kind, verb), device.lines(kind, verb)] for verb in verbs}))


def slopes_of(kind: str, verbs: list[str], folder: Path) -> dict[str, Any]:
    """Measure in a process of its own, which registers a device for good."""
    assert exit_codes(start(measured, str(folder / "found.json"), kind, verbs)) == [0]
    return dict(json.loads((folder / "found.json").read_text()))


def test_waits_grow_with_batches_not_with_layers(tmp_path: Path) -> None:
    """All operations are on the device: tensors of two devices in one operation are an error."""
    found = slopes_of("vit", list(COUNTS), tmp_path)
    for verb, expected in COUNTS.items():
        (*counts, numbers), lines = found[verb]
        assert tuple(counts) == expected, (verb, lines)
        if verb not in ("swap", "TaskLoss.fit"):  # the first widens with its anchors here, the second keeps activations
            assert numbers < ACTIVATIONS, verb


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(("metric", "precision"), [("linear_cka", 1e-9), ("minibatch_cka", 1e-5)])
def test_statistics_of_bfloat16_have_the_documented_dtype(metric: str, precision: float, autocast: bool) -> None:
    """Float64 for moments and Gram matrices of all samples, float32 for those of minibatches."""
    networks = [hf_stitch.load(copy.deepcopy(net("vit", seed).model), example_inputs=images(2)) for seed in (0, 1)]
    for network in networks if not autocast else []:
        network.model.bfloat16()
    options: Any = {"metrics": [metric], "batch_size": 16, "progress": False}
    extract = hf_stitch.analysis.extract_activations
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = hf_stitch.compare(*networks, images(), **options)[metric]
        rows = [extract(each, images(), batch_size=16, progress=False) for each in networks]
    wide = [hf_stitch.Activations({k: v.double() for k, v in x.values.items()}, x.ids, x.pooling) for x in rows]
    assert np.abs(found - hf_stitch.compare(*wide, **options)[metric]).max() < precision


def test_the_benchmark_of_gpus_runs_and_statistics_ignore_the_precision_of_forwards() -> None:
    before = torch.get_float32_matmul_precision()
    table, found = gpu.run(torch.device("cpu"), small=True)
    assert torch.get_float32_matmul_precision() == before
    names, _, seconds, compared, moments, _, errors = (list(column.cells) for column in table.columns)
    assert len(names) == 6 and all(float(str(cell)) > 0 for cell in (*compared, *moments)) and seconds
    assert all(float(str(error)) < 1e-6 for error in errors)
    assert list(found.columns[3].cells) == ["100.00%"]
