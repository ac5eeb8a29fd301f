"""Every example runs, is short, and shows what it promises."""

from __future__ import annotations

import runpy
import sys
from functools import cache
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SHOWS = {
    "check": "relative accuracy: 0.",
    "compare": "most alike: layer",
    "compare_many": "weight_cosine",
    "cut": "same logits: True",
    "diff": "vit.layers.1 alone carries",
    "exchange": "class: VisionEncoderDecoderModel",
    "grid": "out of distribution: [[",
    "own_network": "task: image-classification",
    "plan": "layer3.0",
    "relative": "accuracy with another encoder, no training: 0.",
    "same": "First difference: `vit.layers.1.layernorm_after`",
    "share": "same logits: True",
    "shorten": "trained on: ",
    "stitch": "mean_only",
    "swap": "map: {'name': ",
    "task_loss": "task_loss: 0.",
    "train": "settled at epoch: {'vit.layers.0'",
    "transfer": "in the second network:       0.",
    "two_tokenizers": "She is walk",
    "upgrade_embeddings": "Go with ridge, index",
}
"""Script -> what it prints."""


@pytest.fixture(scope="module")
def networks() -> None:
    """The networks of the scripts, which are trained once, and a part of their images."""
    sys.path.insert(0, str(EXAMPLES))
    import networks

    sys.path.remove(str(EXAMPLES))
    whole, sizes = networks.digits, {"train": 800, "test": 200}
    networks.digits = cache(lambda split="train": whole(split).take(sizes[split]))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem != "networks"))
def test_an_example_runs(
    name: str, networks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    script = EXAMPLES / f"{name}.py"
    assert len(script.read_text().splitlines()) <= 60
    runpy.run_path(str(script), run_name="__main__")
    assert SHOWS[name] in capsys.readouterr().out
    assert f"(../examples/{name}.py)" in (EXAMPLES.parent / "docs" / "jobs.md").read_text(), "no job has a link"
