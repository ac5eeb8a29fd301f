"""The scripts of studies, as tests import them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

STUDIES = Path(__file__).parents[1] / "studies"
RESULTS = STUDIES / "results"

if str(STUDIES) not in sys.path:
    sys.path.append(str(STUDIES))


KEYS = {"paper", "place", "claim", "published", "ours", "n", "verdict"}
"""What every row of the table of all experiments has; those with a rule have that, too."""


def has_keys(row: Mapping[str, str]) -> bool:
    """Return whether a row of the table of all experiments is complete."""
    return row.keys() - {"rule"} == KEYS and all(row.values())


def of(script: str) -> Any:
    """Import a script, for example ``filter_atoms.federated``."""
    return importlib.import_module(script)
