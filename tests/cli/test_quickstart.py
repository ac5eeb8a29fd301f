from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import hf_stitch
from hf_stitch.analysis import Evaluation, StitchGrid
from hf_stitch.cli import app, quickstart


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, dict[str, Any]]:
    """Run the quickstart on one network of each kind: output folder, stderr and JSON record."""
    out = tmp_path_factory.mktemp("quickstart")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quickstart, "NETWORKS", {"cnn-0": ("cnn", 0), "vit-0": ("vit", 0)})
        patch.setattr(quickstart, "PAIRS", (("vit-0", "cnn-0"),))
        result = CliRunner().invoke(
            app, ["quickstart", "--out", str(out), "--epochs", "4", "--max-samples", "560", "--json"]
        )
    assert result.exit_code == 0, result.output
    return out, result.stderr, json.loads(result.stdout)


def test_every_layer_is_stitched_into_every_layer(ran: tuple[Path, str, dict[str, Any]]) -> None:
    grid = StitchGrid.from_dict(ran[2]["grids"]["vit-0 → cnn-0"])
    assert grid.layers_a == tuple(f"vit.layers.{i}" for i in range(4))
    assert grid.layers_b == tuple(f"layer{i + 1}.0" for i in range(4))
    assert grid.matchers == ("lstsq", "procrustes") and grid.n == 140
    assert grid.baselines["target"]["accuracy"][0] > 0.5


def test_best_follows_the_rule(ran: tuple[Path, str, dict[str, Any]]) -> None:
    out, output, record = ran
    value, pair, a, b, matcher = record["best"]
    grid = StitchGrid.from_dict(record["grids"][pair])
    assert value == max(grid[each][:, :-1].max() for each in grid.matchers)
    assert f"{matcher}: {a} -> {b}" not in grid.no_better and b != grid.layers_b[-1]
    saved = Evaluation.from_dict(json.loads((out / "best" / "evaluation.json").read_text()))
    assert saved["relative_accuracy"].value == pytest.approx(value)
    assert record["rule"] in output
    assert "bit-identical logits on all 140 held-out images" in output


def test_files_contain_the_results(ran: tuple[Path, str, dict[str, Any]]) -> None:
    out, _, record = ran
    assert all(Path(path).exists() for path in record["saved"].values())
    (grid,) = hf_stitch.load_report(out / "report.html")
    assert grid.to_dict() == record["grids"]["vit-0 → cnn-0"]


def test_data_without_labelled_images_is_rejected(tmp_path: Path) -> None:
    import datasets

    for split in ("train", "test"):
        datasets.Dataset.from_dict({"text": ["a", "b"]}).to_parquet(tmp_path / f"{split}.parquet")
    result = CliRunner().invoke(app, ["quickstart", "--out", str(tmp_path / "out"), "--dataset", str(tmp_path)])
    assert result.exit_code == 1
    assert "needs images with labels, got Samples(2 x text)" in result.stderr
