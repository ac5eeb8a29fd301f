"""The plugin's detectors fulfil the contract of detectors, and agree with hf-stitch's own and with scikit-learn."""

from __future__ import annotations

import hf_stitch_pytorch_ood as plugin
import numpy as np
import pytest
import torch
from hf_stitch_testing import check_detector

from hf_stitch import registries
from hf_stitch.detectors.distribution_free import NearestNeighbours
from hf_stitch.detectors.gaussian import Mahalanobis
from hf_stitch.representation import Representation

NAMES = {"ood_knn": plugin.KNN, "ood_mahalanobis": plugin.Mahalanobis, "ood_rmd": plugin.RMD, "ood_gmm": plugin.GMM}


def vectors(n: int, seed: int) -> torch.Tensor:
    return torch.randn(n, 5, generator=torch.Generator().manual_seed(seed)) + torch.tensor([3.0, 0, 0, 0, 1])


# Relative distances leave out what all classes share: a far sample need not be strange.
@pytest.mark.parametrize("name", [name for name in NAMES if name != "ood_rmd"])
def test_fulfils_the_contract_of_detectors(name: str) -> None:
    assert registries.detectors.get(name) is NAMES[name]
    assert registries.detectors.entry(name).origin == "plugin hf-stitch-pytorch-ood 0.1.0"
    check_detector(registries.detectors.build(name))


def test_neighbours_are_those_of_hf_stitch() -> None:
    known, new = Representation(vectors(80, 0), "bd"), Representation(vectors(9, 1), "bd")
    for normalize in (True, False):
        theirs = plugin.KNN(k=4, normalize=normalize).fit([known]).score(new)
        ours = NearestNeighbours(k=4, normalize=normalize).fit([known]).score(new)
        torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5)


def test_the_distance_of_one_class_is_that_of_hf_stitch() -> None:
    """Theirs is half the squared distance with a scatter matrix, ours the squared distance with a covariance over d."""
    known, new = Representation(vectors(80, 0), "bd"), Representation(vectors(9, 1), "bd")
    theirs = plugin.Mahalanobis().fit([known], labels=[0] * 80).score(new)
    ours = Mahalanobis(tolerance=0).fit([known]).score(new)
    torch.testing.assert_close(theirs * 2 * 80 / 5, ours, rtol=1e-3, atol=1e-4)


def test_relative_distances_ignore_what_does_not_tell_classes_apart() -> None:
    g = np.random.default_rng(0)
    labels = np.arange(300) % 3
    x = g.normal(size=(300, 5)) + 6 * np.eye(5)[labels]
    known = Representation(torch.from_numpy(x).float(), "bd")
    scorer = plugin.RMD().fit([known], labels=(labels * 2).tolist())  # classes 1 and 3 have no samples
    own = scorer.score(known)
    moved = torch.tensor([0, 0, 0, 0, 8.0])
    far = scorer.score(Representation(known.values + moved, "bd"))
    between = scorer.score(Representation(torch.full((1, 5), 2.0) * torch.tensor([1, 1, 1, 0, 0]), "bd"))
    assert (far - own).abs().median() < 0.3 * (between - own.median()).abs()


def test_unequal_numbers_of_labels_are_refused() -> None:
    with pytest.raises(ValueError, match=r"one label per sample .80., got 3"):
        plugin.GMM().fit([Representation(vectors(80, 0), "bd")], labels=[0, 1, 2])
