"""Pages of results contain the figures of their records, and nothing else."""

from __future__ import annotations

import pytest
import run
from study_scripts import RESULTS

KEYS = {"paper", "place", "claim", "published", "ours", "n", "verdict"}


@pytest.mark.parametrize("study", run.STUDIES, ids=lambda study: study.name)
def test_a_page_is_written_from_its_record(study: run.Study) -> None:
    module, record = study.module(), study.record()
    assert record is not None, "a study without a record shows nothing"
    assert module.page(record) == (RESULTS / f"{study.name}.md").read_text()
    for row in module.claims(record) if hasattr(module, "claims") else ():
        assert row.keys() == KEYS and all(row.values())


def test_the_table_of_all_studies_is_that_of_the_records() -> None:
    assert run.index() == (RESULTS / "index.md").read_text()
    for row in run.claims():
        assert row["page"] == "–" or (RESULTS / row["page"].rpartition("(")[2].rstrip(")")).is_file(), row
