"""Whether the tests notice small faults (``make mutants``): each of ``mutations.toml``, made in a temporary copy.

The exit status is 1 if one is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import rich
from rich.table import Table

ROOT, SECONDS = Path(__file__).parents[1], 240
PYTEST = ["-m", "pytest", "-x", "-q", "-n", "0", "-o", "cache_dir=cache"]
FAILED = Path("cache/v/cache/lastfailed")  # where pytest keeps the tests that have failed
OUTCOMES = {0: "missed", 1: "caught", -signal.SIGKILL: "timed out"}  # exit status -> what it shows of a mutation


def mutations() -> list[dict[str, Any]]:
    """Read the list, in which every ``old`` occurs once in its file."""
    found: list[dict[str, Any]] = tomllib.loads((ROOT / "tests/mutations.toml").read_text("utf-8"))["mutation"]
    for number, each in enumerate(found, 1):
        each["number"], source = number, (ROOT / each["file"]).read_text("utf-8")
        if source.count(each["old"]) != 1:
            raise ValueError(f"mutation {number}: {each['file']} must contain once {each['old']!r}")
    return found


def outcome(copy: Path, arguments: Iterable[str], seconds: float | None = None) -> str:
    """Run tests in a copy, until one fails."""
    path = os.pathsep.join(map(str, [copy, *(copy / "plugins").iterdir()]))
    with (copy / "output.txt").open("w", encoding="utf-8") as output:
        running = subprocess.Popen(
            [sys.executable, *PYTEST, *arguments], cwd=copy, stdout=output, stderr=output,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, start_new_session=True,
        )  # fmt: skip
        try:
            running.wait(seconds)
        except subprocess.TimeoutExpired:  # also of a loop that the mutation made endless
            os.killpg(running.pid, signal.SIGKILL)
        return OUTCOMES.get(running.wait(), "not run")


def tried(mutation: dict[str, Any], copies: queue.Queue[Path], tier: str, seconds: float) -> str:
    """Make a mutation in a copy that is free, and run its tests."""
    copy = copies.get()
    source = (path := copy / mutation["file"]).read_text("utf-8")
    path.write_text(source.replace(mutation["old"], mutation["new"]), "utf-8")
    found = outcome(copy, ["--tier", tier, *mutation["tests"]], seconds)
    path.write_text(source, "utf-8")
    copies.put(copy)
    print(f"{mutation['number']:3} {found}: {mutation['class']}, {mutation['file']}", flush=True)
    return found


def main() -> int:
    """Try the mutations, and show by class how many are caught."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="numbers of mutations; by default all")
    parser.add_argument("--jobs", type=int, default=1, help="number of mutations at a time")
    parser.add_argument("--tier", choices=["first", "all"], default="first", help="which of their tests run")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="limit of each mutation (default: %(default)s)")
    options, copies = parser.parse_args(), queue.Queue[Path]()
    chosen = [each for each in mutations() if not options.only or each["number"] in options.only]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        for job in range(options.jobs):
            copies.put(shutil.copytree(ROOT, Path(folder, str(job)), ignore=shutil.ignore_patterns(".*", "build")))
        outcomes = list(pool.map(lambda each: tried(each, copies, options.tier, options.seconds), chosen))
        for copy in copies.queue:
            failed = json.loads((copy / FAILED).read_text("utf-8")) if (copy / FAILED).exists() else []
            if failed and outcome(copy, ["--tier", "all", *failed]) != "missed":
                sys.exit(f"{(copy / 'output.txt').read_text('utf-8')}\nThis fails without a mutation, too.")
    counts = Counter((each["class"], found) for each, found in zip(chosen, outcomes, strict=True))
    table = Table("class", *(columns := sorted({*outcomes})))
    for kind in dict.fromkeys(each["class"] for each in chosen):
        table.add_row(kind, *(str(counts[kind, column]) for column in columns))
    rich.print(table)
    return int(not {*outcomes} <= {"caught", "timed out"})


if __name__ == "__main__":
    sys.exit(main())
