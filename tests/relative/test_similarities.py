"""Similarities: what they are, what they promise and no more, and what they refuse."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hf_stitch_testing import Part, check_similarity
from hypothesis import given, strategies as st
from scipy.sparse.csgraph import shortest_path
from scipy.spatial.distance import cdist

from hf_stitch.registry import registries
from hf_stitch.relative.similarities import Angular, ChangeOfBasis, Cosine, Euclidean, Geodesic, Inner, Lp, Similarity

SIMILARITIES = [
    *(Cosine(), Inner(), Angular(), Euclidean(), ChangeOfBasis(), Geodesic(neighbours=4)),
    *(Lp(), Lp(p=2), Lp(p=3.5), Lp(p=math.inf)),
]


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("check", [part for each in SIMILARITIES for part in check_similarity.parts(each)], ids=str)
def test_conforms(check: Part) -> None:
    check()


def test_every_built_in_is_among_them() -> None:
    assert {similarity.name for similarity in SIMILARITIES} == set(registries.similarities.names())


@pytest.mark.parametrize(
    ("similarity", "metric", "options"),
    [
        (Cosine(), "cosine", {}),
        (Euclidean(), "euclidean", {}),
        (Lp(), "cityblock", {}),
        (Lp(p=math.inf), "chebyshev", {}),
        (Lp(p=3), "minkowski", {"p": 3}),
    ],
    ids=str,
)
def test_values_are_scipys(similarity: Similarity, metric: str, options: dict[str, Any]) -> None:
    x, anchors = draw(20, 5), draw(7, 5, seed=1)
    expected = cdist(x.numpy(), anchors.numpy(), metric, **options)
    found = similarity(x, anchors).numpy()
    np.testing.assert_allclose(1 - found if metric == "cosine" else found, expected, rtol=1e-12, atol=1e-12)


def test_angles_are_exact_where_the_arccosine_is_not() -> None:
    anchor = torch.tensor([[1.0, 0.0]])
    for angle in (1e-6, 1e-3, 1.0, math.pi - 1e-6):
        x = torch.tensor([math.cos(angle), math.sin(angle)], dtype=torch.float64)
        assert Angular()(x, anchor.double()).item() == pytest.approx(angle, rel=1e-9)
    same = torch.tensor([2.0, 0.0], requires_grad=True)
    Angular()(same, anchor).backward()
    assert same.grad.isfinite().all()


def test_coordinates_give_the_vector_back_and_are_the_shortest_to_do_so() -> None:
    x, anchors = draw(20, 5), draw(9, 5, seed=1)
    found = ChangeOfBasis()(x, anchors)
    torch.testing.assert_close(found @ anchors, x)
    np.testing.assert_allclose(found.T.numpy(), np.linalg.lstsq(anchors.T.numpy(), x.T.numpy())[0], atol=1e-12)


@given(st.integers(2, 12), st.integers(0, 1000))
def test_geodesics_with_all_neighbours_are_euclidean_distances(k: int, seed: int) -> None:
    anchors = draw(k, 3, seed=seed)
    geodesic, euclidean = Geodesic(neighbours=k - 1)(anchors, anchors), Euclidean()(anchors, anchors)
    torch.testing.assert_close(geodesic, euclidean, rtol=1e-9, atol=1e-9)


def test_geodesics_are_those_of_a_dense_graph() -> None:
    anchors, x, near = draw(30, 3), draw(10, 3, seed=1), 6
    apart = cdist(anchors, anchors)
    order = np.argsort(apart, 1)[:, 1 : near + 1]
    graph = np.zeros_like(apart)
    rows = np.arange(30)[:, None]
    graph[rows, order] = apart[rows, order]
    paths = shortest_path(np.maximum(graph, graph.T), directed=False)
    enter = cdist(x, anchors)
    gates = np.argsort(enter, 1)[:, :near]
    expected = np.stack([(enter[i, gates[i], None] + paths[gates[i]]).min(0) for i in range(10)])
    np.testing.assert_allclose(Geodesic(neighbours=near)(x, anchors).numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize("similarity", [Euclidean(), Lp(), Angular(), Cosine()], ids=str)
def test_a_row_has_the_same_bits_or_nearly_in_any_batch(similarity: Similarity) -> None:
    # Distances by inner products would depend on whether there are more than 25 rows.
    x, anchors = draw(60, 8).float() + 100, draw(60, 8, seed=1).float() + 100
    torch.testing.assert_close(similarity(x, anchors)[:2], similarity(x[:2], anchors[:]), rtol=1e-6, atol=1e-6)


ROWS, ZERO, PARTS = draw(4, 3), torch.zeros(1, 3, dtype=torch.float64), torch.cat([draw(5, 2), draw(5, 2) + 100])
REFUSALS: list[tuple[Callable[[], Any], str]] = [
    (lambda: ChangeOfBasis()(draw(2, 5), draw(4, 5)), "change_of_basis: 4 anchors cannot span 5"),
    (lambda: ChangeOfBasis()(draw(2, 5), draw(9, 3) @ draw(3, 5)), "change_of_basis: the 9 anchors span 3 of 5"),
    (lambda: Geodesic(neighbours=2)(PARTS, PARTS), "of 10 anchors has 2 disconnected parts with neighbours=2"),
    (lambda: Geodesic()(PARTS, PARTS), "neighbours=10 and 10 anchors"),
    (lambda: Cosine()(torch.cat([ROWS, ZERO]), ROWS), "cosine: vector 4 of 5 is 0, so its direction is undefined"),
    (lambda: Cosine()(ROWS, torch.cat([ROWS, ZERO])), "cosine: anchor 4 of 5 is 0"),
    (lambda: Angular()(torch.cat([ROWS, ZERO]), ROWS), "angular: vector 4 of 5 is 0"),
    (lambda: registries.similarities.build("lp", p=0.5), "p must be a number >= 1 or math.inf, got 0.5"),
    (lambda: registries.similarities.build("lp", p=True), "got True"),
    (lambda: Geodesic(neighbours=0), "neighbours must be an integer >= 1, got 0"),
    (lambda: ChangeOfBasis(rcond=1), "rcond must be a number >= 0 and < 1 or None, got 1"),
]


@pytest.mark.parametrize(("call", "message"), REFUSALS)
def test_what_has_no_similarity_is_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
