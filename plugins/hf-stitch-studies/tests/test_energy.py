"""The energy detector: conformance, what it tells apart, and the published sizes of its networks."""

from __future__ import annotations

import pytest
import torch
from hf_stitch_studies import Energy
from hf_stitch_studies.energy_networks import GridClassifier, TokenClassifier
from sklearn.metrics import roc_auc_score

from hf_stitch import registries
from hf_stitch.representation import Representation

QUICK = Energy.preset("small", width=4, blocks=1, size=8, epochs=3, fine_tune_epochs=3)


def test_it_is_registered_by_name() -> None:
    assert registries.detectors.build("energy:width=4") == Energy(width=4)
    assert registries.detectors.entry("energy").distribution == ("hf-stitch-studies", "0.1.0")


def test_the_energy_learns_classes_of_grids_and_tells_other_data_apart() -> None:
    g = torch.Generator().manual_seed(0)
    patterns = torch.randn(3, 4, 5, 5, generator=g)

    def batch(n: int) -> tuple[torch.Tensor, list[int]]:
        labels = torch.arange(n) % 3
        return patterns[labels] + 0.5 * torch.randn(n, 4, 5, 5, generator=g), (labels * 7).tolist()

    (own, labels), (new, _) = batch(120), batch(60)
    others, unseen = torch.randn(120, 4, 5, 5, generator=g) - 2, torch.randn(60, 4, 5, 5, generator=g) - 3
    detector = Energy.preset("small", width=8, size=8, epochs=6, fine_tune_epochs=8)
    parts = [Representation(part, "bchw") for part in own.split(50)]
    scorer = detector.fit(parts, labels=labels, auxiliary=[Representation(others, "bchw")])
    near, far = (scorer.score(Representation(x, "bchw")) for x in (new, unseen))
    assert roc_auc_score([0] * 60 + [1] * 60, torch.cat([near, far]).numpy()) > 0.9
    scores = [
        QUICK.fit(batches, labels=labels, auxiliary=[Representation(others, "bchw")]).score(Representation(new, "bchw"))
        for batches in (parts, [Representation(own, "bchw")])
    ]
    assert torch.equal(*scores)  # seeded


def test_the_energy_needs_activations_of_one_shape() -> None:
    g = torch.Generator().manual_seed(0)
    small, large = (Representation(torch.randn(9, 4, side, side, generator=g), "bchw") for side in (3, 5))
    with pytest.raises(ValueError, match=r"one shape, got bchw 4 3x3 first, then bchw 4 5x5 in batch 1; .* same size"):
        QUICK.fit([small, large], labels=[0, 1, 2] * 6, auxiliary=[small])
    with pytest.raises(ValueError, match="got bchw 4 3x3 first, then bchw 4 5x5 in auxiliary batch 0"):
        QUICK.fit([small], labels=[0, 1, 2] * 3, auxiliary=[large])


def test_the_published_energy_network_has_the_published_size() -> None:
    counts = [
        sum(p.numel() for p in net.parameters())
        for net in (GridClassifier(3, 10, 64, 32), TokenClassifier(192, 10, 12))
    ]
    # ResNet-18 for CIFAR; ViT-Ti (5,362,762) without patches (9,408), positions (12,480) and class token (192)
    assert counts == [11_173_962, 5_362_762 - 9_408 - 12_480 - 192]


def test_needs_that_are_not_met_are_named() -> None:
    known = [Representation(torch.randn(50, 4, generator=torch.Generator().manual_seed(0)), "bd")]
    with pytest.raises(ValueError, match=r"detector energy\(.*\) requires the class of each sample"):
        QUICK.fit(known, auxiliary=known)
    with pytest.raises(ValueError, match=r"requires auxiliary activations \(of the same network on other data\)"):
        QUICK.fit(known, labels=[0, 1] * 25)
    with pytest.raises(ValueError, match=r"one entry per sample \(50\), got 3"):
        QUICK.fit(known, labels=[0, 1, 0], auxiliary=known)
    with pytest.raises(ValueError, match="margin_in must be below margin_out"):
        Energy(margin_in=0)
    with pytest.raises(ValueError, match="balogh2025, small, got 'tiny'"):
        Energy.preset("tiny")
