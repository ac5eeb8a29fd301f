from __future__ import annotations

import json
from pathlib import Path

import pytest

import hf_stitch
from hf_stitch.analysis import Evaluation, StitchGrid
from hf_stitch.cli import quickstart

from calls import error_line, run  # isort: skip


def test_the_quickstart_on_one_network_of_each_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quickstart, "NETWORKS", {"cnn-0": ("cnn", 0), "vit-0": ("vit", 0)})
    monkeypatch.setattr(quickstart, "PAIRS", (("vit-0", "cnn-0"),))
    result = run("quickstart", "--out", tmp_path, "--epochs", 4, "--max-samples", 560, "--json")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    grid = StitchGrid.from_dict(record["grids"]["vit-0 → cnn-0"])
    assert grid.layers_a == tuple(f"vit.layers.{i}" for i in range(4))
    assert grid.layers_b == tuple(f"layer{i + 1}.0" for i in range(4))
    assert grid.matchers == ("lstsq", "procrustes") and grid.n == 140
    assert grid.baselines["target"]["accuracy"][0] > 0.5
    # the best one follows the rule
    value, _, a, b, matcher = record["best"]
    assert value == max(grid[each][:, :-1].max() for each in grid.matchers)
    assert f"{matcher}: {a} -> {b}" not in grid.no_better and b != grid.layers_b[-1]
    best = Evaluation.from_dict(json.loads((tmp_path / "best" / "evaluation.json").read_text()))
    assert best["relative_accuracy"].value == pytest.approx(value)
    assert record["rule"] in result.stderr
    assert "bit-identical logits on all 140 held-out images" in result.stderr
    # files contain the results
    assert all(Path(path).exists() for path in record["saved"].values())
    (again,) = hf_stitch.load_report(tmp_path / "report.html")
    assert again.to_dict() == record["grids"]["vit-0 → cnn-0"]


def test_data_without_labelled_images_is_rejected(tmp_path: Path) -> None:
    import datasets

    for split in ("train", "test"):
        datasets.Dataset.from_dict({"text": ["a", "b"]}).to_parquet(tmp_path / f"{split}.parquet")
    line = error_line("quickstart", "--out", tmp_path / "out", "--dataset", tmp_path)
    assert "requires images with labels, got Samples(2 x text)" in line
