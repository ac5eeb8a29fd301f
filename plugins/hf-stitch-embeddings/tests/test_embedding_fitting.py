"""Parts are disjoint, the choice is by held-out retrieval, and few pairs keep what is safe."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hf_stitch_embeddings import (
    evaluate_retrieval,
    fit_embedding_map,
    normalized,
    pairs_curve,
    read_vectors,
    split_pairs,
)
from hf_stitch_embeddings.choosing import Candidate, Fits, Pairs, candidates, choose, score

from hf_stitch import registries


def rows(n: int, d: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, d)).astype(np.float32)


def encoders(n: int, d: int = 24, wide: int = 24, sigma: float = 0.2) -> tuple[np.ndarray, np.ndarray]:
    """Vectors of two encoders of the same hidden texts, of falling variances, with noise."""
    hidden = rows(n, d) * np.linspace(1, 0.2, d, dtype=np.float32)
    return normalized(hidden @ rows(d, d, 1) + sigma * rows(n, d, 3)), normalized(hidden @ rows(d, wide, 2))


def test_parts_are_disjoint_and_cover_all_pairs() -> None:
    old, new = encoders(500)
    parts = split_pairs(old, new, seed=3)
    together = np.concatenate([parts.fit, parts.choose, parts.report, parts.removed])
    assert sorted(together.tolist()) == list(range(500))
    assert parts.fit.tolist() != split_pairs(old, new, seed=4).fit.tolist()


def test_no_near_duplicates_are_across_parts() -> None:
    old, new = encoders(300)
    old, new = (np.concatenate([side, side + 1e-3 * rows(300, 24, 9)]) for side in (old, new))
    parts = split_pairs(old, new)
    assert len(parts.removed) > 50
    sides = [(parts.fit, parts.choose), (parts.fit, parts.report), (parts.choose, parts.report)]
    for one, other in sides:
        assert not set((one % 300).tolist()) & set((other % 300).tolist())


def test_equal_texts_are_duplicates_whatever_their_vectors_are() -> None:
    old, new = encoders(200)
    texts = [f"Text {row // 2}" if row % 2 else f" text  {row // 2}" for row in range(200)]
    parts = split_pairs(old, new, texts=texts)
    held = {row // 2 for row in (*parts.choose, *parts.report)}
    assert not held & {row // 2 for row in parts.fit.tolist()}


def test_the_fit_of_ridge_is_that_of_scikit_learn() -> None:
    linear = pytest.importorskip("sklearn.linear_model")
    old, new = encoders(400)
    made = Fits(Pairs(old, new)).map(Candidate("ridge", "index", {"ridge": 0.7}))
    weight, bias = made.affine() or pytest.fail("affine")
    wanted = linear.Ridge(alpha=0.7).fit(old.astype(float), new.astype(float))
    np.testing.assert_allclose(weight, wanted.coef_, atol=1e-4)
    np.testing.assert_allclose(bias, wanted.intercept_, atol=1e-4)


def test_penalties_are_multiples_of_that_of_gcv() -> None:
    fits = Fits(Pairs(*encoders(200)))
    first, second = (fits.map(Candidate("ridge", "query", multiple=m)) for m in (1.0, 10.0))
    assert second.stitch.fitted["ridge"] == pytest.approx(10 * float(first.stitch.fitted["ridge"]))


def test_candidates_fit_widths_metric_and_number_of_pairs() -> None:
    names = {each.name for each in candidates(2000, 8, 8)}
    assert names == {
        "old model", "identity", "procrustes", "ridge_to_identity", "ridge", "low_rank", "piecewise", "residual_mlp",
        "retrieval",
    }  # fmt: skip
    assert {each.name for each in candidates(2000, 8, 6)} == names - {"identity", "ridge_to_identity"}
    assert {each.name for each in candidates(200, 8, 8)} == {"old model", "identity", "ridge_to_identity"}
    assert {each.direction for each in candidates(2000, 8, 8, metric="l2")} == {"index", "query"}
    with pytest.raises(ValueError, match="equal widths"):
        candidates(2000, 8, 6, map="ridge_to_identity")
    with pytest.raises(ValueError, match="does not support direction 'adjoint'"):
        candidates(2000, 8, 8, map="piecewise", direction="adjoint")
    with pytest.raises(KeyError):
        candidates(2000, 8, 8, map="ridgee")


def test_auto_chooses_what_finds_most_on_held_out_pairs() -> None:
    old, new = encoders(700, wide=20)
    made = fit_embedding_map(old, new, progress=False, index_size=50_000)
    listed = made.record["candidates"]
    assert not made.keeps_old
    assert listed[0]["recall"] == max(each["recall"] for each in listed)
    assert made.direction == listed[0]["direction"]
    assert (made.recipe["matcher"] or {})["name"] == listed[0]["name"]
    assert made.recipe["samples"] == made.record["parts"]["fit"] + made.record["parts"]["choose"]
    report = made.scores["report"]
    assert report["recall"][made.name]["value"] > report["recall"]["old model"]["value"]
    assert made.record["verdict"]["index_size"] == 50_000


def test_squared_error_does_not_decide() -> None:
    """A map that shrinks most vectors to the mean has the smaller error, but loses the order of the neighbours."""
    old, new = encoders(900, sigma=0.6)
    listed = [Candidate("ridge", "index", multiple=m) for m in (1.0, 1000.0)] + [Candidate("procrustes", "index")]
    chosen, scored, _ = choose(listed, [(Pairs(old[:600], new[:600]), Pairs(old[600:], new[600:]))])
    assert chosen == max(scored, key=lambda each: each.recall).candidate
    for each in scored:  # as computed by the map alone
        made = Fits(Pairs(old[:600], new[:600])).map(each.candidate)
        assert each.recall == pytest.approx(score([(made, Pairs(old[600:], new[600:]))])[0].mean())


def test_maps_that_cannot_be_fitted_are_told() -> None:
    old, new = encoders(60, d=40, wide=40)
    listed = [Candidate("old model", "query"), Candidate("low_rank", "index", {"rank": 4})]
    chosen, scored, reason = choose(listed, [(Pairs(old[:30], new[:30]), Pairs(old[30:], new[30:]))])
    assert chosen.name == "old model"
    assert len(scored) == 1
    assert "not fitted: low_rank" in reason
    with pytest.raises(ValueError, match="no map could be fitted"):
        choose(listed[1:], [(Pairs(old[:30], new[:30]), Pairs(old[30:], new[30:]))])


def test_few_pairs_of_far_encoders_keep_the_old_model() -> None:
    generator = np.random.default_rng(0)
    hidden = generator.normal(size=(100, 64)).astype(np.float32)
    old = normalized(hidden + 0.1 * rows(100, 64, 1))
    new = normalized(np.tanh(hidden @ rows(64, 64, 2) / 4))
    made = fit_embedding_map(old, new, progress=False)
    assert made.keeps_old
    assert made.record["verdict"]["sentence"] == (
        "No verdict: the map was scored on 20 held-out pairs, too few for recall@10, which requires 100."
    )
    assert made.recipe["embedding_map"]["reason"]


def test_cross_validation_uses_no_document_of_the_fit() -> None:
    """With fewer pairs than features, an interpolating map is perfect on its own pairs, and chance on others."""
    old, new = normalized(rows(100, 64)), normalized(rows(100, 64, 1))
    listed = [Candidate("ridge", each, {"ridge": 1e-6}) for each in ("index", "query", "adjoint")]  # type: ignore[arg-type]
    folds = np.array_split(np.arange(100), 4)
    parts = [(Pairs(np.delete(old, fold, 0), np.delete(new, fold, 0)), Pairs(old[fold], new[fold])) for fold in folds]
    _, scored, _ = choose(listed, parts)
    for each in scored:
        assert each.recall < 0.2  # 2 of 24


def test_few_pairs_of_near_encoders_suffice() -> None:
    old = normalized(rows(120, 32))
    turn = np.linalg.qr(np.eye(32) + 0.25 * rows(32, 32, 1))[0].astype(np.float32)
    turn *= np.sign(np.diag(turn))
    made = fit_embedding_map(old, normalized(old @ turn * np.linspace(0.3, 2, 32, dtype=np.float32)), progress=False)
    names = {each["name"] for each in made.record["candidates"]}
    assert names == {"old model", "identity", "ridge_to_identity"}
    assert made.recipe["matcher"]["name"] == "ridge_to_identity"


@pytest.mark.parametrize("direction", ["index", "query", "adjoint"])
@pytest.mark.parametrize("metric", ["cosine", "dot"])
def test_every_direction_can_be_fixed(direction: str, metric: str) -> None:
    old, new = encoders(300, wide=16)
    made = fit_embedding_map(old, new, map="ridge", direction=direction, metric=metric, progress=False)  # type: ignore[arg-type]
    assert (made.direction, made.metric, made.normalized) == (direction, metric, metric == "cosine")
    assert made(old if direction == "index" else new).shape == (300, 16 if direction == "index" else 24)


@pytest.mark.parametrize("direction", ["index", "query"])
def test_by_distance_too(direction: str) -> None:
    old, new = (3 * side for side in encoders(300, wide=16, sigma=0.05))
    made = fit_embedding_map(old, new, map="ridge", direction=direction, metric="l2", progress=False)  # type: ignore[arg-type]
    assert not made.normalized
    recall = made.scores["report"]["recall"]
    assert recall[made.name]["value"] > 0.2  # chance: 6 of 59
    assert {each.direction for each in candidates(300, 24, 16, metric="l2")} == {"index", "query"}


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_quantised_indexes_can_be_fitted(dtype: str) -> None:
    old, new = encoders(400)
    codes = np.clip(np.floor((old + 1) / 2 * 255) - 128, -128, 127).astype(np.int8)
    stored = old.astype(np.float16) if dtype == "float16" else read_vectors(codes, quantization="int8", ranges=(-1, 1))
    made, exact = (
        fit_embedding_map(each, new, ids=range(400), map="ridge", direction="index", progress=False)
        for each in (stored, old)
    )
    one, other = (each.scores["report"]["recall"][each.name]["value"] for each in (made, exact))
    assert one == pytest.approx(other, abs=0.05)


def test_a_matcher_with_options_is_used_as_it_is() -> None:
    matcher = registries.matchers.build("piecewise", clusters=3)
    made = fit_embedding_map(*encoders(300), map=matcher, direction="query", progress=False)
    assert made.recipe["matcher"]["clusters"] == 3


def test_the_same_seed_gives_the_same_map() -> None:
    old, new = encoders(200)
    one, other = (fit_embedding_map(old, new, map="residual_mlp", direction="index", progress=False) for _ in range(2))
    np.testing.assert_array_equal(one(old), other(old))


def test_the_last_fit_may_use_all_pairs_after_the_report() -> None:
    old, new = encoders(300)
    part, whole = (
        fit_embedding_map(old, new, map="ridge", direction="adjoint", use_all=each, progress=False)
        for each in (False, True)
    )
    assert (part.recipe["samples"], whole.recipe["samples"]) == (240, 300)
    assert part.scores == whole.scores
    assert part.record["parts"] == whole.record["parts"]
    wanted = Fits(Pairs(old, new)).map(Candidate("ridge", "adjoint", multiple=1.0))
    np.testing.assert_array_equal(whole(new), wanted(new))


def test_encoders_and_texts_are_pairs_too() -> None:
    words = [f"{a}{b}" for a in "abcdefgh" for b in "klmnopqr"]

    def encoder(texts: list[str]) -> list[list[float]]:
        return [[float(ord(t[0])) - 100, float(ord(t[1])) - 110, 1.0] for t in texts]

    made = fit_embedding_map(encoder, encoder, texts=words, map="identity", direction="query", progress=False)
    assert made.scores["report"]["recall"][made.name]["value"] == 1
    with pytest.raises(ValueError, match="pass `texts`"):
        fit_embedding_map(encoder, encoder)


def test_bad_pairs_are_refused() -> None:
    old, new = encoders(200)
    with pytest.raises(ValueError, match="at least 20 pairs"):
        fit_embedding_map(old[:19], new[:19])
    with pytest.raises(ValueError, match="do not correspond"):
        fit_embedding_map(old, new[::-1].copy())
    with pytest.raises(ValueError, match="different texts"):
        same = np.repeat(old[:5], 40, axis=0)
        fit_embedding_map(same, same, ids=range(200))
    with pytest.raises(ValueError, match="got 100"):
        fit_embedding_map(old, new, texts=["a"] * 100)


def test_more_pairs_find_more() -> None:
    old, new = encoders(1600, wide=16)
    curve = pairs_curve(
        old[:1000], new[:1000], old[1000:1500], new[1000:1500], old[1500:], new[1500:], sizes=(30, 1000), seeds=(0, 1)
    )
    for row in curve.scores.values():
        assert row["1000"]["value"] > row["30"]["value"]
    assert curve.scores["ridge, index"]["1000"]["low"] > curve.scores["ridge, index"]["30"]["high"]
    assert len(curve.to_pandas()) == 6
    assert curve.plot().axes


class Asymmetric:
    """An encoder that encodes queries and documents in different ways."""

    def __init__(self, documents: np.ndarray, queries: np.ndarray) -> None:
        self.documents, self.queries = documents, queries

    def encode_document(self, texts: list[str]) -> np.ndarray:
        return self.documents[list(map(int, texts))]

    def encode_query(self, texts: list[str]) -> np.ndarray:
        return self.queries[list(map(int, texts))]

    encode = None


@pytest.mark.parametrize("direction", ["index", "query", "adjoint"])
def test_maps_of_queries_are_fitted_to_queries_and_maps_of_documents_to_documents(direction: Any) -> None:
    old, new = encoders(300)
    old_queries, new_queries = (normalized(side @ rows(24, 24, seed)) for seed, side in enumerate((old, new), 7))
    texts = [str(number) for number in range(300)]
    sides = Asymmetric(old, old_queries), Asymmetric(new, new_queries)
    made = fit_embedding_map(*sides, texts=texts, map="ridge", direction=direction, progress=False, use_all=True)
    of_queries = direction == "query"
    pairs = Pairs(old_queries, new_queries) if of_queries else Pairs(old, new)
    wanted = Fits(pairs).map(Candidate("ridge", direction, multiple=1.0))
    inputs = (old if direction == "index" else new_queries)[:9]
    np.testing.assert_array_equal(made(inputs), wanted(inputs))
    found = Pairs(old, new, (old_queries, new_queries)).take(np.arange(9))
    assert [len(side) for side in (found.old, found.new, *found.as_queries)] == [9] * 4


def test_the_report_has_queries_over_documents() -> None:
    old, new = encoders(300)
    old_queries, new_queries = (normalized(side + 0.3 * rows(300, 24, seed)) for seed, side in enumerate((old, new), 7))
    texts = [str(number) for number in range(300)]
    sides = Asymmetric(old, old_queries), Asymmetric(new, new_queries)
    made = fit_embedding_map(*sides, texts=texts, map="ridge", direction="query", progress=False)
    report = split_pairs(old, new, texts=texts).report
    vectors = (side[report] for side in (old, new, old_queries, new_queries))
    found = evaluate_retrieval(made, *vectors, k=6, exclude=np.arange(len(report)), baselines=False)
    recall = made.scores["report"]["recall"]["ridge, query"]["value"]
    assert recall == pytest.approx(found.scores["ridge, query"]["recall@6"]["value"])
