"""Comparisons that are shared by processes, or killed: the atlas is the one of a single quiet process."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import multiprocessing, nn

import hf_stitch
from hf_stitch.analysis.activations import Activations
from hf_stitch.analysis.atlas import compare
from hf_stitch.metrics import build_metric

N, BATCH = 61, 8


def sides() -> tuple[Any, ...]:
    """A network, saved activations of wider layers, and samples."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    saved = {f"l{i}": torch.randn(N, 3 + i, generator=generator, dtype=torch.float64) for i in range(2)}
    points = torch.randn(N, 4, generator=generator, dtype=torch.float64)
    return hf_stitch.load(net, example_inputs=points[:2]), Activations(saved, range(N)), points


def metrics(minibatch: bool) -> list[Any]:
    exact = ["linear_cka", build_metric("linear_cka", debiased=True), "procrustes", "rsa", "mutual_knn"]
    return [*exact, build_metric("minibatch_cka", batch_size=16)] if minibatch else exact


def compared(minibatch: bool, **options: Any) -> Any:
    return compare(*sides(), metrics=metrics(minibatch), batch_size=BATCH, progress=False, **options)


def die(folder: Path, batches: int) -> None:
    """Compare, and be killed after some batches."""
    torch.set_num_threads(1)
    a, b, points = sides()
    a.layers  # noqa: B018  # surveyed before forwards are counted
    left = [batches + 2]

    def kill(*_: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    a.model.register_forward_pre_hook(kill)
    compare(a, b, points, metrics=metrics(True), batch_size=BATCH, resume=folder, progress=False)


def share(rank: int, count: int, port: int, folder: Path) -> None:
    """Be one of several processes; what launches them sets these variables."""
    torch.set_num_threads(1)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in place.items()} | {"ACCELERATE_USE_CPU": "true"})
    np.savez(folder / f"{rank}.npz", **compared(False, resume=folder / "run").values)
    torch.distributed.destroy_process_group()


def spawn(target: Any, *arguments: Any, count: int = 1) -> list[int | None]:
    context = multiprocessing.get_context("forkserver")  # imports once for all, and forks before there are threads
    context.set_forkserver_preload(["accelerate", "hf_stitch.analysis.atlas", "hf_stitch.adapters.torch"])
    ranks: list[tuple[Any, ...]] = [(i,) for i in range(count)] if count > 1 else [()]
    started = [context.Process(target=target, args=(*rank, *arguments)) for rank in ranks]
    for process in started:
        process.start()
    for process in started:
        process.join(60)
        process.kill()
        process.join()
    return [process.exitcode for process in started]


@pytest.fixture(scope="module")
def whole() -> Any:
    return compared(True)


def test_killed_and_resumed_is_the_same_bit_for_bit(whole: Any, tmp_path: Path) -> None:
    assert spawn(die, tmp_path, 5) == [-signal.SIGKILL]
    assert (tmp_path / "state-0.safetensors").is_file()
    resumed = compared(True, resume=tmp_path)
    assert all(np.array_equal(resumed[name], whole[name]) for name in whole.values)


def test_two_processes_give_the_atlas_of_one(whole: Any, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert spawn(share, 2, port, tmp_path, count=2) == [0, 0]
    first, second = (np.load(tmp_path / f"{rank}.npz") for rank in range(2))
    for name in first:
        np.testing.assert_array_equal(first[name], second[name])
        np.testing.assert_allclose(first[name], whole[name], rtol=1e-10, atol=1e-10)
