#!/usr/bin/env bash
# transformers 5.24.0: FunnelModel with three stages, the default, raises for texts of one to four tokens.
#
# Output seen: FunnelModel raises for texts of [1, 2, 3, 4] tokens, among them index 4 is out of bounds for dimension 0
# with size 4
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export TMPDIR="$folder"  # so that nothing is left behind
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.15.0 transformers==5.24.0
"$folder/venv/bin/python" - <<'PYTHON'
import sys

import torch
from transformers import FunnelConfig, FunnelModel

torch.manual_seed(0)
model = FunnelModel(FunnelConfig(vocab_size=50, d_model=32, n_head=4, d_head=8, d_inner=64)).eval()
refused = {}
for length in range(1, 9):
    try:
        model(torch.randint(5, 50, (1, length)))
    except (IndexError, RuntimeError) as error:
        refused[length] = str(error)
print(f"FunnelModel raises for texts of {list(refused)} tokens, among them {refused.get(1)}")
sys.exit(list(refused) != [1, 2, 3, 4])
PYTHON
