"""Tiers of tests: what each runs, how the list of slow tests is written, and skips without a row."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

FILE = """
import time
from pathlib import Path

import pytest

@pytest.fixture(scope="module")
def shared():
    time.sleep(1.2)

@pytest.mark.parametrize("seconds", [0, 0.5])
def test_some(seconds):
    time.sleep(seconds)

@pytest.mark.parametrize("seconds", [0.5, 0.6])
def test_sweep(seconds):
    time.sleep(seconds)

@pytest.mark.parametrize("number", range(6))
def test_sharing(shared, number):
    pass

def test_formerly_slow():
    time.sleep(0.3)
"""
SENTINELS = '"a contract" = ["tests/test_it.py::test_sweep[0.6]"]'


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A repository with tests, a plugin and lists, whose processes find the tiers of this one."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take a second to import
    pytester.makeconftest('pytest_plugins = ["tests.tiers"]')
    for path, text in {
        "tests/test_it.py": FILE,
        "tests/slow.txt": "tests/test_it.py::test_formerly_slow\ntests/test_it.py::test_gone\ntests/gone.py\n",
        "tests/sentinels.toml": SENTINELS,
        "plugins/one/test_plugin.py": "def test_plugin(): pass",
    }.items():
        file = pytester.path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return pytester


def run(project: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return project.runpytest_subprocess("-p", "no:cacheprovider", *arguments)


def test_a_timed_run_writes_the_list_that_splits_the_tests(project: pytest.Pytester) -> None:
    """A sweep becomes one entry, tests with a shared fixture share its seconds, and entries of lost tests go."""
    run(project, "--tier", "all", "--write-tiers").assert_outcomes(passed=12)
    entries = (project.path / "tests/slow.txt").read_text().splitlines()[1:]
    assert entries == [f"tests/test_it.py::{name}" for name in ("test_formerly_slow", "test_some[0.5]", "test_sweep")]
    run(project).assert_outcomes(passed=9, deselected=3)  # of the sweep, the sentinel stays
    run(project, "--tier", "rest").assert_outcomes(passed=4, deselected=8)  # with the plugin
    run(project, "tests/test_it.py::test_some").assert_outcomes(passed=2)  # as it is named


def test_a_slow_test_that_the_list_lacks_is_named(project: pytest.Pytester) -> None:
    """The summary shows it, and not the sentinel."""
    (project.path / "tests/test_it.py").write_text(FILE.replace("0.5", "0.9").replace("0.6", "0.9001"))
    (project.path / "tests/sentinels.toml").write_text(SENTINELS.replace("0.6", "0.9001"))
    output = run(project).stdout
    output.fnmatch_lines(["*tests/slow.txt lacks*", "*s  tests/test_it.py::test_s*0.9*"])
    assert "0.9001" not in output.str()


def test_every_sentinel_exists(request: pytest.FixtureRequest) -> None:
    """Otherwise nobody would see that its contract is not tested. Only files that this run collects are looked at."""
    tiers = request.config.pluginmanager.get_plugin("Tiers")
    assert not tiers.lost, "tests/sentinels.toml names tests that do not exist"


def test_a_skip_without_a_row_fails(project: pytest.Pytester) -> None:
    """Of a test and of a file; expected failures are no skips."""
    (project.path / "tests/test_it.py").write_text(
        "import pytest\n"
        "def test_explained(): pytest.skip('needs a GPU')\n"
        "def test_bare(): pytest.skip('later')\n"
        "@pytest.mark.xfail\ndef test_expected(): raise ValueError\n"
    )
    (project.path / "tests/test_file.py").write_text("import pytest\npytest.importorskip('no_such_module')")
    (project.path / "tests/sentinels.toml").write_text("")
    rows = '[[skip]]\nreason = "needs a GPU"\nwhy = "no GPU"\nend = "on a machine with one"\n'
    (project.path / "tests/skips.toml").write_text(rows)
    result = run(project, "--continue-on-collection-errors")
    result.assert_outcomes(passed=1, skipped=1, failed=1, errors=1, xfailed=1)
    result.stdout.fnmatch_lines(["*later", "*no row in tests/skips.toml*"])
