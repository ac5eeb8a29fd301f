#!/usr/bin/env bash
# keras-hub 0.32.0: RoBERTa has no token-type embeddings, and drops those of a checkpoint of transformers without a word.
# Published ones are zero, but fine-tuning trains them.
#
# Output seen: outputs differ by 0 between token-type embeddings of 0 and of norm 3.6
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
import numpy as np
from safetensors.numpy import save_file

config = {
    "model_type": "roberta", "vocab_size": 40, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "max_position_embeddings": 66, "type_vocab_size": 1, "layer_norm_eps": 1e-5,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "hidden_act": "gelu", "pad_token_id": 1,
}
linear = {"attention.self.query": (16, 16), "attention.self.key": (16, 16), "attention.self.value": (16, 16)}
linear |= {"attention.output.dense": (16, 16), "intermediate.dense": (32, 16), "output.dense": (16, 32)}
norms = ["embeddings.LayerNorm", "encoder.layer.0.attention.output.LayerNorm", "encoder.layer.0.output.LayerNorm"]
shapes = {f"encoder.layer.0.{name}.weight": shape for name, shape in linear.items()}
shapes |= {f"encoder.layer.0.{name}.bias": shape[:1] for name, shape in linear.items()}
shapes |= {f"{name}.{kind}": (16,) for name in norms for kind in ("weight", "bias")}
shapes |= {"embeddings.word_embeddings.weight": (40, 16), "embeddings.position_embeddings.weight": (66, 16)}
shapes |= {"embeddings.token_type_embeddings.weight": (1, 16)}
generator = np.random.default_rng(0)
weights = {f"roberta.{name}": generator.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
outputs = []
for scale in (0.0, 1.0):
    folder = Path(sys.argv[1], f"model {scale}")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    name = "roberta.embeddings.token_type_embeddings.weight"
    save_file({**weights, name: scale * weights[name]}, folder / "model.safetensors", metadata={"format": "pt"})
    network = keras_hub.models.RobertaBackbone.from_preset(str(folder))
    ids = np.arange(4, 12)[None]
    outputs.append(np.array(network({"token_ids": ids, "padding_mask": np.ones_like(ids)})))
difference = float(np.abs(outputs[0] - outputs[1]).max())
print(f"outputs differ by {difference:g} between token-type embeddings of 0 and of norm {np.linalg.norm(weights[name]):.1f}")
sys.exit(difference != 0.0)
PYTHON
