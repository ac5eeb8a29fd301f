#!/usr/bin/env bash
# mlx-lm 0.32.2: Mistral has no sliding window, although its config names one. Texts within the window are equal to those
# of transformers, and longer texts differ without an error.
#
# Output seen: distance to transformers 3.1e-07 within the window, 6.2e-01 beyond it
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
from transformers import MistralConfig, MistralForCausalLM

torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
rope = {"rope_type": "default", "rope_theta": 10000.0}
config = MistralConfig(vocab_size=50, num_key_value_heads=2, sliding_window=8, rope_parameters=rope, **sizes)
model = MistralForCausalLM(config).eval()
with torch.no_grad():
    for value in model.parameters():
        value.copy_(0.3 * torch.randn_like(value))
model.save_pretrained(Path(sys.argv[1], "model"))
network, _ = load_model(Path(sys.argv[1], "model"))
distances = []
for tokens in (8, 24):
    ids = torch.randint(50, (1, tokens))
    with torch.no_grad():
        expected = model(ids).logits.numpy()
    logits = np.array(network(mx.array(ids.numpy())))
    distances.append(float(np.linalg.norm(logits - expected) / np.linalg.norm(expected)))
print(f"distance to transformers {distances[0]:.1e} within the window, {distances[1]:.1e} beyond it")
sys.exit(not distances[0] < 1e-5 < 1e-3 < distances[1])
PYTHON
