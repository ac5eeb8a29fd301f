"""Detectors: conformance, and values against other code."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.spatial.distance import mahalanobis
from sklearn.neighbors import NearestNeighbors

from hf_stitch.detectors import Detector, Mahalanobis, NearestNeighbours
from hf_stitch.representation import Representation
from hf_stitch.testing import check_detector

DETECTORS = [Mahalanobis(), Mahalanobis(tolerance=0.1), NearestNeighbours(), NearestNeighbours(k=3, normalize=True)]


@pytest.mark.parametrize("detector", DETECTORS, ids=str)
def test_conforms(detector: Detector) -> None:
    check_detector(detector)


def test_mahalanobis_is_scipys_averaged_over_positions() -> None:
    g = torch.Generator().manual_seed(0)
    known, new = (torch.randn(n, 3, 4, 5, generator=g, dtype=torch.float64) + 2 for n in (40, 6))
    scorer = Mahalanobis(tolerance=0).fit([Representation(part, "bchw") for part in known.split(16)])
    rows = known.permute(0, 2, 3, 1).reshape(-1, 3).numpy()
    inverse = np.linalg.inv(np.cov(rows.T, bias=True))
    expected = [
        np.mean([mahalanobis(row, rows.mean(0), inverse) ** 2 / 3 for row in sample.reshape(3, -1).T.numpy()])
        for sample in new
    ]
    np.testing.assert_allclose(scorer.score(Representation(new, "bchw")).numpy(), expected, rtol=1e-9)


def test_masked_positions_and_prefix_tokens_do_not_count() -> None:
    g = torch.Generator().manual_seed(0)
    known = Representation(torch.randn(50, 4, 3, generator=g), "bnd")
    values, mask = torch.randn(2, 5, 3, generator=g), torch.tensor([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]]).bool()
    padded = Representation(values.masked_fill(~mask[..., None], 1e6), "bnd", mask, prefix_tokens=1)
    scorer = Mahalanobis().fit([known])
    alone = [scorer.score(Representation(values[i : i + 1, 1:n], "bnd")) for i, n in ((0, 4), (1, 2))]
    torch.testing.assert_close(scorer.score(padded), torch.cat(alone))


def test_neighbours_are_those_of_scikit_learn() -> None:
    g = np.random.default_rng(0)
    known, new = g.standard_normal((60, 5)), g.standard_normal((7, 5))
    scorer = NearestNeighbours(k=4).fit([Representation(torch.from_numpy(known), "bd")])
    expected = NearestNeighbors(n_neighbors=4).fit(known).kneighbors(new)[0][:, -1]
    np.testing.assert_allclose(scorer.score(Representation(torch.from_numpy(new), "bd")).numpy(), expected, rtol=1e-6)


def test_dead_features_are_strange_only_where_they_change() -> None:
    x = torch.randn(100, 3)
    x[:, 2] = 0
    scorer = Mahalanobis().fit([Representation(x, "bd")])
    changed = x[:5] + torch.tensor([0.0, 0.0, 1.0])
    own, other = (scorer.score(Representation(values, "bd")) for values in (x[:5], changed))
    assert own.isfinite().all() and (other > 10 * own).all()


def test_too_few_samples_are_refused() -> None:
    few = [Representation(torch.randn(3, 4), "bd")]
    with pytest.raises(ValueError, match="at least 5 positions, got 3"):
        Mahalanobis().fit(few)
    with pytest.raises(ValueError, match="at least 10 samples, got 3"):
        NearestNeighbours().fit(few)
    with pytest.raises(ValueError, match="all 9 positions are equal"):
        Mahalanobis().fit([Representation(torch.ones(9, 4), "bd")])
    with pytest.raises(ValueError, match="k must be at least 1"):
        NearestNeighbours(k=0)
    with pytest.raises(ValueError, match="tolerance must be at least 0"):
        Mahalanobis(tolerance=-1)
