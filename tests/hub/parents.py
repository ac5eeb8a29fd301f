"""Tiny networks for the Hub, in the formats of transformers and timm."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import timm
import torch
import transformers
from server import Hub

from tiny_networks import CLASSES, SIZE, build, plain_tokenizer  # isort: skip
from two_tokenizers import decoder  # isort: skip

PARENTS = {
    "timm/cnn": ("cnn", 0),
    "alice/vit": ("vit", 0),
    "alice/vit-2": ("vit", 1),
    "alice/bert": ("bert", 0),
    "alice/bert-2": ("bert", 1),
    "alice/gpt2": ("gpt2", 0),
    "alice/llama": ("llama", 1),
    "alice/own-llama": ("own llama", 0),  # with different tokenizers
    "alice/own-gpt2": ("own gpt2", 0),
}
"""Id -> family and seed."""


def serve(hub: Hub, *ids: str) -> None:
    for id in ids:
        hub.put(id, files_of(*PARENTS[id]))


@cache
def files_of(family: str, seed: int) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if family == "cnn":
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                arguments = {"channels": (16, 24, 32, 48)}
                model = timm.create_model("resnet10t", num_classes=CLASSES, **arguments)
            model.pretrained_cfg["input_size"] = (3, SIZE, SIZE)
            timm.models.save_for_hf(model, folder, model_args=arguments, safe_serialization=True)
        elif family.startswith("own"):
            adapter: Any = decoder(family.removeprefix("own "), torch.float32)
            adapter.model.save_pretrained(folder)
            adapter.processor.save_pretrained(folder)
        else:
            build(family, seed).save_pretrained(folder)
            if family == "vit":
                transformers.ViTImageProcessor(size={"height": SIZE, "width": SIZE}).save_pretrained(folder)
            else:
                plain_tokenizer().save_pretrained(folder)
        return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
