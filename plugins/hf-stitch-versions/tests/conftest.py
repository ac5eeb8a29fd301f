"""Networks for the commands, and scripts that two processes run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

CODE = """
import numpy, torch
from torch.nn import Conv2d, Flatten, Linear, ReLU, Sequential


def pixels(image):
    return torch.from_numpy(numpy.array(image.convert("L").resize((8, 8)))).float()[None] / 255


def net(size=0.0):
    torch.manual_seed(0)
    convolutions = Conv2d(1, 4, 3, padding=1), ReLU(), Conv2d(4, 4, 3, padding=1), ReLU()
    model = Sequential(*convolutions, Flatten(), Linear(256, 10))
    model[2].weight.data += size
    return model.eval(), pixels


def tuned():
    return net(0.5)
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A file with a network of digits, and one that was changed."""
    (tmp_path / "nets.py").write_text(CODE)
    return tmp_path / "nets.py"


@pytest.fixture
def alone_and_launched(tmp_path: Path) -> Callable[..., str]:
    """A function that returns what a script prints, after two processes that run it together have printed the same."""

    def run(text: str, *given: object) -> str:
        (script := tmp_path / "script.py").write_text(text)
        arguments = [str(script), *map(str, given)]
        alone = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True).stdout
        launched = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        subprocess.run([*launched, "--log-dir", str(tmp_path / "log"), "--redirects", "3", *arguments], check=True)
        assert [path.read_text() for path in sorted(tmp_path.glob("log/**/stdout.log"))] == [alone, alone]
        return alone

    return run
