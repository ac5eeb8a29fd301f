"""Peak memory of encode and decode does not grow with the depth of the network."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
import transformers as hf
from families import texts
from torch.profiler import ProfilerActivity, profile

import hf_stitch

ONE_LAYER = 32 * 64 * 128 * 4
"""Bytes of one representation: samples, tokens, width, bytes of a number."""


def peak(run: Callable[[], Any]) -> int:
    """Peak number of bytes of the tensors of a call, from the events of the allocator."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    recorded: Any = profiler.profiler
    events = [e for e in recorded.kineto_results.events() if e.name() == "[memory]"]
    return max(accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))


def test_peak_memory_is_that_of_the_forward_and_the_requested_representations() -> None:
    layers = 12
    config = hf.BertConfig(
        hidden_size=128, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=256, vocab_size=100
    )
    adapter = hf_stitch.load(hf.BertForSequenceClassification(config).eval())
    inputs = texts(32, 64)
    requested = adapter.candidates[:: layers // 4]
    with torch.no_grad():
        for layer in requested:
            adapter.verify_cut(layer)
        representations = adapter.encode(inputs, requested)
        forward = peak(lambda: adapter.forward(inputs))
        encode = peak(lambda: adapter.encode(inputs, requested))
        decodes = [peak(lambda n=n, r=r: adapter.decode(r, n)) for n, r in representations.items()]
    assert sum(r.values.nbytes for r in representations.values()) == 4 * ONE_LAYER
    small = ONE_LAYER // 100  # masks, and the context of each representation
    assert encode <= forward + 4 * ONE_LAYER + small, (forward, encode)
    # the activations at all layers would be 12 times ONE_LAYER
    assert max(decodes) <= forward + small, (forward, decodes)
