"""Comparisons in several processes, or killed and resumed, return the atlas of a single process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import timm.models
import torch
from processes import MPIRUN, free_port, run_ranks
from torch import nn

import hf_stitch
from hf_stitch.analysis.activations import Activations
from hf_stitch.registry import registries
from hf_stitch.workflows._compare import compare

from killing import killed_at_every_operation  # isort: skip

N, BATCH = 61, 8


def sides() -> tuple[Any, ...]:
    """A network, saved activations of wider layers, and samples."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    saved = {f"l{i}": torch.randn(N, 3 + i, generator=generator, dtype=torch.float64) for i in range(2)}
    points = torch.randn(N, 4, generator=generator, dtype=torch.float64)
    return hf_stitch.load(net, example_inputs=points[:2]), Activations(saved, range(N)), points


def alone() -> tuple[Any, ...]:
    g = torch.Generator().manual_seed(1)
    held = [{f"l{i}": torch.randn(N, d + i, generator=g, dtype=torch.float64) for i in range(2)} for d in (3, 5)]
    return tuple(Activations(values, range(N)) for values in held)


def metrics(minibatch: bool) -> list[Any]:
    exact = ["linear_cka", registries.metrics.build("linear_cka", debiased=True), "procrustes", "rsa", "mutual_knn"]
    return [*exact, registries.metrics.build("minibatch_cka", batch_size=16)] if minibatch else exact


def compared(minibatch: bool, made: Any = sides, **options: Any) -> Any:
    return compare(*made(), metrics=metrics(minibatch), batch_size=BATCH, progress=False, **options)


def share(rank: int, folder: Path) -> None:
    """Compare saved activations as one of several processes."""
    np.savez(folder / f"{rank}.npz", **permuted(checkpoint_dir=folder / "job"))


def permuted(**options: Any) -> dict[str, Any]:
    """Values of all metrics of saved activations, and their p-values."""
    atlas = compared(False, alone, permutations=9, **options)
    return {**atlas.values, **{f"p of {metric}": atlas.p_values(metric) for metric in atlas.values}}


@pytest.fixture(scope="module")
def whole() -> Any:
    return compared(True)


def test_a_folder_has_the_work_of_one_comparison_which_is_not_done_again(whole: Any, tmp_path: Path) -> None:
    a, b, points = sides()
    compared(True, lambda: (a, b, points), checkpoint_dir=tmp_path)
    calls, real = [], a.run_with_callback
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(a, "run_with_callback", lambda *args, **options: calls.append(1) or real(*args, **options))
        again = compared(True, lambda: (a, b, points), checkpoint_dir=tmp_path)
    assert all(np.array_equal(again[name], whole[name]) for name in whole.values)
    assert len(calls) <= 2  # and not for 61 samples in batches of 8
    other = Activations({name: rows + 1 for name, rows in b.values.items()}, range(N))
    with pytest.raises(ValueError, match=r"a different job: batch_size \(8, now 9\)"):
        compare(a, b, points, metrics=metrics(True), batch_size=9, checkpoint_dir=tmp_path, progress=False)
    with pytest.raises(ValueError, match=r"different job: b.activations \("):
        compared(True, lambda: (a, other, points), checkpoint_dir=tmp_path)


def test_a_comparison_killed_at_any_operation_resumes_bit_identical(whole: Any, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    folder = tmp_path / "job"
    kills = 0
    for _ in killed_at_every_operation(lambda: compared(True, checkpoint_dir=folder), step=3):
        resumed = compared(True, checkpoint_dir=folder)
        assert all(np.array_equal(resumed[name], whole[name]) for name in whole.values)
        shutil.rmtree(folder)
        kills += 1
    assert kills >= 20


def test_several_processes_return_the_atlas_of_one_process(tmp_path: Path) -> None:
    """61 samples, a prime, cannot be split evenly; ``tests/distributed`` has networks, and other launchers and jobs."""
    run_ranks(2, share, tmp_path, names=MPIRUN)
    whole, first, second = permuted(), *(np.load(tmp_path / f"{rank}.npz") for rank in range(2))
    for name in first:
        assert np.array_equal(first[name], second[name])
        np.testing.assert_allclose(first[name], whole[name], rtol=1e-10, atol=1e-10)


def test_only_the_first_process_prints_under_accelerate_launch(tmp_path: Path) -> None:
    arguments = {"num_classes": 10, "channels": (8, 12, 16, 16)}
    torch.manual_seed(0)
    model = timm.create_model("resnet10t", **arguments, pretrained_cfg_overlay={"input_size": (3, 32, 32)})
    timm.models.save_for_hf(model, str(tmp_path / "net"), model_args=arguments, safe_serialization=True)
    launch = (
        f"accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1 --main_process_port {free_port()}"
    )
    job = "hf_stitch compare ./net ./net --data sklearn:digits --split test --max-samples 41 --json --out run"
    command = [sys.executable, *f"-m {launch} --mixed_precision no --dynamo_backend no -m {job}".split()]
    path = os.pathsep.join([str(Path(hf_stitch.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}  # --cpu needs mpirun
    options: dict[str, Any] = {"cwd": tmp_path, "env": env, "capture_output": True, "text": True, "timeout": 900}
    record = json.loads(subprocess.run(command, check=True, **options).stdout)
    assert record["recipe"]["processes"] == 2
    assert all((tmp_path / path).is_file() for path in record["saved"].values())
