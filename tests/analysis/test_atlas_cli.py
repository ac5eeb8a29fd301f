"""``hf-stitch compare``: table, figures and JSON."""

from __future__ import annotations

import json
from pathlib import Path

import timm
import timm.models
import torch
from typer.testing import CliRunner

from hf_stitch.analysis.comparison.atlas import SimilarityAtlas
from hf_stitch.cli import app


def test_compare_prints_and_saves(tmp_path: Path) -> None:
    arguments = {"num_classes": 10, "channels": (8, 12, 16, 16)}
    torch.manual_seed(0)
    model = timm.create_model("resnet10t", **arguments, pretrained_cfg_overlay={"input_size": (3, 32, 32)})
    timm.models.save_for_hf(model, str(tmp_path / "net"), model_args=arguments, safe_serialization=True)
    call = ["compare", str(tmp_path / "net"), str(tmp_path / "net"), "--data", "sklearn:digits", "--split", "test"]
    call += ["--max-samples", "40", "--metric", "linear_cka:debiased=true", "--metric", "mutual_knn:k=3", "--json"]
    result = CliRunner().invoke(app, [*call, "--out", str(tmp_path / "run")])
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    atlas = SimilarityAtlas.load(tmp_path / "run" / "atlas.json")
    assert list(record["values"]) == ["linear_cka(debiased=True)", "mutual_knn(k=3)"]
    assert all(record["values"][name] == atlas[name].tolist() for name in atlas.values)
    assert record["best_matches"]["mutual_knn(k=3)"] == {layer: layer for layer in atlas.layers_a}
    assert all(Path(path).is_file() for path in record["saved"].values()) and len(record["saved"]) == 3
    planned = json.loads(CliRunner().invoke(app, [*call, "--plan"]).stdout)
    assert {route["metric"] for route in planned["routes"] if route["chosen"]} == set(record["values"])
    for bad, what in (("mutual_knn:q=3", "has no option 'q'"), ("mutual_knn:q", "key=value")):
        refused = CliRunner().invoke(app, [*call, "--metric", bad])
        assert refused.exit_code == 2 and what in " ".join(refused.stderr.replace("│", " ").split())
    unaligned = CliRunner().invoke(app, [*call, "--metric", "rsa", "--rows", "positions", "--align", "offsets"])
    assert unaligned.exit_code == 1 and "--align offsets takes texts, but sample" in unaligned.stderr
