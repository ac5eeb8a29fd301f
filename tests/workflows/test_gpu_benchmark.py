"""The benchmark of GPUs, run on the CPU with tiny networks: statistics ignore the precision of forwards."""

from __future__ import annotations

import torch

from benchmarks import gpu


def test_it_runs_and_statistics_are_exact() -> None:
    before = torch.get_float32_matmul_precision()
    table, found = gpu.run(torch.device("cpu"), small=True)
    assert torch.get_float32_matmul_precision() == before
    names, _, seconds, compared, moments, _, errors = (list(column.cells) for column in table.columns)
    assert len(names) == 6 and all(float(str(cell)) > 0 for cell in (*compared, *moments)) and seconds
    assert all(float(str(error)) < 1e-6 for error in errors)
    assert list(found.columns[3].cells) == ["100.00%"]
