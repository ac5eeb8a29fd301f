#!/usr/bin/env bash
# transformers 5.24.0: a forward in eval mode halves weights of an RWKV model in place, once for every rescale_every
# layers (6 by default), and notes this in an attribute of the model (layers_are_rescaled). save_pretrained writes the
# halved weights without the note, so that the loaded model halves them again: its outputs differ.
#
# Output seen: outputs after saving and loading differ by 0.48 of the largest
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export TMPDIR="$folder"  # so that nothing is left behind
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.15.0 transformers==5.24.0
"$folder/venv/bin/python" - <<'PYTHON'
import sys
import tempfile

import torch
from transformers import RwkvConfig, RwkvModel

torch.manual_seed(0)
model = RwkvModel(RwkvConfig(vocab_size=100, hidden_size=32, num_hidden_layers=12, context_length=64)).eval()
ids = torch.arange(3, 19).reshape(2, 8)
with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
    before = model(input_ids=ids).last_hidden_state
    model.save_pretrained(folder)
    after = RwkvModel.from_pretrained(folder).eval()(input_ids=ids).last_hidden_state
gap = float((after - before).abs().max() / before.abs().max())
print(f"outputs after saving and loading differ by {gap:.2f} of the largest")
sys.exit(gap < 0.1)
PYTHON
