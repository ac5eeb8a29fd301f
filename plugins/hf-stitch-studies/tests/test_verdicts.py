"""Verdicts follow the rules that the pages state."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import numpy as np
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


def test_a_table_has_a_row_for_each_item() -> None:
    columns = {"layer": "{name}", "score": "{value:.1f}", "high": lambda item: item["value"] > 1}
    assert study.table([{"name": "a|b", "value": 2.0}], columns).splitlines()[2] == "| a\\|b | 2.0 | True |"
    pairs = study.table([("a", [1.0, 0.5, 1.5])], {"": "{0}", "score": lambda _, values: study.ranged(values)})
    assert pairs == "|  | score |\n| --- | --- |\n| a | 1.00 [0.50, 1.50] |"
    assert study.table(["a", "b"], {"name": str, "twice": "{0}{0}"}).endswith("| a | aa |\n| b | bb |")


def test_one_pair_of_networks_decides_nothing() -> None:
    counted = importlib.import_module("dr_frankenstein.experiment").counted
    assert counted(["0 → 1", "1 → 0"]) == ("1 pair, both directions", 1)
    assert counted(["0 → 1", "1 → 2", "2 → 0"]) == ("3 pairs", 3)
    rows = [*study.claim("1", "", "", "", "", "2 pairs", "confirmed", units=1).values()]
    assert rows[-2:] == ["2 pairs: too few to decide", "undecided"]


@pytest.mark.parametrize(("beyond", "verdict"), [
    ([(-0.2, 0.1), (-0.1, 0.05)], "refuted"), ([(0.02, 0.05), (-0.1, 0.05)], "undecided"),
    ([(0.2, 0.1), (-0.1, 0.05)], "confirmed"), ([(0.02, 0.05), (0.1, 0.05)], "confirmed"),
])  # fmt: skip
def test_a_measure_that_may_beat_the_baselines_is_not_refuted(beyond: list[tuple[float, float]], verdict: str) -> None:
    bench = importlib.import_module("how_not_to_stitch.bench")
    tau = score(0.5)
    scores = {
        name: {"tau": tau, "beyond": {"rank only": score(*each), "depth only": score(float("nan"))}}
        for name, each in zip("ab", beyond, strict=True)
    } | {name: {"tau": tau, "beyond": {}} for name in ("rank only", "depth only", bench.RELIABILITY)}
    row = bench._baselines("sensitivity", bench.BASELINES["sensitivity"], scores, "10 networks", 10)
    assert row["verdict"].removeprefix("stand-in ") == verdict


def strange(passes: bool) -> dict[str, Any]:
    """A run with eight layers, at which the energy calls everything strange, and passes its tests or does not."""
    controls = {"far": [[float(passes)] * 3] * 8, "train": [[0.5] * 3] * 8}
    of = {"relative_accuracy": [[1.0] * 8] * 8, "energy": {"auroc": [[1.0] * 8] * 8}}
    return {
        "matchers": {"task loss, 2 steps": of}, "controls": {"energy": controls},
        "doses": {"energy": {"coloured": [[0.9] * 5] * 8}},
    }  # fmt: skip


@pytest.mark.parametrize(("itself", "pairs", "verdict"), [
    (False, [True, True], "stand-in confirmed"), (True, [True, True], "stand-in confirmed"),
    (True, [True], "undecided"), (True, [True, False], "undecided"), (False, [False, False], "undecided"),
])  # fmt: skip
def test_one_pair_in_which_the_energy_passes_decides_nothing(itself: bool, pairs: list[bool], verdict: str) -> None:
    module = importlib.import_module("how_not_to_stitch.strange_activations")
    between = {f"{i}a -> {i}b": strange(each) for i, each in enumerate(pairs)}
    runs = module._Runs({"0a -> 0a": strange(itself)}, between, "task loss, 2 steps", 8)
    assert module._strangeness(module.STRANGENESS[0], runs)["verdict"] == verdict


def test_cells_without_a_detector_are_no_evidence() -> None:
    cause = importlib.import_module("how_not_to_stitch.cause")
    detectors = {name: [["nan", 0.5]] for name in cause.DETECTORS}
    one = {
        "matchers": {name: {"relative_accuracy": [[1.0, 1.0]], **detectors} for name in (cause.DIRECT, "residual 1")},
        "far": {name: [0.0, 1.0] for name in cause.DETECTORS},
    }
    cells = cause._Cells(one)
    assert cells.judged.tolist() == [False, True]
    assert cells.kept().tolist() == [[False, True]]


def test_intervals_allow_for_choices() -> None:
    assert study.adjusted(score(0.9), 1) == pytest.approx(score(0.9))
    wide = study.adjusted({"value": 0.9, "low": 0.8, "high": 0.95}, 5)
    assert wide["low"] == pytest.approx(0.9 - 0.1 * 2.5758 / 1.96, abs=1e-4)
    assert wide["high"] == pytest.approx(0.9 + 0.05 * 2.5758 / 1.96, abs=1e-4)
    assert study.adjusted(score(0.9), 5, 2)["high"] > study.adjusted(score(0.9), 5)["high"]


def test_figures_of_one_unit_have_no_interval() -> None:
    assert study.shown(study.over([0.5])) == "0.500"
    assert study.shown(study.over([0.4, 0.6]), 1) == "0.5 [-0.8, 1.8]"
    assert study.above(study.over([]), 0) is None


def test_weights_of_pairs_are_those_of_their_networks() -> None:
    weights = study.network_weights([("a", "b"), ("b", "c"), ("a", "c")], 100)
    assert weights.shape == (100, 3) and np.allclose(weights.sum(1), 1) and (weights.std(0) > 0).all()
    assert np.allclose(study.network_weights([("a", "b")], 5), 1)  # one pair has no spread


def test_intervals_decide_only_where_they_exclude_the_bound() -> None:
    assert [study.above(score(0.9), bound) for bound in (0.88, 0.9, 0.92)] == [True, None, False]
    assert [study.below(score(0.9), bound) for bound in (0.88, 0.9, 0.92)] == [False, None, True]
    assert study.above(dict.fromkeys(("value", "low", "high"), float("nan")), 0.5) is None
    apart = study.difference(score(0.9, 0.03), score(0.8, 0.04))
    assert [round(apart[name], 6) for name in ("value", "low", "high")] == [0.1, 0.05, 0.15]


@pytest.mark.parametrize(("direct", "task", "found"), [
    ([(0.7, 0.6), (0.9, 0.2)], [(0.0, 1.0), (1.0, 0.5)], (0.4, 0.6)),
    ([(0.7, 0.6), (0.9, 0.2)], [(0.0, 1.0), (0.6, 0.9)], (0.4, float("nan"))),  # the sparsity is not reached
])  # fmt: skip
def test_methods_are_compared_at_the_same_sparsity(direct: Any, task: Any, found: tuple[float, float]) -> None:
    sparsity = script("sparsity")
    curves = {sparsity.DIRECT: direct, sparsity.PROXIMAL: task}
    run = {
        method: [{"sparsity": share, "penalty": 0.0, "score": score(value)} for share, value in points]
        for method, points in curves.items()
    }
    assert sparsity.compared({"0 → 1": run}, sparsity.PROXIMAL)["0 → 1"] == pytest.approx(found, nan_ok=True)


@pytest.mark.parametrize(("r2", "loss", "verdict"), [
    ([(0.8, 0.7), (0.8, 0.75)], [(1.0, 0.5), (1.0, 0.5)], "confirmed"),
    ([(0.8, 0.79), (0.8, 0.795)], [(1.0, 0.5), (1.0, 0.5)], "in part"),
    ([(0.8, 0.81), (0.8, 0.79)], [(1.0, 0.5), (1.0, 0.5)], "refuted"),
    ([(0.8, 0.7), (0.8, 0.7)], [(1.0, 0.5), (0.5, 1.0)], "undecided"),  # nothing was learnt
])  # fmt: skip
def test_similarity_falls_only_where_cross_entropy_improves(r2: Any, loss: Any, verdict: str) -> None:
    training = script("similarity_in_training")
    runs = {str(i): {"r2": one, "cross_entropy": other} for i, (one, other) in enumerate(zip(r2, loss, strict=True))}
    assert study.decided(training.falls(runs, "r2")) == verdict


@pytest.mark.parametrize(("accuracies", "wide", "verdict"), [
    ((0.7, 0.72), 0.9, "confirmed"), ((0.7, 0.6), 0.9, "confirmed"), ((0.7, 0.8), 0.9, "undecided"),
    ((0.7, 0.7), 0.81, "undecided"), ((0.7, 0.7), 0.7, "refuted"),
])  # fmt: skip
def test_wider_networks_that_are_more_accurate_do_not_decide(accuracies: Any, wide: float, verdict: str) -> None:
    widths = script("widths")
    kinds = {
        name: {"accuracies": [own, own], "layers": ["conv1"], "relative_accuracy": {widths.TASK: [score(value)]}}
        for name, own, value in zip(("½", "1"), accuracies, (0.8, wide), strict=True)
    }
    record = {"kinds": kinds, "pairs": [("½", "1")]}
    assert study.decided(widths.parts(record, "½", "1")) == verdict
    assert widths.claims(record)[0]["verdict"] == "undecided"  # one pair of each width


def test_modes_are_counted_by_pairs_of_networks() -> None:
    connectivity = script("mode_connectivity")
    barriers = {"bn1": 0.3, "bn2": 0.3, "bn3": 0.3, "bn4": 0.02, "bn5": 0.045, "bn6": 0.01}  # bn5 may be above .05

    def pair(**other: float | None) -> dict[str, Any]:
        found = {**barriers, **other}
        return {layer: {"barriers": [] if value is None else [score(value)]} for layer, value in found.items()}

    assert study.decided(connectivity.parts({"0 → 1": pair(), "2 → 3": pair()})) == "confirmed"
    assert connectivity.by_networks({"0 → 1": pair(), "2 → 3": pair(bn1=0.01)})["bn1"] == (1, 2)
    assert study.decided(connectivity.parts({"0 → 1": pair(), "2 → 3": pair(bn1=0.01)})) == "undecided"  # they disagree
    assert study.decided(connectivity.parts({"0 → 1": pair(bn2=0.01), "2 → 3": pair(bn2=0.01)})) == "in part"
    assert study.decided(connectivity.parts({"0 → 1": pair(), "2 → 3": pair(bn3=None)})) == "undecided"  # a single pair


@pytest.mark.parametrize(("half", "random", "direct", "verdict"), [
    ([0.5], [0.5], 0.95, "confirmed"), ([0.9], [0.9], 0.95, "in part"),  # none is stuck
    ([0.85], [0.5], 0.95, "in part"),  # not half way
    ([0.5], [0.5, 0.9, 0.9], 0.95, "undecided"),  # in one pair only
    ([0.5], [0.5], 0.5, "in part"),
])  # fmt: skip
def test_starts_are_stuck_by_pairs(half: list[float], random: list[float], direct: float, verdict: str) -> None:
    starts = script("initialisations")
    found = {
        "pairs": ["0 → 1", "2 → 3", "4 → 5"], "relative_accuracy": {
            kind: [value for i in range(3) for value in [*[rest] * 9, worst[i % len(worst)]]]
            for kind, rest, worst in (
                (starts.HALF, 0.88, half), (starts.RANDOM, 0.9, random), (starts.DIRECT, 0.95, [direct])
            )
        },
    }  # fmt: skip
    assert study.decided(starts.parts(found)) == verdict
    short = {kind: [value / 2 for value in values] for kind, values in found["relative_accuracy"].items()}
    assert study.decided(starts.parts({**found, "relative_accuracy": short})) in ("undecided", "in part")


@pytest.mark.parametrize(("value", "half", "held"), [
    (0.992, 0.001, True), (0.989, 0.01, None), (0.97, 0.01, False), (0.992, 0.012, None)
])  # fmt: skip
def test_accuracy_is_unchanged_where_the_whole_interval_is(value: float, half: float, held: bool | None) -> None:
    points = [{"cka": 1.0, "score": score(1.0, 0.0)}, {"cka": 0.65, "score": score(value, half)}]
    assert script("low_cka").unchanged(points) is held


def test_layers_without_room_do_not_count_against_least_squares() -> None:
    matching = script("matching")
    full, room = score(1.0, 0.002), score(0.9)
    found = {
        "pairs": ["0 → 1", "1 → 2"], "layers": ["bn1", "bn2"], "gain": [score(0.0, 0.002), score(0.05)],
        "relative_accuracy": {matching.DIRECT: [full, room], matching.TASK: [full, score(0.95)]},
        "by_pair": {matching.TASK: [[1.0, 0.9], [0.8, 0.7]], matching.HARD: [[1.0, 0.9], [0.8, 0.7]]},
    }  # fmt: skip
    rows = {row["claim"]: row for row in matching.claims({"architectures": {"tiny10": found}})}
    row = rows["Tiny-10: least squares significantly underperforms task loss"]
    assert row["verdict"] == "confirmed" and "1 of 1 layers" in row["ours"]


@pytest.mark.parametrize(("count", "parts", "held"), [
    (2, (True, True, False), True), (2, (True, None, False), None), (2, (True, False, False), False),
    (1, (None,), None),
])  # fmt: skip
def test_conditions_that_are_not_known_decide_nothing(count: int, parts: Any, held: bool | None) -> None:
    assert study.at_least(count, parts) is held
