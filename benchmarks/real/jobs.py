"""All rows of the table: name -> job and the names of its networks."""

from __future__ import annotations

from typing import Any

from benchmarks.real import retrieval, sameness, shortening, similarity, stitching

ROWS: dict[str, tuple[Any, ...]] = {
    **similarity.ROWS, **stitching.ROWS, **sameness.ROWS, **shortening.ROWS, **retrieval.ROWS,
}  # fmt: skip
