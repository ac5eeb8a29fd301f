"""The four stores conform; stores are opened by their path or their name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from embedding_store_cases import CASES
from hf_stitch_embeddings.stores import registry
from hf_stitch_embeddings.testing import StoreCase, check_store
from hf_stitch_testing import Part

REPEATED = {"faiss flat-killed", "faiss IVF-killed"}  # "faiss with ids-killed" runs the same code
PARTS = [
    pytest.param(part, id=str(part)) for case in CASES for part in check_store.parts(case) if str(part) not in REPEATED
]


@pytest.mark.parametrize("part", PARTS)
def test_conforms(part: Part) -> None:
    pytest.importorskip({"qdrant": "qdrant_client", "arrays": "numpy"}.get(kind := part.entry.split()[0], kind))
    part()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_a_store_has_written_is_recognised_by_it_alone(case: StoreCase, tmp_path: Path) -> None:
    kind = case.name.split()[0]
    pytest.importorskip({"qdrant": "qdrant_client", "arrays": "numpy"}.get(kind, kind))
    case.make(tmp_path, np.ones((8, 4), np.float32), ["text"] * 8)
    place = tmp_path if kind in ("lancedb", "qdrant") else next(tmp_path.iterdir())
    built_in = [name for name in registry if registry.entry(name).origin == "built-in"]
    assert [name for name in built_in if registry.get(name).holds(place)] == [kind]
