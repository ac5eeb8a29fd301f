"""The memory of a comparison does not grow with the number of samples."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import hf_stitch

SCRIPT = """
import resource, sys
import torch
from torch.nn import Linear, Sequential, Tanh
import hf_stitch

class Drawn(list):  # vectors that are generated on access
    def __len__(self):
        return int(sys.argv[1])

    def __iter__(self):
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, place):
        return torch.randn(64, generator=torch.Generator().manual_seed(place))

nets = [Sequential(Linear(64, 256), Tanh(), Linear(256, 256), Tanh(), Linear(256, 256)) for _ in range(2)]
a, b = (hf_stitch.load(net, example_inputs=torch.zeros(2, 64)) for net in nets)
atlas = hf_stitch.compare(a, b, Drawn(), metrics=["linear_cka", "procrustes"], batch_size=64, progress=False)
assert atlas.n == len(Drawn()) and set(atlas.routes.values()) == {"moments"}, atlas.routes
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def peak(samples: int) -> int:
    """Return the peak memory of a comparison of ``samples`` samples, run in a separate process."""
    path = os.pathsep.join([str(Path(hf_stitch.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SCRIPT, str(samples)]
    return int(subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not report the peak")
def test_ten_times_the_samples_use_no_more_memory() -> None:
    few, many = peak(2_000), peak(20_000)
    assert many <= 1.05 * few, f"{few} for 2,000 samples, {many} for 20,000"
