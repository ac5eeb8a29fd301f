"""Estimate time and memory of a job before it runs, and save activations for the next job."""

import tempfile

from networks import cnn, digits, vit

import hf_stitch
from hf_stitch.analysis import Activations, extract_activations

print(hf_stitch.plan(hf_stitch.stitch_grid, cnn(), vit(), digits(), test_data=digits("test")))

with tempfile.TemporaryDirectory() as folder:
    extract_activations(cnn(), digits("test"), layers=["layer3.0"]).save(f"{folder}/cnn.safetensors")
    saved = Activations.load(f"{folder}/cnn.safetensors")
    print(hf_stitch.compare(saved, vit(), digits("test"), progress=False))  # of the two networks, only the ViT runs
