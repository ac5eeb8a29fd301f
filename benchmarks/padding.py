"""Change of the activations of a text with the rest of its batch, with padding on either side."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import hf_stitch
from hf_stitch.adapters import Adapter

LENGTHS = (9, 5, 7, 2)
"""Numbers of tokens of the texts, in turn."""


class Words:
    """Tokenizer for texts that consist of token ids."""

    pad_token, is_fast = "[PAD]", False

    def __init__(self, pad_id: int, side: str) -> None:
        self.pad_token_id, self.padding_side = pad_id, side

    def __call__(self, texts: Sequence[str], **_: Any) -> dict[str, Tensor]:
        """Return ids and mask, padded to the longest text."""
        rows = [[int(word) for word in text.split()] for text in texts]
        longest, left = max(map(len, rows)), self.padding_side == "left"
        gaps = [[self.pad_token_id] * (longest - len(row)) for row in rows]
        masks = [[0] * len(gap) + [1] * len(row) if left else [1] * len(row) + [0] * len(gap)
                 for row, gap in zip(rows, gaps, strict=True)]  # fmt: skip
        ids = [gap + row if left else row + gap for row, gap in zip(rows, gaps, strict=True)]
        return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(masks)}


def texts(adapter: Adapter, count: int) -> list[str]:
    """Draw texts from the vocabulary of a network; each ends with the end-of-text token."""
    config: Any = adapter.model.config
    text, draw = config.get_text_config() if hasattr(config, "get_text_config") else config, random.Random(7)
    words = [i for i in range(getattr(text, "vocab_size", 200)) if i not in adapter.interface.special_ids]
    end = getattr(text, "eos_token_id", None)
    ends = [end] if isinstance(end, int) and adapter.interface.given else [words[-1]]
    longest = min(max(LENGTHS), adapter.interface.max_tokens or max(LENGTHS))
    sizes = [min(LENGTHS[i % len(LENGTHS)], longest) for i in range(count)]
    return [" ".join(map(str, [*draw.choices(words, k=size - 1), *ends])) for size in sizes]


def tokenizing(adapter: Adapter, side: str = "right") -> Adapter:
    """Load a network again, with a tokenizer that pads on a side."""
    words = Words(adapter.interface.pad_id or 0, side)
    return hf_stitch.load(adapter.model, example_inputs=adapter.example, processor=words)


@torch.no_grad()
def moved(network: Adapter, side: str, batch: int, count: int = 8) -> float:
    """Return the largest difference of activations from each text alone, relative to the largest activation.

    Args:
        network: A network with the tokenizer of :func:`tokenizing`.
        side: Side to pad on. It is set on the tokenizer of the network.
        batch: Number of texts that run together.
        count: Number of texts.
    """
    network.processor.padding_side, samples = side, texts(network, count)

    def rows(some: list[str]) -> dict[str, list[Tensor]]:
        rows_of_layer: dict[str, list[Tensor]] = {}

        def keep(layer: str, r: hf_stitch.Representation) -> None:
            pooling = "cls" if r.padding_unknown else "none"
            owners, hidden = r.row_samples(pooling), r.rows(pooling).clone()
            rows_of_layer[layer] = [hidden[owners == text] for text in range(len(some))]

        network.run_with_callback(network.preprocess(some), network.candidates, keep)
        return rows_of_layer

    alone, largest = [rows([text]) for text in samples], 0.0
    for start in range(0, count, batch):
        for layer, rows_of_layer in rows(samples[start : start + batch]).items():
            for text, hidden in enumerate(rows_of_layer, start):
                (expected,) = alone[text][layer]
                if hidden.shape != expected.shape or not bool(hidden.isfinite().all()):
                    return float("inf")  # padding counts as text
                largest = max(largest, float((hidden - expected).abs().max() / expected.abs().max()))
    return largest
