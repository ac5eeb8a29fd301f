"""Every job has the same result with one process and with several."""

from __future__ import annotations

from pathlib import Path

import jobs
import numpy as np
import pytest
import torch
from processes import run_ranks

TOLERANCE = {"training": 1e-5}
EXACT = 1e-10


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_several_processes_have_the_results_of_one(count: int, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    run_ranks(count, jobs.run_all, tmp_path)
    for job in jobs.JOBS:
        whole = np.asarray(job(tmp_path), float)
        each = [np.load(tmp_path / f"{job.__name__}-{rank}.npy") for rank in range(count)]
        assert len(whole) > 1 and np.isfinite(whole).mean() > 0.5, job.__name__
        assert all(np.array_equal(each[0], other, equal_nan=True) for other in each), job.__name__
        tolerance = TOLERANCE.get(job.__name__, EXACT)
        np.testing.assert_allclose(each[0], whole, rtol=tolerance, atol=tolerance, err_msg=job.__name__)


def measure(rank: int, folder: Path) -> None:
    np.save(folder / f"{rank}.npy", jobs.scores_of_float32())


def test_what_is_measured_of_a_sample_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    """In float32 too, because each process takes whole batches."""
    torch.set_num_threads(1)
    run_ranks(2, measure, tmp_path)
    whole = jobs.scores_of_float32()
    assert all(np.array_equal(np.load(tmp_path / f"{rank}.npy"), whole) for rank in range(2))
