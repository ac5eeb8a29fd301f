"""Every experiment runs from the command line to its figures on a few random images."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import numpy as np
import pytest
from study_scripts import run_script

pytestmark = pytest.mark.slow

BOTH = ("tiny10", "resnet20")
EXPERIMENTS = {
    "direct_matching": [f"direct_matching_{architecture}" for architecture in BOTH],
    "matching": [f"matching_{architecture}" for architecture in BOTH],
    "widths": ["widths_least_squares", "widths_task_loss"],
    "training_variants": [f"training_variants_{architecture}" for architecture in BOTH],
    "similarity_in_training": [f"similarity_in_training_{architecture}" for architecture in BOTH],
    "low_cka": ["low_cka"],
    "initialisations": [f"initialisations_{architecture}" for architecture in BOTH],
    "mode_connectivity": ["mode_connectivity"],
    "sparsity": [f"sparsity_{architecture}{matrices}" for architecture in BOTH for matrices in ("", "_matrices")],
    "low_rank": [f"low_rank_{architecture}" for architecture in BOTH],
    "across_data_sets": ["across_data_sets_cifar10", "across_data_sets_fashion_mnist"],
    "several_stitches": ["several_stitches"],
}
"""Script -> its figures."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write two data sets of random images, 32 × 32 in colour and 28 × 28 in grey, and return their folder."""
    folder, random = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for name, column, shape in (("cifar10", "img", (32, 32, 3)), ("fashion_mnist", "image", (28, 28))):
        (folder / name).mkdir()
        for split, n in (("train", 150), ("test", 60)):
            features = datasets.Features({column: datasets.Image(), "label": datasets.ClassLabel(num_classes=10)})
            images = list(random.integers(0, 256, (n, *shape), dtype=np.uint8))
            columns = {column: images, "label": [i % 10 for i in range(n)]}
            datasets.Dataset.from_dict(columns, features).to_parquet(folder / name / f"{split}.parquet")
    return folder


@pytest.mark.parametrize("script", EXPERIMENTS)
def test_experiment_writes_record_and_figures(script: str, data: Path, tmp_path: Path) -> None:
    run_script(
        f"dr_frankenstein.{script}",
        "--preset",
        "test",
        "--data-dir",
        data,
        "--networks",
        data / "networks",
        "--out",
        tmp_path,
    )
    assert sorted(path.stem for path in tmp_path.glob("*.png")) == sorted(EXPERIMENTS[script])
    [record] = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert record.pop("preset")
    assert any(record.values())


def test_swaps_leave_page_record_and_figures(data: Path, tmp_path: Path) -> None:
    run_script(
        "dr_frankenstein.swaps",
        "--preset",
        "test",
        "--data-dir",
        data,
        "--networks",
        data / "networks",
        "--out",
        tmp_path,
    )
    scores = json.loads((tmp_path / "swapping.json").read_text())["scores"]
    assert {row["n"] for row in scores if row["map"] == "ridge"} == {2}
    assert {row["n"] for row in scores if row["map"] == "lstsq"} == {0, 2}  # 20 anchors are too few
    assert len(list(tmp_path.glob("swapping_*.png"))) == 4
