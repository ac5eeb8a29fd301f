"""Two tiers of tests, and skips that are explained: a plugin of pytest, which the root ``conftest.py`` loads.

``slow.txt`` lists the ids of slow tests. A timed run of all tests writes it (``make tiers``). ``--tier first``, the
default, leaves them out; ``--tier rest`` runs them and the tests of plugins, so that both together are all tests.
``sentinels.toml`` names one slow test per contract that stays in the first tier. A test that is named by its id on the
command line always runs.

``skips.toml`` has a row for every reason to skip a test. A test that is skipped for another reason fails.
"""

from __future__ import annotations

import re
import time
import tomllib
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

LIMIT = 0.3  # seconds; a listed test leaves the list below half of it, so that noise does not change the list


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tiers")
    group.addoption("--tier", choices=["first", "rest", "all"], default="first", help="which tests to run")
    group.addoption("--write-tiers", action="store_true", help="write tests/slow.txt from the times of this run")


def pytest_configure(config: pytest.Config) -> None:
    """Read the lists, which a repository may lack."""
    folder = config.rootpath / "tests"
    texts = [path.read_text("utf-8") if (path := folder / name).is_file() else "" for name in Tiers.FILES]
    config.pluginmanager.register(Tiers(config, *texts), Tiers.__name__)


def names(test: str) -> Iterator[str]:
    """Return the names under which a list can hold a test: its id, its function and its file."""
    yield test
    yield test.partition("[")[0]
    yield test.partition("::")[0]


def folded(slow: Iterable[str], tests: Iterable[str]) -> set[str]:
    """Replace the ids of a function, then those of a file, by one name if all its tests are slow."""
    listed = {test: test for test in slow}
    for level in (1, 2):
        whole = defaultdict(set)
        for test in tests:
            whole[[*names(test)][level]].add(test)
        for name, members in whole.items():
            if members <= listed.keys():
                listed |= dict.fromkeys(members, name)
    return {*listed.values()}


class Tiers:
    """The lists of a run, and the seconds of its tests."""

    FILES = ("slow.txt", "sentinels.toml", "skips.toml")

    def __init__(self, config: pytest.Config, slow: str, sentinels: str, skips: str) -> None:
        """Parse the texts of the three files."""
        self.config = config
        self.slow = {line for line in slow.splitlines() if not line.startswith("#")}
        self.sentinels = {test for tests in tomllib.loads(sentinels).values() for test in tests}
        self.skips = [row["reason"] for row in tomllib.loads(skips).get("skip", [])]
        self.seconds: dict[str, float] = defaultdict(float)
        self.shared: dict[str, float] = defaultdict(float)  # file -> seconds of fixtures that its tests share
        self.skipped: set[str] = set()
        self.lost: list[str] = []  # sentinels that are not tests

    def is_slow(self, test: str) -> bool:
        """Whether a test is left to the second tier."""
        return not self.slow.isdisjoint(names(test)) and self.sentinels.isdisjoint(names(test))

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        files, known = {item.nodeid.partition("::")[0] for item in items}, {n for i in items for n in names(i.nodeid)}
        asked = [arg for arg in self.config.args if "::" in arg]
        self.lost = [test for test in self.sentinels - known if test.partition("::")[0] in files and not asked]
        tier = self.config.getoption("tier")
        kept, left = [], []
        for item in items:
            first = not self.is_slow(item.nodeid)
            wanted = first if tier == "first" else not first or item.nodeid.startswith("plugins/")
            wanted |= tier == "all" or any(item.nodeid.startswith(arg) for arg in asked)
            (kept if wanted else left).append(item)
        if left:
            self.config.hook.pytest_deselected(items=left)
            items[:] = kept

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Generator[None, Any, Any]:
        """Note the seconds of a fixture that several tests share."""
        start = time.perf_counter()
        result = yield
        item = getattr(request, "_pyfuncitem", None)
        if fixturedef.scope != "function" and item is not None:
            item.user_properties.append(("shared seconds", time.perf_counter() - start))
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Fail a test that is skipped without a row."""
        return self.explained((yield))

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """Fail a file that is skipped without a row."""
        return self.explained((yield))

    def explained(self, report: Any) -> Any:
        """Turn a skip without a row into a failure."""
        if report.skipped and not hasattr(report, "wasxfail"):
            reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
            if not any(re.search(row, reason) for row in self.skips):
                report.outcome = "failed"
                report.longrepr = f"{reason}\nThis reason to skip a test has no row in tests/skips.toml."
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add up the seconds of a test."""
        own = report.duration
        if report.when == "setup":
            shared = sum(seconds for name, seconds in report.user_properties if name == "shared seconds")
            self.shared[report.nodeid.partition("::")[0]] += shared
            own -= shared
        self.seconds[report.nodeid] += own
        if report.skipped:
            self.skipped.add(report.nodeid)

    def costs(self) -> dict[str, float]:
        """Return the seconds of each test, with an equal part of what the tests of its file share."""
        counts: dict[str, int] = defaultdict(int)
        for test in self.seconds:
            counts[test.partition("::")[0]] += 1
        return {test: own + self.shared[f := test.partition("::")[0]] / counts[f] for test, own in self.seconds.items()}

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Name the slow tests that the list lacks, or write the list."""
        costs = self.costs()
        if self.config.getoption("write_tiers"):
            path = self.config.rootpath / "tests" / self.FILES[0]
            path.write_text("\n".join(["# Written by make tiers.", *sorted(self.measured(costs))]) + "\n", "utf-8")
            terminalreporter.write_line(f"{path} is written.")
            return
        listed = self.slow | self.sentinels
        new = [test for test, cost in costs.items() if cost > 2 * LIMIT and listed.isdisjoint(names(test))]
        if new:
            terminalreporter.section("slow tests that tests/slow.txt lacks (make tiers renews it)")
            for test in sorted(new, key=costs.__getitem__, reverse=True):
                terminalreporter.write_line(f"{costs[test]:6.2f} s  {test}")

    def measured(self, costs: dict[str, float]) -> set[str]:
        """Return the list of slow tests after this run; files that were not run keep their entries."""
        listed = {test for test in costs if not self.slow.isdisjoint(names(test))}
        slow = {
            test
            for test, cost in costs.items()
            if cost > (LIMIT / 2 if test in listed else LIMIT) or (test in self.skipped and test in listed)
        }
        files = {test.partition("::")[0] for test in costs}
        elsewhere = {
            entry
            for entry in self.slow
            if (file := entry.partition("::")[0]) not in files and Path(self.config.rootpath, file).is_file()
        }
        return folded(slow, costs) | elsewhere
