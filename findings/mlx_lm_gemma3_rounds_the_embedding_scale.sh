#!/usr/bin/env bash
# mlx-lm 0.32.2: Gemma 3 rounds the scale of its embeddings to bfloat16, also if all weights are float32. transformers rounds
# it to the dtype of the weights. Widths with a root that bfloat16 holds exactly, such as 1024, are not affected.
#
# Output seen: distance to transformers 1.5e-04, and 4.9e-07 with the scale rounded to bfloat16
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
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

torch.manual_seed(0)
sizes = {"hidden_size": 24, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
rope = {kind: {"rope_type": "default", "rope_theta": base} for kind, base in
        (("sliding_attention", 10000.0), ("full_attention", 1000000.0))}
config = Gemma3TextConfig(vocab_size=50, num_hidden_layers=6, rope_parameters=rope, **sizes)
model = Gemma3ForCausalLM(config).eval()
folder = Path(sys.argv[1], "model")
model.save_pretrained(folder)
network, _ = load_model(folder)
ids = torch.randint(50, (1, 12))
logits = np.array(network(mx.array(ids.numpy())))
embedding = model.model.embed_tokens
distances = []
for scale in (24**0.5, float(torch.tensor(24**0.5).bfloat16())):
    embedding.embed_scale.fill_(scale)
    with torch.no_grad():
        expected = model(ids).logits.numpy()
    distances.append(float(np.linalg.norm(logits - expected) / np.linalg.norm(expected)))
print(f"distance to transformers {distances[0]:.1e}, and {distances[1]:.1e} with the scale rounded to bfloat16")
sys.exit(not distances[1] < 2e-6 < 1e-5 < distances[0])
PYTHON
