"""Statistics of all pairs of layers against dense float64 computations, pair by pair."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from hf_stitch.metrics import linear_cka, minibatch_cka
from hf_stitch.statistics.grams import HSIC, Grams, MinibatchGrams, gram_of, size_of
from hf_stitch.statistics.layer_moments import LayerMoments


def layers(seed: int, n: int, widths: tuple[int, ...], offset: float = 0.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randn(n, 4, generator=generator, dtype=torch.float64)
    made = []
    for width in widths:
        noise = torch.randn(n, width, generator=generator, dtype=torch.float64)
        made.append(shared @ torch.randn(4, width, generator=generator, dtype=torch.float64) + noise + offset)
    return made


def cka(hsic: HSIC) -> np.ndarray:
    return (hsic.xy / torch.outer(hsic.xx, hsic.yy).sqrt()).numpy()


def dense(x: list[Tensor], y: list[Tensor], debiased: bool = False) -> np.ndarray:
    return np.array([[linear_cka(a, b, debiased=debiased).item() for b in y] for a in x])


X, Y = layers(0, 60, (3, 7, 5)), layers(1, 60, (6, 2))


def moments(x: list[Tensor], y: list[Tensor] | None, size: int = 13) -> LayerMoments:
    kept = LayerMoments([rows[0] for rows in x], None if y is None else [rows[0] for rows in y])
    for start in range(0, len(x[0]), size):
        part = [[rows[start : start + size] for rows in side] for side in (x, y or [])]
        kept.update(part[0], None if y is None else part[1])
    return kept


@pytest.mark.parametrize("same", [False, True])
def test_moments_of_a_pair(same: bool) -> None:
    kept, y = moments(X, None if same else Y), X if same else Y
    for i, j in ((0, 1), (2, 0), (1, 1)):
        pair = kept.moments(i, j)
        centred = [(rows - rows.mean(0)).numpy() for rows in (X[i], y[j])]
        assert pair.n == 60
        np.testing.assert_allclose(pair.mean_y, y[j].mean(0), rtol=1e-12)
        np.testing.assert_allclose(pair.sxy, centred[0].T @ centred[1], atol=1e-11)
        np.testing.assert_allclose(pair.sxx, centred[0].T @ centred[0], atol=1e-11)
        np.testing.assert_allclose(pair.syy, centred[1].T @ centred[1], atol=1e-11)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 700), min_size=1, max_size=6), st.booleans())
def test_batching_changes_no_bit(sizes: list[int], same: bool) -> None:
    n = sum(sizes)
    x, y = layers(2, n, (3, 2)), None if same else layers(3, n, (4,))
    whole, parts = moments(x, y, n), LayerMoments([r[0] for r in x], None if y is None else [r[0] for r in y])
    for piece in zip(*(rows.split(sizes) for rows in (*x, *(y or []))), strict=True):
        parts.update(list(piece[:2]), list(piece[2:]) or None)
    assert all(torch.equal(a, b) for a, b in zip(whole.hsic(), parts.hsic(), strict=True))


@pytest.mark.parametrize("offset", [0.0, 30.0, 300.0])
@pytest.mark.parametrize("debiased", [False, True])
@pytest.mark.parametrize("same", [False, True])
def test_moments_and_grams_are_the_dense_values_however_far_the_mean(same: bool, debiased: bool, offset: float) -> None:
    x, y = layers(4, 200, (16, 8, 3), offset), None if same else layers(5, 200, (12, 2), -offset)
    near = [rows + offset for rows in y] if y is not None else None
    expected = dense([rows - offset for rows in x], near or [rows - offset for rows in x], debiased)
    np.testing.assert_allclose(cka(moments(x, y).hsic(debiased)), expected, atol=1e-11)
    np.testing.assert_allclose(cka(Grams(x, y).hsic(debiased)), expected, atol=1e-11)


@pytest.mark.parametrize("offset", [0.0, 30.0, 300.0])
def test_minibatches_in_float32_far_from_zero(offset: float) -> None:
    x, y = ([r.float() for r in layers(seed, 256, (512, 2048), offset)] for seed in (6, 7))
    exact = MinibatchGrams(64, 2, 2).update([r.double() for r in x], [r.double() for r in y]).hsic()
    np.testing.assert_allclose(cka(MinibatchGrams(64, 2, 2).update(x, y).hsic()), cka(exact), atol=1e-6)


@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("size", [1, 7, 16, 60])
def test_minibatches_are_those_of_the_metric(same: bool, size: int) -> None:
    y = X if same else Y
    kept = MinibatchGrams(16, len(X), None if same else len(Y))
    for start in range(0, 60, size):
        parts = [[rows[start : start + size] for rows in side] for side in (X, Y)]
        kept.update(parts[0], None if same else parts[1])
    expected = [[minibatch_cka(a, b, batch_size=16).item() for b in y] for a in X]
    np.testing.assert_allclose(cka(kept.hsic()), expected, rtol=1e-12)


@pytest.mark.parametrize("n", [511, 512, 700])
@pytest.mark.parametrize("same", [False, True])
def test_states_go_on_bit_for_bit(n: int, same: bool) -> None:
    x, y = layers(8, n + 50, (3, 2)), None if same else layers(9, n + 50, (4,))
    mini: MinibatchGrams = MinibatchGrams(64, 2, None if same else 1)

    def feed(kept: LayerMoments | MinibatchGrams, some: slice) -> None:
        kept.update([r[some] for r in x], None if y is None else [r[some] for r in y])

    for kept in (LayerMoments([r[0] for r in x], None if y is None else [r[0] for r in y]), mini):
        feed(kept, slice(n))
        again = type(kept).from_state_dict(kept.state_dict())
        feed(kept, slice(n, None))
        feed(again, slice(n, None))
        assert all(torch.equal(a, b) for a, b in zip(kept.hsic(), again.hsic(), strict=True))


@pytest.mark.parametrize("n", [4, 5, 64, 65, 129, 150, 523])
@pytest.mark.parametrize("same", [False, True])
def test_half_of_the_products_is_enough(n: int, same: bool) -> None:
    x, y = layers(10, n, (3, 5000)), None if same else layers(11, n, (7,))
    for debiased in (False, True):
        np.testing.assert_allclose(cka(Grams(x, y).hsic(debiased)), dense(x, y or x, debiased), rtol=1e-10, atol=1e-12)
    found = cka(MinibatchGrams(n, 2, None if same else 1).update(x, y).hsic())
    np.testing.assert_allclose(found, dense(x, y or x, True), rtol=1e-10, atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(st.integers(4, 70), st.integers(4, 20), st.integers(1, 25), st.booleans())
def test_rows_announced_give_the_same_minibatches(n: int, size: int, batch: int, same: bool) -> None:
    x, y = layers(12, n, (3, 2)), [] if same else layers(13, n, (4,))
    gathered = MinibatchGrams(size, 2, None if same else 1).update(x, None if same else y).hsic()
    kept = MinibatchGrams(size, 2, None if same else 1, n)
    for parts in zip(*(rows.split(batch) for rows in (*x, *y)), strict=True):
        reduced = [kept.keep(part) for part in parts]
        kept.update(reduced[:2], None if same else reduced[2:])
        kept = MinibatchGrams.from_state_dict(kept.state_dict())
    for some, other in zip(kept.hsic(), gathered, strict=True):
        torch.testing.assert_close(some, other, rtol=1e-9, atol=1e-9)


def test_of_batches_that_are_minibatches_no_row_is_kept() -> None:
    kept = MinibatchGrams(16, 1, n=60)
    for rows in X[0].split(16):
        kept.update([kept.keep(rows)])
        assert not any(key.startswith("pending") for key in kept.state_dict())


def test_equal_rows_have_no_hsic() -> None:
    dead = [torch.full((40, 5), 0.1, dtype=torch.float64)]
    assert moments(dead, None).hsic().xx.item() == 0
    assert Grams(dead).hsic().xx.item() == 0
    assert MinibatchGrams(8, 1).update([dead[0].float()]).hsic().xx.item() == 0


@pytest.mark.parametrize("n", [100, 600])
def test_layer_moments_with_buffered_rows_merge(n: int) -> None:
    rows = torch.randn(900, 3, dtype=torch.float64) + 5
    whole = LayerMoments([torch.zeros(3)]).update([rows]).moments(0, 0)
    halves = [LayerMoments([torch.zeros(3)]).update([part]) for part in (rows[:n], rows[n:])]
    merged = halves[0].merge(halves[1])
    assert merged.n == 900 and halves[1].n == 900 - n
    torch.testing.assert_close(merged.moments(0, 0).scatter, whole.scatter)


def test_float32_stays_float32_where_forwards_may_be_less_exact() -> None:
    """bfloat16 on CPUs with AVX-512 BF16 or AMX, TF32 on GPUs."""
    rows = torch.randn(256, 512, generator=torch.Generator().manual_seed(0))
    before = torch.get_float32_matmul_precision()
    exact = gram_of(rows, torch.empty(size_of(256))).products
    try:
        torch.set_float32_matmul_precision("medium")
        backends: Any = torch.backends
        places = [each for each in (backends.cuda.matmul, backends.mkldnn.matmul) if hasattr(each, "fp32_precision")]
        chosen = [place.fp32_precision for place in places]
        assert torch.equal(gram_of(rows, torch.empty(size_of(256))).products, exact)
        assert torch.get_float32_matmul_precision() == "medium"
        assert [place.fp32_precision for place in places] == chosen != ["ieee", "ieee"]
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("same", [False, True])
def test_moments_of_narrow_layers_are_those_of_plain_products(same: bool) -> None:
    x, y = layers(30, 40_000, (3, 2)), layers(31, 40_000, (1,))  # several buffers
    kept = LayerMoments([rows[0] for rows in x], None if same else [y[0][0]])
    for batch in range(0, 40_000, 7_001):
        some = [[rows[batch : batch + 7_001] for rows in side] for side in (x, y)]
        kept.update(some[0], None if same else some[1])
        kept = LayerMoments.from_state_dict(kept.state_dict())
    other = x[1] if same else y[0]
    centred = [rows.double() - rows.double().mean(0) for rows in (x[0], other)]
    found, size = kept.moments(0, 1 if same else 0), len(x[0])
    for own, (left, right) in (("sxx", (0, 0)), ("syy", (1, 1)), ("sxy", (0, 1))):
        plain = centred[left].T @ centred[right] / size
        torch.testing.assert_close(getattr(found, own) / size, plain, rtol=1e-11, atol=1e-13)


KEPT = moments(X, Y)
REFUSALS: list[tuple[Callable[[], Any], str]] = [
    (lambda: KEPT.update(X[:2], Y), r"shapes \[\(60, 3\), \(60, 7\), \(60, 5\)\]"),
    (lambda: KEPT.update(X, [Y[0], Y[1][:9]]), "shapes"),
    (lambda: moments(X, None).update(X, X), "pass the rows of the first side only"),
    (lambda: LayerMoments.from_state_dict({"count": torch.tensor(3)}), "lacks 'origin'"),
    (lambda: LayerMoments.from_state_dict({**KEPT.state_dict(), "cross": torch.zeros(1)}), "float64 of shape"),
    (lambda: Grams(X, [Y[0][:3]]), "same number of rows, got"),
    (lambda: MinibatchGrams(3, 1), "at least 4 rows, got 3"),
    (lambda: moments([rows[:3] for rows in X], None).hsic(debiased=True), "at least 4 rows, got 3"),
]


@pytest.mark.parametrize(("call", "message"), REFUSALS)
def test_what_does_not_fit_is_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
