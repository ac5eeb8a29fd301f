"""Linear probes agree with logistic regression, and low-rank approximations with the SVD of the training rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hf_stitch_studies import linear_probe
from hf_stitch_studies.benching.low_rank import LowRankBasis, default_ranks
from hf_stitch_studies.benching.probing import linear_probes
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    return torch.from_numpy(pixels[order] / 16).float(), torch.from_numpy(labels[order])


def accuracy(probe: torch.nn.Linear, features: torch.Tensor, labels: torch.Tensor) -> float:
    return (probe(features).argmax(1) == labels).float().mean().item()


def test_a_probe_is_as_accurate_as_logistic_regression() -> None:
    features, labels = digits()
    train, test = slice(0, 1200), slice(1200, None)
    probe = linear_probe(features[train], labels[train], epochs=60, learning_rate=1e-2)
    regression = LogisticRegression(max_iter=2000).fit(features[train].numpy(), labels[train].numpy())
    expected = regression.score(features[test].numpy(), labels[test].numpy())
    assert accuracy(probe, features[test], labels[test]) == pytest.approx(expected, abs=0.02)


def test_a_probe_converges_to_logistic_regression() -> None:
    """With overlapping classes and many steps, the weights are those of the unregularised maximum of the likelihood."""
    torch.manual_seed(0)
    labels = torch.arange(2000) % 2
    features = torch.randn(2000, 3) + labels[:, None]
    probe = linear_probe(features, labels, epochs=150, batch_size=500, learning_rate=0.05)
    regression = LogisticRegression(C=np.inf).fit(features.numpy(), labels.numpy())
    found = probe.weight[1] - probe.weight[0]
    np.testing.assert_allclose(found.numpy(), regression.coef_[0], rtol=0.05)


def test_the_schedule_is_that_of_the_protocol() -> None:
    """One sample and one step per epoch: Adam moves each weight by the learning rate in its first steps."""
    features, labels = torch.ones(1, 1), [0]
    steps = [linear_probe(features, labels, classes=2, epochs=1, learning_rate=lr).weight[0, 0] for lr in (1e-3, 2e-3)]
    assert (steps[1] - steps[0]).item() == pytest.approx(1e-3, rel=1e-3)
    after = [linear_probe(features, labels, classes=2, epochs=n).weight[0, 0].item() for n in (9, 10)]
    # Ten epochs decay after the fifth, nine too: the tenth step adds a tenth of the learning rate.
    assert after[1] - after[0] == pytest.approx(1e-4, rel=0.05)


def test_probes_side_by_side_are_those_one_by_one_and_leave_the_random_state() -> None:
    features, labels = digits()
    several = [features[:300], features[:300].flip(1) * 3, torch.zeros(300, 64)]
    state = torch.get_rng_state()
    together = linear_probes(several, labels[:300], seed=3)
    assert torch.equal(state, torch.get_rng_state())
    for probe, own in zip(together, several, strict=True):
        alone = linear_probe(own, labels[:300], seed=3)
        torch.testing.assert_close(probe.weight, alone.weight, rtol=1e-3, atol=1e-5)
        assert not alone.weight.requires_grad
    again = linear_probe(several[0], labels[:300], seed=3)
    assert torch.equal(again.weight, linear_probe(several[0], labels[:300], seed=3).weight)
    assert not torch.equal(again.weight, linear_probe(several[0], labels[:300], seed=4).weight)


@pytest.mark.parametrize(
    ("features", "labels", "options", "message"),
    [
        (torch.ones(4, 2, 2), [0] * 4, {}, r"must be floating-point tensors \(n, d\)"),
        (torch.ones(4, 2, dtype=torch.int64), [0] * 4, {}, "must be floating-point tensors"),
        (torch.ones(4, 2), [0] * 3, {}, r"labels must have the shape \(4,\), .* got \(3,\)"),
        (torch.ones(4, 2), [0, 1, 2, 5], {"classes": 3}, "labels must be from 0 to 2, got 5"),
        (torch.full((4, 2), torch.nan), [0, 1] * 2, {}, "contain NaN or infinity"),
        (torch.ones(4, 2), [0, 1] * 2, {"epochs": 0}, "epochs must be an integer >= 1, got 0"),
        (torch.ones(4, 2), [0, 1] * 2, {"learning_rate": 0.0}, "learning_rate must be a number > 0, got 0.0"),
    ],
)
def test_wrong_input_of_a_probe_is_named(
    features: torch.Tensor, labels: list[int], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        linear_probe(features, labels, **options)


@pytest.mark.parametrize("width", [1, 2, 3, 7, 12, 64, 100, 192, 512])
def test_default_ranks_fall_from_the_width_to_one(width: int) -> None:
    ranks = default_ranks(width)
    assert ranks[0] == width and ranks[-1] == 1 and list(ranks) == sorted(set(ranks), reverse=True)


def test_default_ranks_are_those_of_the_paper() -> None:
    assert default_ranks(256) == (256, 224, 192, 160, 128, 96, 64, 32, 16, 8, 4, 2, 1)
    assert default_ranks(192) == (*range(192, 0, -16), 8, 4, 2, 1)
    with pytest.raises(ValueError, match="width must be >= 1, got 0"):
        default_ranks(0)


def test_approximations_are_the_principal_components_of_the_training_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    train, test = (torch.randn(n, 5, generator=generator) @ torch.diag(torch.arange(1.0, 6)) + 7 for n in (40, 30))
    basis = LowRankBasis.of(train)
    for rank in (1, 3):
        oracle = PCA(rank).fit(train.double().numpy())
        expected = oracle.inverse_transform(oracle.transform(test.double().numpy()))
        np.testing.assert_allclose(basis.approximate(test, rank).numpy(), expected, atol=1e-10)
    assert torch.equal(basis.approximate(test, 5), test.double())
    with pytest.raises(ValueError, match="rank must be from 1 to 5"):
        basis.approximate(test, 6)
    with pytest.raises(ValueError, match="more than 5 training samples, got 5"):
        LowRankBasis.of(train[:5])


def test_the_approximation_of_a_row_does_not_depend_on_the_other_rows() -> None:
    train, test = torch.randn(40, 5), torch.randn(30, 5)
    basis = LowRankBasis.of(train)
    torch.testing.assert_close(basis.approximate(test, 2)[:3], basis.approximate(test[:3], 2))
