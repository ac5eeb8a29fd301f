"""The distribution of docs/plugins/adapter.md passes its own tests, and what the page says of cuts holds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import torch
from hf_stitch_testing import check_adapter
from test_new_plugin import install
from torch import Tensor, nn

import hf_stitch
from hf_stitch.adapters import Interface

PAGE = (Path(__file__).parents[3] / "docs" / "plugins" / "adapter.md").read_text()
LIBRARY, PROJECT, TEST = re.findall(
    r"^```(?:py|toml)\n(.*?)^```", PAGE.partition("## A distribution")[2], re.DOTALL | re.MULTILINE
)


def test_it_passes_its_own_tests(tmp_path: Path) -> None:
    for name, text in (("hf_stitch_tiny.py", LIBRARY), ("pyproject.toml", PROJECT), ("test_tiny.py", TEST)):
        (tmp_path / name).write_text(text)
    install(tmp_path)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    call = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_tiny.py"]
    found = subprocess.run(call, cwd=tmp_path, capture_output=True, text=True, check=False, env=environment)
    assert found.returncode == 0 and "13 passed" in found.stdout, found.stdout + found.stderr


class Bypassed(nn.Module):
    """The output of the first of three layers is added to that of the third."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), nn.Linear(4, 2)

    def forward(self, features: Tensor) -> Tensor:
        first = features = self.layers[0](features).tanh()
        for layer in self.layers[1:]:
            features = layer(features).tanh()
        logits: Tensor = self.head(features + first)
        return logits


class Between(Bypassed):
    """The input of every layer is added to its output, outside of the layer."""

    def forward(self, features: Tensor) -> Tensor:
        for layer in self.layers:
            features = features + layer(features).tanh()
        logits: Tensor = self.head(features)
        return logits


def test_a_single_cut_suffices_for_the_check() -> None:
    adapter = hf_stitch.load(Bypassed(), example_inputs=torch.randn(2, 4))
    assert adapter.layers == ("layers.0",)
    check_adapter(adapter, {"features": torch.randn(3, 4)})
    assert "'layers.0' bypasses it" in str(adapter.verify_cut("layers.1"))


def test_additions_between_blocks_leave_no_cut() -> None:
    assert hf_stitch.load(Between(), example_inputs=torch.randn(2, 4)).layers == ()


def test_the_arguments_of_an_interface_are_those_of_the_page() -> None:
    table = PAGE.partition("`Interface(content")[2].partition("`named(")[0]
    assert re.findall(r"`(\w+): ", table) == list(Interface.__dataclass_fields__)
