"""Matchers of rows: against computations by hand, and in the whole public API."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hf_stitch_embeddings import Piecewise, ResidualMLP, Retrieval
from scipy.special import log_softmax, softmax
from sklearn.linear_model import Ridge as SklearnRidge
from sklearn.metrics import r2_score
from torch.nn import Linear, ReLU, Sequential

import hf_stitch
from hf_stitch import Moments
from hf_stitch.matchers import RowsMatcher
from hf_stitch.matchers.regression import Ridge

MATCHERS = [Piecewise(clusters=3), ResidualMLP(width=16, epochs=8), Retrieval(epochs=8)]


def rows(n: int = 240, dx: int = 6, dy: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in regions with maps of their own, with means away from 0."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, dx, generator=g) + 4 * torch.randint(0, 2, (n, 1), generator=g)
    return x, x.abs() @ torch.randn(dx, dy, generator=g) + 0.1 * torch.randn(n, dy, generator=g) + 2


@pytest.mark.parametrize(
    "matcher", [Piecewise(clusters=8), ResidualMLP(width=4, epochs=2), Retrieval(epochs=2)], ids=str
)
def test_another_seed_gives_another_stitch(matcher: Any) -> None:
    fits = (dataclasses.replace(matcher, seed=seed).fit(*rows()).state_dict() for seed in (0, 0, 1))
    first, again, other = (torch.cat([value.flatten() for value in fit.values()]) for fit in fits)
    assert torch.equal(first, again) and not torch.equal(first, other)


@pytest.mark.parametrize("matcher", MATCHERS, ids=lambda matcher: matcher.name)
def test_r2_is_that_of_the_training_rows(matcher: RowsMatcher) -> None:
    (x, y), state = rows(), torch.get_rng_state()
    first = matcher.fit(x, y)
    assert torch.equal(state, torch.get_rng_state())
    predicted = first.double()(x.double()).detach().numpy()
    expected = r2_score(y.double().numpy(), predicted, multioutput="variance_weighted")
    assert first.fitted["n"] == 240 and first.fitted["r2"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("matcher", MATCHERS[:2], ids=lambda matcher: matcher.name)
def test_regions_are_fitted_better_than_by_one_affine_map(matcher: RowsMatcher) -> None:
    x, y = rows(2000)
    affine = Ridge().fit(Moments(6, 4).update(x, y)).fitted["r2"]
    more = dataclasses.replace(matcher, **({"clusters": 8} if matcher.name == "piecewise" else {"epochs": 40}))
    assert float(more.fit(x, y).fitted["r2"]) > float(affine) + 0.02


def test_one_piece_is_ridge_on_the_rows_and_on_what_it_leaves() -> None:
    x, y = rows()
    stitch = Piecewise(clusters=1).fit(x, y, dtype=torch.float64)
    common = Ridge().fit(Moments(6, 4).update(x, y), dtype=torch.float64)
    left = (y - common(x.double())).detach().numpy()
    own = Ridge().fit(Moments(6, 4).update(x, torch.from_numpy(left)), dtype=torch.float64)
    again = SklearnRidge(alpha=own.fitted["ridge"]).fit(x.double().numpy(), left)
    expected = common(x.double()).detach().numpy() + again.predict(x.double().numpy())
    np.testing.assert_allclose(stitch(x.double()).detach().numpy(), expected, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pieces_take_nothing_from_the_direction_that_a_norm_removes(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    region = torch.randint(0, 2, (2000, 1)) * 2 - 1
    x = torch.nn.functional.layer_norm(0.3 * torch.randn(2000, 8) + 4 * region * torch.arange(8).sub(3.5).sign(), (8,))
    y = torch.where(region > 0, x @ torch.randn(8, 4), x @ torch.randn(8, 4))
    stitch = Piecewise(clusters=2).fit(x.to(dtype), y, dtype=torch.float64)
    assert stitch.weights.abs().max() > 1
    assert stitch.weights.mean(2).abs().max() < 50 * torch.finfo(dtype).eps


def test_shares_are_those_of_the_formula() -> None:
    x, y = rows()
    stitch = Piecewise(clusters=3).fit(x, y, dtype=torch.float64)
    centres, width = stitch.centres.detach().numpy(), stitch.width.item()
    squares = ((x.double().numpy()[:, None] - centres) ** 2).sum(-1)
    np.testing.assert_allclose(stitch.shares(x.double()).detach().numpy(), softmax(-squares / width**2, axis=1))


def test_the_loss_of_retrieval_is_the_divergence() -> None:
    random = np.random.default_rng(0)
    mapped, y = random.normal(size=(2, 7, 4))
    cosines = [
        (y / np.linalg.norm(y, axis=1, keepdims=True)) @ (other / np.linalg.norm(other, axis=1, keepdims=True)).T
        for other in (y, mapped)
    ]
    p, q = (log_softmax(each / 0.1, axis=1) for each in cosines)
    expected = (np.exp(p) * (p - q)).sum(1).mean()
    got = Retrieval(temperature=0.1)._divergence(torch.from_numpy(mapped), torch.from_numpy(y))
    assert got.item() == pytest.approx(expected)


def test_training_never_makes_held_out_rows_worse() -> None:
    x = torch.randn(60, 5, generator=torch.Generator().manual_seed(1))
    for matcher in (ResidualMLP(width=8, rate=1e3), Retrieval(rate=1e3)):
        fitted = matcher.fit(x, x @ x.T[:, :5]).fitted
        assert fitted["held_out_loss"] <= fitted["held_out_loss_before"] and fitted["epochs"] == 0


@pytest.mark.parametrize("matcher", MATCHERS, ids=lambda matcher: matcher.name)
def test_rows_that_determine_nothing_are_refused(matcher: RowsMatcher) -> None:
    x, y = rows()
    with pytest.raises(ValueError, match="at least"):
        matcher.fit(x[:1], y[:1])
    with pytest.raises(ValueError, match="NaN"):
        matcher.fit(x, torch.where(torch.arange(240)[:, None] == 3, float("nan"), y))
    with pytest.raises(ValueError, match="shape"):
        matcher.fit(x[:, None], y)
    with pytest.raises(ValueError, match="pair up"):
        matcher.fit(x[:9], y)


@pytest.mark.parametrize("matcher", MATCHERS, ids=lambda matcher: matcher.name)
def test_networks_are_stitched_and_saved_with_it(matcher: RowsMatcher, tmp_path) -> None:
    torch.manual_seed(0)
    nets = [Sequential(Linear(4, 8), ReLU(), Linear(8, 3)).eval() for _ in "ab"]
    a, b = (hf_stitch.load(net, example_inputs=torch.randn(2, 4)) for net in nets)
    x = torch.randn(300, 4)
    stitched = hf_stitch.stitch(
        a, b, x, source_layer="1", target_layer="1", matcher=matcher, task="image-classification", progress=False
    )
    stitched.stitcher.save_pretrained(tmp_path)
    again = hf_stitch.Stitcher.from_pretrained(tmp_path).attach(a, b)
    assert torch.equal(again(input=x[:9]).logits, stitched(input=x[:9]).logits)
    assert stitched.config.recipe["matcher"]["name"] == matcher.name
    with pytest.raises(ValueError, match=f"matcher '{matcher.name}.*requires rows, but a grid stores only moments"):
        hf_stitch.stitch_grid(a, b, x, matchers=[matcher], task="image-classification", progress=False)
