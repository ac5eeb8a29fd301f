"""Saving and loading a stitched model of 100M parameters, compared with bare safetensors files of the same weights."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

import hf_stitch
from benchmarks.timing import in_turn, machine

REPEATS = 5
WIDTH, LAYERS, VOCABULARY = 768, 12, 30_522


def model() -> hf_stitch.StitchedModel:
    """Stitch two networks of BERT-base's size, cut after their sixth blocks."""
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        intermediate_size=4 * WIDTH,
        num_labels=2,  # type: ignore[call-arg]  # a field of every config
    )
    network = hf_stitch.load(transformers.BertForSequenceClassification(config).eval())
    layer = f"bert.encoder.layer.{LAYERS // 2 - 1}"
    spec = network.spec(layer)
    stitch = hf_stitch.stitches.StitchingLayer(spec, spec, "none", hf_stitch.stitches.IdentityStitch(WIDTH, WIDTH))
    return hf_stitch.artefacts.joining.join(network, layer, stitch, network, layer, task="text-classification")


def main() -> None:
    """Run all ways in turn and print medians and ratios."""
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
    table = Table("way", "seconds", "over bare weights", title=f"{count:.0f}M parameters ({machine()})")
    for way, taken in seconds.items():
        table.add_row(way, f"{taken:.2f}", f"{taken / seconds[f'{way[:4]} bare weights']:.2f}")
    Console().print(table)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
