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


@pytest.mark.parametrize(("random", "direct", "verdict"), [
    ([0.9] * 9 + [0.5], [0.95] * 10, "confirmed"),
    ([0.9] * 10, [0.95] * 10, "in part"),  # none is stuck
    ([0.5] * 9 + [0.1], [0.95] * 10, "undecided"),  # trained too short
    ([0.5] * 9 + [0.1], [0.95] * 9 + [0.5], "undecided"),
])  # fmt: skip
def test_starts_that_were_trained_too_short_are_not_stuck(random: Any, direct: Any, verdict: str) -> None:
    assert study.decided(script("initialisations").parts(np.array(random), np.array(direct))) == verdict


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
    assert script("experiment").at_least(count, parts) is held
