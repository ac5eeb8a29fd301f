#!/usr/bin/env bash
# transformers 5.24.0: with eager attention in float64, real tokens beside padding on the left are NaN (BLOOM, MPT,
# Gemma 2); in float32 they are finite.
#
# Output seen: logits of real tokens are finite: float32 True, float64 False
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export TMPDIR="$folder"  # so that nothing is left behind
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.15.0 transformers==5.24.0
"$folder/venv/bin/python" - <<'PYTHON'
import sys

import torch
from transformers import BloomConfig, BloomForCausalLM

torch.manual_seed(0)
model = BloomForCausalLM(BloomConfig(vocab_size=50, hidden_size=32, n_layer=2, n_head=4)).eval()
ids, mask = torch.tensor([[3, 3, 7, 8, 9]]), torch.tensor([[0, 0, 1, 1, 1]])
with torch.no_grad():
    found = [bool(model.to(dtype)(ids, attention_mask=mask).logits[0, 2:].isfinite().all())
             for dtype in (torch.float32, torch.float64)]
print(f"logits of real tokens are finite: float32 {found[0]}, float64 {found[1]}")
sys.exit(found != [True, False])
PYTHON
