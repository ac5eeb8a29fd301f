#!/usr/bin/env bash
# mlx-lm 0.32.2: Gemma computes GELU by erf whatever the config names; checkpoints of Gemma name gelu_pytorch_tanh. The
# MLP then differs by some 1e-4 of its norm, a thousand times the rounding of float32.
#
# Output seen: distance to transformers with gelu_pytorch_tanh 2.0e-04, with gelu 5.7e-07
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export TMPDIR="$folder"  # so that nothing is left behind
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.15.0 transformers==5.24.0 mlx-lm==0.32.2 'mlx[cpu]==0.32.4'
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import torch
from mlx_lm.utils import load_model
from transformers import GemmaConfig, GemmaForCausalLM

sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
ids, distances = torch.tensor([[3, 5, 7, 8, 9]]), []
for activation in ("gelu_pytorch_tanh", "gelu"):
    torch.manual_seed(0)
    config = GemmaConfig(vocab_size=50, num_key_value_heads=2, **sizes)
    config.hidden_act = activation
    model = GemmaForCausalLM(config).eval()
    with torch.no_grad():
        for value in model.parameters():
            value.copy_(0.3 * torch.randn_like(value))
        expected = model(ids).logits.numpy()
    saved = Path(sys.argv[1], activation)
    model.save_pretrained(saved)
    network, _ = load_model(saved)
    logits = np.array(network(mx.array(ids.numpy())))
    distances.append(float(np.linalg.norm(logits - expected) / np.linalg.norm(expected)))
print(f"distance to transformers with gelu_pytorch_tanh {distances[0]:.1e}, with gelu {distances[1]:.1e}")
sys.exit(not distances[0] > 1e-5 > 2e-6 > distances[1])
PYTHON
