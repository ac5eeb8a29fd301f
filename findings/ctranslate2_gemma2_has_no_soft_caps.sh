#!/usr/bin/env bash
# CTranslate2 4.8.5: a converted Gemma 2 computes without the soft caps of attention and logits that its config names. The
# outputs differ from those of transformers without an error, and equal those of a network without the caps.
#
# Output seen: distance to transformers 5.1e-02, and 2.5e-07 without the soft caps
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export TMPDIR="$folder"  # so that nothing is left behind
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet ctranslate2==4.8.5 torch==2.15.0 transformers==5.24.0
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import sys
from pathlib import Path

import ctranslate2
import numpy as np
import torch
from ctranslate2.converters import TransformersConverter
from tokenizers import Tokenizer, models
from transformers import Gemma2Config, Gemma2ForCausalLM, PreTrainedTokenizerFast

torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
sizes |= {"vocab_size": 50, "num_key_value_heads": 2, "query_pre_attn_scalar": 8}
model = Gemma2ForCausalLM(Gemma2Config(**sizes, attn_implementation="eager")).eval()
with torch.no_grad():
    for value in model.parameters():
        value.copy_(0.5 * torch.randn_like(value))
folder = Path(sys.argv[1], "model")
model.save_pretrained(folder)
words = {"<pad>": 0, "<eos>": 1, "<bos>": 2, "<unk>": 3, **{f"t{number}": number for number in range(4, 50)}}
PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<unk>")),
    pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>",
).save_pretrained(folder)
TransformersConverter(str(folder)).convert(str(folder / "converted"))
ids = torch.randint(4, 50, (1, 12))
generator = ctranslate2.Generator(str(folder / "converted"), compute_type="float32")
logits = np.array(generator.forward_batch([[f"t{number}" for number in ids[0].tolist()]]))


def distance():
    with torch.no_grad():
        expected = model(ids).logits.numpy()
    return float(np.linalg.norm(logits - expected) / np.linalg.norm(expected))


with_caps = distance()
model.config.attn_logit_softcapping = model.config.final_logit_softcapping = None
for module in model.modules():
    if hasattr(module, "attn_logit_softcapping"):
        module.attn_logit_softcapping = None
without = distance()
print(f"distance to transformers {with_caps:.1e}, and {without:.1e} without the soft caps")
sys.exit(not without < 1e-5 < 1e-2 < with_caps)
PYTHON
