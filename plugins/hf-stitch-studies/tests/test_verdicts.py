"""Verdicts follow the rules that the pages state."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import pytest
import study


def script(name: str) -> ModuleType:
    return importlib.import_module(f"dr_frankenstein.{name}")


def score(value: float, half: float = 0.01) -> dict[str, float]:
    return {"value": value, "low": value - half, "high": value + half}


@pytest.mark.parametrize(("parts", "verdict"), [
    ([True, True], "confirmed"), ([False], "refuted"), ([True, False, None], "in part"), ([True, None], "undecided"),
    ([False, None], "undecided"), ([None], "undecided"), ([], "undecided"),
])  # fmt: skip
def test_what_is_not_known_does_not_decide(parts: list[bool | None], verdict: str) -> None:
    assert study.decided(parts) == verdict


def test_a_claim_is_decided_by_its_parts() -> None:
    claim = study.Claim("4", "table 1", "it works", "100%", "at least .9")
    row = claim.row("0.95", "3 pairs", [True], 3)
    assert (row["verdict"], row["rule"], row["published"]) == ("stand-in confirmed", "at least .9", "100%")
    assert claim.row("0.95", "3 pairs", [None], 3)["verdict"] == "undecided"
    alone = claim.row("0.95", "1 pair", [True], 1)
    assert (alone["verdict"], alone["n"]) == ("undecided", "1 pair: too few to decide")
    untested = claim.untested("ten networks")
    assert (untested["verdict"], untested["ours"]) == ("not tested", "takes ten networks")


def test_a_claim_needs_a_rule_and_a_known_verdict() -> None:
    with pytest.raises(ValueError, match="a claim needs a rule"):
        study.Claim("4", "table 1", "it works", "100%", "")
    with pytest.raises(ValueError, match="there is no verdict 'not yet'"):
        study.claim("4", "table 1", "it works", "100%", "0.95", "3 pairs", "not yet")


def test_one_pair_of_networks_decides_nothing() -> None:
    counted = importlib.import_module("dr_frankenstein.experiment").counted
    assert counted(["0 → 1", "1 → 0"]) == ("1 pair, both directions", 1)
    assert counted(["0 → 1", "1 → 2", "2 → 0"]) == ("3 pairs", 3)
    rows = [*study.claim("1", "", "", "", "", "2 pairs", "confirmed", units=1).values()]
    assert rows[-2:] == ["2 pairs: too few to decide", "undecided"]


def test_intervals_decide_only_where_they_exclude_the_bound() -> None:
    assert [study.above(score(0.9), bound) for bound in (0.88, 0.9, 0.92)] == [True, None, False]
    assert [study.below(score(0.9), bound) for bound in (0.88, 0.9, 0.92)] == [False, None, True]
    assert study.above(dict.fromkeys(("value", "low", "high"), float("nan")), 0.5) is None
    apart = study.difference(score(0.9, 0.03), score(0.8, 0.04))
    assert [round(apart[name], 6) for name in ("value", "low", "high")] == [0.1, 0.05, 0.15]


@pytest.mark.parametrize(("direct", "task", "verdict"), [
    ([(0.7, 0.6), (0.9, 0.2)], [(0.0, 1.0), (1.0, 0.5)], "refuted"),  # .4 and .6 at a sparsity of .8
    ([(0.7, 0.6), (0.9, 0.2)], [(0.0, 1.0), (1.0, 0.7)], "confirmed"),  # .4 and .76
    ([(0.7, 0.9), (0.9, 0.7)], [(0.0, 1.0), (1.0, 0.7)], "refuted"),  # direct matching holds
    ([(0.7, 0.6), (0.9, 0.2)], [(0.0, 1.0), (0.6, 0.9)], "undecided"),  # the sparsity is not reached
])  # fmt: skip
def test_methods_are_compared_at_the_same_sparsity(direct: Any, task: Any, verdict: str) -> None:
    sparsity = script("sparsity")
    curves = {sparsity.DIRECT: direct, sparsity.PROXIMAL: task}
    run = {
        method: [{"sparsity": share, "penalty": 0.0, "score": score(value)} for share, value in points]
        for method, points in curves.items()
    }
    assert sparsity._decided(sparsity._compared({"0 → 1": run}, sparsity.PROXIMAL)) == verdict


@pytest.mark.parametrize(("r2", "loss", "verdict"), [
    ([(0.8, 0.7), (0.8, 0.75)], [(1.0, 0.5), (1.0, 0.5)], "confirmed"),
    ([(0.8, 0.79), (0.8, 0.795)], [(1.0, 0.5), (1.0, 0.5)], "in part"),
    ([(0.8, 0.81), (0.8, 0.5)], [(1.0, 0.5), (1.0, 0.5)], "refuted"),
    ([(0.8, 0.7), (0.8, 0.7)], [(1.0, 0.5), (0.5, 1.0)], "undecided"),  # nothing was learnt
])  # fmt: skip
def test_similarity_falls_only_where_cross_entropy_improves(r2: Any, loss: Any, verdict: str) -> None:
    training = script("similarity_in_training")
    runs = {str(i): {"r2": one, "cross_entropy": other} for i, (one, other) in enumerate(zip(r2, loss, strict=True))}
    assert training._falls(runs, "r2") == verdict


@pytest.mark.parametrize(("accuracies", "wide", "verdict"), [
    ((0.7, 0.72), 0.9, "confirmed"), ((0.7, 0.6), 0.9, "confirmed"), ((0.7, 0.8), 0.9, "undecided"),
    ((0.7, 0.7), 0.81, "refuted"),
])  # fmt: skip
def test_wider_networks_that_are_more_accurate_do_not_decide(accuracies: Any, wide: float, verdict: str) -> None:
    widths = script("widths")
    kinds = {
        name: {"accuracies": [own], "layers": ["conv1"], "relative_accuracy": {widths.TASK: [score(value)]}}
        for name, own, value in zip(("½", "1"), accuracies, (0.8, wide), strict=True)
    }
    assert widths._compared({"kinds": kinds}, "½", "1")[0] == verdict


def test_paths_are_connected_where_the_whole_interval_of_the_barrier_is_small() -> None:
    connectivity = script("mode_connectivity")
    barriers = {"bn1": 0.3, "bn2": 0.3, "bn3": 0.3, "bn4": 0.02, "bn5": 0.045, "bn6": 0.01}  # bn5 may be above .05
    pairs = {"0 → 1": {layer: {"paths": [[1.0] * 5], "barriers": [score(value)]} for layer, value in barriers.items()}}
    assert connectivity._decided(pairs) == ("confirmed", 0, (2, 3))
    pairs["0 → 1"]["bn2"]["barriers"] = [score(0.01)]
    assert connectivity._decided(pairs)[0] == "in part"
    pairs["0 → 1"]["bn2"] = {"paths": [], "barriers": []}  # no start reaches the threshold
    assert connectivity._decided(pairs)[0] == "in part"
