"""Experiments on filter atoms: their scripts run, and statistics, verdicts and pages follow from the figures."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import study
import torch
from study_scripts import run_script

pytestmark = pytest.mark.slow

EXPERIMENTS = {
    "correlation": ["correlation"],
    "decorrelation": ["decorrelation"],
    "probing_data": [],
    "blindness": [],
    "across_data_sets_atoms": [],
    "unequal_widths": [],
    "toy_regression": [],
    "propositions": ["propositions"],
}
"""Script -> its figures."""
WITHOUT_DATA = ("toy_regression", "propositions")


def imported(name: str) -> Any:
    """Import a script."""
    return importlib.import_module(f"filter_atoms.{name}")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write data sets of random images, and return their folder."""
    folder, random = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    sets = {"cifar10": ("img", (32, 32, 3), 10), "cifar100": ("img", (32, 32, 3), 100),
            "fashion_mnist": ("image", (28, 28), 10), "mnist": ("image", (28, 28), 10)}  # fmt: skip
    for name, (column, shape, classes) in sets.items():
        (folder / name).mkdir()
        for split, n in (("train", 200), ("test", 200)):
            label = "fine_label" if name == "cifar100" else "label"
            columns: dict[str, Any] = {column: list(random.integers(0, 256, (n, *shape), dtype=np.uint8))}
            kinds = {column: datasets.Image(), label: datasets.ClassLabel(num_classes=classes)}
            columns[label] = [i % classes for i in range(n)]
            if name == "cifar100":
                columns["coarse_label"] = [i % 20 for i in range(n)]
                kinds["coarse_label"] = datasets.ClassLabel(num_classes=20)
            datasets.Dataset.from_dict(columns, datasets.Features(kinds)).to_parquet(folder / name / f"{split}.parquet")
    return folder


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiment_writes_record_page_and_figures(name: str, data: Path, tmp_path: Path) -> None:
    pytest.importorskip("hf_stitch_filter_atoms")
    options = [] if name in WITHOUT_DATA else ["--data-dir", data, "--networks", data / "networks"]
    run_script(f"filter_atoms.{name}", "--preset", "test", "--out", tmp_path, *options)
    assert sorted(path.stem for path in tmp_path.glob("*.png")) == EXPERIMENTS[name]
    assert json.loads((tmp_path / f"{name}.json").read_text())["preset"] == "test"
    assert "nan" not in (tmp_path / f"{name}.md").read_text().replace("dominant", "")


def symmetric(random: np.random.Generator, k: int) -> np.ndarray:
    matrix = random.standard_normal((k, k))
    return matrix + matrix.T


def test_additive_fit_takes_the_means_of_models_off() -> None:
    pairwise = imported("pairwise")
    matrix = symmetric(np.random.default_rng(0), 6)
    residual = matrix - pairwise.additive(matrix)
    np.fill_diagonal(residual, 0)
    assert np.allclose(residual.sum(0), 0)
    own = np.add.outer(np.arange(6.0), np.arange(6.0))
    assert np.allclose(pairwise.upper(pairwise.additive(own)), pairwise.upper(own))


def test_intervals_over_models_are_wider_than_over_pairs() -> None:
    pairwise = imported("pairwise")
    random = np.random.default_rng(0)
    quality = random.standard_normal(10)
    matrix = np.add.outer(quality, quality)  # 45 pairs, ten independent numbers
    found = pairwise.bootstrap([{"x": matrix}], lambda pairs: float(pairs("x").mean()), 500)
    pairs = pairwise.upper(matrix)
    assert found.value == pytest.approx(pairs.mean())
    assert found.high - found.low > 2 * 1.96 * pairs.std() / np.sqrt(len(pairs))


def test_a_constant_predictor_has_no_correlation() -> None:
    pairwise = imported("pairwise")
    random = np.random.default_rng(0)
    group = {"x": np.full((5, 5), 0.3), "y": symmetric(random, 5)}
    found = pairwise.bootstrap([group], pairwise.correlations("x", "y"), 20)
    assert np.isnan(found.value)
    assert pairwise.shown({"value": None, "low": None, "high": None}) == "–"


