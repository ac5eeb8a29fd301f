"""Both verdicts occur, queries are scored, and ageing is noticed."""

from __future__ import annotations

import numpy as np
import pytest
from hf_stitch_embeddings import (
    EmbeddingMap,
    calibrate,
    evaluate_retrieval,
    fit_embedding_map,
    monitor,
    normalized,
    query_scores,
    verdict,
)
from hf_stitch_embeddings.deciding import Verdict
from sklearn.metrics import roc_auc_score


def rows(n: int, d: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, d)).astype(np.float32)


def encoders(sigma: float, n: int = 1500, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """An encoder, and another one that is the first, rotated, with noise."""
    old = normalized(rows(n, 16, seed))
    turned = old @ np.linalg.qr(rows(16, 16, 99))[0].astype(np.float32)
    return old, normalized(turned + sigma / 4 * rows(n, 16, seed + 7))


def fitted(sigma: float, n: int = 1500) -> EmbeddingMap:
    return fit_embedding_map(*encoders(sigma, n), map="ridge", direction="index", index_size=20_000, progress=False)


@pytest.fixture(scope="module")
def near() -> EmbeddingMap:
    return fitted(0.02)


@pytest.fixture(scope="module")
def far() -> EmbeddingMap:
    return fitted(0.6, 5200)


def test_both_verdicts_occur(near: EmbeddingMap, far: EmbeddingMap) -> None:
    yes, no = verdict(near), verdict(far)
    assert yes.go
    assert yes.sentence.startswith("Go")
    assert not no.go
    assert no.sure
    assert no.sentence.startswith("No go with ridge, index")
    assert "in an index of 20,000 documents" in no.sentence
    assert "re-embedded and re-ranked" in no.sentence
    assert f"The old model is predicted to reach {no.old['value']:.3f}" in no.sentence
    assert Verdict.from_dict(yes.to_dict()) == yes


def test_the_user_sets_the_threshold(far: EmbeddingMap) -> None:
    assert verdict(far, threshold=0.01).go
    assert not verdict(far, threshold=0.01, margin=0.9).go
    with pytest.raises(ValueError, match="threshold"):
        verdict(far, threshold=1.2)


def test_without_scores_there_is_no_verdict() -> None:
    kept = EmbeddingMap.old_model(3)
    with pytest.raises(ValueError, match="scores"):
        verdict(kept)
    with pytest.raises(ValueError, match="scores"):
        monitor(kept, rows(100, 3), rows(100, 3))


def test_few_held_out_pairs_give_no_verdict() -> None:
    """Recall@4 among 48 pairs says nothing about an index."""
    with pytest.raises(ValueError, match="scored on 48 held-out pairs, too few for recall@10, which requires 100: fit"):
        verdict(fitted(0.02, 240))
    assert verdict(fitted(0.02, 500)).figure == "recall@10"


def test_a_result_on_other_vectors_takes_precedence(near: EmbeddingMap) -> None:
    old, new = encoders(0.9, n=1100, seed=5)
    result = evaluate_retrieval(near, old[100:], new[100:], old[:100], new[:100], k=10)
    found = verdict(near, result=result)
    assert not found.go
    assert found.index_size is None
    assert "pool of 1,000" in found.sentence


def test_more_pairs_are_worth_less_and_less() -> None:
    old, new = rows(500, 64), rows(500, 64) @ rows(64, 64, 5) + 3 * rows(500, 64, 6)
    made = fit_embedding_map(old, new, map="ridge", direction="index", progress=False)
    count = made.recipe["samples"]
    more = verdict(made).more_pairs
    assert set(more) == {str(2 * count), str(4 * count)}
    assert verdict(made).predicted["value"] < more[str(2 * count)] < more[str(4 * count)] <= 1


def test_the_score_of_a_query_goes_with_its_recall() -> None:
    old, new = encoders(0.3, n=4500)
    made = fit_embedding_map(old[:1500], new[:1500], map="ridge", direction="index", progress=False)
    documents, asked = slice(2500, None), slice(1500, 2500)
    gaps = query_scores(made, new[asked], made(old[documents]))
    wanted = np.sort(normalized(new[asked]) @ made(old[documents]).T, axis=1)[:, ::-1]
    np.testing.assert_allclose(gaps, wanted[:, 9] - wanted[:, 49], atol=1e-5)
    with pytest.raises(ValueError, match="below far"):
        query_scores(made, new[asked], made(old[documents]), near=50, far=10)


def test_a_fresh_map_has_not_aged_and_a_changed_encoder_is_noticed(far: EmbeddingMap) -> None:
    old, new = encoders(0.6, n=400, seed=20)
    fresh = monitor(far, old, new)
    assert not fresh.aged
    assert fresh.loss["low"] < 0.02
    changed = normalized(new + 0.5 * rows(400, 16, 33))
    assert monitor(far, old, changed).aged
    assert "refit" in str(monitor(far, old, changed))


def test_only_a_loss_beyond_chance_is_ageing(far: EmbeddingMap) -> None:
    old, new = encoders(0.6, n=400, seed=20)
    loss = monitor(far, old, new).loss
    assert loss["low"] < loss["value"] < loss["high"]
    assert not monitor(far, old, new, tolerance=(loss["low"] + loss["value"]) / 2).aged
    assert monitor(far, old, new, tolerance=loss["low"] - 1e-6).aged


def test_a_smaller_pool_alone_is_no_improvement(far: EmbeddingMap) -> None:
    old, new = encoders(0.6, n=100, seed=21)
    found = monitor(far, old, new)
    report = far.scores["report"]
    assert found.then["value"] > report["recall"][far.name]["value"]  # read off at the size of the new pool
    assert found.loss["low"] <= 0 <= found.loss["high"]
    with pytest.raises(ValueError, match="requires at least"):
        monitor(far, old[:10], new[:10])
    with pytest.raises(ValueError, match="same number of rows"):
        monitor(far, old[:50], new)


def test_the_roc_agrees_with_scikit_learn_and_each_is_left_out() -> None:
    generator = np.random.default_rng(0)
    true = generator.uniform(0.4, 1, 14)
    predicted = true + 0.1 + 0.05 * generator.normal(size=14)
    found = calibrate(predicted, true)
    assert found.auc == pytest.approx(roc_auc_score(true >= 0.8, predicted))
    errors = predicted - true
    for place, go in enumerate(found.decisions):
        others = np.delete(errors, place).mean()
        assert go == (predicted[place] - others >= 0.8)
    assert found.accuracy >= 0.8
    assert calibrate(predicted, true, kind="safe").margin > found.margin
    with pytest.raises(ValueError, match="two pairs"):
        calibrate([0.5, 0.6], [0.5, 0.6], groups=["a", "a"])
