"""Training dynamics from filter atoms: settling epochs, random walks, verdicts, and a run on a few random images."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import datasets
import numpy as np
import pytest
import study
from study_scripts import run_script

pytestmark = pytest.mark.slow


@pytest.fixture
def script() -> ModuleType:
    pytest.importorskip("hf_stitch_filter_atoms")
    return importlib.import_module("filter_atoms.dynamics_atoms")


def test_a_layer_settles_where_it_stays_above_the_threshold(script: ModuleType) -> None:
    curves = np.array([[0.5, 0.9, 0.7, 0.9, 1.0], [0.9, 0.9, 0.9, 0.9, 1.0], [0.0, 0.0, 0.0, 0.6, 1.0]])
    assert script.settling(curves, 0.8) == pytest.approx([2.5, 0.0, 3.5])


def test_the_order_of_layers_that_settle_at_once_is_zero(script: ModuleType) -> None:
    assert script.order(np.zeros(5)) == 0
    assert script.order(np.array([1.0, 2.0, 3.0])) == pytest.approx(1)


@pytest.mark.parametrize("entries", [4, 81])
def test_walks_are_those_of_random_directions(script: ModuleType, entries: int) -> None:
    random = np.random.default_rng(0)
    states = random.standard_normal((8, entries)).cumsum(0)
    drawn = script.walks(states, 4_000, random)
    steps = np.linalg.norm(np.diff(states, axis=0), axis=1)
    directions = random.standard_normal((4_000, 7, entries))
    directions *= (steps / np.linalg.norm(directions, axis=2))[..., None]
    paths = np.concatenate([np.broadcast_to(states[0], (4_000, 1, entries)), directions], 1).cumsum(1)
    paths /= np.linalg.norm(paths, axis=2, keepdims=True)
    naive = (paths * paths[:, -1:]).sum(2)
    assert drawn.mean(0) == pytest.approx(naive.mean(0), abs=0.02)
    assert drawn.std(0) == pytest.approx(naive.std(0), abs=0.02)


def arm(schedule: str, orders: list[float], high: float, accuracy: float = 0.95) -> dict[str, Any]:
    seeds = [{"order": {"0.99": order, "0.999": order}} for order in orders]
    return {
        "architecture": "alexnet", "schedule": schedule, "metric": "S_Atom", "seeds": seeds,
        "walks": {"0.99": {"low": high - 0.2, "high": high}}, "accuracy": [{"train": accuracy}],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("decaying", "constant", "verdict"),
    [
        (([0.9, 0.8], 0.5), ([0.9, 0.7], 0.5), "confirmed"),
        (([0.9, 0.8], 0.5), ([0.9, -0.1], 0.5), "in part"),
        (([0.9, -0.8], 0.5), ([-0.9, 0.1], 0.5), "refuted"),
        (([0.9, -0.1], 0.5), ([0.4, -0.4], 0.1), "undecided"),  # the walks explain the order
        (([0.9, 0.8], 0.5, 0.3), ([0.9, 0.7], 0.5, 0.3), "undecided"),  # nothing was learnt
    ],
)
def test_the_verdict_on_the_order(script: ModuleType, decaying: Any, constant: Any, verdict: str) -> None:
    record = {"arms": [arm("cosine", *decaying), arm("constant", *constant)]}
    assert study.decided(script.parts(record, "alexnet")) == verdict


@pytest.mark.parametrize(
    ("tasks", "control", "verdict"),
    [
        ([0.99, 0.9, 0.9, 0.9, 0.99], [0.99, 0.99, 0.99, 0.99, 0.99], "confirmed"),
        ([0.99, 0.95, 0.95, 0.95, 0.99], [0.99, 0.9, 0.9, 0.9, 0.99], "in part"),
        ([0.99, 0.95, 0.95, 0.95, 0.9], [0.99, 0.99, 0.99, 0.99, 0.99], "in part"),
        ([0.9, 0.95, 0.95, 0.95, 0.9], [0.99, 0.99, 0.99, 0.99, 0.99], "refuted"),
    ],
)
def test_the_verdict_on_two_tasks(script: ModuleType, tasks: list[float], control: list[float], verdict: str) -> None:
    pairs = {script.TASKS: tasks, script.ORDERS: control}
    layers = [f"conv{i}" for i in range(1, 6)]
    similarity = {pair: {"S_Atom": dict(zip(layers, values, strict=True))} for pair, values in pairs.items()}
    parts = script.task_parts({"architecture": "alexnet", "runs": [{"similarity": similarity}]})
    assert study.decided(parts) == verdict


def test_the_experiment_writes_page_record_and_figures(script: ModuleType, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for name, labels in (("cifar10", {"label": 10}), ("cifar100", {"fine_label": 100})):
        (tmp_path / name).mkdir()
        for split in ("train", "test"):
            classes = {label: datasets.ClassLabel(num_classes=count) for label, count in labels.items()}
            columns = {label: [i % count for i in range(200)] for label, count in labels.items()}
            images = list(random.integers(0, 256, (200, 32, 32, 3), dtype=np.uint8))
            features = datasets.Features({"img": datasets.Image(), **classes})
            data = datasets.Dataset.from_dict({"img": images, **columns}, features)
            data.to_parquet(tmp_path / name / f"{split}.parquet")
    run_script(
        "filter_atoms.dynamics_atoms",
        "--preset",
        "test",
        "--data-dir",
        tmp_path,
        "--networks",
        tmp_path / "networks",
        "--out",
        tmp_path / "out",
    )
    figures = [f"dynamics_atoms_{name}{part}" for name in ("alexnet", "vgg11") for part in ("", "_tasks")]
    assert sorted(path.stem for path in (tmp_path / "out").glob("*.png")) == sorted(figures)
    record = json.loads((tmp_path / "out" / "dynamics_atoms.json").read_text())
    assert script.page(record) == (tmp_path / "out" / "dynamics_atoms.md").read_text()
    assert len(script.claims(record)) == 4
