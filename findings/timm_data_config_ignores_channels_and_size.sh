#!/usr/bin/env bash
# timm 1.0.31: resolve_model_data_config(model) returns the size and the channels of the pretrained weights, not those of
# the model. A model created with in_chans=1 or img_size=128 refuses what the transform of its own data config makes.
#
# timm.models.get_model_input_config(model) returns those of the model, but no mean and std for its channels.
#
# Output seen:
#   in_chans=1: data config (3, 176, 176), model (1, 176, 176); the model refuses a transformed image
#   img_size=128: data config (3, 224, 224), model (3, 128, 128); the model refuses a transformed image
#
# Exits with 1 if the data config is that of the model, or the model takes the transformed image.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export TMPDIR="$folder"  # so that nothing is left behind
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet timm==1.0.31 torch==2.15.0 torchvision==0.29.2
"$folder/venv/bin/python" - <<'PYTHON'
import sys

import timm
import torch
from PIL import Image

found = []
for architecture, option, value in [("resnet10t", "in_chans", 1), ("resmlp_12_224", "img_size", 128)]:
    model = timm.create_model(architecture, **{option: value}).eval()
    config = timm.data.resolve_model_data_config(model)
    own = tuple(timm.models.get_model_input_config(model)["input_size"])
    transform = timm.data.create_transform(**config, is_training=False)
    try:
        with torch.no_grad():
            model(transform(Image.new("RGB", (300, 300)))[None])
        does = "takes"
    except (AssertionError, RuntimeError):
        does = "refuses"
    print(f"{option}={value}: data config {config['input_size']}, model {own}; the model {does} a transformed image")
    found.append(does == "refuses" and config["input_size"] != own)
sys.exit(0 if all(found) else 1)
PYTHON
