"""Verdicts follow the rules that the pages state."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import pytest


def script(name: str) -> ModuleType:
    return importlib.import_module(f"dr_frankenstein.{name}")


def score(value: float, half: float = 0.01) -> dict[str, float]:
    return {"value": value, "low": value - half, "high": value + half}


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
