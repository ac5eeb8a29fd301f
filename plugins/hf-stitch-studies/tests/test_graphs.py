"""The experiments on graph networks run from the command line to their pages, on made graphs."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import study
import torch
from study_scripts import has_keys, run_script

pytestmark = pytest.mark.slow

PICTURES = {"performance_proxy": ["performance_proxy"], "graph_stitching": []}
"""Name -> names of the figures."""
NODES, FEATURES, CLASSES = 220, 30, 3


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two graphs in the format of the citation graphs, whose features and edges tell the classes."""
    folder = tmp_path_factory.mktemp("data") / "planetoid"
    folder.mkdir()
    for seed, name in enumerate(("cora", "citeseer")):
        random = np.random.default_rng(seed)
        y = random.integers(CLASSES, size=NODES)
        features = random.random((NODES, FEATURES)) < np.where(np.arange(FEATURES) % CLASSES == y[:, None], 0.4, 0.1)
        linked = random.random((NODES, NODES)) < np.where(y[:, None] == y, 0.04, 0.005)
        edges = np.array(np.nonzero(np.triu(linked, 1)))
        rows, columns = np.nonzero(features)
        none = np.zeros(NODES, dtype=bool)
        np.savez(
            folder / f"{name}.npz",
            x_data=np.ones(len(rows), "float32"), x_indices=columns, x_shape=np.array([NODES, FEATURES]),
            x_indptr=np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=NODES))]),
            edge_index=np.concatenate([edges, edges[::-1]], 1), y=y, has_label=(np.arange(NODES) != 7) | (seed == 0),
            train_mask=none, val_mask=none, test_mask=none,
        )  # fmt: skip
    return folder.parent


@pytest.mark.parametrize("name", PICTURES)
def test_an_experiment_writes_record_page_and_figures(name: str, data: Path, tmp_path: Path) -> None:
    run_script(
        f"relative_representations.{name}",
        "--preset",
        "test",
        "--data-dir",
        data,
        "--cache",
        tmp_path / "cache",
        "--out",
        tmp_path,
    )
    assert sorted(path.stem for path in tmp_path.glob("*.png")) == PICTURES[name]
    record = json.loads((tmp_path / f"{name}.json").read_text())
    assert record["preset"] == "test"
    module = importlib.import_module(f"relative_representations.{name}")
    assert module.page(record) == (tmp_path / f"{name}.md").read_text()
    assert all(map(has_keys, module.claims(record)))


def runs(similarity: Any, count: int = 12) -> list[dict[str, Any]]:
    """Runs whose accuracy rises with the epoch, and whose similarity is a function of accuracy and run."""
    module = importlib.import_module("relative_representations.performance_proxy")
    found = []
    for run in range(count):
        rows = []
        for epoch in (10, 30, 50):
            accuracy = 0.3 + epoch / 100 + 0.01 * run
            row = dict.fromkeys(module.ALL_COLUMNS, accuracy)
            row |= {module.EPOCH: epoch, module.of(module.SIMILARITY, module.RELU): similarity(accuracy, run)}
            rows.append(row)
        found.append(
            {
                "run": ["gcn2", 32, 0.1, "relu", "relu", "Adam", 0.01, run],
                "path": [[row[name] for name in module.OF_PATH] for row in rows],
                "configurations": [[row[name] for name in module.ALL_COLUMNS] for row in rows],
            }
        )
    return found


def test_correlations_across_networks_and_within_runs_are_told_apart() -> None:
    module = importlib.import_module("relative_representations.performance_proxy")
    name = module.of(module.SIMILARITY, module.RELU)
    own = runs(lambda accuracy, run: accuracy + 10 * (-1) ** run * run)
    across = module.points_of(own).correlations([name], module.PEARSON)[name]
    within, n = module.within_runs(own, name, module.PEARSON)
    assert abs(across.value) < 0.5 and across.low < across.value < across.high
    assert (within.value, n) == (pytest.approx(1), 12)
    less = module.points_of(own).correlations([name], module.SPEARMAN, module.of(module.AGREEMENT, module.RELU))[name]
    assert less.high < 0 and study.above(module.stored(less), 0) is False


def test_a_network_is_that_of_its_best_step_by_validation_nodes(data: Path, tmp_path: Path) -> None:
    module = importlib.import_module("relative_representations.graph_stitching")
    preset = module.Preset(1, 12, 20, 8, 3)
    task = module.task_of("cora", str(data), preset.anchors, preset.nodes)
    parts = [set(nodes.tolist()) for nodes in (task.train, task.valid, task.test)]
    assert sum(map(len, parts)) == len(set.union(*parts)) == NODES and len(parts[1]) == len(parts[2]) == NODES // 10
    assert set(task.anchors.tolist()) <= parts[0]
    whole = module.trained("cora", "GCN", module.RELATIVE, 0, preset, task, tmp_path)
    valid = [score for score, _ in whole.history]
    assert len(valid) == preset.steps and valid.index(max(valid)) == whole.best - 1
    answers = whole(task.graph).argmax(1)
    found = [task.f1(answers, nodes) for nodes in (task.valid, task.test)]
    assert found == pytest.approx(whole.history[whole.best - 1], abs=1e-3)


def test_a_first_layer_on_sparse_features_is_the_dense_one() -> None:
    module = importlib.import_module("relative_representations.graph_stitching")
    dense, x = torch.nn.Linear(30, 4), (torch.rand(50, 30) < 0.1).float()
    sparse = module.Sparse(dense, x).eval()
    assert torch.allclose(sparse(torch.ones(50, 1)), dense(x), atol=1e-6)
    assert not torch.allclose(sparse.train()(torch.ones(50, 1)), dense(x), atol=1e-2)


def test_one_collapsed_network_does_not_decide_a_median() -> None:
    median = importlib.import_module("relative_representations.kept").median
    gaps = np.array([-80.0, *np.linspace(-1, 1, 15)])
    found = median(gaps)
    assert found.value == pytest.approx(-0.0714, abs=1e-3) and -1 <= found.low < found.high <= 1
    assert median(gaps + 100).value == pytest.approx(found.value + 100)
