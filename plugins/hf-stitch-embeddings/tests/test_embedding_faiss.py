"""FAISS indexes that map queries answer as they do to mapped queries."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hf_stitch_embeddings import EmbeddingMap

from hf_stitch.stitches import LinearStitch, LowRankStitch, ResidualMLPStitch

faiss = pytest.importorskip("faiss")
from hf_stitch_embeddings.stores.faiss import search_mapped  # noqa: E402

OLD, NEW = 16, 24
RANDOM = np.random.default_rng(0)
DOCUMENTS = RANDOM.normal(size=(500, OLD)).astype(np.float32)
DOCUMENTS /= np.linalg.norm(DOCUMENTS, axis=1, keepdims=True)
QUERIES = RANDOM.normal(size=(20, NEW)).astype(np.float32)
FACTORIES = ["Flat", "HNSW16", "IVF8,Flat", "SQ8", "IVF8,SQ8"]


def built(factory: str, metric: Any = None) -> Any:
    index = faiss.index_factory(OLD, factory, faiss.METRIC_INNER_PRODUCT if metric is None else metric)
    index.train(DOCUMENTS)
    index.add(DOCUMENTS)
    return index


MAPS: dict[str, Callable[[], EmbeddingMap]] = {
    "affine": lambda: EmbeddingMap.of(LinearStitch(NEW, OLD), direction="query"),
    "low rank": lambda: EmbeddingMap.of(LowRankStitch(NEW, OLD, rank=5), direction="query"),
    "adjoint": lambda: EmbeddingMap.of(LinearStitch(OLD, NEW)).adjoint(),
    "dot": lambda: EmbeddingMap.of(LinearStitch(NEW, OLD), direction="query", metric="dot"),
}


@pytest.mark.parametrize("factory", FACTORIES)
@pytest.mark.parametrize("name", MAPS)
def test_it_answers_as_to_mapped_queries(name: str, factory: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    index, embedding_map = built(factory), MAPS[name]()
    chain = search_mapped(index, embedding_map)
    expected_scores, expected = index.search(embedding_map(QUERIES), 10)
    scores, found = chain.search(QUERIES, 10)
    np.testing.assert_allclose(scores, expected_scores, rtol=1e-4, atol=1e-5)
    assert (found == expected).mean() > 0.98  # ties may change places
    faiss.write_index(chain, str(tmp_path / "chain.faiss"))
    again = faiss.read_index(str(tmp_path / "chain.faiss")).search(QUERIES, 10)
    np.testing.assert_array_equal(again[1], found)


def test_distances_need_a_map_for_them() -> None:
    embedding_map = EmbeddingMap.of(LinearStitch(NEW, OLD), direction="query", metric="l2")
    index = built("Flat", faiss.METRIC_L2)
    np.testing.assert_array_equal(
        search_mapped(index, embedding_map).search(QUERIES, 5)[1], index.search(embedding_map(QUERIES), 5)[1]
    )
    with pytest.raises(ValueError, match="is a map for l2, and the index has inner products"):
        search_mapped(built("Flat"), embedding_map)


def test_documents_are_not_added_through_the_map_of_queries() -> None:
    index = built("Flat")
    chain = search_mapped(index, MAPS["affine"]())
    for action in (lambda: chain.add(QUERIES), lambda: chain.add_with_ids(QUERIES, np.arange(20))):
        with pytest.raises(TypeError, match="add documents, embedded by the old encoder, to the index behind it"):
            action()
    index.add(DOCUMENTS[:3])
    assert chain.search(QUERIES, 1)[1].shape == (20, 1) and index.ntotal == 503


@pytest.mark.parametrize(
    ("embedding_map", "why"),
    [
        (lambda: EmbeddingMap.of(LinearStitch(OLD, NEW)), r"rewrite the index with it, or take its adjoint\(\)"),
        (lambda: EmbeddingMap.old_model(OLD), "keep the old queries"),
        (
            lambda: EmbeddingMap.of(LinearStitch(NEW, 9), direction="query"),
            "makes vectors of width 9, the index has 16",
        ),
        (lambda: EmbeddingMap.of(ResidualMLPStitch(NEW, OLD, hidden=3), direction="query"), "is not linear"),
    ],
)
def test_other_maps_are_refused(embedding_map: Callable[[], EmbeddingMap], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        search_mapped(built("Flat"), embedding_map())
