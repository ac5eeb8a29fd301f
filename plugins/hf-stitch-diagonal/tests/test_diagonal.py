"""The installed plugin is registered by name and fulfils the contract of matchers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hf_stitch_diagonal import Diagonal
from hf_stitch_testing import check_matcher

from hf_stitch import Moments, registries


def test_registered_by_name():
    assert registries.matchers.get("diagonal") is Diagonal
    assert registries.matchers.entry("diagonal").origin == "plugin hf-stitch-diagonal 0.1.0"


def test_fulfils_the_contract_of_matchers():
    check_matcher("diagonal")


def test_fits_a_line_per_feature():
    x, y = torch.randn(2, 40, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x[:, 2] = 0.1
    stitch = Diagonal().fit(Moments(3, 3).update(x, y), dtype=torch.float64)
    slopes, shifts = zip(*(np.polyfit(x[:, j], y[:, j], 1) for j in range(2)), strict=True)
    np.testing.assert_allclose(stitch.weight.detach(), np.diag([*slopes, 0.0]), atol=1e-12)
    np.testing.assert_allclose(stitch.bias.detach(), [*shifts, y[:, 2].mean()], atol=1e-12)
    residual = (y - stitch(x)).detach().square().sum() / (y - y.mean(0)).square().sum()
    assert stitch.fitted["r2"] == pytest.approx(1 - residual.item())


def test_rejects_unequal_widths():
    with pytest.raises(ValueError, match="requires equal widths, got 3 -> 2; use 'lstsq'"):
        Diagonal().fit(Moments(3, 2))
