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
from processes import run_ranks

from hf_stitch.storage.checkpoint import Checkpoint
from hf_stitch.training import TaskLoss

TRAINED: dict[str, Any] = {"matchers": ["lstsq", TaskLoss(epochs=1, max_steps=12, batch_size=16)], "detectors": []}
"""Stitches that are trained are a part of the grid."""
WORK: dict[str, Callable[[Path], Any]] = {
    "compare": lambda folder: jobs.atlas(folder, metrics=["linear_cka", "rsa"], batch_size=4, checkpoint_dir=folder),
    "grid": lambda folder: jobs.grid(folder, checkpoint_dir=folder),
    "trained_grid": lambda folder: jobs.grid(folder, checkpoint_dir=folder, **TRAINED),
    "training": lambda folder: jobs.training(folder, checkpoint_dir=folder, save_every=3),
}


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


def whole(rank: int, folder: Path, name: str, state: str) -> None:
    """Do a job to its end, from the state in a folder if there is one."""
    np.save(folder / f"{state}-{rank}.npy", np.asarray(WORK[name](folder / state)))


def check(folder: Path, count: int, name: str, who: int, saves: int) -> None:
    folder.mkdir(exist_ok=True)
    codes = [-signal.SIGKILL if rank == who else 3 for rank in range(count)]
    run_ranks(count, killed, folder, name, who, saves, codes=codes)
    for state in ("state", "new state"):
        run_ranks(count, whole, folder, name, state)
    for rank in range(count):
        found, expected = (np.load(folder / f"{state}-{rank}.npy") for state in ("state", "new state"))
        assert np.array_equal(found, expected, equal_nan=True)


def test_a_killed_job_is_resumed(tmp_path: Path) -> None:
    """The process is killed while it scores, after it has fitted."""
    check(tmp_path, 2, "grid", who=1, saves=9)


@pytest.mark.parametrize("name", WORK)
def test_a_job_killed_anywhere_is_resumed(name: str, tmp_path: Path) -> None:
    for who, saves in ((0, 0), (1, 1), (1, 2), (0, 4)):
        who = 0 if name == "training" else who  # the first process alone saves the state of training
        check(tmp_path / str(saves), 2, name, who, saves)
