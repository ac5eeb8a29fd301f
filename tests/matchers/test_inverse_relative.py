"""Inverse relative projection against its formula, and where it is exact."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from hf_stitch.matchers.alignment import InverseRelative
from hf_stitch.relative import RelativeProjection
from hf_stitch.statistics import Moments

if TYPE_CHECKING:
    from conftest import Rows

DOUBLE = torch.float64


def test_it_is_the_projection_on_one_side_s_anchors_and_the_pseudo_inverse_of_the_other_s(rows: Rows) -> None:
    x, y = rows.centred
    stitch = InverseRelative(scale=False, rcond=1e-2).fit(rows.moments, DOUBLE)
    relative = RelativeProjection.of(torch.from_numpy(rows.x), "inner", center=True)(torch.from_numpy(rows.x[:20]))
    expected = relative.numpy() @ np.linalg.pinv(y.T) + rows.y.mean(0)
    np.testing.assert_allclose(stitch(torch.from_numpy(rows.x[:20])).detach().numpy(), expected, rtol=1e-8, atol=1e-9)
    raw = InverseRelative(center=False, scale=False, rcond=1e-2).fit(rows.moments, DOUBLE)
    np.testing.assert_allclose(raw.matrix().detach().numpy().T, rows.x.T @ np.linalg.pinv(rows.y.T), atol=1e-9)
    scaled = InverseRelative(rcond=1e-2).fit(rows.moments, DOUBLE)
    ratio = np.square(y).sum() / np.square(x).sum()
    np.testing.assert_allclose(scaled.matrix().detach().numpy(), ratio * stitch.matrix().detach().numpy(), rtol=1e-8)


def test_anchors_of_length_1_make_the_papers_map_of_cosines(paired: type[Rows]) -> None:
    rows = paired.draw(40, 5, 5)
    unit_x, unit_y = (side / np.linalg.norm(side, axis=1, keepdims=True) for side in rows)
    stitch = InverseRelative(center=False, scale=False, rcond=1e-2).fit(paired(unit_x, unit_y).moments, DOUBLE)
    cosines = RelativeProjection.of(torch.from_numpy(rows.x))(torch.from_numpy(rows.x)).numpy()
    expected = cosines @ np.linalg.pinv(unit_y.T)
    np.testing.assert_allclose(stitch(torch.from_numpy(unit_x)).detach().numpy(), expected, atol=1e-9)

    def least_cosine(center: bool) -> float:
        """With the paper's map, of vectors of any length."""
        fitted = InverseRelative(center=center, rcond=1e-2).fit(paired(unit_x, unit_y).moments, DOUBLE)
        made = fitted(torch.from_numpy(rows.x))
        return float(torch.nn.functional.cosine_similarity(made.detach(), torch.from_numpy(expected)).min())

    assert least_cosine(center=False) == pytest.approx(1)
    assert least_cosine(center=True) < 0.99


@pytest.mark.parametrize("anchors", [12, 8])
def test_it_is_exact_for_what_is_turned_scaled_and_shifted(anchors: int, paired: type[Rows]) -> None:
    rows = paired.draw(100, 6, 6)
    turn = np.linalg.qr(np.random.default_rng(1).standard_normal((6, 6)))[0]
    y = 7 * rows.x @ turn + 3
    stitch = InverseRelative().fit(paired(rows.x[:anchors], y[:anchors]).moments, DOUBLE)
    np.testing.assert_allclose(stitch(torch.from_numpy(rows.x)).detach().numpy(), y, atol=1e-8)
    assert stitch.fitted["r2"] == pytest.approx(1)
    assert stitch.fitted["scale"] == pytest.approx(49)
    assert stitch.fitted["y_rank"] == 6


def test_fewer_anchors_than_features_reach_what_they_span(paired: type[Rows]) -> None:
    rows = paired.draw(100, 6, 6)
    few = paired(rows.x[:4], 2 * rows.x[:4])
    stitch = InverseRelative(scale=False).fit(few.moments, DOUBLE)
    assert stitch.fitted["y_rank"] == 3
    np.testing.assert_allclose(np.linalg.svd(few.centred[1])[2][3:] @ stitch.matrix().detach().numpy(), 0, atol=1e-9)


def test_rcond_leaves_weak_directions_of_y_out(paired: type[Rows]) -> None:
    rows = paired.draw(200, 5, 5)
    y = rows.y @ np.diag([1, 1, 1, 1e-3, 1e-3])
    assert InverseRelative().fit(paired(rows.x, y).moments).fitted["y_rank"] == 3
    assert InverseRelative(rcond=1e-4).fit(paired(rows.x, y).moments).fitted["y_rank"] == 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_direction_that_a_norm_removed_is_not_magnified(dtype: torch.dtype) -> None:
    """LayerNorm leaves width - 1 directions; what y has in the last is the rounding of its offset."""
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(1000, 24, generator=draw)
    y = torch.nn.functional.layer_norm(rows, (24,), torch.linspace(0.5, 2, 24)) + 5
    x = (y - 5) @ torch.linalg.qr(torch.randn(24, 24, generator=draw)).Q + 0.05 * torch.randn(1000, 24, generator=draw)
    stitch = InverseRelative().fit(Moments(24, 24).update(x[:300].to(dtype), y[:300].to(dtype)))
    assert stitch.fitted["y_rank"] == 23
    assert ((stitch(x[300:]) - y[300:]).square().mean() / y[300:].var(0).mean()) < 0.1
