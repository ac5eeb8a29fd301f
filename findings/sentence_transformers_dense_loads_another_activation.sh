#!/usr/bin/env bash
# sentence-transformers 6.2.0: a Dense module whose activation is no class of torch is saved, and loads with Tanh
# instead.
#
# The same encoder, saved with save_pretrained and loaded from the folder, returns other embeddings. A line of the log
# is the only sign ("Activation function path 'squares.Square' is not trusted, falling back to the default activation
# function (Tanh)"), while a module of another package in modules.json is refused with an error. Only names that begin
# with "torch." are kept, so that activations of transformers are replaced, too.
#
# Output of version 6.2.0 (transformers 5.24.0, torch 2.15.0):
#   saved: Square, loaded: Tanh
#   largest difference of the embeddings: 0.448
#
# Exits with 1 if the loaded encoder has its own activation, or loading raises an error.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export TMPDIR="$folder"  # so that nothing is left behind
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet sentence-transformers==6.2.0 transformers==5.24.0 torch==2.15.0
cd "$folder"
cat > squares.py <<'PYTHON'
import torch


class Square(torch.nn.Module):
    def forward(self, x):
        return x * x
PYTHON
"$folder/venv/bin/python" - <<'PYTHON'
import sys

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tokenizers import Tokenizer, models, pre_tokenizers

sys.path.insert(0, ".")
from squares import Square

words = Tokenizer(models.WordLevel({word: place for place, word in enumerate(["[UNK]", "a", "b"])}, "[UNK]"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
torch.manual_seed(0)
dense = Dense(8, 4, activation_function=Square())
encoder = SentenceTransformer(modules=[StaticEmbedding(words, embedding_dim=8), dense], device="cpu")
encoder.save_pretrained("saved")
again = SentenceTransformer("saved", device="cpu")
before, after = (type(model[1].activation_function).__name__ for model in (encoder, again))
print(f"saved: {before}, loaded: {after}")
difference = abs(encoder.encode(["a b"]) - again.encode(["a b"])).max()
print(f"largest difference of the embeddings: {difference:.3f}")
sys.exit(0 if after == "Tanh" and difference > 0.01 else 1)
PYTHON
