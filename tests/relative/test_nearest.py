"""Nearest rows by blocks: those of all similarities at once, however rows are divided."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from hf_stitch.relative import nearest, neighbours
from hf_stitch.relative.neighbours import Near


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 70),
    others=st.integers(1, 70),
    k=st.integers(1, 12),
    sizes=st.tuples(st.integers(1, 33), st.integers(1, 33)),
    distance=st.sampled_from(["cosine", "euclidean"]),
    how=st.sampled_from(["themselves", "tensor", "chunks"]),
    seed=st.integers(0, 10**6),
)
def test_blocks_do_not_matter(count: int, others: int, k: int, sizes: Any, distance: Near, how: str, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    queries = torch.randn(count, 5, generator=draw, dtype=torch.float64)
    rows = queries if how == "themselves" else torch.randn(others, 5, generator=draw, dtype=torch.float64)
    k = min(k, len(rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(neighbours, "BLOCK", sizes[0])
        patch.setattr(neighbours, "CHUNK", sizes[0] * sizes[1])
        values, places = nearest(queries, rows.split(sizes[1]) if how == "chunks" else rows, k, distance)
    if distance == "cosine":
        every = torch.nn.functional.normalize(queries) @ torch.nn.functional.normalize(rows).T
    else:
        every = (queries[:, None] - rows[None]).norm(dim=2)
    expected = every.sort(dim=1, descending=distance == "cosine")
    torch.testing.assert_close(values, expected.values[:, :k], rtol=0, atol=1e-7)
    assert torch.equal(places, expected.indices[:, :k])


def test_rows_from_far_to_near_and_equal_rows() -> None:
    near = torch.arange(200.0)[:, None]
    values, places = nearest(torch.full((3, 1), 1000.0), near.split(8), k=4, distance="euclidean")
    assert places.tolist() == [[199, 198, 197, 196]] * 3
    assert values[0].tolist() == [801, 802, 803, 804]
    same = torch.ones(50, 4)
    values, places = nearest(same, same, k=6)
    torch.testing.assert_close(values, torch.ones(50, 6))
    assert all(len(set(row)) == 6 for row in places.tolist())


def with_nan(row: int) -> torch.Tensor:
    return torch.ones(9, 4).index_fill(0, torch.tensor(row), torch.nan)


@pytest.mark.parametrize(
    ("queries", "rows", "options", "message"),
    [
        (torch.ones(2, 4), torch.ones(5, 3), {}, "rows and queries must have equal widths, got 3 and 4"),
        (torch.ones(2, 4), torch.ones(53, 4).split(10), {"k": 54}, "got k=54 and 53 rows"),
        (torch.ones(2, 4), torch.ones(53, 4), {"k": 0}, "k >= 1"),
        (torch.ones(2, 4), torch.ones(5, 4), {"distance": "l1"}, "must be one of 'cosine', 'euclidean', got 'l1'"),
        (torch.ones(2, 4), with_nan(7).split(4), {}, "row 7 contains NaN or infinity"),
        (with_nan(2), torch.ones(5, 4), {}, "query 2 contains NaN or infinity"),
    ],
)
def test_a_wrong_search_is_refused(queries: Any, rows: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        nearest(queries, rows, **{"k": 1, **options})
