"""An exchanged tower is the same from one process and from two."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from processes import run_ranks

import hf_stitch

pytest.importorskip("hf_stitch_towers")


def clip(width: int) -> Any:
    """A tiny network of two towers, whose processor makes tensors."""
    import transformers as hf

    torch.manual_seed(width)
    small = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    vision = hf.CLIPVisionConfig(**small, hidden_size=width, image_size=16, patch_size=8)
    text = hf.CLIPTextConfig(**small, hidden_size=16, vocab_size=60, eos_token_id=2, bos_token_id=1)
    config = hf.CLIPConfig(vision_config=vision.to_dict(), text_config=text.to_dict(), projection_dim=16)
    return hf_stitch.load(hf.CLIPModel(config).eval(), processor=to_tensor)


def to_tensor(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.asarray(image)).permute(2, 0, 1).float() / 255 - 0.5


def exchanged(batch_size: int) -> Any:
    draw = np.random.default_rng(0)
    images = [Image.fromarray(draw.integers(0, 255, (16, 16, 3), dtype=np.uint8)) for _ in range(96)]
    return hf_stitch.swap(
        clip(16), clip(24), images, part="vision", matcher="ridge", batch_size=batch_size, progress=False
    )


def share(rank: int, folder: Path) -> None:
    for batch_size in (8, 64):
        made = json.dumps(exchanged(batch_size).to_dict())
        (folder / f"{batch_size}-{rank}.json").write_text(made, encoding="utf-8")


def test_two_processes_find_what_one_finds(tmp_path: Path) -> None:
    run_ranks(2, share, tmp_path)
    alone = exchanged(8)
    assert alone.folded and "mean only" in alone.scores
    for batch_size in (8, 64):
        for rank in (0, 1):
            found = type(alone).from_dict(
                json.loads((tmp_path / f"{batch_size}-{rank}.json").read_text(encoding="utf-8"))
            )
            for row, figures in alone.scores.items():
                for name, score in figures.items():
                    assert found.scores[row][name].value == pytest.approx(score.value, abs=1e-5), (row, name)
