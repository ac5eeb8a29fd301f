"""Estimates, intervals and scores on which verdicts of studies rest."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import f1_score
from study_scripts import of


def test_kept_share_is_above_chance() -> None:
    pairs = of("relative_representations.exchange").Pairs(["network"] * 3)
    found = pairs.kept(np.full((3, 3), 50.0) + 40 * np.eye(3), 10.0)
    assert (found.value, found.low, found.high) == pytest.approx((0.5, 0.5, 0.5))


def test_pairs_between_groups_leave_out_pairs_within() -> None:
    pairs = of("relative_representations.exchange").Pairs(["one", "one", "other"], between=True)
    values = np.array([[0.0, 0.0, 1.0], [0.0, 0.0, 3.0], [np.nan, 5.0, 0.0]])
    found = pairs.mean(values)
    assert found.value == pytest.approx(3)
    assert 1 <= found.low < found.value < found.high <= 5


def test_intervals_follow_the_networks() -> None:
    exchange = of("relative_representations.exchange")
    quality = np.arange(8.0)
    found = exchange.Pairs(["network"] * 8).mean(np.broadcast_to(quality, (8, 8)))
    standard_error = quality.std() / np.sqrt(8)
    assert found.value == pytest.approx(quality.mean())
    assert (found.high - found.low) / 2 == pytest.approx(1.96 * standard_error, rel=0.15)


def test_one_collapsed_network_does_not_decide_a_median() -> None:
    median = of("relative_representations.exchange").median
    gaps = np.array([-80.0, *np.linspace(-1, 1, 15)])
    found = median(gaps)
    assert found.value == pytest.approx(-0.0714, abs=1e-3) and -1 <= found.low < found.high <= 1
    assert median(gaps + 100).value == pytest.approx(found.value + 100)


def test_intervals_are_those_of_student() -> None:
    student = of("relative_representations.exchange").student
    found = student([1.0, 2.0, 3.0])
    assert (found.value, found.low, found.high) == pytest.approx((2.0, 2 - 2.4841, 2 + 2.4841), abs=1e-3)


def symmetric(random: np.random.Generator, k: int) -> np.ndarray:
    matrix = random.standard_normal((k, k))
    return matrix + matrix.T


def test_additive_fit_takes_the_means_of_models_off() -> None:
    pairwise = of("filter_atoms.pairwise")
    matrix = symmetric(np.random.default_rng(0), 6)
    residual = matrix - pairwise.additive(matrix)
    np.fill_diagonal(residual, 0)
    assert np.allclose(residual.sum(0), 0)
    own = np.add.outer(np.arange(6.0), np.arange(6.0))
    assert np.allclose(pairwise.upper(pairwise.additive(own)), pairwise.upper(own))


def test_intervals_over_models_are_wider_than_over_pairs() -> None:
    pairwise = of("filter_atoms.pairwise")
    random = np.random.default_rng(0)
    quality = random.standard_normal(10)
    matrix = np.add.outer(quality, quality)  # 45 pairs, ten independent numbers
    found = pairwise.bootstrap([{"x": matrix}], lambda pairs: float(pairs("x").mean()), 500)
    pairs = pairwise.upper(matrix)
    assert found.value == pytest.approx(pairs.mean())
    assert found.high - found.low > 2 * 1.96 * pairs.std() / np.sqrt(len(pairs))


def test_a_constant_predictor_has_no_correlation() -> None:
    pairwise = of("filter_atoms.pairwise")
    random = np.random.default_rng(0)
    group = {"x": np.full((5, 5), 0.3), "y": symmetric(random, 5)}
    found = pairwise.bootstrap([group], pairwise.correlations("x", "y"), 20)
    assert np.isnan(found.value)
    assert pairwise.cell({"value": None, "low": None, "high": None}) == "–"


def test_auroc_counts_pairs_of_a_cluster() -> None:
    federated = of("filter_atoms.federated")
    groups = np.array([0.0, 0, 1, 1, 2, 2])
    same = np.equal.outer(groups, groups).astype(float)
    for kind, masks in federated.clusters(groups, 2).items():
        assert federated.auroc(federated.pairs_of(same, masks)) == 1, kind
        assert federated.auroc(federated.pairs_of(-same, masks)) == 0, kind
        assert federated.auroc(federated.pairs_of(np.ones((6, 6)), masks)) == 0.5, kind
    counted = {kind: int(masks["counted"].sum()) for kind, masks in federated.clusters(groups, 2).items()}
    assert counted == {"subtask": 16, "digits": 20}


def test_only_candidates_that_the_images_tell_apart_are_no_ties() -> None:
    steps = of("how_not_to_stitch.task_loss_steps")
    best = np.ones(100, int)
    near, far = best.copy(), best.copy()
    near[:2], far[:30] = 0, 0
    assert steps.tied(np.stack([near, best, far])).tolist() == [True, True, False]


def test_what_is_found_is_compared_with_the_truth() -> None:
    script = of("embedding_upgrade.upgrade_table")
    documents = np.eye(4, dtype=np.float32)
    queries = np.array([[1.0, 0.5, 0.2, 0.1]], dtype=np.float32)
    assert script.ranked(queries, documents, 3).tolist() == [[0, 1, 2]]
    assert script.ranked(documents, documents, 3, True).shape == (4, 3)
    assert 0 not in script.ranked(documents, documents, 3, True)[0]
    assert script.overlap(np.array([[0, 1]]), np.array([[1, 2]])).tolist() == [0.5]
    graded = script.graded(np.array([[3, 1, 0], [2, 1, 0]]), [[3], [1]])
    assert graded["mrr"] == 0.75
    assert graded["ndcg"] == pytest.approx((1 + 1 / np.log2(3)) / 2)


def test_f1_is_that_of_scikit_learn_and_resamples_are_paired() -> None:
    labels = of("relative_representations.translated_labels")
    draws = np.random.default_rng(0)
    truth = draws.integers(3, size=300)
    better, worse = (np.where(draws.random(300) < share, truth, draws.integers(3, size=300)) for share in (0.8, 0.5))
    bootstrap = labels.Bootstrap(300, 2, 400)
    high, low = bootstrap.f1(truth, [better, better]), bootstrap.f1(truth, [worse, worse])
    assert high.shape == (401,)
    assert high[0] == pytest.approx(100 * f1_score(truth, better, average="macro"), abs=1e-3)
    value, least, most = labels.interval(high - low, 1)
    assert 0 < least < value < most
    assert (high - high == 0).all()
    assert bootstrap.share([truth == better] * 2)[0] == pytest.approx(100 * (truth == better).mean(), abs=1e-3)
