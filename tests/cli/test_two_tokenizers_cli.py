"""``hf-stitch stitch`` of decoders: ``--align prefix``, and ``--unpaired``."""

from __future__ import annotations

from pathlib import Path

import torch

import hf_stitch

from calls import run  # isort: skip
from two_tokenizers import LAYER, SENTENCES, decoder  # isort: skip


def saved(name: str, folder: Path) -> Path:
    adapter = decoder(name, torch.float32)
    adapter.model.save_pretrained(folder / name)
    adapter.processor.save_pretrained(folder / name)
    return folder / name


def written(sentences: list[str], folder: Path) -> Path:
    folder.mkdir()
    lines = ["text", *(f'"{" ".join(each.split())}"' for each in sentences)]
    (folder / "train.csv").write_text("\n".join(lines), encoding="utf-8")
    return folder


def stitched(source: Path, target: Path, data: Path, *options: object) -> hf_stitch.StitchedModel:
    layers = ("--source-layer", LAYER[source.name], "--target-layer", LAYER[target.name])
    out = source.parent / "out"
    result = run("stitch", source, target, "--data", data, "--out", out, *layers, "--matcher", *options)
    assert result.exit_code == 0, result.output
    return hf_stitch.StitchedModel.from_pretrained(out / "model")


def test_two_decoders_from_folders(tmp_path: Path) -> None:
    networks = [saved(name, tmp_path) for name in LAYER]
    model = stitched(*networks, written(SENTENCES, tmp_path / "texts"), "ridge", "--align", "prefix", "--own")
    assert model.config.recipe["own"] is True and model.stitch.body.in_features == 16 + 12


def test_samples_without_partners(tmp_path: Path) -> None:
    network = saved("llama", tmp_path)
    parts = {"pairs": SENTENCES[:20], "left": SENTENCES[20:120], "right": SENTENCES[120:]}
    pairs, *unpaired = (written(some, tmp_path / name) for name, some in parts.items())
    recipe = stitched(network, network, pairs, "seeded_refinement", "--unpaired", *unpaired).config.recipe
    assert len(recipe["unpaired"]) == 2 and recipe["fitted_samples"]["n"] == 16 + 100 + len(SENTENCES) - 120
