"""The metric of relative representations against its formula."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from metric_rows import centred, related
from sklearn.metrics.pairwise import cosine_similarity

from hf_stitch.metrics import paired_cosine, relative_cosine
from hf_stitch.relative import RelativeProjection


@pytest.mark.parametrize("option", [False, True])
@pytest.mark.parametrize("n", [40, 600])
def test_it_is_the_mean_cosine_of_rows_of_both_tables_of_cosines(n: int, option: bool) -> None:
    x, y = related(n, 7, 5)
    sides = (centred(x), centred(y)) if option else (x, y)
    of_x, of_y = (cosine_similarity(side) for side in sides)
    expected = np.mean([a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in zip(of_x, of_y, strict=True)])
    assert relative_cosine(x, y, center=option) == pytest.approx(expected, rel=1e-10)


def test_it_is_the_paired_cosine_of_projections_on_all_rows() -> None:
    x, y = (torch.from_numpy(side) for side in related(40, 7, 5))
    one, other = RelativeProjection.of(x, center=True), RelativeProjection.of(y, center=True)
    torch.testing.assert_close(relative_cosine(x, y), paired_cosine(one(x), other(y)))


def test_it_is_centred_because_a_common_part_hides_all_differences() -> None:
    x, y = (np.maximum(side, 0) + 5 for side in related(300, 7, 5))
    shuffled = y[np.random.default_rng(0).permutation(300)]
    assert relative_cosine(x, shuffled, center=False) > 0.99
    assert relative_cosine(x, y) > 2 * relative_cosine(x, shuffled)


def test_the_order_of_the_samples_does_not_matter() -> None:
    x, y = related(300, 7, 5)
    order = np.random.default_rng(0).permutation(300)
    assert relative_cosine(x[order], y[order]) == pytest.approx(relative_cosine(x, y), rel=1e-10)
