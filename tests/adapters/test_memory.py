"""Cutting takes no more memory than the model and the representations asked for, however deep the network."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch
import transformers as hf
from families import texts
from torch.profiler import ProfilerActivity, profile

import hf_stitch

ONE_LAYER = 32 * 64 * 128 * 4
"""Bytes of one representation: samples, tokens, width, bytes of a number."""


def peak(run: Callable[[], Any]) -> int:
    """The most bytes that a call's tensors held at once, by the allocator's own events."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    recorded: Any = profiler.profiler
    events = [e for e in recorded.kineto_results.events() if e.name() == "[memory]"]
    return max(accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))


@pytest.mark.parametrize("layers", [12, 48])
def test_no_peak_of_memory_beyond_the_model_and_what_was_asked_for(layers: int) -> None:
    config = hf.BertConfig(
        hidden_size=128, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=256, vocab_size=100
    )
    adapter = hf_stitch.load(hf.BertForSequenceClassification(config).eval())
    inputs = texts(32, 64)
    asked = adapter.candidates[:: layers // 4]
    with torch.no_grad():
        for layer in asked:
            adapter.verify_cut(layer)
        representations = adapter.encode(inputs, asked)
        forward = peak(lambda: adapter.forward(inputs))
        encode = peak(lambda: adapter.encode(inputs, asked))
        decodes = [peak(lambda n=n, r=r: adapter.decode(r, n)) for n, r in representations.items()]
    assert sum(r.values.nbytes for r in representations.values()) == 4 * ONE_LAYER
    small = ONE_LAYER // 100  # masks, and the context of each representation
    assert encode <= forward + 4 * ONE_LAYER + small, (forward, encode)
    assert max(decodes) <= forward + small, (forward, decodes)  # what all layers say would be 12 or 48 of them
