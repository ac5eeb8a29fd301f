#!/usr/bin/env bash
# transformers 5.24.0: BigBird with block-sparse attention reads a short text with full attention, and never switches
# back: the outputs of a long text depend on whether the model has read a short one before.
#
# Output seen: the outputs of a long text differ by 0.0013 of the largest after a short one (original_full)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export TMPDIR="$folder"  # so that nothing is left behind
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.15.0 transformers==5.24.0
"$folder/venv/bin/python" - <<'PYTHON'
import sys

import torch
from transformers import BigBirdConfig, BigBirdModel

torch.manual_seed(0)
sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
model = BigBirdModel(BigBirdConfig(vocab_size=100, **sizes, block_size=16, num_random_blocks=2)).eval()
long, short = torch.randint(3, 100, (1, 256)), torch.randint(3, 100, (1, 32))
with torch.no_grad():
    before = model(long).last_hidden_state
    model(short)
    after = model(long).last_hidden_state
gap = float((after - before).abs().max() / before.abs().max())
print(f"the outputs of a long text differ by {gap:.4f} of the largest after a short one ({model.attention_type})")
sys.exit(gap < 1e-4)
PYTHON
