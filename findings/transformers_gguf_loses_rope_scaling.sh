#!/usr/bin/env bash
# transformers 5.24.0: a GGUF file of Llama with linear RoPE scaling loads without its scaling, and without a warning, so
# that all tokens have other positions than in llama.cpp.
#
# Output seen: file: linear scaling by 4.0; loaded: {'rope_theta': 10000.0, 'rope_type': 'default'}
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export TMPDIR="$folder"  # so that nothing is left behind
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.15.0 transformers==5.24.0 gguf==0.19.0 accelerate==1.15.0
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import sys
from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM

path = Path(sys.argv[1], "model.gguf")
writer = gguf.GGUFWriter(str(path), "llama")
writer.add_block_count(1)
writer.add_context_length(256)
writer.add_embedding_length(32)
writer.add_feed_forward_length(64)
writer.add_head_count(4)
writer.add_head_count_kv(4)
writer.add_vocab_size(50)
writer.add_layer_norm_rms_eps(1e-5)
writer.add_rope_freq_base(10000.0)
writer.add_rope_dimension_count(8)
writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
writer.add_rope_scaling_factor(4.0)
generator = np.random.default_rng(0)
shapes = {"token_embd": (50, 32), "output_norm": (32,), "output": (50, 32)}
shapes |= {f"blk.0.attn_{name}": (32, 32) for name in ("q", "k", "v", "output")}
shapes |= {"blk.0.ffn_gate": (64, 32), "blk.0.ffn_up": (64, 32), "blk.0.ffn_down": (32, 64)}
shapes |= {"blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,)}
for name, shape in shapes.items():
    writer.add_tensor(f"{name}.weight", generator.standard_normal(shape, dtype=np.float32))
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
fields = gguf.GGUFReader(path).fields
kind, factor = (fields[f"llama.rope.scaling.{key}"].contents() for key in ("type", "factor"))
model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name)
print(f"file: {kind} scaling by {factor}; loaded: {model.config.rope_parameters}")
sys.exit(model.config.rope_parameters.get("rope_type") != "default" or (kind, factor) != ("linear", 4.0))
PYTHON
