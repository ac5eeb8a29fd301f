"""Pages of results contain the figures of their records, and nothing else."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
sys.path.insert(0, str(ROOT / "examples"))
import results  # noqa: E402

OTHERS = (
    "bench",
    "cause",
    "layer_identification",
    "layer_grids",
    "low_rank_layers",
    "strange_activations",
    "text_audit",
)
"""Pages that scripts of how_not_to_stitch write by themselves."""


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget the modules of the scripts: others have the same names."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    results.forget()
    yield
    results.forget()


@pytest.mark.parametrize("experiment", results.EXPERIMENTS, ids=lambda experiment: experiment.name)
def test_a_page_is_written_from_its_record(experiment: results.Experiment) -> None:
    if (record := results.record_of(experiment)) is None:
        pytest.skip(f"{experiment.name} has no record so far, which the table of all experiments says")
    assert results.imported(experiment).page(record) == (RESULTS / f"{experiment.name}.md").read_text()


@pytest.mark.parametrize("name", OTHERS)
def test_a_page_on_how_not_to_stitch_is_written_from_its_record(name: str) -> None:
    for folder in ("how_not_to_stitch", "dr_frankenstein"):
        sys.path.insert(0, str(ROOT / "examples" / folder))
    page = importlib.import_module(name).page
    assert page(json.loads((RESULTS / f"{name}.json").read_text())) == (RESULTS / f"{name}.md").read_text()


def test_the_table_of_all_experiments_is_that_of_the_records() -> None:
    assert results.index() == (RESULTS / "index.md").read_text()
    for row in results.claims():
        assert row["page"] == "–" or (RESULTS / row["page"].rpartition("(")[2].rstrip(")")).is_file(), row
