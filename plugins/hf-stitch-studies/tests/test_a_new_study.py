"""The study that the README adds runs, and the README has the signatures of `study`."""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import run
import study
import study_scripts

README = (Path(__file__).parents[1] / "README.md").read_text()
SECTION = README.partition("## Add a study")[2].partition("\n## ")[0]


def blocks(language: str) -> list[str]:
    """Return the blocks of the section in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", SECTION, re.DOTALL | re.MULTILINE)


SCRIPT, ENTRY, SMOKE = blocks("py")
(TEXT,) = blocks("markdown")


@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[run.Study]:
    """Write the files of the study, and add it to the studies; its results go to a folder of their own."""
    (tmp_path / "my_folder").mkdir()
    (tmp_path / "my_folder" / "my_study.py").write_text(SCRIPT)
    (tmp_path / "my_folder" / "my_study.md").write_text(TEXT)
    (tmp_path / "results").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", [])  # the runs set it
    entry = eval(ENTRY, vars(run))
    monkeypatch.setattr(run, "STUDIES", (entry,))
    monkeypatch.setattr(run, "PAGES", tmp_path / "results")
    yield entry
    for name in ("my_folder", "my_folder.my_study"):
        sys.modules.pop(name, None)


def test_its_record_gives_page_and_rows(added: run.Study, tmp_path: Path) -> None:
    shared = argparse.Namespace(out=tmp_path / "out", preset="test", data_dir=None, published=None)
    run.run_here(added, shared)
    run.publish(tmp_path / "out")
    page = (tmp_path / "results" / "my_study.md").read_text()
    assert page == (tmp_path / "out" / "my_study" / "my_study.md").read_text()
    record = json.loads((tmp_path / "results" / "my_study.json").read_text())
    rows = importlib.import_module("my_folder.my_study").claims(record)
    assert len(rows) == 3 and all(map(study_scripts.has_keys, rows))
    title, what, table, *_ = page.split("\n\n")
    assert title.startswith("# ") and what.startswith("**What to do**: ") and table == study.verdicts(rows)
    index = (tmp_path / "results" / "index.md").read_text().partition(f"## {run.PAPERS[study.OWN]}")[2]
    assert all(f"| {row['claim']} | – | {row['ours']} |" in index for row in rows)


def test_its_smoke_run_passes(added: run.Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_in_this_process(script: str, *options: object) -> None:
        sys.argv = [script, *map(str, options)]
        runpy.run_module(script, run_name="__main__")

    monkeypatch.setattr(study_scripts, "run_script", run_in_this_process)
    namespace: dict[str, Any] = {}
    exec(SMOKE, namespace)
    namespace["test_my_study"](tmp_path / "out")


SIGNATURES = [
    found.groups()
    for row in re.findall(r"^\| (`.*?`) \| ", SECTION.partition("| of `study` |")[2], re.MULTILINE)
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


def test_published_networks_are_asked_for_only_by_studies_of_them(
    added: run.Study, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    of_them = run.Study("some.of_them", ("--published", "{published}"))
    monkeypatch.setattr(run, "STUDIES", (added, of_them))
    monkeypatch.setattr(sys, "argv", ["run.py", "all", "--out", "OUT"])
    with pytest.raises(SystemExit):
        run.main()
    assert "--published is needed for of_them" in capsys.readouterr().err
