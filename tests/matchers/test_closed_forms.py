"""Each closed form against an independent dense computation: NumPy, SciPy, scikit-learn."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, get_args

import numpy as np
import pytest
import scipy.linalg
import torch
from sklearn.linear_model import Lasso as SklearnLasso, Ridge as SklearnRidge

from hf_stitch.matchers.alignment import Compare, Permutation, Procrustes, Recoloured
from hf_stitch.matchers.regression import Lasso, LowRank, Lstsq, Ridge, RidgeToIdentity
from hf_stitch.stitches import LinearStitch, LowRankStitch

if TYPE_CHECKING:
    from conftest import Rows

DOUBLE = torch.float64


def weights(stitch: LinearStitch | LowRankStitch) -> tuple[np.ndarray, np.ndarray]:
    """The map as (dx, dy), and the bias."""
    bias = torch.zeros(stitch.out_features) if stitch.bias is None else stitch.bias
    return stitch.matrix().detach().numpy().T, bias.detach().numpy()


def error(x: np.ndarray, y: np.ndarray, matrix: np.ndarray, bias: np.ndarray | float = 0.0) -> float:
    return float(((x @ matrix + bias - y) ** 2).sum())


# -- lstsq


def test_lstsq_is_numpys(rows: Rows) -> None:
    matrix, bias = weights(Lstsq().fit(rows.moments, DOUBLE))
    expected = np.linalg.lstsq(np.c_[rows.x, np.ones(300)], rows.y)[0]
    np.testing.assert_allclose(np.r_[matrix, bias[None]], expected, rtol=1e-8, atol=1e-10)
    through_0 = Lstsq(intercept=False).fit(rows.moments, DOUBLE)
    assert through_0.bias is None
    np.testing.assert_allclose(weights(through_0)[0], np.linalg.lstsq(rows.x, rows.y)[0], rtol=1e-8, atol=1e-10)


def test_lstsq_of_deficient_x_is_the_map_of_least_norm(paired: type[Rows]) -> None:
    x, y = paired.draw(200, 6, 4)
    x = np.c_[x, x[:, :2] - x[:, 2:4], np.full(200, 0.1)]  # two dependent features and a constant one
    stitch = Lstsq().fit(paired(x, y).moments, DOUBLE)
    assert stitch.fitted["x_rank"] == 6
    x, y = paired(x, y).centred
    np.testing.assert_allclose(weights(stitch)[0], np.linalg.pinv(x, rcond=1e-10) @ y, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("condition", [1e3, 1e5])
def test_lstsq_loses_no_direction_of_an_ill_conditioned_layer(condition: float, paired: type[Rows]) -> None:
    x, _ = paired.draw(2000, 8, 8)
    x *= np.geomspace(1, 1 / condition, 8)
    truth = np.random.default_rng(1).standard_normal((8, 8))
    stitch = Lstsq().fit(paired(x, x @ truth).moments, DOUBLE)
    assert stitch.fitted["x_rank"] == 8
    np.testing.assert_allclose(weights(stitch)[0], truth, atol=2e-15 * condition**2)


def test_rcond_is_stated_on_singular_values_of_centred_x(paired: type[Rows]) -> None:
    x, y = paired.draw(2000, 8, 8, mean=20.0)
    x *= np.geomspace(1, 1e-4, 8)
    singular = np.linalg.svd(x - x.mean(0), compute_uv=False)
    for rank in range(1, 9):
        rcond = float(np.sqrt(singular[rank - 1] * singular[rank] if rank < 8 else singular[-1] ** 2 / 4) / singular[0])
        stitch = Lstsq(rcond=rcond).fit(paired(x, y).moments, DOUBLE)
        assert (stitch.fitted["x_rank"], stitch.fitted["rcond"]) == (rank, rcond)
        centred_x, centred_y = paired(x, y).centred
        expected = np.linalg.lstsq(centred_x, centred_y, rcond=rcond)[0]
        np.testing.assert_allclose(weights(stitch)[0], expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())


def test_the_default_rcond_is_recorded(paired: type[Rows]) -> None:
    stitch = Lstsq().fit(paired.draw(100, 9, 5).moments)
    assert stitch.fitted["rcond"] == pytest.approx(np.sqrt(9 * np.finfo(float).eps), rel=1e-12)


@pytest.mark.parametrize(("intercept", "least"), [(True, 10), (False, 9)])
def test_lstsq_wants_as_many_rows_as_unknowns(intercept: bool, least: int, paired: type[Rows]) -> None:
    with pytest.raises(ValueError, match=f"at least {least} rows, got {least - 1}; .*'ridge'"):
        Lstsq(intercept=intercept).fit(paired.draw(least - 1, 9, 5).moments)
    assert Lstsq(intercept=intercept).fit(paired.draw(least, 9, 5).moments).fitted["n"] == least


# -- ridge


@pytest.mark.parametrize("kind", [Ridge, RidgeToIdentity])
@pytest.mark.parametrize("n", [300, 7])
@pytest.mark.parametrize("ridge", [1e-3, 1.0, 1e3])
def test_ridge_is_sklearns(ridge: float, n: int, kind: type, paired: type[Rows]) -> None:
    """Towards the identity it is that of the change."""
    rows, change = paired.draw(n, 9, 5 if kind is Ridge else 9, mean=10.0), kind is RidgeToIdentity
    matrix, bias = weights(kind(ridge=ridge).fit(rows.moments, DOUBLE))
    expected = SklearnRidge(alpha=ridge, solver="svd").fit(rows.x, rows.y - rows.x if change else rows.y)
    np.testing.assert_allclose(matrix, expected.coef_.T + change * np.eye(*matrix.shape), rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(bias, expected.intercept_, rtol=1e-7, atol=1e-8)


def test_ridge_of_zero_is_least_squares(rows: Rows) -> None:
    stitch = Ridge(ridge=0).fit(rows.moments, DOUBLE)
    np.testing.assert_allclose(weights(stitch)[0], weights(Lstsq().fit(rows.moments, DOUBLE))[0], rtol=1e-12)
    assert (stitch.fitted["ridge"], stitch.fitted["df"]) == (0.0, rows.x.shape[1] + 1)


def test_ridge_to_identity_of_equal_sides_is_the_identity(paired: type[Rows]) -> None:
    x, _ = paired.draw(4, 9, 9)
    matrix, bias = weights(RidgeToIdentity().fit(paired(x, x).moments, DOUBLE))
    np.testing.assert_allclose(matrix, np.eye(9), atol=1e-12)
    np.testing.assert_allclose(bias, 0, atol=1e-12)


def gcv(x: np.ndarray, y: np.ndarray, ridge: float) -> tuple[float, float]:
    """Generalised cross-validation and degrees of freedom from the dense hat matrix."""
    n, dx = x.shape
    centred = x - x.mean(0)
    hat = np.full((n, n), 1 / n) + centred @ np.linalg.solve(centred.T @ centred + ridge * np.eye(dx), centred.T)
    residual = y - hat @ y
    return float((residual**2).sum() / n / (1 - np.trace(hat) / n) ** 2), float(np.trace(hat))


@pytest.mark.parametrize(("n", "noise"), [(40, 1.0), (40, 8.0), (300, 0.5), (8, 1.0)])
def test_gcv_finds_the_penalty_that_a_dense_search_finds(n: int, noise: float, paired: type[Rows]) -> None:
    rows = paired.draw(n, 12, 5, noise=noise, mean=3.0)
    stitch = Ridge(ridge="gcv").fit(rows.moments, DOUBLE)
    ridge = stitch.fitted["ridge"]
    least, df = gcv(rows.x, rows.y, ridge)
    largest = np.linalg.svd(rows.centred[0], compute_uv=False)[0] ** 2
    others = [gcv(rows.x, rows.y, penalty)[0] for penalty in largest * np.logspace(-9, 3, 241)]
    assert least <= min(others) * 1.005  # the grid is ten to a decade
    assert stitch.fitted["df"] == pytest.approx(df, rel=1e-6)
    expected = SklearnRidge(alpha=ridge, solver="svd").fit(rows.x, rows.y)
    np.testing.assert_allclose(weights(stitch)[0], expected.coef_.T, rtol=1e-7, atol=1e-8)


# -- procrustes


@pytest.mark.parametrize("center", [True, False])
def test_procrustes_is_scipys(center: bool, paired: type[Rows]) -> None:
    rows = paired.draw(300, 9, 9)
    stitch = Procrustes(center=center).fit(rows.moments, DOUBLE)
    x, y = rows.centred if center else rows
    np.testing.assert_allclose(weights(stitch)[0], scipy.linalg.orthogonal_procrustes(x, y)[0], atol=1e-10)
    assert (stitch.bias is None) != center


def random_frames(dx: int, dy: int, count: int) -> list[np.ndarray]:
    """Random semi-orthogonal maps (dx, dy)."""
    g = np.random.default_rng(0)
    frames = [np.linalg.qr(g.standard_normal((max(dx, dy), min(dx, dy))))[0] for _ in range(count)]
    return [frame if dx >= dy else frame.T for frame in frames]


@pytest.mark.parametrize("scale", [False, True])
def test_procrustes_is_the_optimum_that_it_says(rows: Rows, scale: bool) -> None:
    stitch = Procrustes(scale=scale).fit(rows.moments, DOUBLE)
    x, y = rows.centred
    matrix, factor = weights(stitch)[0], stitch.fitted["scale"]
    frame = matrix / factor
    narrow = frame.T @ frame if x.shape[1] >= y.shape[1] else frame @ frame.T
    np.testing.assert_allclose(narrow, np.eye(len(narrow)), atol=1e-12)
    assert (factor == 1.0) != scale
    g = np.random.default_rng(1)
    nearby = [np.linalg.svd(frame + 0.05 * g.standard_normal(frame.shape), full_matrices=False) for _ in range(50)]
    for other in [*random_frames(*frame.shape, 50), *(left @ right for left, _, right in nearby)]:
        assert (x @ other * y).sum() <= (x @ frame * y).sum() + 1e-9
        if x.shape[1] <= y.shape[1]:
            best = (x @ other * y).sum() / ((x @ other) ** 2).sum() if scale else 1.0
            assert error(x, y, matrix) <= error(x, y, best * other) + 1e-9
    for change in (0.99, 1.01):
        assert not scale or error(x, y, matrix) < error(x, y, change * matrix)


def test_recoloured_drops_directions_of_either_side_below_rcond(paired: type[Rows]) -> None:
    drawn, scale = paired.draw(300, 4, 4), np.array([1.0, 0.5, 0.1, 0.01])
    for rows in (paired(drawn.x * scale, drawn.y), paired(drawn.x, drawn.y * scale)):
        values = [np.linalg.svd(side, compute_uv=False) for side in rows.centred]
        stitch = Recoloured(rcond=0.25).fit(rows.moments, DOUBLE)
        assert [stitch.fitted[rank] for rank in ("x_rank", "y_rank")] == [int((s > s[0] / 4).sum()) for s in values]


@pytest.mark.parametrize("widths", [(6, 6), (9, 4), (4, 9)])
def test_recoloured_keeps_the_covariance_and_is_the_optimum(widths: tuple[int, int], paired: type[Rows]) -> None:
    rows = paired.draw(300, *widths)
    x, y = rows.centred
    matrix, bias = weights(Recoloured().fit(rows.moments, DOUBLE))
    covariance, made = y.T @ y, (x @ matrix).T @ (x @ matrix)
    if widths[0] >= widths[1]:
        np.testing.assert_allclose(made, covariance, rtol=1e-9, atol=1e-9 * np.trace(covariance))
    values, vectors = np.linalg.eigh(covariance)
    root = (vectors * values**0.5) @ vectors.T
    inner = np.linalg.inv(root) @ made @ np.linalg.inv(root)  # a projection, if x has fewer directions
    np.testing.assert_allclose(inner @ inner, inner, atol=1e-9)
    assert round(np.trace(inner)) == min(widths)
    np.testing.assert_allclose((rows.x @ matrix + bias).mean(0), rows.y.mean(0), atol=1e-9)
    white = np.linalg.inv(np.linalg.cholesky(x.T @ x)).T
    for frame in random_frames(*widths, 50):  # other maps that keep the covariance
        other = white @ frame @ root
        assert (x @ other * y).sum() <= (x @ matrix * y).sum() + 1e-9
        assert widths[0] < widths[1] or error(x, y, matrix) <= error(x, y, other) + 1e-9


def test_procrustes_says_when_the_rotation_is_not_unique(paired: type[Rows]) -> None:
    assert Procrustes().fit(paired.draw(5, 9, 9).moments).fitted["xy_rank"] == 4


# -- low rank


def brute_force(x: np.ndarray, y: np.ndarray, rank: int) -> np.ndarray:
    """M_LS V_k V_kᵀ with V from the SVD of the fitted values (Csiszárik et al. 2021, section 4.2)."""
    least_squares = np.linalg.lstsq(x, y)[0]
    right = np.linalg.svd(x @ least_squares, full_matrices=False)[2][:rank]
    return least_squares @ right.T @ right


@pytest.mark.parametrize("rank", [1, 3, 5])
def test_low_rank_is_the_truncated_fit(rows: Rows, rank: int) -> None:
    stitch = LowRank(rank=rank).fit(rows.moments, DOUBLE)
    expected = brute_force(*rows.centred, rank)
    matrix, bias = weights(stitch)
    np.testing.assert_allclose(matrix, expected, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(bias, rows.y.mean(0) - rows.x.mean(0) @ expected, rtol=1e-8, atol=1e-10)
    assert np.linalg.matrix_rank(matrix) == rank


@pytest.mark.parametrize(
    ("rank", "n", "repeated", "message"),
    [
        (5, 100, False, "rank must be <= 4, got 5: x has 6 features of numerical rank 6 .* y has 4"),
        (4, 100, True, "rank must be <= 3, got 4: x has 6 features of numerical rank 3"),
        (2, 6, False, "at least 7 rows, got 6"),
    ],
)
def test_low_rank_refuses_too_high_ranks(rank: int, n: int, repeated: bool, message: str, paired: type[Rows]) -> None:
    x, y = paired.draw(n, 6, 4)
    with pytest.raises(ValueError, match=message):
        LowRank(rank=rank).fit(paired(np.tile(x[:, :3], 2) if repeated else x, y).moments)


# -- lasso


@pytest.mark.parametrize("alpha", [1e-3, 0.1, 1.0])
def test_lasso_is_scikit_learns(alpha: float, rows: Rows) -> None:
    matrix, bias = weights(Lasso(alpha=alpha).fit(rows.moments, DOUBLE))
    expected = SklearnLasso(alpha=alpha, tol=1e-12, max_iter=100_000).fit(rows.x, rows.y)
    np.testing.assert_allclose(matrix, expected.coef_.T, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(bias, expected.intercept_, rtol=1e-5, atol=1e-5)
    assert ((matrix == 0) == (np.abs(expected.coef_.T) < 1e-12)).mean() > 0.99


def test_lasso_of_a_large_penalty_is_the_mean(rows: Rows) -> None:
    stitch = Lasso(alpha=1e6).fit(rows.moments, DOUBLE)
    assert stitch.fitted["zeros"] == 1.0
    np.testing.assert_allclose(weights(stitch)[1], rows.y.mean(0), rtol=1e-12)


# -- permutation


@pytest.mark.parametrize("compare", ["correlation", "distance"])
def test_permutation_is_the_best_of_all(compare: str, paired: type[Rows]) -> None:
    rows = paired.draw(60, 5, 5)
    x, y = rows.centred
    corr = np.corrcoef(rows.x.T, rows.y.T)[:5, 5:]
    costs = -corr if compare == "correlation" else ((x[:, :, None] - y[:, None]) ** 2).sum(0)
    best = min(itertools.permutations(range(5)), key=lambda order: sum(costs[i, j] for j, i in enumerate(order)))
    matrix, _ = weights(Permutation(compare=compare).fit(rows.moments, DOUBLE))
    np.testing.assert_array_equal(matrix, np.eye(5)[:, list(best)])


def test_semi_matching_takes_the_best_for_each(paired: type[Rows]) -> None:
    rows = paired.draw(60, 4, 6)
    corr = np.corrcoef(rows.x.T, rows.y.T)[:4, 4:]
    stitch = Permutation(semi=True).fit(rows.moments, DOUBLE)
    np.testing.assert_array_equal(weights(stitch)[0], np.eye(4)[:, corr.argmax(0)])
    assert stitch.fitted["matched"] == 6
    assert stitch.fitted["correlation"] == pytest.approx(corr.max(0).mean())


@pytest.mark.parametrize(("dx", "dy"), [(3, 5), (5, 3)])
def test_of_unequal_widths_as_many_are_matched_as_the_narrower_has(dx: int, dy: int, paired: type[Rows]) -> None:
    matrix, _ = weights(Permutation().fit(paired.draw(50, dx, dy).moments, DOUBLE))
    assert (matrix.sum(0) <= 1).all() and (matrix.sum(1) <= 1).all() and matrix.sum() == 3


@pytest.mark.parametrize(("dx", "dy"), [(2, 4), (4, 2), (3, 3)])
def test_distance_counts_features_without_a_match_too(dx: int, dy: int, paired: type[Rows]) -> None:
    rng = np.random.default_rng(dx)
    x = rng.normal(size=(80, dx)) * np.arange(1, dx + 1)
    y = (x @ rng.normal(size=(dx, dy)) + rng.normal(size=(80, dy))) * 10.0 ** -np.arange(dy)
    rows = paired(x, y)
    matches = [
        list(zip(chosen, order, strict=True))
        for chosen in itertools.permutations(range(dx), min(dx, dy))
        for order in itertools.combinations(range(dy), min(dx, dy))
    ]
    centred_x, centred_y = rows.centred

    def residual(pairs: list[tuple[int, int]]) -> float:
        found = np.zeros_like(centred_y)
        for i, j in pairs:
            found[:, j] = centred_x[:, i]
        return float(((found - centred_y) ** 2).sum())

    matrix, bias = weights(Permutation(compare="distance").fit(rows.moments, DOUBLE))
    assert error(x, y, matrix, bias) == pytest.approx(min(map(residual, matches)))


@pytest.mark.parametrize("matcher", [Permutation(semi=s, compare=c) for s in (False, True) for c in get_args(Compare)])
@pytest.mark.parametrize("value", [7.0, 0.1])
def test_a_constant_feature_of_y_is_its_mean(matcher: Permutation, value: float, paired: type[Rows]) -> None:
    x, _ = paired.draw(50, 3, 3)
    stitch = matcher.fit(paired(x, np.c_[x[:, 2], np.full(50, value), x[:, 0]]).moments, DOUBLE)
    np.testing.assert_array_equal(weights(stitch)[0], [[0, 0, 1], [0, 0, 0], [1, 0, 0]])
    assert stitch.fitted["matched"] == 2
    assert stitch.fitted["correlation"] == pytest.approx(1)


def test_a_constant_feature_of_x_is_matched_with_none(paired: type[Rows]) -> None:
    x, _ = paired.draw(50, 4, 4)
    x[:, 1] = 7
    stitch = Permutation(semi=True).fit(paired(x, x[:, [0, 2, 3]]).moments, DOUBLE)
    np.testing.assert_array_equal(weights(stitch)[0], np.eye(4)[:, [0, 2, 3]])
