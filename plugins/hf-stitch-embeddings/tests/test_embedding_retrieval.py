"""Recall, gains and predictions agree with independent computations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hf_stitch_embeddings import EmbeddingMap, RetrievalResult, evaluate_retrieval, exact_search, normalized
from hf_stitch_embeddings.retrieval import extrapolate, interval, quality, query_weights
from hypothesis import given, settings, strategies as st
from sklearn.metrics import ndcg_score
from sklearn.neighbors import NearestNeighbors

from hf_stitch.stitches import IdentityStitch, LinearStitch


def recall_at(found: np.ndarray, truth: np.ndarray) -> np.ndarray:
    return np.array([len(set(a) & set(b)) / len(b) for a, b in zip(found.tolist(), truth.tolist(), strict=True)])


def rows(n: int, d: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, d)).astype(np.float32)


def noisy(sigma: float, n: int = 1200, d: int = 16) -> tuple[np.ndarray, np.ndarray, EmbeddingMap]:
    """Old and new vectors of which the second are the first, rotated, with noise; and the rotation."""
    old = rows(n, d)
    rotation = np.linalg.qr(rows(d, d, 1))[0]
    new = old @ rotation.T + sigma * rows(n, d, 2)
    return old, new, EmbeddingMap.of(LinearStitch.of(weight=torch.from_numpy(rotation)))


@pytest.mark.parametrize(("metric", "kind"), [("cosine", "cosine"), ("l2", "euclidean")])
def test_search_agrees_with_scikit_learn(metric: str, kind: str) -> None:
    queries, documents = rows(30, 8), rows(500, 8, 1)
    wanted = NearestNeighbors(n_neighbors=12, algorithm="brute", metric=kind).fit(documents).kneighbors(queries)[1]
    found = exact_search(queries, documents, 12, metric=metric)[0]  # type: ignore[arg-type]
    np.testing.assert_array_equal(found, wanted)


def test_search_by_inner_product_in_blocks_agrees_with_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_stitch_embeddings.retrieval.CELLS", 512 * 100)
    queries, documents = rows(700, 8), rows(950, 8, 1)
    wanted = np.argsort(-(queries @ documents.T), axis=1)[:, :9]
    np.testing.assert_array_equal(exact_search(queries, documents, 9, metric="dot")[0], wanted)


def test_recall_agrees_with_brute_force_in_every_direction() -> None:
    old, new, index = noisy(0.5)
    maps = {"index": index, "adjoint": index.adjoint()}
    docs, asked = slice(100, None), slice(0, 100)
    result = evaluate_retrieval(maps, old[docs], new[docs], old[asked], new[asked], k=(1, 10), resamples=50)

    def nearest(queries: np.ndarray, documents: np.ndarray, k: int) -> np.ndarray:
        return np.argsort(-(normalized(queries) @ normalized(documents).T), axis=1, kind="stable")[:, :k]

    weight = (index.affine() or pytest.fail("affine"))[0]
    for k in (1, 10):
        true = nearest(new[asked], new[docs], k)
        wanted = {
            "index": nearest(new[asked], old[docs] @ weight.T, k),
            "adjoint": nearest(new[asked] @ weight, old[docs], k),
            "old model": nearest(old[asked], old[docs], k),
            "no map": nearest(new[asked], old[docs], k),
            "re-embedding": true,
        }
        for name, found in wanted.items():
            share = np.mean([len(set(a) & set(b)) / k for a, b in zip(found, true, strict=True)])
            assert result.scores[name][f"recall@{k}"]["value"] == pytest.approx(share, abs=2e-3), (name, k)
    gain = result.gains["index"]["recall@10"]["value"]
    values = (result.scores[name]["recall@10"]["value"] for name in ("index", "old model"))
    assert gain == pytest.approx(np.subtract(*values), abs=1e-9)


def test_reranking_finds_what_is_among_the_first_hundred() -> None:
    old, new, index = noisy(0.8)
    docs, asked = slice(100, None), slice(0, 100)
    result = evaluate_retrieval(index, old[docs], new[docs], old[asked], new[asked], k=10, resamples=20)
    true, _ = exact_search(new[asked], new[docs], 10)
    first, _ = exact_search(new[asked], index(old[docs]), 100)
    score = result.scores[index.name]
    assert score["reranked@10"]["value"] == pytest.approx(recall_at(first, true).mean(), abs=1e-6)
    assert score["reranked@10"]["value"] > score["recall@10"]["value"]


def test_reranking_is_not_scored_where_chance_finds_most() -> None:
    old, new, index = noisy(0.8, n=600)
    result = evaluate_retrieval(index, old[100:], new[100:], old[:100], new[:100], k=10, resamples=20)
    assert "reranked@10" not in result.scores[index.name]


@pytest.mark.parametrize("metric", ["cosine", "dot", "l2"])
@pytest.mark.parametrize("copies", [2, 3, 25])
def test_documents_that_occur_several_times_do_not_count_against_an_exact_map(copies: int, metric: Any) -> None:
    """Whichever copies the map and the truth rank first, in sequence or shuffled; also apart, in parts, reranked."""
    old, _, index = noisy(0)
    index = EmbeddingMap.of(index.stitch, metric=metric)
    new = old @ (index.affine() or pytest.fail("affine"))[0].T
    documents = np.random.default_rng(0).permutation(np.repeat(np.arange(100, 100 + max(400, 1200 // copies)), copies))
    marked = np.arange(len(documents)) % 3 == 0
    result = evaluate_retrieval(
        index,
        old[documents],
        new[documents],
        old[:40],
        new[:40],
        k=(1, 10),
        in_pairs=marked,
        resamples=20,
        index_size=9000,
    )
    assert "reranked@10" in result.scores[index.name]
    for figure, score in result.scores[index.name].items():
        assert score["value"] == pytest.approx(1), figure
    assert all(value == pytest.approx(1) for value in result.pools[index.name]["recall@10"] if np.isfinite(value))
    assert result.scores["random map"]["recall@10"]["value"] < 0.2


def test_no_figure_depends_on_the_order_of_the_documents() -> None:
    """Signs of 12 dimensions have few inner products: most ranks are ties, and their places are shared by chance."""
    old, new, index = noisy(0.5, n=500, d=12)
    signs, order = np.where(old > 0, 1, -1).astype(np.float32), np.random.default_rng(1).permutation(400)
    best = exact_search(new[:100], new[100:], 3)[0]
    found = [
        evaluate_retrieval(
            {"signs": index},
            signs[100:][some],
            new[100:][some],
            signs[:100],
            new[:100],
            k=(1, 10),
            resamples=2,
            relevance=[set(np.argsort(some)[row].tolist()) for row in best],
        ).scores
        for some in (np.arange(400), np.argsort(signs[100:, 0]), order)
    ]
    for name in ("old model", "no map", "re-embedding"):
        for figure in ("recall@10", "ndcg@10", "mrr@10"):
            values = [scores[name][figure]["value"] for scores in found]
            assert max(values) - min(values) < 1e-6, (name, figure)
    similarities = signs[:100] @ signs[100:].T
    true, draws = exact_search(new[:100], new[100:], 10)[0], np.random.default_rng(0)
    drawn = [
        recall_at(np.lexsort((draws.random(similarities.shape), -similarities))[:, :10], true).mean()
        for _ in range(200)
    ]
    assert found[0]["old model"]["recall@10"]["value"] == pytest.approx(np.mean(drawn), abs=3e-3)


@pytest.mark.parametrize("decimals", [8, 0])  # without and with equally near documents
def test_quality_agrees_with_scikit_learn_and_with_random_orders(decimals: int) -> None:
    generator = np.random.default_rng(0)
    gains = generator.integers(0, 3, size=(20, 30)) * (generator.random((20, 30)) < 0.3).astype(float)
    scores = generator.normal(size=(20, 30)).round(decimals)
    relevance = [{d: g for d, g in enumerate(row) if g} for row in gains]
    ndcg, mrr = quality(torch.from_numpy(scores), relevance, 10)
    np.testing.assert_allclose(ndcg, [ndcg_score(gains[[q]], scores[[q]], k=10) for q in range(20)])
    order = np.lexsort((generator.random((2000, 20, 30)), np.broadcast_to(-scores, (2000, 20, 30))))[..., :10]
    hits = np.take_along_axis(np.broadcast_to(gains > 0, (2000, 20, 30)), order, 2)
    first = np.where(hits.any(2), 1 / (1 + hits.argmax(2)), 0)
    np.testing.assert_allclose(mrr, first.mean(0), atol=5 * first.std(0).max() / 2000**0.5 + 1e-12)


def test_relevance_is_reported_beside_fidelity() -> None:
    old, new, index = noisy(0.3)
    docs, asked = slice(100, None), slice(0, 100)
    relevance = [set(row.tolist()) for row in exact_search(old[asked], old[docs], 3)[0]]
    result = evaluate_retrieval(
        index, old[docs], new[docs], old[asked], new[asked], k=10, relevance=relevance, resamples=50
    )
    assert result.scores["old model"]["ndcg@10"]["value"] == 1
    assert result.scores["old model"]["mrr@10"]["value"] == 1
    assert result.scores["re-embedding"]["ndcg@10"]["value"] < 1  # fidelity is no quality
    assert np.isnan(quality(torch.ones(1, 1), [set()], 1)).all()


def test_documents_of_the_fit_are_reported_apart() -> None:
    old, new, index = noisy(0.5)
    new = new.copy()
    marked = np.zeros(1100, dtype=bool)
    marked[:550] = True
    new[100:650] = old[100:650] @ (index.affine() or pytest.fail("affine"))[0].T  # these fit exactly
    result = evaluate_retrieval(index, old[100:], new[100:], old[:100], new[:100], k=10, in_pairs=marked, resamples=20)
    score = result.scores[index.name]
    assert score["recall@10 in"]["value"] > score["recall@10"]["value"] > score["recall@10 out"]["value"]


def test_all_baselines_are_there_and_chance_finds_nothing() -> None:
    old, new, index = noisy(0.3)
    docs, asked, fit = slice(100, 800), slice(0, 100), slice(800, None)
    result = evaluate_retrieval(
        index, old[docs], new[docs], old[asked], new[asked], k=(1, 10), pairs=(old[fit], new[fit]), resamples=50
    )
    value = {name: row["recall@10"]["value"] for name, row in result.scores.items()}
    assert set(value) == {
        index.name, f"{index.name} + CSLS", "old model", "no map", "random map", "relative representations",
        "centring + whitening", "re-embedding",
    }  # fmt: skip
    assert value["random map"] < 0.05
    assert value["no map"] < 0.1
    assert value["relative representations"] > 0.2
    assert value["centring + whitening"] > 0.4
    assert value["re-embedding"] == 1
    again = RetrievalResult.from_dict(result.to_dict())
    assert str(again) == str(result)
    assert len(result.to_pandas()) == 8 * 2
    assert result.plot().axes


def test_unequal_widths_have_no_baseline_without_a_map() -> None:
    old, new = rows(300, 6), rows(300, 6) @ rows(6, 9, 1)
    result = evaluate_retrieval({}, old[50:], new[50:], old[:50], new[:50], k=10, resamples=20)
    assert "no map" not in result.scores
    assert any("widths 6 and 9 differ" in note for note in result.notes)


def test_a_single_query_says_nothing_about_others() -> None:
    weights = query_weights(1, 20, 0)
    assert np.isnan(interval(np.ones(1), weights)["low"])
    guess = extrapolate(np.array([[1.0], [0.9]]), [200, 400], 10_000, weights)
    assert (guess["low"], guess["high"]) == (0, 1) and 0 < guess["value"] < 1


def test_the_prediction_covers_the_recall_of_the_whole_index() -> None:
    old, new, index = noisy(0.7, n=16_300)
    asked = slice(0, 300)
    whole = evaluate_retrieval(index, old[300:], new[300:], old[asked], new[asked], k=10, baselines=False)
    small = slice(300, 1300)
    part = evaluate_retrieval(
        index, old[small], new[small], old[asked], new[asked], k=10, index_size=16_000, baselines=False
    )
    true = whole.scores[index.name]["recall@10"]["value"]
    in_pool = part.scores[index.name]["recall@10"]["value"]
    guess = part.predicted[index.name]["recall@10"]
    assert true < in_pool - 0.05  # a pool flatters
    assert guess["low"] <= true <= guess["high"]
    assert abs(guess["value"] - true) < abs(in_pool - true) / 2


def test_a_prediction_is_the_mean_of_two_lines() -> None:
    pools, index_size = np.array([1600, 800, 400, 200]), 10_000
    above, chance, floor = np.array([0.62, 0.7, 0.8, 0.88]), 10 / pools, 10 / index_size
    recalls = np.repeat((chance + (1 - chance) * above)[:, None], 40, 1)
    line, odds = (
        np.polyval(np.polyfit(np.log2(pools), points, 1), np.log2(index_size))
        for points in (above, np.log(above / (1 - above)))
    )
    wanted = floor + (1 - floor) * (line + 1 / (1 + np.exp(-odds))) / 2
    guess = extrapolate(recalls, pools.tolist(), index_size, query_weights(40, 20, 0))
    assert guess["value"] == pytest.approx(wanted)


def test_no_prediction_from_a_single_pool() -> None:
    values = np.full((1, 9), 0.5)
    assert np.isnan(extrapolate(values, [50], 1000, query_weights(9, 10, 0))["value"])
    assert extrapolate(values, [50], 50, query_weights(9, 10, 0))["value"] == 0.5


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    n=st.integers(45, 120),
    widths=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    metric=st.sampled_from(["cosine", "dot", "l2"]),
)
def test_recall_is_bounded_and_1_for_re_embedding(seed: int, n: int, widths: tuple[int, int], metric: str) -> None:
    old, new = rows(n, widths[0], seed), rows(n, widths[1], seed + 1)
    index = EmbeddingMap.of(LinearStitch.of(weight=torch.from_numpy(rows(widths[1], widths[0], seed))), metric=metric)  # type: ignore[arg-type]
    result = evaluate_retrieval(
        index, old, new, old, new, k=(1, 10), exclude=np.arange(n), resamples=20, index_size=1000, seed=seed
    )
    for table in (result.scores, result.predicted):
        for name, row in table.items():
            for score in row.values():
                if np.isnan(score["value"]):
                    continue
                assert -1e-9 <= score["low"] <= score["high"] <= 1 + 1e-9
                assert 0 <= score["value"] <= 1 + 1e-9
            if name == "re-embedding" and table is result.scores:
                assert row["recall@10"] == {"value": 1.0, "low": 1.0, "high": 1.0}


def test_vectors_that_do_not_fit_are_refused() -> None:
    old, new, index = noisy(0.3, n=200)
    asked = slice(0, 20)
    with pytest.raises(ValueError, match="must have equal numbers of rows"):
        evaluate_retrieval(index, old[:-1], new, old[asked], new[asked])
    with pytest.raises(ValueError, match="must have the same width"):
        evaluate_retrieval(index, old, new, old[asked, :3], new[asked])
    with pytest.raises(ValueError, match="at least 400 documents"):
        evaluate_retrieval(index, old, new, old[asked], new[asked], k=100)
    with pytest.raises(ValueError, match="relevance"):
        evaluate_retrieval(index, old, new, old[asked], new[asked], relevance=[{1}])
    other = EmbeddingMap.old_model(16, metric="dot")
    with pytest.raises(ValueError, match="same metric"):
        evaluate_retrieval({"a": index, "b": other}, old, new, old[asked], new[asked])


def test_kinds_of_queries_are_reported_apart() -> None:
    random = np.random.default_rng(0)
    old = random.normal(size=(460, 8)).astype(np.float32)
    new = old.copy()
    new[30:60] = random.normal(size=(30, 8))  # queries of another kind, which the map does not know
    documents, queries = slice(60, None), slice(60)
    kinds = ["news"] * 30 + ["code"] * 30
    keep = EmbeddingMap.of(IdentityStitch(8, 8))
    result = evaluate_retrieval(
        {"identity": keep}, old[documents], new[documents], old[queries], new[queries], k=10, kinds=kinds, resamples=50
    )
    scores = result.scores["old model"]
    assert scores["recall@10 of news"]["value"] == 1.0
    assert scores["recall@10 of code"]["value"] < 0.2
    both = (scores["recall@10 of news"]["value"] + scores["recall@10 of code"]["value"]) / 2
    assert scores["recall@10"]["value"] == pytest.approx(both)
    assert result.figure == "recall@10"
    with pytest.raises(ValueError, match="kinds must have one item for each of 60 queries, got 3"):
        evaluate_retrieval(keep, old[documents], new[documents], old[queries], new[queries], kinds=kinds[:3])
