"""A process that fails or is killed ends the others with its error, within a bounded time."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jobs
import pytest
from processes import TORCHRUN, exit_codes, free_port, run_rank, start

import hf_stitch
from hf_stitch.training import TaskLoss

BOUND = 30
"""Seconds within which the others end."""


def fail() -> None:
    Path(os.environ["WHEN"]).write_text(str(time.time()))
    raise OSError("the disk of this process is full")


def kill() -> None:
    Path(os.environ["WHEN"]).write_text(str(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)


HOW = {"fails": fail, "killed": kill}


def read_some_batches_and(how: Callable[[], None], left: int = 1) -> None:
    """Call a function when this process has read some batches of more than one sample."""
    batches = hf_stitch.Samples.batches

    def reading(self: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal left
        for batch in batches(self, *arguments, **options):
            left -= len(batch.samples) > 1
            if left < 0:
                how()
            yield batch

    hf_stitch.Samples.batches = reading  # type: ignore[method-assign]


def train(folder: Path) -> None:
    """Training that is disturbed in the middle of its steps."""

    def callback(step: int, layers: Any) -> None:
        if step == 7 and os.environ["RANK"] == os.environ["DISTURBED"]:
            HOW[os.environ["HOW"]]()

    TaskLoss(epochs=1, max_steps=20, batch_size=16).fit(
        jobs.stitched(), jobs.images(80), target=jobs.networks()[1], callback=callback, progress=False
    )


WORK: dict[str, Callable[[Path], Any]] = {
    "compare": jobs.atlas, "stitch": jobs.closed_form, "stitch_grid": jobs.grid, "evaluate": jobs.evaluation,
    "audit": jobs.audit, "TaskLoss": train,
}  # fmt: skip


def work(rank: int, folder: Path, name: str, who: int, how: str) -> None:
    """Do a job in which one process is disturbed; the others note their errors and when they ended."""
    os.environ |= {"DISTURBED": str(who), "HOW": how, "WHEN": str(folder / "when")}
    jobs.stitched(), jobs.stitched(matcher="identity", source_layer="3")
    if rank == who and name != "TaskLoss":
        read_some_batches_and(HOW[how])
    try:
        WORK[name](folder)
    except Exception as error:
        (folder / f"{rank}.json").write_text(json.dumps([f"{type(error).__name__}: {error}", time.time()]))
        os._exit(3)
    os._exit(0)


def ends(folder: Path, count: int, name: str, who: int, how: str) -> tuple[list[str], float]:
    """Return the errors of the other processes, and the seconds until the last of them ended."""
    port = free_port()
    places = [dict(zip(TORCHRUN, map(str, (rank, rank, count)), strict=True)) for rank in range(count)]
    started = [start(run_rank, place, port, work, rank, folder, name, who, how) for rank, place in enumerate(places)]
    codes = exit_codes(*started)
    assert codes == [-signal.SIGKILL if how == "killed" and rank == who else 3 for rank in range(count)]
    noted = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count) if rank != who]
    return [what for what, _ in noted], max(at for _, at in noted) - float((folder / "when").read_text())


def explained(error: str, who: int, how: str) -> bool:
    """Whether an error names the process that ended, or, of one that took the connections along, that it did."""
    expected = f"process {who} failed: OSError: the disk of this process is full"
    killed = (f"process {who} has ended", "the process that connects all has ended")
    named = expected in error if how == "fails" else any(part in error for part in killed[: 1 + (who == 0)])
    return error.startswith("OtherProcessError") and named


@pytest.mark.parametrize(("name", "who", "how"), [("evaluate", 1, "fails"), ("stitch", 1, "killed")])
def test_the_others_end_with_the_error(name: str, who: int, how: str, tmp_path: Path) -> None:
    errors, seconds = ends(tmp_path, 2, name, who, how)
    assert all(explained(error, who, how) for error in errors), errors
    assert seconds < BOUND


@pytest.mark.slow
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("who", [0, 2])
@pytest.mark.parametrize("name", WORK)
def test_three_processes_end_with_the_error_of_any_job(name: str, who: int, how: str, tmp_path: Path) -> None:
    errors, seconds = ends(tmp_path, 3, name, who, how)
    assert all(explained(error, who, how) for error in errors), errors
    assert seconds < BOUND
