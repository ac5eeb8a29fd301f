"""Pages of results contain the figures of their records, and nothing else."""

from __future__ import annotations

import re

import pytest
import run
from study_scripts import RESULTS, has_keys

DECIDED = [
    study for study in run.STUDIES if hasattr(study.module(), "claims") and "how_not_to_stitch" not in study.script
]
"""Studies of claims, but those of the fourth paper."""


@pytest.mark.parametrize("study", run.STUDIES, ids=lambda study: study.name)
def test_a_page_is_written_from_its_record(study: run.Study) -> None:
    module, record = study.module(), study.record()
    assert record is not None, "a study without a record shows nothing"
    assert module.page(record) == (RESULTS / f"{study.name}.md").read_text()
    assert all(map(has_keys, module.claims(record) if hasattr(module, "claims") else ()))


@pytest.mark.parametrize("study", DECIDED, ids=lambda study: study.name)
def test_the_first_screen_says_what_to_do_and_the_verdicts(study: run.Study) -> None:
    title, do, table, *_ = (RESULTS / f"{study.name}.md").read_text().split("\n\n")
    assert title.startswith("# ") and do.startswith("**What to do**: ") and len(do) < 500
    for row in study.module().claims(study.record()):
        assert f"| **{row['verdict']}** | {row['claim']} |" in table


def test_figures_that_pages_name_exist() -> None:
    for page in RESULTS.glob("*.md"):
        for name in re.findall(r"[\w/]+\.png", page.read_text()):
            assert name.startswith("OUT/") or (RESULTS / name).is_file(), f"{page.name} names {name}"


def test_the_table_of_all_studies_is_that_of_the_records() -> None:
    assert run.index() == (RESULTS / "index.md").read_text()
    for row in run.claims():
        assert row["page"] == "–" or (RESULTS / row["page"].rpartition("(")[2].rstrip(")")).is_file(), row


def test_questions_of_our_own_are_in_no_table_of_a_paper() -> None:
    for row in run.claims():
        beyond = row["place"].startswith(("beyond", "after paper", "open question"))
        assert row["paper"] in ("own", "4") or not beyond, row
