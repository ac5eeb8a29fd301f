"""All rows of the table: name -> job and the names of its networks."""

from __future__ import annotations

from typing import Any

from benchmarks.real import similarity

ROWS: dict[str, tuple[Any, ...]] = {**similarity.ROWS}
