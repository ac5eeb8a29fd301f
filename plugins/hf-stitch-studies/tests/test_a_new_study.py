"""The study that the README adds has its page and rows, and the README has the signatures of `study`."""

from __future__ import annotations

import inspect
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import run
import study
from study_scripts import has_keys, of

README = (Path(__file__).parents[1] / "README.md").read_text()
SECTION = README.partition("## Add a study")[2].partition("\n## ")[0]


def blocks(language: str) -> list[str]:
    """Return the blocks of the section in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", SECTION, re.DOTALL | re.MULTILINE)


(SCRIPT,), (ENTRY, _) = blocks("py"), blocks("toml")
(TEXT,) = blocks("markdown")


def test_its_record_gives_page_and_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_folder").mkdir()
    (tmp_path / "my_folder" / "my_study.py").write_text(SCRIPT)
    (tmp_path / "my_folder" / "my_study.md").write_text(TEXT)
    results = tmp_path / "results"
    results.mkdir()
    (results / "times.json").write_text("{}")
    monkeypatch.syspath_prepend(tmp_path)
    (listed,) = tomllib.loads(f"studies = [{ENTRY}]")["studies"]
    monkeypatch.setattr(run, "STUDIES", (run.Study.of(listed),))
    monkeypatch.setattr(run, "PAGES", results)
    module = of("my_folder.my_study")
    layers = {"0": [0.95, 0.96, 0.94], "1": [0.5, 0.6, 0.55], "2": [0.9, 0.8, 0.99]}
    record = {"pairs": 3, "steps": 30, "layers": layers}
    study.write_results("my_study", record, module.page, results)
    page, rows = (results / "my_study.md").read_text(), module.claims(record)
    run.write_pages()
    assert page == (results / "my_study.md").read_text()
    assert json.loads((results / "my_study.json").read_text()) == record
    assert [row["verdict"] for row in rows] == ["confirmed", "refuted", "undecided"] and all(map(has_keys, rows))
    title, what, table, *_ = page.split("\n\n")
    assert title.startswith("# ") and what.startswith("**What to do**: ") and table == study.verdicts(rows)
    index = (results / "index.md").read_text().partition(f"## {run.PAPERS[study.OWN]}")[2]
    assert all(f"| {row['claim']} | – | {row['ours']} |" in index for row in rows)


SIGNATURES = [
    found.groups()
    for row in re.findall(r"^\| (`.*?`) \| ", SECTION.partition("| function of `study` |")[2], re.MULTILINE)
    for found in re.finditer(r"`([\w.]+)\((.*?)\)`", row)
]


@pytest.mark.parametrize(("name", "written"), SIGNATURES, ids=[name for name, _ in SIGNATURES])
def test_signatures_are_those_of_study(name: str, written: str) -> None:
    given = re.sub(r"\[.*?\]|\(.*?\)|\*, ", "", written.replace("[[dict], str]", "").replace("[[], Any]", ""))
    names = [each.partition(":")[0].partition("=")[0].strip(" *") for each in given.split(", ")]
    function: Any = study
    for part in name.split("."):
        function = getattr(function, part)
    assert names == [each for each in inspect.signature(function).parameters if each != "self"]
