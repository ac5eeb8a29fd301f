"""What metrics collect beside ``Moments``: sums for unbiased HSIC, and ``Features``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from metric_rows import related

from hf_stitch.metrics._neighbours import Jaccard
from hf_stitch.statistics.features import Features

X, Y = (torch.from_numpy(side) for side in related(90, 5, 3, mean=30.0))


def test_all_features_are_kept_in_order() -> None:
    kept = Features().update(X[:40], Y[:40]).merge(Features().update(X[40:], Y[40:])).merge(Features())
    assert torch.equal(kept.x, X)
    assert torch.equal(kept.y, Y)
    assert Jaccard().from_features(kept) == Jaccard().update(X, Y).compute()


@pytest.mark.parametrize("sizes", [[90], [7] * 12 + [6], [1] * 90])
def test_a_limit_keeps_the_same_rows_whatever_the_batches(sizes: list[int]) -> None:
    at_once = Features(limit=20).update(X, Y)
    kept = Features(limit=20)
    for batch in zip(X.split(sizes), Y.split(sizes), strict=True):
        kept.update(*batch)
    assert kept.seen == 90
    assert torch.equal(kept.x, at_once.x)
    again = Features.from_state_dict(kept.state_dict())
    assert torch.equal(again.x, kept.x)
    assert again.seen == 90


def test_a_limit_keeps_a_uniform_part() -> None:
    index = torch.arange(100.0)[:, None]
    counts = torch.zeros(100)
    for seed in range(400):
        part = Features(limit=10, seed=2 * seed).update(index[:70], index[:70])
        part.merge(Features(limit=10, seed=2 * seed + 1).update(index[70:], index[70:]))
        counts[part.x[:, 0].long()] += 1
    assert counts.sum() == 4000
    # Each row is kept 40 times, give or take 6; the last 30 rows, which came by the merge, 1200 times in all.
    assert (counts - 40).abs().max() < 30
    assert abs(counts[70:].sum() - 1200) < 120


KEPT = Features(limit=5).update(X, Y)
REFUSALS: list[tuple[Callable[[], Any], str]] = [
    (lambda: KEPT.update(Y, Y), "x rows must have width 5 like earlier rows, got 3"),
    (lambda: KEPT.update(X, Y[:-1]), "must pair up"),
    (lambda: KEPT.merge(Features()), "equal limits to merge, got 5 and None"),
    (lambda: Features(limit=1), "limit must be at least 2"),
    (lambda: Features().x, "features are empty"),
    (lambda: Features.from_state_dict({"x_parts": X}), "lacks 'most'; it has x_parts"),
]


@pytest.mark.parametrize(("call", "message"), REFUSALS)
def test_wrong_features_are_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
