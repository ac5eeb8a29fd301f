#!/usr/bin/env bash
# transformers 5.24.0: a text that T5GemmaForSequenceClassification classifies has other logits beside padding. The head
# reads the token after the last one (+ 1 for the shift to the right), which is padding if there is some, and is clamped
# to the last token if there is none.
#
# Output seen: the logits of a text differ by 2.3 of the largest beside one token of padding
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export TMPDIR="$folder"  # so that nothing is left behind
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.15.0 transformers==5.24.0
"$folder/venv/bin/python" - <<'PYTHON'
import sys

import torch
from transformers import T5GemmaConfig, T5GemmaForSequenceClassification

sizes = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
sizes |= {"num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48}
torch.manual_seed(0)
config = T5GemmaConfig(encoder=sizes, decoder=sizes, vocab_size=50, pad_token_id=0, bos_token_id=2, eos_token_id=1)
model = T5GemmaForSequenceClassification(config).eval()
with torch.no_grad():
    alone, padded = (
        model(input_ids=ids, attention_mask=(ids != 0).long()).logits
        for ids in (torch.tensor([[5, 6, 7, 1]]), torch.tensor([[5, 6, 7, 1, 0]]))
    )
gap = float((padded - alone).abs().max() / alone.abs().max())
print(f"the logits of a text differ by {gap:.1f} of the largest beside one token of padding")
sys.exit(gap < 1e-4)
PYTHON
