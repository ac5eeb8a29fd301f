"""Write artefacts of this version that later versions must read: ``python tests/hub/make_fixtures.py VERSION``.

The networks have random weights and take a few kB. Each artefact is written together with an input and its output.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from torch.nn import Linear, ReLU, Sequential

import hf_stitch

FIXTURES = Path(__file__).with_name("fixtures")
TINY = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}


def networks() -> tuple[hf_stitch.Adapter, hf_stitch.Adapter]:
    """Build two networks of user code, for a stitcher."""
    nets = []
    for seed in range(2):
        torch.manual_seed(seed)
        nets.append(Sequential(Linear(4, 6), ReLU(), Linear(6, 3)))
    a, b = (hf_stitch.load(net, example_inputs=torch.zeros(2, 4)) for net in nets)
    return a, b


def main(version: str) -> None:
    """Write both artefacts."""
    a, b = networks()
    rows = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    stitched = hf_stitch.stitch(
        a, b, rows, source_layer="1", target_layer="1", matcher="ridge", ridge=1.0, task=None, progress=False
    )
    folder = FIXTURES / version
    stitched.stitcher.save_pretrained(folder / "stitcher")
    with torch.no_grad():
        save_file({"input": rows[:3], "output": stitched(input=rows[:3])}, folder / "stitcher.answer.safetensors")

    vits = []
    for seed in range(2):
        torch.manual_seed(seed)
        config = transformers.ViTConfig(**TINY, image_size=4, patch_size=2, num_channels=1, num_labels=3)
        vits.append(hf_stitch.load(transformers.ViTForImageClassification(config).eval()))
    pictures = torch.randn(60, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    data = [{"image": picture, "label": i % 3} for i, picture in enumerate(pictures)]
    whole = hf_stitch.stitch(
        vits[0], vits[1], data, source_layer="vit.layers.0", target_layer="vit.layers.0", progress=False
    )
    whole.save_pretrained(folder / "model")
    with torch.no_grad():
        expected = {"pixel_values": pictures[:3], "output": whole(pixel_values=pictures[:3]).logits}
    save_file(expected, folder / "model.answer.safetensors")


if __name__ == "__main__":
    main(sys.argv[1])
