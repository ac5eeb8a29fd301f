#!/usr/bin/env bash
# torch 2.15.0 (CPU): under no_grad, the rounding of a matrix product whose input is transposed depends on whether the
# weight requires a gradient (at::matmul folds the batch then). So the outputs of nn.GRU and nn.RNN with batch_first, of
# nn.MultiheadAttention and of Mamba change by rounding when the network is frozen with requires_grad_(False).
#
# Output seen (x86 with AVX-512): outputs of frozen weights differ by 2e-07
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export TMPDIR="$folder"  # so that nothing is left behind
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.15.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import sys

import torch

torch.manual_seed(0)
model, x = torch.nn.GRU(16, 12, batch_first=True).eval(), torch.randn(3, 7, 16)
with torch.no_grad():
    trainable = model(x)[0]
    model.requires_grad_(False)
    frozen = model(x)[0]
print(f"outputs of frozen weights differ by {float((frozen - trainable).abs().max() / trainable.abs().max()):.1g}")
sys.exit(torch.equal(trainable, frozen))
PYTHON
