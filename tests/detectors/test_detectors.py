"""Detectors: values against other code."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from scipy.spatial.distance import mahalanobis
from scipy.stats import multivariate_normal
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import roc_auc_score
from sklearn.neighbors import NearestNeighbors
from sklearn.neural_network import MLPClassifier

from hf_stitch.detectors import Detector, Scorer
from hf_stitch.detectors.distribution_free import Classifier, NearestNeighbours
from hf_stitch.detectors.gaussian import LikelihoodRatio, Mahalanobis
from hf_stitch.representation import Representation

NORMAL = NormalDist()


def vectors(n: int, seed: int, width: int = 4) -> torch.Tensor:
    return torch.randn(n, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def area(scorer: Scorer, strange: torch.Tensor, own: torch.Tensor) -> float:
    scores = [scorer.score(Representation(x, "bd" if x.dim() == 2 else "bnd")) for x in (strange, own)]
    return float(roc_auc_score([1] * len(strange) + [0] * len(own), torch.cat(scores).numpy()))


def test_another_seed_gives_another_classifier() -> None:
    own, stitched = (Representation(vectors(50, seed), "bd") for seed in (0, 1))
    first, again, other = (Classifier(seed=s).fit([own], auxiliary=[stitched]).score(own) for s in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)


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


@pytest.mark.parametrize("detector", [Mahalanobis(), LikelihoodRatio(), Classifier(), NearestNeighbours()], ids=str)
def test_a_sample_without_positions_has_no_score(detector: Detector) -> None:
    known = [Representation(torch.randn(50, 4, 3), "bnd")]
    scorer = detector.fit(known, auxiliary=[Representation(torch.randn(50, 4, 3) + 1, "bnd")])
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]]).bool()
    empty = Representation(torch.randn(2, 4, 3), "bnd", mask, prefix_tokens=1)
    with pytest.raises(ValueError, match=r"sample 1 of the batch (lacks positions|is completely masked)"):
        scorer.score(empty)


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


def test_the_likelihood_ratio_is_scipys() -> None:
    own, stitched, new = vectors(400, 0), vectors(300, 1) * 0.5 + 1, vectors(9, 2)
    scorer = LikelihoodRatio(tolerance=0).fit(
        [Representation(own, "bd")], auxiliary=[Representation(part, "bd") for part in stitched.split(70)]
    )
    logs = [
        multivariate_normal(x.mean(0).numpy(), np.cov(x.T.numpy(), bias=True)).logpdf(new.numpy())
        for x in (stitched, own)
    ]
    np.testing.assert_allclose(scorer.score(Representation(new, "bd")).numpy(), logs[0] - logs[1], rtol=1e-9)


@pytest.mark.parametrize("detector", [LikelihoodRatio(), Classifier(), Classifier(hidden=0)], ids=str)
def test_a_shift_is_told_apart_as_well_as_it_can_be(detector: Detector) -> None:
    """Two normal distributions at a distance d of one another: the best AUROC is Φ(d / √2)."""
    shift = torch.tensor([0.8, -0.6, 0, 0])
    scorer = detector.fit(
        [Representation(vectors(4000, 0), "bd")], auxiliary=[Representation(vectors(4000, 1) + shift, "bd")]
    )
    found = area(scorer, vectors(4000, 2) + shift, vectors(4000, 3))
    assert found == pytest.approx(NORMAL.cdf(1 / 2**0.5), abs=0.02)


def test_a_classifier_of_few_positions_is_trained_to_the_end() -> None:
    """In ten epochs of 80 positions, which are ten steps, weights hardly leave their initial values."""
    known, moved = vectors(40, 0), vectors(40, 1) + torch.tensor([1.0, -1, 1, -1])
    known, moved = known[:, [0, 1, 2, 3] * 4], moved[:, [0, 1, 2, 3] * 4]
    scorer = Classifier().fit([Representation(known, "bd")], auxiliary=[Representation(moved, "bd")])
    logits = scorer.score(Representation(torch.cat([known, moved]), "bd")).numpy()
    loss = np.logaddexp(0, -logits * np.repeat([-1, 1], 40)).mean()
    assert loss < 0.2
    with pytest.MonkeyPatch.context() as patch, pytest.warns(ConvergenceWarning):  # it has no number of epochs
        patch.setattr("sklearn.neural_network.MLPClassifier", partial(MLPClassifier, max_fun=1))
        Classifier(hidden=0).fit([Representation(known, "bd")], auxiliary=[Representation(moved, "bd")])


@pytest.mark.parametrize("detector", [LikelihoodRatio(), Classifier()], ids=str)
def test_the_mean_over_positions_adds_up_evidence(detector: Detector) -> None:
    """Of p independent positions at a distance d, the best AUROC is Φ(d √p / √2)."""
    own, stitched, new, other = (vectors(8000, seed).view(1000, 8, 4) for seed in range(4))
    shift = torch.tensor([0.3, 0, 0, 0])
    scorer = detector.fit([Representation(own, "bnd")], auxiliary=[Representation(stitched + shift, "bnd")])
    assert area(scorer, new + shift, other) == pytest.approx(NORMAL.cdf(0.3 * 2), abs=0.04)


def test_shrinkage_is_seen_by_what_compares_scales_and_not_by_logistic_regression() -> None:
    own, new = vectors(1500, 0), vectors(1500, 1)
    known, shrunk = [Representation(own, "bd")], [Representation(vectors(1500, 2) / 2, "bd")]
    other = vectors(1500, 3) / 2
    for detector in (LikelihoodRatio(), Classifier()):
        assert area(detector.fit(known, auxiliary=shrunk), other, new) > 0.8
    assert abs(area(Classifier(hidden=0).fit(known, auxiliary=shrunk), other, new) - 0.5) < 0.05
    for alone in (Mahalanobis(), NearestNeighbours()):  # smaller scores: strange, because these are two-sided
        assert alone.two_sided and area(alone.fit(known), other, new) < 0.25


def test_strangeness_of_positions_that_leaves_means_alone_is_seen_only_by_what_reads_positions() -> None:
    """Of each pair of positions, one moves as far as the other moves back."""
    own, new = (vectors(2400, seed).view(600, 4, 4) for seed in (0, 1))
    moved = vectors(2400, 2).view(600, 4, 4) + torch.tensor([1.0, -1, 1, -1])[None, :, None]
    known, auxiliary = [Representation(own, "bnd")], [Representation(moved, "bnd")]
    assert area(Mahalanobis().fit(known), moved, new) > 0.9
    assert area(LikelihoodRatio().fit(known, auxiliary=auxiliary), moved, new) > 0.9
    assert abs(area(NearestNeighbours().fit(known), moved, new) - 0.5) < 0.06


def known(values: torch.Tensor) -> list[Representation]:
    return [Representation(values, "bd")]


REFUSALS: list[tuple[Callable[[], Any], str]] = [
    (lambda: Mahalanobis().fit(known(torch.randn(3, 4))), "at least 5 positions, got 3"),
    (lambda: NearestNeighbours().fit(known(torch.randn(3, 4))), "at least 10 samples, got 3"),
    (lambda: Mahalanobis().fit(known(torch.ones(9, 4))), "all 9 positions are equal"),
    (lambda: NearestNeighbours(k=0), "k must be an integer >= 1"),
    (lambda: Mahalanobis(tolerance=-1), "tolerance must be a number >= 0"),
    (lambda: Classifier(epochs=0), "epochs must be an integer >= 1"),
    (lambda: LikelihoodRatio().fit(known(vectors(50, 0))), "requires auxiliary activations .*output of a stitch"),
    (
        lambda: LikelihoodRatio().fit(known(vectors(50, 0)), auxiliary=known(vectors(3, 1))),
        "at least 5 stitched positions, got 3",
    ),
    (
        lambda: LikelihoodRatio(tolerance=0).fit(known(vectors(50, 0)), auxiliary=known(torch.ones(50, 4))),
        "singular.*increase tolerance",
    ),
]


@pytest.mark.parametrize(("call", "message"), REFUSALS)
def test_what_cannot_be_fitted_is_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_outputs_of_a_norm_lie_in_a_hyperplane_up_to_rounding(dtype: torch.dtype) -> None:
    normed = Representation(torch.nn.functional.layer_norm(vectors(50, 0), (4,)).to(dtype), "bd")
    with pytest.raises(ValueError, match=r"singular.*increase tolerance"):
        Mahalanobis(tolerance=0).fit([normed])
    assert 0.7 < Mahalanobis().fit([normed]).score(normed).mean() < 1
