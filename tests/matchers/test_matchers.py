"""What holds of every matcher: conformance, building by name, configs, R² and refusals."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from hf_stitch.built_ins import BUILT_INS
from hf_stitch.matchers import ClosedFormMatcher
from hf_stitch.matchers.alignment import InverseRelative, Permutation, Procrustes, Recoloured
from hf_stitch.matchers.regression import Lasso, LowRank, Lstsq, Ridge, RidgeToIdentity
from hf_stitch.matchers.starts import Attention, LowRankResidual, Random
from hf_stitch.registry import Entry, UnknownNameError, registries

if TYPE_CHECKING:
    from conftest import Rows

OPTIONS: dict[type[ClosedFormMatcher], dict[str, Any]] = {
    Attention: {"heads": 2, "width": 8, "ridge": 50.0, "causal": True, "seed": 1},
    InverseRelative: {"center": False, "scale": False, "rcond": 0.5},
    Lasso: {"alpha": 0.5, "tolerance": 0.5},
    LowRank: {"rank": 2, "rcond": 0.5},
    LowRankResidual: {"rank": 3, "ridge": 50.0},
    Lstsq: {"intercept": False, "rcond": 0.5},
    Permutation: {"compare": "distance", "semi": True},
    Procrustes: {"center": False, "scale": True},
    Random: {"seed": 1, "rank": 2},
    Recoloured: {"rcond": 0.5},
    Ridge: {"ridge": 50.0},
    RidgeToIdentity: {"ridge": 50.0},
}
"""Other values than :data:`NEEDED` and the defaults."""
NEEDED: dict[type[ClosedFormMatcher], dict[str, Any]] = {
    Lasso: {"alpha": 0.001}, LowRank: {"rank": 1}, LowRankResidual: {"rank": 2},
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "option"), [(kind, option) for kind, options in OPTIONS.items() for option in options]
)
def test_every_option_changes_the_stitch(kind: type[ClosedFormMatcher], option: str, paired: type[Rows]) -> None:
    drawn, scale = paired.draw(60, 5, 5), 3.0 ** -np.arange(5)  # in directions of unequal size
    moments = paired(drawn.x * scale, drawn.y * scale[::-1]).moments
    given = NEEDED.get(kind, {})
    one, other = (kind(**each).fit(moments) for each in (given, {**given, option: OPTIONS[kind][option]}))
    state, others = one.state_dict(), other.state_dict()
    same = state.keys() == others.keys() and all(torch.equal(state[name], others[name]) for name in state)
    assert not same or one.config() != other.config()


def test_all_options_are_tried() -> None:
    kinds = [registries.matchers.get(name) for name in BUILT_INS["matchers"]]
    for kind in (kind for kind in kinds if issubclass(kind, ClosedFormMatcher)):
        assert {field.name for field in dataclasses.fields(kind)} == {*OPTIONS.get(kind, ())}


@pytest.mark.parametrize("mean", [30.0, 300.0])
@pytest.mark.parametrize("matcher", [Lstsq(), Ridge(ridge=1.0), Procrustes(), LowRank(rank=3)], ids=str)
def test_a_far_mean_costs_no_precision(matcher: ClosedFormMatcher, mean: float, paired: type[Rows]) -> None:
    near, far = (paired.draw(400, 6, 6, mean=shift) for shift in (0.0, mean))
    torch.testing.assert_close(
        matcher.fit(far.moments, torch.float64).matrix(),
        matcher.fit(near.moments, torch.float64).matrix(),
        rtol=1e-8,
        atol=1e-9,
    )
    stitch = matcher.fit(far.moments)
    with torch.no_grad():
        at_mean = stitch(torch.from_numpy(far.x.mean(0)).float()).numpy()
    assert np.abs(at_mean - far.y.mean(0)).max() < 1e-6 * mean * 6


@pytest.mark.parametrize(
    "matcher",
    [Lstsq(), Ridge(), RidgeToIdentity(), Procrustes(), LowRank(rank=4), Recoloured(), InverseRelative()],
    ids=str,
)
def test_a_failing_decomposition_raises(monkeypatch: Any, matcher: ClosedFormMatcher, paired: type[Rows]) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise torch.linalg.LinAlgError("did not converge")

    monkeypatch.setattr(torch.linalg, "eigh", fail)
    monkeypatch.setattr(torch.linalg, "svd", fail)
    with pytest.raises(torch.linalg.LinAlgError, match="did not converge"):
        matcher.fit(paired.draw(50, 5, 5).moments)


def test_weights_are_float32_unless_asked(rows: Rows) -> None:
    assert Lstsq().fit(rows.moments).weight.dtype == torch.float32
    assert Lstsq().fit(rows.moments, torch.float64).weight.dtype == torch.float64


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("rigde", {}, UnknownNameError, "did you mean 'ridge'"),
        ("lstsq", {"intersept": False}, TypeError, r"did you mean 'intercept'\? .* intercept, rcond"),
        ("identity", {"scale": 2}, TypeError, "unexpected option 'scale'. Its options: none"),
        ("inverse_relative", {"center": 1}, ValueError, "center must be True or False, got 1"),
        ("inverse_relative", {"rcond": 2}, ValueError, r"rcond must be a number >= 0 and < 1 or None, got 2"),
        ("lasso", {}, TypeError, "'lasso' among matchers requires the option 'alpha'"),
        ("lasso", {"alpha": 0}, ValueError, "alpha must be a number > 0, got 0"),
        ("permutation", {"compare": "cosine"}, ValueError, "compare must be .*'correlation', 'distance', got 'cosine'"),
        (Ridge(ridge=2.0), {"ridge": 1.0}, TypeError, r"is an instance and does not accept options \(ridge\)"),
        ("odd", {}, TypeError, r"'odd' among matchers must be a subclass of Matcher, got .*dict"),
        ("low_rank", {"rank": 0}, ValueError, "rank must be an integer >= 1, got 0"),
        ("ridge", {"ridge": "cv"}, ValueError, "ridge must be a number >= 0 or 'gcv', got 'cv'"),
    ],
)
def test_a_wrong_config_is_refused(
    name: Any, options: dict[str, Any], error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registries.matchers._entries, "odd", Entry.of("odd", dict))
    with pytest.raises(error, match=message):
        registries.matchers.build(name, **options)
