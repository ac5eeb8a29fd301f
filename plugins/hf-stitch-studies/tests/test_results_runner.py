"""`run.py` runs every study once, whatever ends it in between, and writes pages from records."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from study_scripts import STUDIES

SCRIPT = """
import argparse, json, pathlib, time
def page(record): return f"# {record['name']}: {record['figure']}\\n"
def claims(record):
    return [{"paper": "1", "place": "1", "claim": "it runs", "published": "–", "ours": str(record["figure"]), "n": "1",
             "verdict": "confirmed"}]
if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for option in ("--preset", "--data-dir", "--out", "--wait"):
        parser.add_argument(option)
    arguments = parser.parse_args()
    out = pathlib.Path(arguments.out)
    with open(out / "starts", "a") as starts:
        starts.write("x")
    while arguments.wait and not pathlib.Path(arguments.wait).exists():
        time.sleep(0.05)
    (out / f"{out.name}.json").write_text(json.dumps({"name": out.name, "figure": 7}))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Copy the program with three studies, of which the second waits for a file."""
    (tmp_path / "some").mkdir()
    (tmp_path / "results").mkdir()
    studies = ", ".join(
        f"Study('some.{name}', {('--wait', str(tmp_path / 'go')) if name == 'second' else ()!r})"
        for name in ("first", "second", "third")
    )
    text = (STUDIES / "run.py").read_text()
    assert text.count('if __name__ == "__main__":') == 1
    text = text.replace('if __name__ == "__main__":', f'STUDIES = ({studies})\nif __name__ == "__main__":')
    (tmp_path / "run.py").write_text(text)
    shutil.copy(STUDIES / "study.py", tmp_path)
    (tmp_path / "other_claims.py").write_text("def other_claims():\n    return []\n")
    for name in ("first", "second", "third"):
        (tmp_path / "some" / f"{name}.py").write_text(SCRIPT)
    return tmp_path


def start(folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, folder / "run.py", "all", "--publish", "--published", folder, "--out", folder / "out"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def wait_for(path: Path) -> None:
    for _ in range(1200):
        if path.exists():
            return
        time.sleep(0.05)
    pytest.fail(f"{path} was not written")


def test_a_killed_run_goes_on_and_runs_nothing_twice(folder: Path) -> None:
    killed = start(folder)
    wait_for(folder / "out" / "second" / "starts")
    killed.kill()
    killed.communicate()
    again, _ = start(folder).communicate()  # the second experiment goes on without the program that started it
    assert [line.strip()[:11] for line in again.splitlines()[1::2]] == ["done before", "runs elsewh", "done in 0 s"]
    (folder / "go").touch()
    wait_for(folder / "out" / "second" / "done.json")
    last, _ = start(folder).communicate()
    assert last.count("done before") == 3
    results = folder / "results"
    for name in ("first", "second", "third"):
        assert (folder / "out" / name / "starts").read_text() == "x"
        assert (results / f"{name}.md").read_text() == f"# {name}: 7\n"
        assert json.loads((results / "times.json").read_text())[name]["preset"] == "small"
        assert (
            f"| it runs | – | 7 | 1 | small | confirmed | [{name}]({name}.md) |" in (results / "index.md").read_text()
        )


def test_a_failed_experiment_does_not_end_the_others(folder: Path) -> None:
    (folder / "go").touch()
    (folder / "some" / "first.py").write_text("raise ValueError('no data')")
    running = start(folder)
    shown, _ = running.communicate()
    assert running.returncode == 1
    assert f"failed; see {folder / 'out' / 'first' / 'log.txt'}" in shown.replace("\n", "")
    assert shown.count("done in") == 2
    assert "no data" in (folder / "out" / "first" / "log.txt").read_text()
