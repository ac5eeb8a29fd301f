"""A process that fails or is killed ends the others within a bounded time."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jobs
import pytest
from processes import free_port, run_ranks

import hf_stitch

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

    jobs.training(folder, callback=callback)


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


OTHER = r"OtherProcessError: [\w.]+ stops in process \d, because another process has failed or ended: see its error"


def check(folder: Path, count: int, name: str, who: int, how: str) -> None:
    """Check the errors of the other processes, and the seconds until the last of them ended."""
    codes = [-signal.SIGKILL if how == "killed" and rank == who else 3 for rank in range(count)]
    run_ranks(count, work, folder, name, who, how, codes=codes)
    noted = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count) if rank != who]
    assert all(re.fullmatch(OTHER, error) for error, _ in noted), noted
    assert max(at for _, at in noted) - float((folder / "when").read_text()) < BOUND


@pytest.mark.parametrize(
    ("count", "name", "who", "how"),
    [
        *((2, "evaluate", 1, "fails"), (2, "stitch", 1, "killed")),
        *((3, name, who, how) for name in WORK for who in (0, 2) for how in HOW),
    ],
)
def test_the_others_end(count: int, name: str, who: int, how: str, tmp_path: Path) -> None:
    check(tmp_path, count, name, who, how)


SCRIPT = """
import os
import sys
sys.path[:0] = sys.argv[1:3]
import script
from test_failing_processes import HOW, read_some_batches_and
if os.environ["RANK"] == "1":
    read_some_batches_and(HOW[sys.argv[3]])
script.main(sys.argv[4])
"""


@pytest.mark.parametrize("how", HOW)
def test_a_launcher_prints_the_error_and_ends_all(how: str, tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(SCRIPT)
    options = ["--nproc_per_node", "2", "--master_port", str(free_port()), str(tmp_path / "failing.py")]
    here = Path(__file__).parent
    command = [sys.executable, "-m", "torch.distributed.run", *options, here, here.parent, how, tmp_path]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "WHEN": str(tmp_path / "when")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode and (time.time() - float((tmp_path / "when").read_text())) < BOUND
    assert ("OSError: the disk of this process is full" if how == "fails" else "Signal 9 (SIGKILL)") in done.stderr
