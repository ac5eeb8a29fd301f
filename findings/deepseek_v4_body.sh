#!/usr/bin/env bash
# transformers 5.24.0: the body of a DeepSeek-V4 language model loads without its final norm.
#
# A DeepseekV4ForCausalLM is saved by save_pretrained and read by AutoModel. The conversion of names turns
# model.norm.weight into model.kv_norm.weight, which the body does not have: norm.weight is reported as missing and gets
# its initial value, ones. Every output of the body is scaled by another norm than that of the saved network.
#
# Output seen (transformers 5.24.0, torch 2.15.0):
#   missing ['norm.weight']
#   unexpected ['lm_head.weight', 'model.kv_norm.weight']
#   norm of the saved network 3.0, of the loaded body 1.0
#
# Exits with 0 as long as this is so, with 1 if the norm is loaded.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export TMPDIR="$folder"  # so that nothing is left behind
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.24.0 torch==2.15.0
cat > "$folder/body.py" <<'PYTHON'
import sys
import tempfile

import torch
import transformers

config = transformers.DeepseekV4Config(
    vocab_size=50, hidden_size=64, moe_intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, head_dim=16,
    q_lora_rank=16, num_experts_per_tok=2, n_routed_experts=4, o_lora_rank=16, index_n_heads=4, index_head_dim=16,
    layer_types=["heavily_compressed_attention", "compressed_sparse_attention"], mlp_layer_types=["moe", "moe"],
    max_position_embeddings=128,
)
model = transformers.DeepseekV4ForCausalLM(config)
with torch.no_grad():
    model.model.norm.weight.fill_(3)
with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    body, report = transformers.AutoModel.from_pretrained(folder, output_loading_info=True)
print("missing", sorted(report["missing_keys"]))
print("unexpected", sorted(report["unexpected_keys"]))
print(f"norm of the saved network 3.0, of the loaded body {body.norm.weight[0].item()}")
sys.exit(0 if "norm.weight" in report["missing_keys"] else 1)
PYTHON
"$folder/venv/bin/python" "$folder/body.py"
