"""Time of encode and decode at the middle block over one forward pass of the whole network.

Random weights, real sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import timm
import torch
import transformers as hf
from torch import nn

import hf_stitch
from benchmarks.timing import paired, show
from hf_stitch.adapters.discovery.verify import same

NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "ResNet-50 (timm, 224 px)": lambda: timm.create_model("resnet50"),
    "ViT-S/16 (timm, 224 px)": lambda: timm.create_model("vit_small_patch16_224"),
    "RoBERTa-base (128 tokens)": lambda: hf.RobertaForSequenceClassification(
        hf.RobertaConfig(vocab_size=50265, max_position_embeddings=514)
    ),
}
BATCH, TOKENS, REPEATS = 8, 128, 7


def _inputs(adapter: hf_stitch.Adapter) -> dict[str, Any]:
    name = adapter.interface.content[0]
    if adapter.interface.modality == "text":
        ids = torch.randint(10, 1000, (BATCH, TOKENS))
        return {name: ids, "attention_mask": torch.ones_like(ids)}
    return {name: torch.randn(BATCH, *adapter.interface.shapes[name])}


@torch.no_grad()
def rows() -> Iterator[tuple[str, ...]]:
    """Yield a row for each network."""
    for name, create in NETWORKS.items():
        adapter = hf_stitch.load(create().eval())
        layer = adapter.layers[len(adapter.layers) // 2]
        inputs = _inputs(adapter)

        def split(adapter: hf_stitch.Adapter = adapter, layer: str = layer, inputs: dict[str, Any] = inputs) -> Any:
            return adapter.decode(adapter.encode(inputs, layer)[layer], layer)

        def whole(adapter: hf_stitch.Adapter = adapter, inputs: dict[str, Any] = inputs) -> Any:
            return adapter.forward(inputs)

        exact = same(split(), whole())
        ours, forward, ratio = paired(split, whole, REPEATS)
        yield name, layer, f"{forward:.3f}", f"{ours:.3f}", f"{ratio:.3f}", str(exact)


def main() -> None:
    """Run the benchmark and print its table."""
    columns = "network", "cut", "forward s", "encode + decode s", "ratio", "exact"
    show(f"encode + decode at the middle block, batch {BATCH}", columns, rows())
