"""Matrices are drawn on one scale."""

import numpy as np
import pytest
from hf_stitch_studies.matrices import matrices


def test_matrices_share_a_scale() -> None:
    figure = matrices({"a": [[-2.0, 0.0]], "b": np.zeros((3, 2))})
    first, second = (axes.images[0] for axes in figure.axes[:2])
    assert first.get_array().tolist() == [[2.0, 0.0]]
    assert first.get_clim() == second.get_clim() == (0, 2)
    assert matrices({"zero": np.zeros((2, 2))}).axes[0].images[0].get_clim() == (0, 1)
    with pytest.raises(ValueError, match="at least one matrix"):
        matrices({})
    for bad in ([1.0], [[np.nan]], np.zeros((0, 2))):
        with pytest.raises(ValueError, match="'a' must be a matrix of finite numbers"):
            matrices({"a": bad})
