"""Far means, few rows, dead features, coarse dtypes: where similarity metrics fail silently."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from metric_rows import related

from hf_stitch import metrics as M
from hf_stitch.metrics._cca import CCA
from hf_stitch.metrics._cka import LinearCKA, MinibatchCKA
from hf_stitch.statistics import Moments

TRANSLATABLE = [
    ("linear_cka", {}),
    ("linear_cka", {"debiased": True}),
    ("minibatch_cka", {"batch_size": 50}),
    ("rbf_cka", {}),
    ("cca", {}),
    ("pwcca", {}),
    ("svcca", {}),
    ("procrustes", {}),
    ("shape_distance", {}),
    ("linear_regression", {}),
]


@pytest.mark.parametrize("deviations", [30.0, 300.0])
@pytest.mark.parametrize(("name", "options"), TRANSLATABLE, ids=str)
def test_a_far_mean_in_float32_changes_little(name: str, options: dict[str, Any], deviations: float) -> None:
    x, y = (torch.from_numpy(side / side.std(0)).float() for side in related(200, 6, 5, mean=0.0))
    near = getattr(M, name)(x, y, **options).item()
    far_x, far_y = x + deviations, y - deviations
    far = getattr(M, name)(far_x, far_y, **options).item()
    # What is left is the rounding of the float32 rows themselves.
    assert far == pytest.approx(near, rel=1e-7 * deviations, abs=1e-7 * deviations)
    metric = {"linear_cka": LinearCKA, "minibatch_cka": MinibatchCKA, "cca": CCA}.get(name)
    if metric:
        streamed = metric(**options)
        for batch in zip(far_x.split(7), far_y.split(7), strict=True):
            streamed.update(*batch)
        assert streamed.compute() == pytest.approx(far, rel=1e-8)


def test_debiased_cka_of_independent_rows_is_near_0_at_any_width() -> None:
    g = np.random.default_rng(0)
    x, y = g.standard_normal((2, 100, 400))
    assert M.linear_cka(x, y) > 0.7
    assert abs(M.linear_cka(x, y, debiased=True)) < 0.03
    assert abs(M.minibatch_cka(x, y, batch_size=25)) < 0.1


def test_canonical_correlations_of_few_rows_are_refused() -> None:
    g = np.random.default_rng(0)
    x, y = g.standard_normal((2, 20, 30))
    for name in ("cca", "pwcca"):
        with pytest.raises(
            ValueError, match=rf"{name} takes at least 21 rows, got 20, as x has rank 19.*canonical correlation is 1"
        ):
            getattr(M, name)(x, y)
        with pytest.raises(ValueError, match=rf"{name} takes at least"):
            getattr(M, name)(x[:, :3], y[:, :19])
    with pytest.raises(ValueError, match=r"svcca takes at least .* components of x explain 1 of its variance"):
        M.svcca(x, y, variance=1.0)
    with pytest.raises(ValueError, match=r"shape_distance takes at least 21 rows.*alpha=1"):
        M.shape_distance(x, y, alpha=0.5)
    assert M.svcca(x, y, variance=0.3) < 1
    assert M.cca(x, y, ridge=1.0) < 1


def test_pwcca_looks_only_at_as_many_directions_as_there_are() -> None:
    x, y = related(200, 8, 3)
    rotated = y @ np.linalg.qr(np.random.default_rng(0).standard_normal((3, 3)))[0]
    assert M.pwcca(x, rotated) == pytest.approx(M.pwcca(x, y), rel=1e-9)
    assert M.pwcca(x, y) != pytest.approx(M.pwcca(y, x), rel=1e-3)
    turned = x @ np.linalg.qr(np.random.default_rng(1).standard_normal((8, 8)))[0]
    assert M.pwcca(turned, y) != pytest.approx(M.pwcca(x, y), rel=1e-6)


def test_a_fit_that_explains_any_rows_is_refused() -> None:
    g = np.random.default_rng(0)
    x, y = g.standard_normal((2, 20, 19))
    with pytest.raises(ValueError, match=r"linear_regression takes at least 21 rows.*explains any y"):
        M.linear_regression(x, y)
    assert M.linear_regression(x, y, center=False) < 1
    assert M.linear_regression(x, y, weight=np.eye(19)) < 0


def test_features_that_depend_on_each_other_add_nothing() -> None:
    x, y = related(60, 5, 5)
    x[:, 4] = x[:, 0] - 2 * x[:, 1]
    with_constant = np.column_stack([x[:, :4], np.full(60, 0.1)])
    for rows in (x, with_constant, x.astype(np.float32)):
        assert M.cca(rows, y) == pytest.approx(M.cca(x[:, :4], y), rel=1e-5)
        assert M.cca(y, rows, squared=True) == pytest.approx(M.cca(y, x[:, :4], squared=True), rel=1e-5)
        assert M.shape_distance(rows, y, alpha=0) == pytest.approx(M.shape_distance(y, rows, alpha=0), rel=1e-9)
    assert M.pwcca(y, x) == pytest.approx(M.pwcca(y, x[:, :4]), rel=1e-9)  # the weights are those of y
    assert M.pwcca(with_constant, y) == pytest.approx(M.pwcca(x[:, :4], y), rel=1e-9)
    assert 0 < M.cca(x, y, ridge=1e-3) < 1
    assert 0 < M.svcca(x, y, variance=1.0) < 1
    assert M.linear_regression(x, y) == pytest.approx(M.linear_regression(x[:, :4], y), rel=1e-10)


def test_rank_does_not_depend_on_the_scale_of_features() -> None:
    x, y = related(60, 5, 5)
    scaled = x * 10.0 ** np.arange(-10, 15, 5)
    assert M.cca(scaled, y) == pytest.approx(M.cca(x, y), rel=1e-8)


ALL_EQUAL = np.tile(0.1 + np.arange(5.0), (60, 1))


@pytest.mark.parametrize(
    "name",
    [
        "cca",
        "linear_cka",
        "linear_regression",
        "minibatch_cka",
        "procrustes",
        "pwcca",
        "rbf_cka",
        "shape_distance",
        "svcca",
    ],
)
@pytest.mark.parametrize("side", ["x", "y"])
def test_rows_that_are_all_equal_are_refused(name: str, side: str) -> None:
    pair = (ALL_EQUAL, related(60, 5, 5)[1])
    with pytest.raises(ValueError, match=rf"{name}: all 60 rows of {side} are equal"):
        getattr(M, name)(*(pair if side == "x" else pair[::-1]))


@pytest.mark.parametrize(
    ("name", "options", "row", "message"),
    [
        ("rsa", {}, 0.1, "row 7 of x is constant, so its correlation"),
        ("rsa", {"distance": "cosine"}, 0.0, "row 7 of x is zero, so its cosine"),
        ("jaccard", {}, 0.0, "row 7 of x is zero"),
        ("mutual_knn", {}, 0.0, "row 7 of x is zero"),
        ("mrr", {}, 0.0, "row 7 of x is zero"),
        ("paired_cosine", {}, 0.0, "row 7 of x is zero"),
    ],
)
def test_rows_without_a_direction_are_refused(name: str, options: dict[str, Any], row: float, message: str) -> None:
    x, y = related(60, 5, 5)
    x[7] = row
    with pytest.raises(ValueError, match=rf"{name}: {message}"):
        getattr(M, name)(x, y, **options)


@pytest.mark.parametrize("name", ["mutual_knn", "jaccard", "mrr"])
def test_more_neighbours_than_rows_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}: k must be below the number of rows, got k=10 and 10 rows"):
        getattr(M, name)(*related(10, 5, 5))


def test_other_degenerate_rows_are_refused() -> None:
    x, y = related(60, 5, 5)
    with pytest.raises(ValueError, match=r"median distance between rows of x is 0"):
        M.rbf_cka(np.repeat(x[:2], [55, 5], axis=0), y)
    with pytest.raises(ValueError, match=r"all rows of x are equally far apart"):
        M.rsa(np.eye(5), y[:5], distance="euclidean")
    with pytest.raises(ValueError, match=r"debiased linear_cka takes at least 4 rows, got 3"):
        M.linear_cka(x[:3], y[:3], debiased=True)
    with pytest.raises(ValueError, match=r"direct_matching: y is 0"):
        M.direct_matching(x, np.zeros_like(x))
    with pytest.raises(ValueError, match=r"linear_regression: y is 0"):
        M.linear_regression(x, np.zeros_like(x), center=False)
    with pytest.raises(ValueError, match=r"weight must be \(5, 5\) and bias \(5,\), got \(5, 4\)"):
        M.linear_regression(x, y, weight=np.ones((5, 4)))
    with pytest.raises(ValueError, match=r"bias needs a weight"):
        M.linear_regression(x, y, bias=np.ones(5))
    one_apart = np.zeros((10, 2))
    one_apart[3] = 1
    with pytest.raises(ValueError, match=r"linear_cka: HSIC of x with itself is 0"):
        M.linear_cka(one_apart, y[:10], debiased=True)


def test_what_are_no_probabilities_is_refused() -> None:
    p, q = np.full((2, 5, 3), 1 / 3)
    for row, message in (([1.5, -0.5, 0.0], "got minimum -0.5 and sum 1"), ([0.5, 0.2, 0.2], "sum 0.9")):
        q[2] = row
        with pytest.raises(ValueError, match=f"row 2 of y must contain probabilities, .*{message}"):
            M.jensen_shannon(p, q, inputs="probabilities")


def test_what_is_no_matrix_is_refused() -> None:
    good = np.eye(5)
    for bad, error, message in [
        ([[1.0]], TypeError, "x must be a numpy array or a torch tensor, got list"),
        (np.ones((5, 2, 2)), ValueError, r"x must have shape \(rows, features\), got \(5, 2, 2\)"),
        (np.ones((5, 0)), ValueError, r"got \(5, 0\)"),
        (np.ones((5, 2), bool), ValueError, "x must contain real floating-point numbers, got bool"),
        (torch.ones(5, 2, dtype=torch.complex64), ValueError, "got torch.complex64"),
        (np.diag([1, 2, np.inf, 3, np.nan]), ValueError, "row 2 of x contains NaN or infinity"),
        (np.ones((4, 2)), ValueError, "got 4 and 5 rows"),
    ]:
        with pytest.raises(error, match=r"linear_cka.*" + message):
            M.linear_cka(bad, good)  # type: ignore[arg-type, call-overload]


def test_debiased_cka_and_plain_moments_are_kept_apart() -> None:
    x, y = (torch.from_numpy(side) for side in related(20, 4, 4))
    with pytest.raises(ValueError, match=r"cannot be computed from Moments"):
        LinearCKA(debiased=True).from_moments(Moments(4, 4).update(x, y))
    assert LinearCKA(debiased=True).statistic == "debiased"


def test_rounding_is_taken_off_and_errors_are_not() -> None:
    from hf_stitch.metrics._rows import nonnegative

    scale = torch.tensor(1.0, dtype=torch.float64)
    assert nonnegative("m", -1e-16 * scale, scale, 5) == 0
    assert nonnegative("m", 1e-16 * scale, scale, 5) == 1e-16
    with pytest.raises(ArithmeticError, match=r"m: -1.000e-06 must not be negative"):
        nonnegative("m", -1e-6 * scale, scale, 5)


def test_a_failing_decomposition_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise torch.linalg.LinAlgError("did not converge")

    for name in ("svd", "svdvals", "eigh"):
        monkeypatch.setattr(torch.linalg, name, fail)
    for function in (M.cca, M.pwcca, M.svcca, M.procrustes, M.shape_distance, M.linear_regression):
        with pytest.raises(torch.linalg.LinAlgError, match=r"did not converge"):
            function(*related(60, 5, 5))


@pytest.mark.parametrize("score", [M.procrustes, M.shape_distance])
def test_no_distance_is_negative_zero(score: Any) -> None:
    """Rounding may take the square of a distance below 0; -0.0 is shown with its sign."""
    for seed in range(100):
        x = torch.randn(50, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        assert math.copysign(1, score(x, 3 * x.flip(1)).item()) == 1
