"""The relative projection as a stitch: its formula, its options, its anchors, and many rows."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hf_stitch_testing import check_stitch
from torch.nn import functional

from hf_stitch.relative import RelativeProjection, nearest
from hf_stitch.relative.similarities import Geodesic, Lp


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def turn(width: int) -> torch.Tensor:
    return torch.linalg.qr(draw(width, width, seed=9)).Q


OPTIONS: list[dict[str, Any]] = [
    {},
    {"similarities": "inner", "center": True},
    {"similarities": ["cosine", "euclidean", "lp", {"name": "lp", "p": "inf"}]},
    {"similarities": ["cosine", Lp(p=3)], "aggregate": "mlp_sum"},
    {"similarities": "change_of_basis", "center": True},
    {"similarities": Geodesic(neighbours=3)},
    {"similarities": "angular", "normalise": "layer"},
    {"similarities": "euclidean", "normalise": "l2", "subspaces": 2},
    {"feature_step": 0.25, "similarity_step": 0.1},
    {"subspaces": 3, "aggregate": "mlp_sum"},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_conforms(options: dict[str, Any], dtype: torch.dtype) -> None:
    check_stitch(RelativeProjection.of(draw(9, 6).to(dtype), **options))


def test_the_formula() -> None:
    x, anchors = draw(4, 3, 6), draw(9, 6, seed=1)
    assert not list(RelativeProjection.of(anchors).parameters())  # anchors are not trained
    expected = functional.cosine_similarity(x[..., None, :], anchors, dim=-1)
    torch.testing.assert_close(RelativeProjection.of(anchors)(x), expected)
    mean = anchors.mean(0)
    expected = functional.cosine_similarity((x - mean)[..., None, :], anchors - mean, dim=-1)
    torch.testing.assert_close(RelativeProjection.of(anchors, center=True)(x), expected)
    unit = RelativeProjection.of(anchors, center=True, normalise="l2")
    torch.testing.assert_close(unit(x), functional.normalize(expected, dim=-1))
    layered = RelativeProjection.of(anchors, center=True, normalise="layer")(x)
    torch.testing.assert_close(layered.mean(-1), torch.zeros(4, 3).double(), atol=1e-12, rtol=0)


def test_spaces_lie_side_by_side_similarity_by_similarity() -> None:
    x, anchors = draw(5, 6), draw(9, 6, seed=1)
    several = RelativeProjection.of(anchors, ["cosine", "inner"], subspaces=2)
    parts = [
        RelativeProjection.of(anchors[:, half], name)(x[:, half])
        for name in ("cosine", "inner")
        for half in (slice(3), slice(3, 6))
    ]
    assert several.out_features == 36
    torch.testing.assert_close(several(x), torch.cat(parts, 1))


def test_mlp_sum_is_the_sum_of_its_spaces() -> None:
    x, anchors = draw(5, 6), draw(9, 6, seed=1)
    summed = RelativeProjection.of(anchors, ["cosine", "euclidean"], aggregate="mlp_sum")
    spaces = RelativeProjection.of(anchors, ["cosine", "euclidean"])(x).chunk(2, 1)
    torch.testing.assert_close(summed(x), sum(mlp(space) for mlp, space in zip(summed.mlps, spaces, strict=True)))
    summed(x).sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in summed.parameters())


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, {"turned", "scaled"}),
        ({"center": True}, {"turned", "scaled", "shifted"}),
        ({"similarities": "euclidean"}, {"turned", "shifted"}),
        ({"similarities": "euclidean", "normalise": "l2"}, {"turned", "shifted", "scaled"}),
        ({"similarities": "change_of_basis"}, {"turned", "scaled", "mapped"}),
        ({"similarities": "change_of_basis", "center": True}, {"turned", "scaled", "mapped", "shifted"}),
        ({"subspaces": 2}, {"scaled"}),
        ({"similarities": ["cosine", "euclidean"]}, {"turned"}),
    ],
    ids=lambda value: str(sorted(value) if isinstance(value, set) else value),  # the order of a set is not fixed
)
def test_it_keeps_the_promises_of_its_similarities_and_no_more(options: dict[str, Any], kept: set[str]) -> None:
    x, anchors, mixing = draw(5, 6) + 1, draw(9, 6, seed=1) + 1, draw(6, 6, seed=2)
    ways = {
        "turned": lambda rows: rows @ turn(6),
        "scaled": lambda rows: 3 * rows,
        "shifted": lambda rows: rows + 5 * mixing[0],
        "mapped": lambda rows: rows @ mixing,
    }
    one = RelativeProjection.of(anchors, **options)
    assert {way for way, put in ways.items() if torch.allclose(one.with_anchors(put(anchors))(put(x)), one(x))} == kept


def test_rounding_has_the_gradient_of_no_rounding() -> None:
    x, anchors = draw(5, 6).requires_grad_(), draw(9, 6, seed=1)
    rounded, plain = (RelativeProjection.of(anchors, "inner", similarity_step=step) for step in (0.5, None))
    assert torch.equal((2 * rounded(x)).round(), 2 * rounded(x))
    (of_rounded,) = torch.autograd.grad(rounded(x).sum(), x)
    (of_plain,) = torch.autograd.grad(plain(x).sum(), x)
    torch.testing.assert_close(of_rounded, of_plain)
    coarse = RelativeProjection.of(anchors.round(), "inner", feature_step=1.0)
    torch.testing.assert_close(coarse(x), RelativeProjection.of(anchors.round(), "inner")(x.round()))
    assert torch.autograd.grad(coarse(x).sum(), x)[0].abs().min() > 0


def test_narrow_vectors_meet_anchors_in_full() -> None:
    one, x = RelativeProjection.of(draw(9, 6).float(), center=True), draw(5, 6).bfloat16()
    assert torch.equal(one(x), one(x.float()).bfloat16())


def test_another_encoder_takes_the_place_of_the_first() -> None:
    x, anchors = draw(5, 6), draw(9, 6, seed=1)
    one = RelativeProjection.of(anchors, ["cosine", "angular"], aggregate="mlp_sum")
    embedding = torch.linalg.qr(draw(8, 6, seed=3)).Q.T  # into more dimensions
    other = one.with_anchors(2 * anchors @ embedding)
    assert (other.in_features, other.out_features) == (8, 9)
    torch.testing.assert_close(other(x @ embedding), one(x))
    assert all(a.data_ptr() != b.data_ptr() for a, b in zip(other.parameters(), one.parameters(), strict=True))
    assert (one.anchors == anchors).all()


GOOD = draw(5, 4)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: RelativeProjection.of(GOOD[0]), r"must be floating-point vectors of shape \(k, d\)"),
        (lambda: RelativeProjection.of(GOOD.long()), "got torch.int64"),
        (lambda: RelativeProjection.of(GOOD.index_fill(0, torch.tensor(2), torch.nan)), "anchor 2 contains NaN"),
        (lambda: RelativeProjection.of(torch.ones(5, 4)), "all 5 anchors have the same representation"),
        (lambda: RelativeProjection.of(torch.cat([GOOD, GOOD[1:2]])), r"anchors 1 and 5 .* \(5 of 6 differ\)"),
        (lambda: RelativeProjection.of(torch.cat([GOOD, 0 * GOOD[:1]])), "cosine: anchor 5 of 6 is 0"),
        (lambda: RelativeProjection.of(GOOD[:3], "change_of_basis"), "3 anchors cannot span 4 features"),
        (lambda: RelativeProjection.of(GOOD[:4], "change_of_basis", center=True), "span 3 of 4 dimensions"),
        (lambda: RelativeProjection.of(GOOD).with_anchors(GOOD[:3]), "projection has 5 anchors, got 3"),
        (lambda: RelativeProjection(4, 0), "anchors must be an integer >= 1, got 0"),
        (lambda: RelativeProjection.of(GOOD[:1], "euclidean"), "requires several anchors, got 1"),
        (
            lambda: RelativeProjection.of(GOOD, center=True)(GOOD.mean(0, keepdim=True)),
            r"with center=True, it equals the mean of the anchors\); drop it, set center=T",
        ),
        (lambda: RelativeProjection(4, 5, []), "at least one similarity"),
        (lambda: RelativeProjection(4, 5, subspaces=3), "must divide the 4 features, got 3"),
        (lambda: RelativeProjection(4, 5, normalise="batch"), "one of 'l2', 'layer' or None, got 'batch'"),
        (lambda: RelativeProjection(4, 5, aggregate="sum"), "'concatenate', 'mlp_sum', got 'sum'"),
        (lambda: RelativeProjection(4, 5, similarity_step=0), "similarity_step must be a number > 0 or None, got 0"),
        (lambda: RelativeProjection(4, 5, "cosin"), "did you mean 'cosine'"),
        (lambda: RelativeProjection.of(GOOD)(0 * GOOD), "cosine: vector 0 of 5 is 0"),
        (lambda: RelativeProjection.of(GOOD)(GOOD[:, 1:]), "maps 4 features to 5"),
        (lambda: RelativeProjection.of(GOOD).stream(GOOD[:, 1:]), r"shape \(n, 4\), got \(5, 3\)"),
        (lambda: RelativeProjection.of(GOOD).stream(GOOD, chunk=0), "chunk must be an integer >= 1"),
    ],
)
def test_bad_input_is_refused(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


# -- many rows


def test_a_stream_is_the_projection_in_parts(tmp_path: Path) -> None:
    one = RelativeProjection.of(draw(9, 6).float(), ["cosine", "euclidean"], center=True)
    rows = draw(50, 6).float()
    np.save(tmp_path / "rows.npy", rows.numpy())

    class Stored:  # as data sets of h5py and zarr are
        shape = (50, 6)

        def __len__(self) -> int:
            return 50

        def __getitem__(self, part: slice) -> np.ndarray:
            return rows.numpy()[part]

    for given in (rows, np.load(tmp_path / "rows.npy", mmap_mode="r"), rows.double().numpy(), Stored()):
        torch.testing.assert_close(torch.cat(list(one.stream(given, chunk=7))), one(rows))


def test_a_stream_reads_and_gives_a_chunk_at_a_time_and_keeps_none() -> None:
    read: list[int] = []
    given: list[weakref.ref[torch.Tensor]] = []

    class Watched(np.ndarray):
        def __getitem__(self, part: Any) -> Any:
            read.append(len(range(*part.indices(len(self)))))
            return np.asarray(super().__getitem__(part))

    def watched() -> Iterator[torch.Tensor]:
        for part in RelativeProjection.of(draw(9, 6)).stream(draw(50, 6).numpy().view(Watched), chunk=20):
            given.append(weakref.ref(part))
            assert len(read) == len(given) and len(part) == read[-1] <= 20
            assert sum(each() is not None for each in given) <= 2
            yield part

    assert nearest(draw(3, 9), watched(), k=2)[1].shape == (3, 2)
    assert sum(read) == 50 and not any(each() is not None for each in given)


def test_values_that_hardly_vary_have_variance_1_all_the_same() -> None:
    x = (draw(30, 16) + 50).float()
    layered = RelativeProjection.of(x[:12], normalise="layer")(x[12:])
    torch.testing.assert_close(layered.var(1, correction=0), torch.ones(18))
