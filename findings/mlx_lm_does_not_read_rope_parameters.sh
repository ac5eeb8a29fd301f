#!/usr/bin/env bash
# mlx-lm 0.32.2: transformers 5 saves the RoPE base of Llama inside rope_parameters, where mlx-lm does not look. It takes
# the base 10000 without an error. A checkpoint of transformers 4, with rope_theta at the top level, is read correctly.
#
# Output seen: distance to transformers 3.7e-07 with the base 10000, 1.0e-01 with 500000
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
from transformers import LlamaConfig, LlamaForCausalLM

sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50}
distances = []
for base in (10000.0, 500000.0):
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": base}
    model = LlamaForCausalLM(LlamaConfig(**sizes, rope_parameters=rope)).eval()
    with torch.no_grad():
        for value in model.parameters():
            value.copy_(0.3 * torch.randn_like(value))
    folder = Path(sys.argv[1], f"model {base:g}")
    model.save_pretrained(folder)
    network, _ = load_model(folder)
    ids = torch.randint(50, (1, 24))
    with torch.no_grad():
        expected = model(ids).logits.numpy()
    logits = np.array(network(mx.array(ids.numpy())))
    distances.append(float(np.linalg.norm(logits - expected) / np.linalg.norm(expected)))
print(f"distance to transformers {distances[0]:.1e} with the base 10000, {distances[1]:.1e} with 500000")
sys.exit(not distances[0] < 1e-5 < 1e-3 < distances[1])
PYTHON
