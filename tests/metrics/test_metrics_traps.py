"""Far means, few rows, dead features, coarse dtypes: where similarity metrics fail silently."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from metric_rows import related

from hf_stitch import metrics as M
from hf_stitch.metrics._cca import CCA
from hf_stitch.metrics._cka import LinearCKA, MinibatchCKA
from hf_stitch.statistics import Moments

X, Y = related(60, 5, 5)
INDEFINITE, SHORT = np.tile([1.5, -0.5, 0.0], (5, 1)), np.tile([0.5, 0.2, 0.2], (5, 1))
FEW = np.random.default_rng(0).standard_normal((2, 20, 30))
TRANSLATABLE: list[tuple[str, dict[str, Any]]] = [
    ("linear_cka", {"debiased": True}),
    ("minibatch_cka", {"batch_size": 50}),
    *((name, {}) for name in ("linear_cka", "rbf_cka", "cca", "pwcca", "svcca")),
    *((name, {}) for name in ("procrustes", "shape_distance", "linear_regression")),
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


def test_regularised_values_of_few_rows_are_defined() -> None:
    x, y = FEW
    assert M.svcca(x, y, variance=0.3) < 1
    assert M.cca(x, y, ridge=1.0) < 1
    x, y = np.random.default_rng(0).standard_normal((2, 20, 19))
    assert M.linear_regression(x, y, center=False) < 1
    assert M.linear_regression(x, y, weight=np.eye(19)) < 0


def test_pwcca_looks_only_at_as_many_directions_as_there_are() -> None:
    x, y = related(200, 8, 3)
    rotated = y @ np.linalg.qr(np.random.default_rng(0).standard_normal((3, 3)))[0]
    assert M.pwcca(x, rotated) == pytest.approx(M.pwcca(x, y), rel=1e-9)
    assert M.pwcca(x, y) != pytest.approx(M.pwcca(y, x), rel=1e-3)
    turned = x @ np.linalg.qr(np.random.default_rng(1).standard_normal((8, 8)))[0]
    assert M.pwcca(turned, y) != pytest.approx(M.pwcca(x, y), rel=1e-6)


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
    assert M.cca(x * 10.0 ** np.arange(-10, 15, 5), y) == pytest.approx(M.cca(x, y), rel=1e-8)


def changed(value: float) -> np.ndarray:
    """X with one row of equal values."""
    return np.where(np.arange(60)[:, None] == 7, value, X)


EQUAL = np.tile(0.1 + np.arange(5.0), (60, 1))  # whose mean is rounded
REFUSALS: list[tuple[Callable[[], Any], str]] = [
    (lambda: M.cca(*FEW), "cca requires at least 21 rows, got 20, as x has rank 19.*canonical correlation is 1"),
    (lambda: M.pwcca(*FEW), "pwcca requires at least 21 rows, got 20, as x has rank 19.*canonical correlation is 1"),
    (lambda: M.cca(FEW[0][:, :3], FEW[1][:, :19]), "cca requires at least 21 rows"),
    (lambda: M.pwcca(X[:20, :3], FEW[1], directions="all"), "at least 21 rows, got 20, as y has rank 19"),
    (lambda: M.svcca(*FEW, variance=1.0), "svcca requires at least .* components of x explain 1 of its variance"),
    (lambda: M.shape_distance(*FEW, alpha=0.5), "shape_distance requires at least 21 rows.*alpha=1"),
    (lambda: M.linear_regression(*FEW[:, :, :19]), "linear_regression requires at least 21 rows.*explains any y"),
    (lambda: M.linear_cka(EQUAL, Y), "linear_cka: all 60 rows of x are equal"),
    (lambda: M.minibatch_cka(X, EQUAL), "minibatch_cka: all 60 rows of y are equal"),
    (lambda: M.linear_regression(X, EQUAL), "linear_regression: all 60 rows of y are equal"),
    (lambda: M.procrustes(EQUAL, Y), "procrustes: all 60 rows of x are equal"),
    (lambda: M.rsa(changed(0.1), Y), "rsa: row 7 of x is constant, so its correlation"),
    (lambda: M.rsa(changed(0.0), Y, distance="cosine"), "rsa: row 7 of x is zero, so its cosine"),
    (lambda: M.jaccard(changed(0.0), Y), "jaccard: row 7 of x is zero"),
    (lambda: M.mrr(changed(0.0), Y), "mrr: row 7 of x is zero"),
    (lambda: M.paired_cosine(changed(0.0), Y), "paired_cosine: row 7 of x is zero"),
    (lambda: M.rbf_cka(np.repeat(X[:2], [55, 5], axis=0), Y), "median distance between rows of x is 0"),
    (lambda: M.rsa(np.eye(5), Y[:5], distance="euclidean"), "all rows of x have equal distances"),
    (lambda: M.direct_matching(X, 0 * X), "direct_matching: y is all zeros"),
    (lambda: M.linear_regression(X, 0 * X, center=False), "linear_regression: y is all zeros"),
    (lambda: M.linear_regression(X, Y, weight=np.ones((5, 4))), r"weight must be \(5, 5\) .* got \(5, 4\)"),
    (lambda: M.linear_regression(X, Y, bias=np.ones(5)), "bias requires weight"),
    (lambda: M.linear_cka(np.eye(10)[:, :2] * [0, 1], Y[:10], debiased=True), "HSIC of x with itself is 0"),
    (lambda: M.jensen_shannon(INDEFINITE, INDEFINITE, inputs="probabilities"), "got minimum -0.5 and sum 1"),
    (lambda: M.jensen_shannon(SHORT, SHORT, inputs="probabilities"), "probabilities, .* sum 0.9"),
    (lambda: M.linear_cka([[1.0]], np.eye(5)), "linear_cka: x must be a numpy array or a torch tensor, got list"),
    (lambda: M.linear_cka(np.ones((5, 0)), np.eye(5)), r"x must have shape \(rows, features\), got \(5, 0\)"),
    (lambda: M.linear_cka(np.ones((5, 2), bool), np.eye(5)), "must contain real floating-point numbers, got bool"),
    (lambda: M.linear_cka(np.diag([1, 2, np.inf, 3, np.nan]), np.eye(5)), "row 2 of x contains NaN or infinity"),
    (lambda: M.linear_cka(np.eye(5), np.eye(5), debiased=1), "linear_cka: debiased must be True or False, got 1"),
    (lambda: M.linear_cka(np.eye(5), np.eye(5), no_such=1), "no_such"),
    (lambda: LinearCKA(debiased=True).from_moments(Moments(2, 2)), "requires LayerMoments, got Moments"),
]


@pytest.mark.parametrize(("call", "message"), REFUSALS)
def test_what_has_no_value_is_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        call()


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
