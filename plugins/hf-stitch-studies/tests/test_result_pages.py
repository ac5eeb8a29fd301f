"""Pages of results contain the figures of their records, and nothing else."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import run
from study import OWN, VERDICTS, markdown
from study_scripts import RESULTS, STUDIES, has_keys

CLAIMED = [study for study in run.STUDIES if study.record() and hasattr(study.module(), "claims")]


@pytest.fixture(scope="module", name="rows")
def of_all() -> list[dict[str, str]]:
    """Return the rows of the table of all studies, which take seconds."""
    return list(run.claims())


@pytest.mark.parametrize("study", run.STUDIES, ids=lambda study: study.name)
def test_a_page_is_written_from_its_record(study: run.Study) -> None:
    module, record = study.module(), study.record()
    assert record is not None, "a study without a record shows nothing"
    assert module.page(record) == (RESULTS / f"{study.name}.md").read_text()
    assert all(map(has_keys, module.claims(record) if hasattr(module, "claims") else ()))


@pytest.mark.parametrize("study", CLAIMED, ids=lambda study: study.name)
def test_a_page_shows_verdicts_rules_and_what_to_do_first(study: run.Study) -> None:
    module, record = study.module(), study.record()
    if not (rows := module.claims(record)):
        pytest.skip("no claim: a question about our own tools")
    title, what, table, *_ = (RESULTS / f"{study.name}.md").read_text().split("\n\n")
    assert title.startswith("# ") and what.startswith("**What to do**: ") and len(what) < 600
    for row in rows:
        assert row["paper"] in run.PAPERS
        names = ("claim", "place", "published", "ours", "n", *(("rule",) if "rule" in row else ()))
        line = markdown([f"**{row['verdict']}**", *(row[name] for name in names)], ()).splitlines()[0]
        assert line in table.splitlines()
        assert "rule" in row or not study.script.startswith("how_not_to_stitch.")


def test_figures_that_pages_name_exist() -> None:
    for page in RESULTS.glob("*.md"):
        for name in re.findall(r"[\w/]+\.png", page.read_text()):
            assert name.startswith("OUT/") or (RESULTS / name).is_file(), f"{page.name} names {name}"


def test_the_table_of_all_studies_is_that_of_the_records(rows: list[dict[str, str]]) -> None:
    assert run.index(rows) == (RESULTS / "index.md").read_text()
    for row in rows:
        assert row["paper"] in run.PAPERS
        assert row["page"] == "–" or (RESULTS / row["page"].rpartition("(")[2].rstrip(")")).is_file(), row


def test_questions_of_our_own_are_in_no_table_of_a_paper(rows: list[dict[str, str]]) -> None:
    for row in rows:
        beyond = row["place"].startswith(("beyond", "after paper", "open question"))
        assert row["paper"] == OWN or not beyond, row


def by_hand(path: Path) -> list[int]:
    """Return the lines in which a row gets a verdict that no figure decides."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        values: list[ast.expr | None] = []
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "claim":
            values = [*node.args, *(keyword.value for keyword in node.keywords)]
        elif isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            values = [value for key, value in pairs if isinstance(key, ast.Constant) and key.value == "verdict"]
        words = [value.value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str)]
        if any(word.removeprefix("stand-in ") in VERDICTS for word in words):
            found.append(node.lineno)
    return found


@pytest.mark.parametrize("study", run.STUDIES, ids=lambda study: study.name)
def test_no_verdict_is_written_by_hand(study: run.Study) -> None:
    assert by_hand(STUDIES / f"{study.script.replace('.', '/')}.py") == []


@pytest.mark.parametrize("row", ['claim("1", "4.2", "works", "–", "0.9", "2 pairs", "stand-in confirmed")',
                                 '{"claim": "works", "verdict": "refuted"}'])  # fmt: skip
def test_a_verdict_by_hand_is_found(row: str, tmp_path: Path) -> None:
    (tmp_path / "study.py").write_text(f"rows = [{row}]\n")
    assert by_hand(tmp_path / "study.py") == [1]
