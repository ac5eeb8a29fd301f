"""A job of several processes, of which one was killed, goes on from its checkpoint with the same result."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jobs
import numpy as np
import pytest
import torch
from processes import TORCHRUN, exit_codes, free_port, run_rank, run_ranks, start

import hf_stitch
from hf_stitch.storage.checkpoint import Checkpoint
from hf_stitch.training import TaskLoss


def compare(folder: Path) -> Any:
    a, b = jobs.networks()
    found = hf_stitch.compare(
        a, b, jobs.images(), metrics=["linear_cka", "rsa"], batch_size=4, checkpoint_dir=folder, progress=False
    )
    return jobs.numbers(found)


def grid(folder: Path) -> Any:
    return jobs.grid(folder, checkpoint_dir=folder)


def trained_grid(folder: Path) -> Any:
    """Stitches that are trained are a part of the grid."""
    trained = TaskLoss(epochs=1, max_steps=12, batch_size=16)
    return jobs.grid(folder, checkpoint_dir=folder, matchers=["lstsq", trained], detectors=[])


def training(folder: Path) -> Any:
    layer = TaskLoss(epochs=1, max_steps=20, batch_size=16).fit(
        jobs.stitched(), jobs.images(80), target=jobs.networks()[1], checkpoint_dir=folder, save_every=3, progress=False
    )
    return torch.cat([value.flatten() for value in layer.state_dict().values()])


WORK: dict[str, Callable[[Path], Any]] = {each.__name__: each for each in (compare, grid, trained_grid, training)}


def killed(rank: int, folder: Path, name: str, who: int, saves: int) -> None:
    """Do a job in which a process is killed when it has saved its state a few times."""
    save, left = Checkpoint.save, saves

    def saving(self: Checkpoint, *arguments: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        save(self, *arguments)

    Checkpoint.due = lambda self, done: self.lasting  # type: ignore[method-assign]  # after each batch
    if rank == who:
        Checkpoint.save = saving  # type: ignore[method-assign]
    try:
        WORK[name](folder / "state")
    except Exception:
        os._exit(3)
    os._exit(0)


def resumed(rank: int, folder: Path, name: str) -> None:
    np.save(folder / f"{rank}.npy", np.asarray(WORK[name](folder / "state")))


def uninterrupted(rank: int, folder: Path, name: str) -> None:
    np.save(folder / f"whole-{rank}.npy", np.asarray(WORK[name](folder / "other state")))


def check(folder: Path, count: int, name: str, who: int, saves: int) -> None:
    folder.mkdir(exist_ok=True)
    port = free_port()
    places = [dict(zip(TORCHRUN, map(str, (rank, rank, count)), strict=True)) for rank in range(count)]
    codes = exit_codes(
        *(start(run_rank, place, port, killed, rank, folder, name, who, saves) for rank, place in enumerate(places))
    )
    assert codes == [-signal.SIGKILL if rank == who else 3 for rank in range(count)]
    run_ranks(count, resumed, folder, name)
    run_ranks(count, uninterrupted, folder, name)
    for rank in range(count):
        found, whole = np.load(folder / f"{rank}.npy"), np.load(folder / f"whole-{rank}.npy")
        assert np.array_equal(found, whole, equal_nan=True)


@pytest.mark.parametrize(("name", "who", "saves"), [("grid", 1, 9)])
def test_a_killed_job_is_resumed(name: str, who: int, saves: int, tmp_path: Path) -> None:
    """The process is killed while it scores, after it has fitted."""
    check(tmp_path, 2, name, who, saves)


@pytest.mark.slow
@pytest.mark.parametrize("name", WORK)
def test_a_job_killed_anywhere_is_resumed(name: str, tmp_path: Path) -> None:
    for number in range(10):
        who = number % 2 if name != "training" else 0  # the first process alone saves the state of training
        check(tmp_path / str(number), 2, name, who, saves=number // 2)
