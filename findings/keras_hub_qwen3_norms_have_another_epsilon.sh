#!/usr/bin/env bash
# keras-hub 0.32.0: the norms of queries and keys of a Qwen3 checkpoint keep the epsilon 1e-5, whatever rms_norm_eps is in
# the config (1e-6 in published ones). The other norms have that of the config.
#
# Output seen: config: rms_norm_eps 0.001; layers: feedforward_layernorm 0.001, key_dense_layernorm 1e-05,
# query_dense_layernorm 1e-05, self_attention_layernorm 0.001, sequence_output_layernorm 0.001
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export TMPDIR="$folder"  # so that nothing is left behind
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet keras-hub==0.32.0 keras==3.15.1 jax==0.10.2 tensorflow-cpu==2.21.0 safetensors
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import json
import os
import sys
from pathlib import Path

os.environ |= {"KERAS_BACKEND": "jax", "TF_CPP_MIN_LOG_LEVEL": "3"}
import keras_hub

folder = Path(sys.argv[1], "model")
folder.mkdir()
config = {
    "model_type": "qwen3", "vocab_size": 40, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-3, "rope_theta": 10000.0,
    "sliding_window": None, "use_sliding_window": False, "max_position_embeddings": 64, "tie_word_embeddings": True,
}
(folder / "config.json").write_text(json.dumps(config))
network = keras_hub.models.Qwen3Backbone.from_preset(str(folder), load_weights=False)
norms = {
    layer.path.rpartition("/")[2] or layer.name: layer.epsilon
    for layer in network._flatten_layers() if hasattr(layer, "epsilon")
}
print("config: rms_norm_eps 0.001; layers: " + ", ".join(f"{name} {value:g}" for name, value in sorted(norms.items())))
sys.exit([norms["query_dense_layernorm"], norms["key_dense_layernorm"]] != [1e-5, 1e-5])
PYTHON
