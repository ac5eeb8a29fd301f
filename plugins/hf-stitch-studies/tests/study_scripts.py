"""The scripts of studies, as tests import and run them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

STUDIES = Path(__file__).parents[1] / "studies"
RESULTS = STUDIES / "results"
SHARED = Path(__file__).parents[4] / "shared"
"""Folder of data and networks, beside that of the project; without it, some tests are skipped."""

if str(STUDIES) not in sys.path:
    sys.path.append(str(STUDIES))


KEYS = {"paper", "place", "claim", "published", "ours", "n", "verdict"}
"""What every row of the table of all experiments has; those with a rule have that, too."""


def has_keys(row: Mapping[str, str]) -> bool:
    """Return whether a row of the table of all experiments is complete."""
    return row.keys() - {"rule"} == KEYS and all(row.values())


def run_script(script: str, *options: object) -> None:
    """Run a script, for example ``filter_atoms.federated``, which must succeed."""
    command = [sys.executable, "-m", script, *map(str, options)]
    done = subprocess.run(command, cwd=STUDIES, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
