"""A script runs unchanged under the launchers of accelerate, with the same results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jobs
import numpy as np
import pytest
from processes import free_port

HERE = Path(__file__).parent


def run(*arguments: Any, **variables: str) -> None:
    path = os.pathsep.join([str(HERE.parents[1]), str(HERE), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables}
    subprocess.run([sys.executable, *map(str, arguments)], env=env, check=True, timeout=300, capture_output=True)


def launch(folder: Path) -> None:
    options = ["--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--main_process_port", free_port()]
    more = ["--mixed_precision", "no", "--dynamo_backend", "no"]
    command = ["-m", "accelerate.commands.launch", *options, *more, HERE / "script.py", folder]
    run(*command, ACCELERATE_USE_CPU="true")


def torchrun(folder: Path) -> None:
    """A launcher that does not tell accelerate to use CPUs."""
    options = ["--nproc_per_node", "2", "--master_port", free_port()]
    run("-m", "torch.distributed.run", *options, HERE / "script.py", folder)


@pytest.mark.parametrize("launcher", [launch, torchrun])
def test_the_script_has_the_same_results(launcher: Any, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    run(HERE / "script.py", tmp_path / "one")
    launcher(tmp_path / "two")
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert names == ["audit.json", "compare.json", "evaluate.json", "grid.json"]
    assert names == sorted(path.name for path in (tmp_path / "two").iterdir())
    for name in names:
        one, two = (json.loads((tmp_path / folder / name).read_text()) for folder in ("one", "two"))
        assert {one["result"]} == {two["result"]}
        numbers = [jobs.flat({key: value for key, value in each.items() if key != "recipe"}) for each in (one, two)]
        np.testing.assert_allclose(*map(np.array, numbers), rtol=1e-9, atol=1e-9)
        if "recipe" in one and "processes" in two["recipe"]:
            assert (one["recipe"].get("processes", 1), two["recipe"]["processes"]) == (1, 2)
