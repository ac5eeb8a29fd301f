"""``hf-stitch stitch --align prefix``."""

from __future__ import annotations

from pathlib import Path

import torch
from typer.testing import CliRunner

import hf_stitch
from hf_stitch.cli import app

from two_tokenizers import LAYER, SENTENCES, decoder  # isort: skip


def test_two_decoders_from_folders(tmp_path: Path) -> None:
    for name in LAYER:
        adapter = decoder(name, torch.float32)
        adapter.model.save_pretrained(tmp_path / name)
        adapter.processor.save_pretrained(tmp_path / name)
    (tmp_path / "texts").mkdir()
    lines = ["text", *(f'"{" ".join(each.split())}"' for each in SENTENCES)]
    (tmp_path / "texts" / "train.csv").write_text("\n".join(lines), encoding="utf-8")
    arguments = [
        "stitch", str(tmp_path / "llama"), str(tmp_path / "gpt2"), "--data", str(tmp_path / "texts"), "--out",
        str(tmp_path / "out"), "--source-layer", LAYER["llama"], "--target-layer", LAYER["gpt2"], "--matcher", "ridge",
        "--align", "prefix", "--own",
    ]  # fmt: skip
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    model = hf_stitch.StitchedModel.from_pretrained(tmp_path / "out" / "model")
    assert model.config.recipe["own"] is True and model.stitch.body.in_features == 16 + 12


def test_samples_without_partners(tmp_path: Path) -> None:
    adapter = decoder("llama", torch.float32)
    adapter.model.save_pretrained(tmp_path / "net")
    adapter.processor.save_pretrained(tmp_path / "net")
    for name, some in (("pairs", SENTENCES[:20]), ("left", SENTENCES[20:120]), ("right", SENTENCES[120:])):
        (tmp_path / name).mkdir()
        lines = ["text", *(f'"{" ".join(each.split())}"' for each in some)]
        (tmp_path / name / "train.csv").write_text("\n".join(lines), encoding="utf-8")
    arguments = [
        "stitch", str(tmp_path / "net"), str(tmp_path / "net"), "--data", str(tmp_path / "pairs"), "--out",
        str(tmp_path / "out"), "--source-layer", LAYER["llama"], "--target-layer", LAYER["llama"], "--matcher",
        "seeded_refinement", "--unpaired", str(tmp_path / "left"), str(tmp_path / "right"),
    ]  # fmt: skip
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    recipe = hf_stitch.StitchedModel.from_pretrained(tmp_path / "out" / "model").config.recipe
    assert len(recipe["unpaired"]) == 2 and recipe["fitted_samples"]["n"] == 16 + 100 + len(SENTENCES) - 120
