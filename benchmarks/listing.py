"""Time to list and verify the cuts of a network, over one forward pass of two samples.

Random weights, real sizes, processor time on one thread; the fastest of several forwards, one listing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import timm
import torch
import transformers as hf
from torch import Tensor, nn

import hf_stitch
from benchmarks.timing import seconds, show

TOKENS, FORWARDS = 16, 9
IMAGES = (
    *("resnet18", "rexnet_100", "vit_tiny_patch16_224", "efficientnet_b0", "convnext_tiny"),
    "swin_tiny_patch4_window7_224",
)
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    **{name: partial(timm.create_model, name) for name in IMAGES},
    "BERT-base": lambda: hf.BertForSequenceClassification(hf.BertConfig()),
    "RoBERTa-base": lambda: hf.RobertaForMaskedLM(hf.RobertaConfig()),
    "GPT-2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config()),
    "T5-small": lambda: hf.T5ForConditionalGeneration(hf.T5Config(decoder_start_token_id=0)),
}


def inputs_of(model: nn.Module) -> dict[str, Tensor]:
    """Return two samples for a network."""
    if not isinstance(model, hf.PreTrainedModel):
        size: Any = model.default_cfg
        return {"x": torch.randn(2, *size["input_size"])}
    ids = torch.randint(10, 1000, (2, TOKENS))
    decoded = {"decoder_input_ids": ids.clone()} if model.config.is_encoder_decoder else {}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **decoded}


def rows() -> Iterator[tuple[str, ...]]:
    """Yield a row for each network."""
    for name, create in NETWORKS.items():
        model = create().eval()
        inputs = inputs_of(model)
        with torch.no_grad():
            forward = min(seconds(partial(model, **inputs), FORWARDS))
        adapter = hf_stitch.load(model, example_inputs=inputs)
        (took,) = seconds(partial(getattr, adapter, "layers"))
        yield name, str(len(adapter.layers)), f"{1000 * forward:.0f}", f"{took:.2f}", f"{took / forward:.1f}"


def main() -> None:
    """Run the benchmark and print its table."""
    torch.set_num_threads(1)
    columns = "network", "cuts", "forward ms", "listing s", "forwards"
    show("listing verified cuts over one forward of two samples", columns, rows())
