"""The metric of relative representations against its formula."""

from __future__ import annotations

import numpy as np
import pytest
from metric_rows import centred, related
from sklearn.metrics.pairwise import cosine_similarity

from hf_stitch.metrics import relative_cosine


@pytest.mark.parametrize("option", [False, True])
@pytest.mark.parametrize("n", [40, 600])
def test_it_is_the_mean_cosine_of_rows_of_both_tables_of_cosines(n: int, option: bool) -> None:
    x, y = related(n, 7, 5)
    sides = (centred(x), centred(y)) if option else (x, y)
    of_x, of_y = (cosine_similarity(side) for side in sides)
    expected = np.mean([a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in zip(of_x, of_y, strict=True)])
    assert relative_cosine(x, y, center=option) == pytest.approx(expected, rel=1e-10)


def test_it_is_centred_because_a_common_part_hides_all_differences() -> None:
    x, y = (np.maximum(side, 0) + 5 for side in related(300, 7, 5))
    shuffled = y[np.random.default_rng(0).permutation(300)]
    assert relative_cosine(x, shuffled, center=False) > 0.99
    assert relative_cosine(x, y) > 2 * relative_cosine(x, shuffled)
