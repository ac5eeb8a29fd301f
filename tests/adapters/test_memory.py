"""Cutting takes no more memory than the model and the representations asked for, however deep the network."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys, torch, transformers, hf_stitch

def memory(key):
    return int(next(l for l in open("/proc/self/status") if l.startswith(key)).split()[1]) / 1024

config = transformers.BertConfig(
    hidden_size=256, num_hidden_layers=int(sys.argv[1]), num_attention_heads=4, intermediate_size=512, vocab_size=100
)
adapter = hf_stitch.load(transformers.BertForSequenceClassification(config).eval())
inputs = {"input_ids": torch.randint(3, 100, (64, 128)), "attention_mask": torch.ones(64, 128, dtype=torch.long)}
layers = adapter.layers[:: len(adapter.layers) // 4]
with torch.no_grad():
    adapter.forward({name: value[:2] for name, value in inputs.items()})
    adapter.explain(layers[0])
    open("/proc/self/clear_refs", "w").write("5")
    before = memory("VmRSS")
    adapter.forward(inputs)
    forward = memory("VmHWM") - before
    for layer in layers:
        adapter.explain(layer)
    open("/proc/self/clear_refs", "w").write("5")
    before = memory("VmRSS")
    representations = adapter.encode(inputs, layers)
    for layer, representation in representations.items():
        adapter.decode(representation, layer)
asked = sum(r.values.nbytes for r in representations.values()) / 2**20
print(forward, memory("VmHWM") - before, asked)
"""


@pytest.mark.slow
def test_no_peak_of_memory_beyond_the_model_and_what_was_asked_for() -> None:
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("peaks of memory are read off Linux's /proc")
    beyond = {}
    for layers in (12, 48):
        run = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(layers)], capture_output=True, text=True, check=True, cwd=Path.cwd()
        )
        forward, peak, asked = map(float, run.stdout.split())
        assert asked == 4 * 64 * 128 * 256 * 4 / 2**20
        beyond[layers] = peak - asked - forward
    one_layer = 64 * 128 * 256 * 4 / 2**20
    assert max(beyond.values()) < 4 * one_layer, beyond  # what all 48 layers say would be 48 of them
