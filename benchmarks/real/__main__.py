"""Run all jobs on trained networks, and write docs/real-networks.json and .md (``make real``).

Each row of the table runs in a process of its own, so that its time and memory are its own, and a row that fails is
recorded as failed while the others run. A second run continues with the rows that are missing, have failed, or were
measured with other versions.

    python -m benchmarks.real --data-dir DATA --published NETWORKS [--only shorten "MiniLM → E5"] [--page]
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from benchmarks.real import page, retrieval, sameness, shortening, similarity, stitching
from benchmarks.real.networks import NETWORKS
from benchmarks.real.places import Places
from hf_stitch.provenance import machine
from hf_stitch.storage.files import write_whole

DOCS = Path(__file__).parents[2] / "docs"
RECORD = DOCS / "real-networks.json"
ROWS: dict[str, tuple[Any, ...]] = {
    name: row for each in (similarity, stitching, sameness, shortening, retrieval) for name, row in each.ROWS.items()
}
"""Name of a row -> job and its networks."""
LIMIT = 3600
"""Seconds for one row."""


def main() -> None:
    """Run the rows that the record lacks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, help="folder of datasets; default: the Hub")
    parser.add_argument("--published", type=Path, help="folder of the networks of Csiszárik et al.; default: left out")
    parser.add_argument("--only", nargs="+", default=[], help="jobs, networks or parts of the names of rows")
    parser.add_argument("--python", action="append", default=[], help="RUNTIME=INTERPRETER, for example keras=…")
    parser.add_argument("--page", action="store_true", help="only write the page")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args()
    places = Places(options.data_dir, options.published, dict(each.split("=", 1) for each in options.python))
    if options.row:
        print(json.dumps(measured(options.row, places)))
        return
    for name in [] if options.page else ROWS:
        if options.only and not any(part in name for part in options.only):
            continue
        kept = read()
        if "error" in kept["rows"].get(name, {"error": ""}) or kept["rows"][name]["versions"] != versions(name):
            row = in_process(name, sys.argv[1:])
            write({**(now := read()), "machine": machine(), "rows": {**now["rows"], name: row}})
            print(name, row.get("error", f"{row.get('seconds', 0):.0f} s"), flush=True)
    text = page.page((DOCS / "real-networks.md").read_text("utf-8"), read())
    write_whole(DOCS / "real-networks.md", lambda file: file.write_text(text, "utf-8"))


def measured(name: str, places: Places) -> dict[str, Any]:
    """Run one row in this process; a row that fails contains the error."""
    start = time.perf_counter()
    job, *networks = ROWS[name]
    try:
        figures = job(places, *networks)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "versions": versions(name)}
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {"figures": figures, "seconds": time.perf_counter() - start, "memory": memory, "versions": versions(name)}


def in_process(name: str, arguments: list[str]) -> dict[str, Any]:
    """Run one row in a new process; return its error if it fails."""
    command = [sys.executable, "-m", "benchmarks.real", *arguments, "--row", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return {"error": f"exceeded {LIMIT} s", "versions": versions(name)}
    if done.returncode:
        return {"error": f"the process ended with status {done.returncode}", "versions": versions(name)}
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def versions(name: str) -> dict[str, str]:
    """Return the versions that a row depends on: of the libraries, and of the packages with its weights."""
    packages = [NETWORKS[network].package for network in ROWS[name][1:] if network in NETWORKS]
    installed = {each.metadata["Name"]: each.version for each in distributions()}
    return {name: installed.get(name, "not installed") for name in ("torch", "transformers", "timm", *packages)}


def read() -> dict[str, Any]:
    """Return the record."""
    return json.loads(RECORD.read_text("utf-8")) if RECORD.exists() else {"rows": {}}


def write(record: Mapping[str, Any]) -> None:
    """Replace the record."""
    write_whole(RECORD, lambda file: file.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", "utf-8"))


if __name__ == "__main__":
    main()
