#!/usr/bin/env bash
# OpenVINO 2026.4.1: a decoder of transformers converted with its default (SDPA) attention returns NaN for every real
# token of a text that is padded on the left, from the second layer on. Positions of padding see nothing, so their
# softmax is NaN; torch returns finite values there, and multiplies them by attention weights of 0.
#
# Output seen: logits of real tokens are finite: torch True, OpenVINO False; without padding: torch True, OpenVINO True
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export TMPDIR="$folder"  # so that nothing is left behind
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.15.0 transformers==5.24.0 openvino==2026.4.1
"$folder/venv/bin/python" - <<'PYTHON'
import sys

import numpy as np
import openvino
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=50, **sizes)).eval()
forward = model.forward
model.forward = lambda input_ids, attention_mask: forward(
    input_ids=input_ids, attention_mask=attention_mask, use_cache=False
).logits
example = torch.ones(2, 6, dtype=torch.long)
graph = openvino.convert_model(model, example_input={"input_ids": example, "attention_mask": example})
compiled = openvino.Core().compile_model(graph, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
ids, found = torch.tensor([[3, 3, 7, 8, 9]]), []
for mask in (torch.tensor([[0, 0, 1, 1, 1]]), torch.ones_like(ids)):
    with torch.no_grad():
        values = model(ids, mask).numpy(), compiled({"input_ids": ids.numpy(), "attention_mask": mask.numpy()})[0]
    found += [bool(np.isfinite(value[0, 2:]).all()) for value in values]
print(
    f"logits of real tokens are finite: torch {found[0]}, OpenVINO {found[1]}; "
    f"without padding: torch {found[2]}, OpenVINO {found[3]}"
)
sys.exit(found != [True, False, True, True])
PYTHON
