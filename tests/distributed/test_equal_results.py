"""Every job has the same result with one process and with several."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jobs
import numpy as np
import pytest
import torch
import transformers as hf
from PIL import Image
from processes import run_ranks

import hf_stitch
from hf_stitch.running import Processes
from hf_stitch.training import TaskLoss

TOLERANCE = {"training": 1e-5, "sharded": 1e-5, "relative": 1e-6, "scores_of_float32": 0}
"""Of jobs that differ: ``relative`` has a head in float32; samples have equal bits, as processes take whole batches."""
EXACT = 1e-10


def share(rank: int, folder: Path) -> None:
    """Do all jobs as one of several processes, after those of networks that are random in each of them are refused."""
    torch.manual_seed(rank)
    nets = [torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2)) for _ in range(2)]
    a, b = (hf_stitch.load(net, example_inputs=torch.randn(2, 4)) for net in nets)
    data, cuts = torch.ones(20, 4), {"source_layer": "0", "target_layer": "0"}
    for job in (lambda: hf_stitch.compare(a, b, data), lambda: hf_stitch.stitch(a, b, data, **cuts)):
        with pytest.raises(ValueError, match=r"the processes do different jobs: .* differ; load the same weights"):
            job()
    jobs.run_all(rank, folder)


@pytest.mark.parametrize("count", [2, 3])
def test_several_processes_have_the_results_of_one(count: int, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    run_ranks(count, share, tmp_path)
    jobs.run_all(count, tmp_path)  # one process, as if it had the next rank
    for job in jobs.JOBS:
        *each, whole = (np.load(tmp_path / f"{job.__name__}-{rank}.npy") for rank in range(count + 1))
        assert len(whole) > 1 and np.isfinite(whole).mean() > 0.5, job.__name__
        assert all(np.array_equal(each[0], other, equal_nan=True) for other in each), job.__name__
        tolerance = TOLERANCE.get(job.__name__, EXACT)
        np.testing.assert_allclose(each[0], whole, rtol=tolerance, atol=tolerance, err_msg=job.__name__)
    # Besides its part, a process reads single samples for checks, and the first batch, about whose means all take sums.
    *read, alone = (json.loads((tmp_path / f"read-{rank}.json").read_text()) for rank in range(count + 1))
    assert all(each[name] < 0.85 * alone[name] for each in read for name in alone), (read, alone)


def train_text(rank: int, folder: Path, shard: bool) -> None:
    """A stitch between two small language models in float32."""
    from tiny_networks import WORDS, adapted, build

    a, b = (adapted("llama", build("llama", seed)) for seed in range(2))
    data = hf_stitch.Samples.of([" ".join(WORDS[place : place + 3 + place % 7]) for place in range(37)])
    cuts = {"source_layer": "model.layers.1", "target_layer": "model.layers.1"}
    matcher = TaskLoss(max_steps=5, batch_size=8, lr=1e-2, labels="hard")
    model = hf_stitch.stitch(a, b, data, matcher="lstsq", task="text-generation", progress=False, **cuts)
    layer = matcher.fit(model, data, progress=False, shard=shard)
    np.save(folder / f"{rank}.npy", torch.cat([value.flatten() for value in layer.state_dict().values()]))


def test_distributed_weights_of_language_models(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    run_ranks(2, train_text, tmp_path, True)
    train_text(2, tmp_path, False)
    first, second, whole = (np.load(tmp_path / f"{rank}.npy") for rank in range(3))
    assert np.array_equal(first, second)
    np.testing.assert_allclose(first, whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize(("n", "batch"), [(61, 8), (7, 1), (7, 64), (64, 8), (15, 8)])
def test_parts_are_a_partition_of_whole_batches_if_there_are_enough(n: int, batch: int, count: int) -> None:
    ranks = (Processes(SimpleNamespace(num_processes=count, process_index=rank)) for rank in range(count))
    parts = [each.part(n, batch) for each in ranks]
    assert [start for start, _ in parts] == [0, *(stop for _, stop in parts[:-1])] and parts[-1][1] == n
    assert all(start < stop for start, stop in parts)
    if math.ceil(n / batch) >= count:
        assert all(start % batch == 0 for start, _ in parts)


# -- towers: the tests of one process are those of the plugin
def clip(width: int) -> Any:
    """A tiny network of two towers, whose processor makes tensors."""
    torch.manual_seed(width)
    small = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    vision = hf.CLIPVisionConfig(**small, hidden_size=width, image_size=16, patch_size=8)
    text = hf.CLIPTextConfig(**small, hidden_size=16, vocab_size=60, eos_token_id=2, bos_token_id=1)
    config = hf.CLIPConfig(vision_config=vision.to_dict(), text_config=text.to_dict(), projection_dim=16)
    return hf_stitch.load(hf.CLIPModel(config).eval(), processor=to_tensor)


def to_tensor(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.asarray(image)).permute(2, 0, 1).float() / 255 - 0.5


def exchanged(batch_size: int) -> Any:
    draw = np.random.default_rng(0)
    images = [Image.fromarray(draw.integers(0, 255, (16, 16, 3), dtype=np.uint8)) for _ in range(96)]
    options = {"batch_size": batch_size, "progress": False}
    return hf_stitch.swap(clip(16), clip(24), images, part="vision", matcher="ridge", **options)


def exchange(rank: int, folder: Path) -> None:
    for batch_size in (8, 64):
        (folder / f"{batch_size}-{rank}.json").write_text(json.dumps(exchanged(batch_size).to_dict()), encoding="utf-8")


def test_an_exchanged_tower_is_the_same_from_two_processes(tmp_path: Path) -> None:
    pytest.importorskip("hf_stitch_towers")
    run_ranks(2, exchange, tmp_path)
    alone = exchanged(8)
    assert alone.folded and "mean only" in alone.scores
    for batch_size in (8, 64):
        for rank in (0, 1):
            found = type(alone).from_dict(json.loads((tmp_path / f"{batch_size}-{rank}.json").read_text("utf-8")))
            for row, figures in alone.scores.items():
                for name, score in figures.items():
                    assert found.scores[row][name].value == pytest.approx(score.value, abs=1e-5), (row, name)
