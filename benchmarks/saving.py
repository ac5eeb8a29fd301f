"""Saving and loading a stitched model of 100M parameters, compared with bare safetensors files of the same weights."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

import hf_stitch
from benchmarks.timing import in_turn, show

REPEATS = 5
WIDTH, LAYERS = 768, 12


def model() -> hf_stitch.StitchedModel:
    """Stitch two networks of BERT-base's size, cut after their sixth blocks."""
    config = transformers.BertConfig(num_labels=2)
    network = hf_stitch.load(transformers.BertForSequenceClassification(config).eval())
    layer = f"bert.encoder.layer.{LAYERS // 2 - 1}"
    spec = network.spec(layer)
    stitch = hf_stitch.stitches.StitchingLayer(spec, spec, "none", hf_stitch.stitches.IdentityStitch(WIDTH, WIDTH))
    return hf_stitch.artefacts.joining.join(network, layer, stitch, network, layer, task="text-classification")


def main() -> None:
    """Run all ways in turn and print medians and ratios."""
    torch.set_num_threads(1)
    stitched = model()
    weights = {name: tensor.clone() for name, tensor in stitched.state_dict().items()}
    with tempfile.TemporaryDirectory() as name:
        folder, bare = Path(name) / "model", Path(name) / "bare.safetensors"
        ways = {
            "save bare weights": lambda: save_file(weights, bare),
            "save": lambda: stitched.save_pretrained(folder),
            "save, sync": lambda: stitched.save_pretrained(folder, sync=True),
            "load bare weights": lambda: {name: tensor.clone() for name, tensor in load_file(bare).items()},
            "load": lambda: hf_stitch.StitchedModel.from_pretrained(folder),
        }
        in_turn(ways, 1)
        seconds = {way: statistics.median(taken) for way, taken in in_turn(ways, REPEATS).items()}
    count = sum(tensor.numel() for tensor in weights.values()) / 1e6
    ratios = {way: taken / seconds[f"{way[:4]} bare weights"] for way, taken in seconds.items()}
    rows = ((way, f"{taken:.2f}", f"{ratios[way]:.2f}") for way, taken in seconds.items())
    show(f"{count:.0f}M parameters", ("way", "seconds", "over bare weights"), rows)