@pytest.mark.parametrize(
    ("low", "atom", "verdict"),
    [(0.85, 0.9, "confirmed"), (0.3, 0.9, "in part"), (-0.1, 0.9, "refuted"), (0.85, 0.97, "undecided")],
)
def test_verdict_on_the_correlation(low: float, atom: float, verdict: str) -> None:
    correlation = imported("correlation")
    interval = {"value": 0.9, "low": low, "high": 1.0}
    arm = {
        "groups": [{"pairs": {correlation.ATOM: [atom, atom]}}],
        "r": {correlation.ATOM: {f"{target} pearson": interval for target in correlation.TARGETS}},
        "grassmann": interval,
    }
    found = correlation.decided({"arms": {correlation.MAIN: arm, "six": arm}})
    assert {study.decided(parts) for parts in found.values()} == {verdict}


@pytest.mark.parametrize(
    ("patches", "answer"),
    [(0.05, "Yes: patch cosine."), (-0.05, "No."), (1e-8, "No.")],
    ids=["better", "worse", "equal"],
)
def test_a_rival_is_better_if_its_interval_is_above_rounding(patches: float, answer: str) -> None:
    correlation = imported("correlation")
    better = {
        rival: {"pearson": {"low": patches if rival == correlation.PATCHES else -0.1}} for rival in correlation.RIVALS
    }
    arms = {name: {"better": better} for name in (correlation.MAIN, "overlapping")}
    assert correlation.answer({"arms": arms}).startswith(answer)


@pytest.mark.parametrize(
    ("values", "verdict"),
    [([0.2, 0.5, 0.9], "confirmed"), ([0.2, 0.6, 0.5], "in part"), ([0.5, 0.6, 0.4], "refuted")],
)
def test_verdict_on_decorrelation(values: list[float], verdict: str) -> None:
    def strength(value: float, accuracy: float) -> dict[str, Any]:
        return {"r": {"cca": {"value": value, "low": value - 0.1, "high": value + 0.1}}, "accuracy": accuracy}

    ruined = strength(0.0, 0.1)  # does not count
    strengths = [*(strength(value, 0.6) for value in values), ruined]
    assert study.decided(imported("decorrelation").decided({"strengths": strengths})) == verdict


@pytest.mark.parametrize(("own", "verdict"), [(0.5, "confirmed"), (0.15, "in part")])
def test_only_own_atoms_show_what_networks_have_learnt(own: float, verdict: str) -> None:
    script = imported("across_data_sets_atoms")
    starts = {
        start: {"atom": {kind: [0.1 if "untrained" in kind else trained] for kind in script.KINDS}}
        for start, trained in (("same", 0.9), ("own", own))
    }
    assert study.decided(script.parts({"starts": starts})) == verdict


def test_classes_of_a_task_are_numbered_in_its_order() -> None:
    networks = imported("networks")
    images = networks.Images(
        torch.arange(6)[:, None, None, None].expand(6, 3, 32, 32), torch.tensor([5, 7, 5, 9, 7, 1])
    )
    found = images.of_classes([7, 5])
    assert found.labels.tolist() == [1, 0, 1, 0]
    assert found.pixels[:, 0, 0, 0].tolist() == [0, 1, 2, 4]


def test_cca_is_that_of_the_package_at_full_rank() -> None:
    from hf_stitch.metrics import cca

    tasks = imported("task_networks")
    x, noise = torch.randn(2, 200, 6, dtype=torch.float64)
    y = x @ torch.randn(6, 6, dtype=torch.float64) + noise
    found = tasks.canonical(tasks.basis(x), tasks.basis(y))
    assert found == pytest.approx(float(cca(x, y, squared=True)) ** 0.5)
    assert tasks.basis(x[:, [0, 1, 1]]).shape[1] == 2


def test_bounds_of_proposition_2_1_hold() -> None:
    features, bounds = imported("propositions").changes(np.random.default_rng(1), 100)
    assert (features <= bounds).all()
