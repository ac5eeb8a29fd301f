#!/usr/bin/env bash
# keras-hub 0.32.0: a Mistral checkpoint of transformers in float32 is rounded to float16 while it loads, whatever dtype is
# asked for. The weights are float32 afterwards, so that nothing shows the loss. Other families keep all bits.
#
# Output seen: 12 float32 arrays: 0 loaded as they are, 12 rounded to float16, as float32
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
import keras
import keras_hub
import numpy as np
from safetensors.numpy import save_file

folder = Path(sys.argv[1], "model")
folder.mkdir()
config = {
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "vocab_size": 40, "hidden_size": 16,
    "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "sliding_window": 64, "max_position_embeddings": 64, "tie_word_embeddings": False, "torch_dtype": "float32",
}
sizes = {"self_attn.q_proj": (16, 16), "self_attn.k_proj": (16, 16), "self_attn.v_proj": (16, 16)}
sizes |= {"self_attn.o_proj": (16, 16), "mlp.gate_proj": (32, 16), "mlp.up_proj": (32, 16), "mlp.down_proj": (16, 32)}
sizes |= {"input_layernorm": (16,), "post_attention_layernorm": (16,)}
shapes = {f"model.layers.0.{name}.weight": shape for name, shape in sizes.items()}
shapes |= {"model.embed_tokens.weight": (40, 16), "model.norm.weight": (16,), "lm_head.weight": (40, 16)}
generator = np.random.default_rng(0)
weights = {name: generator.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
(folder / "config.json").write_text(json.dumps(config))
network = keras_hub.models.MistralCausalLM.from_preset(str(folder), preprocessor=None, dtype="float32")
loaded = {weight.path: np.asarray(keras.ops.convert_to_numpy(weight)) for weight in network.weights}
rounded = exact = 0
for value in weights.values():
    places = [found for found in loaded.values() if found.size == value.size]
    exact += any(np.array_equal(np.sort(found.ravel()), np.sort(value.ravel())) for found in places)
    half = np.sort(value.astype(np.float16).astype(np.float32).ravel())
    rounded += any(np.array_equal(np.sort(found.ravel()), half) for found in places)
dtypes = sorted({str(value.dtype) for value in loaded.values()})
print(f"{len(weights)} float32 arrays: {exact} loaded as they are, {rounded} rounded to float16, as {', '.join(dtypes)}")
sys.exit(not (rounded > exact and dtypes == ["float32"]))
PYTHON
