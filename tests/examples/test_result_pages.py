"""Pages of results contain the figures of their records, and nothing else."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = {
    "bench": "how_not_to_stitch.bench",
    "cause": "how_not_to_stitch.cause",
    "layer_identification": "how_not_to_stitch.layer_identification",
    "layer_grids": "how_not_to_stitch.layer_grids",
    "low_rank_layers": "how_not_to_stitch.low_rank_layers",
    "strange_activations": "how_not_to_stitch.strange_activations",
    "text_audit": "how_not_to_stitch.text_audit",
    "several_stitches": "dr_frankenstein.several_stitches",
}
"""Page in docs/results -> script that writes it."""


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_written_from_its_record(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, script = PAGES[name].split(".")
    for path in (folder, "dr_frankenstein"):
        monkeypatch.syspath_prepend(str(ROOT / "examples" / path))
    page = importlib.import_module(script).page
    results = ROOT / "docs" / "results"
    assert page(json.loads((results / f"{name}.json").read_text())) == (results / f"{name}.md").read_text()
