"""Values from the definitions, by other means: loops, scipy and scikit-learn; and known values."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.linalg
import scipy.spatial.distance as sd
import scipy.stats
import torch
from hypothesis import given, settings, strategies as st
from metric_rows import centred, related
from sklearn.cross_decomposition import CCA as SklearnCCA
from sklearn.linear_model import LinearRegression, Ridge
from sklearn.metrics import r2_score
from sklearn.neighbors import NearestNeighbors

from hf_stitch import metrics as M

X, Y = related(60, 6, 4)


def unbiased_hsic_of_grams(k: np.ndarray, other: np.ndarray) -> float:
    """Song et al. 2012, from Gram matrices without their diagonals."""
    n, one = len(k), np.ones(len(k))
    k, other = k - np.diag(np.diag(k)), other - np.diag(np.diag(other))
    total = np.trace(k @ other) + (one @ k @ one) * (one @ other @ one) / ((n - 1) * (n - 2))
    return (total - 2 / (n - 2) * (one @ k @ other @ one)) / (n * (n - 3))


def cosine_of(hsic: list[float]) -> float:
    return hsic[1] / math.sqrt(hsic[0] * hsic[2])


@pytest.mark.parametrize("shape", [(60, 6, 4), (20, 40, 30), (25, 8, 50)], ids=str)
def test_cka_of_grams(shape: tuple[int, int, int]) -> None:
    x, y = related(*shape)
    gram_x, gram_y = x @ x.T, y @ y.T
    n = len(x)
    centring = np.eye(n) - 1 / n
    kc, lc = centring @ gram_x @ centring, centring @ gram_y @ centring
    assert M.linear_cka(x, y) == pytest.approx(cosine_of([(kc**2).sum(), (kc * lc).sum(), (lc**2).sum()]), rel=1e-10)
    pairs = ((gram_x, gram_x), (gram_x, gram_y), (gram_y, gram_y))
    expected = cosine_of([unbiased_hsic_of_grams(*pair) for pair in pairs])
    assert M.linear_cka(x, y, debiased=True) == pytest.approx(expected, rel=1e-9)


def test_minibatch_cka_sums_over_batches() -> None:
    sums = [0.0, 0.0, 0.0]
    for rows in (slice(0, 20), slice(20, 40), slice(40, 58)):
        k, other = X[rows] @ X[rows].T, Y[rows] @ Y[rows].T
        for i, pair in enumerate(((k, k), (k, other), (other, other))):
            sums[i] += len(k) * unbiased_hsic_of_grams(*pair)
    assert M.minibatch_cka(X[:58], Y[:58], batch_size=20) == pytest.approx(cosine_of(sums), rel=1e-9)


def test_minibatch_cka_joins_a_short_rest_to_the_last_batch() -> None:
    assert M.minibatch_cka(X[:23], Y[:23], batch_size=20) == pytest.approx(M.linear_cka(X[:23], Y[:23], debiased=True))


def test_cca_and_its_kin_of_orthonormal_bases() -> None:
    u, v = (np.linalg.qr(centred(side))[0] for side in (X, Y))
    correlations = np.linalg.svd(u.T @ v, compute_uv=False)
    assert M.cca(X, Y) == pytest.approx(correlations.mean(), rel=1e-10)
    assert M.cca(X, Y, squared=True) == pytest.approx((correlations**2).mean(), rel=1e-10)
    assert M.svcca(X, Y, variance=1.0) == pytest.approx(correlations.mean(), rel=1e-10)
    fitted = SklearnCCA(n_components=4, scale=False, max_iter=5000, tol=1e-12).fit(X, Y)
    by_power = [np.corrcoef(a, b)[0, 1] for a, b in zip(*(side.T for side in fitted.transform(X, Y)), strict=True)]
    assert M.cca(X, Y) == pytest.approx(np.mean(by_power), rel=1e-6)


def test_ridge_cca_is_that_of_regularised_covariances() -> None:
    x, y = centred(X), centred(Y)
    sxx, syy = (s.T @ s + 0.3 * np.trace(s.T @ s) / s.shape[1] * np.eye(s.shape[1]) for s in (x, y))
    squared = scipy.linalg.eigvals(np.linalg.solve(sxx, x.T @ y) @ np.linalg.solve(syy, y.T @ x)).real
    assert M.cca(X, Y, ridge=0.3) == pytest.approx(np.sqrt(np.sort(squared)[-4:]).mean(), rel=1e-9)


def test_pwcca_weights_only_directions_that_are_there() -> None:
    u = np.linalg.svd(centred(X), full_matrices=False)[0]
    left, correlations, _ = np.linalg.svd(u.T @ np.linalg.qr(centred(Y))[0])
    weights = np.abs((u @ left[:, :4]).T @ centred(X)).sum(1)
    assert M.pwcca(X, Y) == pytest.approx(weights @ correlations / weights.sum(), rel=1e-10)


def weighted_over_all(x: np.ndarray, y: np.ndarray) -> float:
    """PWCCA with weights over all directions of x, from symmetric whitening as in the code of Ding et al. (2021).

    The directions of x without a partner in y are aligned with the principal axes of the rest.
    """
    x, y = centred(x), centred(y)
    values, vectors = np.linalg.eigh(x.T @ x)
    variates = x @ vectors / np.sqrt(values) @ vectors.T
    span = scipy.linalg.orth(y, rcond=1e-10)
    left, correlations, _ = np.linalg.svd(variates.T @ span)
    count = min(len(left), span.shape[1])
    known, rest = (variates @ left[:, :count]).T @ x, (variates @ left[:, count:]).T @ x
    _, lengths, axes = np.linalg.svd(rest, full_matrices=False)
    weights = np.abs(known).sum(1)
    return float(weights @ correlations[:count] / (weights.sum() + np.abs(np.diag(lengths) @ axes).sum()))


@pytest.mark.parametrize("rank", [1, 2, 3, 5])
def test_pwcca_weights_all_directions_of_the_reference(rank: int) -> None:
    """A y of any rank: sums of its directions, with noise so that no two correlations are equal."""
    g = np.random.default_rng(rank)
    x, y = related(80, 6, 5, seed=rank)
    low = y @ g.standard_normal((5, rank)) @ g.standard_normal((rank, 7))
    value = M.pwcca(x, low, directions="all")
    assert value == pytest.approx(weighted_over_all(x, low), rel=1e-9)
    assert M.pwcca(x, low @ g.standard_normal((7, 7)) + 3, directions="all") == pytest.approx(value, rel=1e-8)
    assert value < M.pwcca(x, low @ np.linalg.svd(low)[2][:rank].T)  # which ignores the part of x that y lacks


def test_pwcca_of_low_rank_approximations_rises_with_the_rank_in_any_basis() -> None:
    """All their correlations are 1 or 0, so that the basis is open on both sides; the paired weights give 1."""
    x = centred(related(80, 6, 6, seed=3)[0]) @ np.diag([1.0, 0.7, 0.5, 0.3, 0.2, 0.1])
    left, lengths, axes = np.linalg.svd(x, full_matrices=False)
    found = []
    for rank in range(1, 7):
        low, coordinates = (left[:, :rank] * lengths[:rank]) @ axes[:rank], left[:, :rank] * lengths[:rank]
        value = M.pwcca(x, low, directions="all")
        lengths_l1 = lengths * np.abs(axes).sum(1)  # the canonical variates are the left singular vectors
        assert value == pytest.approx(lengths_l1[:rank].sum() / lengths_l1.sum(), rel=1e-9)
        turned = np.random.default_rng(rank).permutation(80)
        assert M.pwcca(x[turned], low[turned], directions="all") == pytest.approx(value, rel=1e-9)
        assert M.pwcca(x, coordinates) == pytest.approx(1)
        found.append(value)
    assert (np.diff(found) > 0).all() and found[-1] == pytest.approx(1)


def test_pwcca_takes_sides_of_low_rank() -> None:
    x, y = related(80, 6, 5)
    low = y[:, :2] @ np.random.default_rng(0).standard_normal((2, 5))
    # The weights of x are its co-moments with the canonical variates, which depend on the span of y alone.
    assert M.pwcca(x, low) == pytest.approx(M.pwcca(x, y[:, :2]), rel=1e-9)
    # From the definition, with orthonormal coordinates of the rows in place of factors of the scatter.
    (u, lengths, axes), v = np.linalg.svd(centred(low), full_matrices=False), np.linalg.qr(centred(x))[0]
    turns, correlations, _ = np.linalg.svd(u[:, :2].T @ v, full_matrices=False)
    weights = np.abs(turns.T @ (lengths[:2, None] * axes[:2])).sum(1)
    assert M.pwcca(low, x, directions="all") == pytest.approx(correlations @ weights / weights.sum(), rel=1e-9)


def test_procrustes_is_the_residual_of_the_best_rotation() -> None:
    x, y = related(60, 5, 5)
    x, y = centred(x), centred(y)
    rotation, _ = scipy.linalg.orthogonal_procrustes(x, y)
    assert M.procrustes(x, y, unit_norm=False) == pytest.approx(np.linalg.norm(x @ rotation - y), rel=1e-10)
    x, y = x / np.linalg.norm(x), y / np.linalg.norm(y)
    rotation, scale = scipy.linalg.orthogonal_procrustes(x, y)
    assert M.procrustes(x, y, squared=True) == pytest.approx(np.linalg.norm(x @ rotation - y) ** 2, rel=1e-9)
    assert M.shape_distance(x, y) == pytest.approx(np.arccos(scale), rel=1e-9)


@pytest.mark.parametrize("function", [M.procrustes, M.shape_distance, M.linear_cka], ids=lambda f: f.__name__)
def test_wide_rows_have_the_value_and_gradient_of_padded_ones(function) -> None:
    """More features than rows take another route; zeros added to narrow ones force it on the same rows."""
    x, y = (torch.from_numpy(side) for side in related(12, 5, 4))
    narrow, wide = x.clone().requires_grad_(), torch.nn.functional.pad(x, (0, 20)).requires_grad_()
    value, same = function(narrow, y), function(wide, y)
    assert value.item() == pytest.approx(same.item(), rel=1e-10)
    value.backward()
    same.backward()
    torch.testing.assert_close(wide.grad[:, :5], narrow.grad, rtol=1e-8, atol=1e-10)


def test_wide_rows_take_little_memory() -> None:
    x, y = torch.randn(8, 300_000), torch.randn(8, 200_000)  # a width × width matrix would have 60 billion entries
    assert 0 <= M.linear_cka(x, y) <= 1
    assert 0 <= M.procrustes(x, y) <= math.sqrt(2)
    assert 0 <= M.shape_distance(x, y) <= math.pi / 2
    assert M.direct_matching(x, x) == 0


def test_r2_of_a_fit_is_that_of_sklearn() -> None:
    for centring in (True, False):
        predicted = LinearRegression(fit_intercept=centring).fit(X, Y).predict(X)
        expected = 1 - ((predicted - Y) ** 2).sum() / ((centred(Y) if centring else Y) ** 2).sum()
        assert M.linear_regression(X, Y, center=centring) == pytest.approx(expected, rel=1e-10)


def test_r2_of_a_given_map_is_that_of_its_predictions() -> None:
    fitted = Ridge(alpha=30).fit(X, Y)
    weight, bias = fitted.coef_, fitted.intercept_
    expected = r2_score(Y, fitted.predict(X), multioutput="variance_weighted")
    assert M.linear_regression(X, Y, weight=weight, bias=bias) == pytest.approx(expected, rel=1e-10)
    uncentred = 1 - ((X @ weight.T - Y) ** 2).sum() / (Y**2).sum()
    assert M.linear_regression(X, Y, center=False, weight=weight) == pytest.approx(uncentred, rel=1e-10)
    assert 1 - M.direct_matching(X @ weight.T, Y) == pytest.approx(uncentred, rel=1e-10)


def test_r2_falls_when_the_map_leaves_the_fit() -> None:
    """Refitted, R² is blind to the map; for the map as given it is not, and has a gradient."""
    x, y = torch.from_numpy(X), torch.from_numpy(Y)
    weight = torch.linalg.lstsq(x, y).solution.T.requires_grad_()
    best = M.linear_regression(x, y, weight=weight, center=False)
    assert best.item() == pytest.approx(M.linear_regression(X, Y, center=False), rel=1e-9)
    assert torch.autograd.grad(best, weight)[0].abs().max() < 1e-9
    assert M.linear_regression(x, y, weight=2 * weight, center=False) < best - 0.1
    mapped = X @ np.diag([1.0, 2, 3, 4, 5, 6])
    assert M.linear_regression(mapped, Y) == pytest.approx(M.linear_regression(X, Y), rel=1e-10)


@pytest.mark.parametrize("distance", ["correlation", "cosine", "euclidean"])
def test_rsa_of_scipy(distance: str) -> None:
    rdms = [sd.pdist(side, distance) for side in (X, Y)]
    for compare, reference in (("spearman", scipy.stats.spearmanr), ("pearson", scipy.stats.pearsonr)):
        assert M.rsa(X, Y, distance=distance, compare=compare) == pytest.approx(reference(*rdms).statistic, rel=1e-9)


def test_rsa_shares_the_ranks_of_ties() -> None:
    x, y = (np.repeat(side[:6], 3, axis=0) for side in (X, Y))  # threefold rows: distances that are 0, or equal
    rdms = [sd.pdist(np.round(side), "euclidean") for side in (x, y)]
    value = M.rsa(np.round(x), np.round(y), distance="euclidean")
    assert value == pytest.approx(scipy.stats.spearmanr(*rdms).statistic, rel=1e-9)


@pytest.mark.parametrize("distance", ["cosine", "euclidean"])
def test_neighbours_of_sklearn(distance: str) -> None:
    k = 7
    near = [NearestNeighbors(n_neighbors=k, metric=distance).fit(s).kneighbors(return_distance=False) for s in (X, Y)]
    shared = [set(a) & set(b) for a, b in zip(*near, strict=True)]
    assert M.mutual_knn(X, Y, k=k, distance=distance) == pytest.approx(np.mean([len(s) / k for s in shared]))
    jaccard = [len(s) / (2 * k - len(s)) for s in shared]
    assert M.jaccard(X, Y, k=k, distance=distance) == pytest.approx(np.mean(jaccard))


@pytest.mark.parametrize("distance", ["cosine", "euclidean"])
def test_shares_of_ties_have_the_precision_of_rows(distance: str) -> None:
    x = np.repeat(X[:6], 4, axis=0)  # three copies of a row share two places
    for name in ("mutual_knn", "jaccard"):
        assert getattr(M, name)(x, 2 * x, k=2, distance=distance) == pytest.approx(1, abs=1e-14)


def test_neighbours_do_not_depend_on_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = related(60, 5, 5)
    names = ("mutual_knn", "mrr")
    whole = [getattr(M, name)(x, y) for name in names]
    monkeypatch.setattr("hf_stitch.metrics._neighbours._QUERIES", 7)
    assert [getattr(M, name)(x, y) for name in names] == pytest.approx(whole)


def test_mrr_counts_ranks() -> None:
    gallery = np.eye(4)
    queries = np.array([[4.0, 3, 2, 1], [4, 3, 2, 1], [4, 3, 2, 1], [4, 3, 2, 1]])
    assert M.mrr(queries, gallery, k=3) == pytest.approx((1 + 1 / 2 + 1 / 3 + 0) / 4)
    assert M.mrr(queries, np.ones((4, 4)), k=3) == 0  # all are as near as the right one


def test_paired_cosine_of_scipy() -> None:
    x, y = related(30, 5, 5)
    assert M.paired_cosine(x, y) == pytest.approx(np.mean([1 - sd.cosine(a, b) for a, b in zip(x, y, strict=True)]))


def test_jensen_shannon_of_scipy() -> None:
    x, y = related(30, 5, 5)
    p, q = scipy.special.softmax(x, 1), scipy.special.softmax(y, 1)
    expected = np.mean(sd.jensenshannon(p, q, axis=1) ** 2)
    assert M.jensen_shannon(x, y) == pytest.approx(expected, rel=1e-9)
    assert M.jensen_shannon(p, q, inputs="probabilities") == pytest.approx(expected, rel=1e-9)


def test_outputs_are_compared_by_their_greatest() -> None:
    x, y = related(40, 5, 5)
    assert M.disagreement(x, y) == pytest.approx((x.argmax(1) != y.argmax(1)).mean())


@settings(max_examples=20, deadline=None)
@given(n=st.integers(20, 60), dx=st.integers(2, 6), dy=st.integers(2, 6), seed=st.integers(0, 10**6))
def test_relations_between_metrics(n: int, dx: int, dy: int, seed: int) -> None:
    x, y = related(n, dx, dy, seed=seed)
    assert M.procrustes(x, y) == pytest.approx(2 * math.sin(M.shape_distance(x, y) / 2), rel=1e-6)  # chord and arc
    assert M.linear_regression(x, np.linalg.qr(centred(y))[0]) == pytest.approx(
        M.cca(x, y, squared=True) * min(dx, dy) / dy, rel=1e-8
    )  # R² of a whitened target is the mean squared correlation over its directions
    assert M.mutual_knn(x, y) >= M.jaccard(x, y)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), widths=st.tuples(*[st.integers(2, 6)] * 3))
def test_triangle_inequality(seed: int, widths: tuple[int, int, int]) -> None:
    g = np.random.default_rng(seed)
    x, y, z = (np.exp(2 * g.standard_normal()) * g.standard_normal((30, width)) for width in widths)
    for distance in [
        lambda a, b: M.procrustes(a, b),
        lambda a, b: M.procrustes(a, b, unit_norm=False),
        lambda a, b: M.shape_distance(a, b),
        lambda a, b: M.shape_distance(a, b, alpha=0.5),
        lambda a, b: M.shape_distance(a, b, distance="euclidean", alpha=0.3),
    ]:
        assert distance(x, z) <= distance(x, y) + distance(y, z) + 1e-9


def test_the_square_of_procrustes_breaks_the_triangle_inequality() -> None:
    g = np.random.default_rng(0)
    x = g.standard_normal((30, 3))
    square = [M.procrustes(a, b, squared=True, unit_norm=False) for a, b in ((x, 2 * x), (2 * x, 3 * x), (x, 3 * x))]
    assert square[2] > square[0] + square[1]
