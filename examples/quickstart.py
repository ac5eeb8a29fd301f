"""Stitch two networks, score the result and save it, with the networks that ``make quickstart`` trained on digits.

python examples/quickstart.py [FOLDER]        # FOLDER: output folder of the quickstart, by default runs/quickstart
"""

import sys
from pathlib import Path

import hf_stitch
from hf_stitch.data import read_data

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/quickstart")
source = hf_stitch.load(str(folder / "networks" / "cnn-0"))
target = hf_stitch.load(str(folder / "networks" / "vit-0"))
print("cuts of the source:", ", ".join(source.layers))
print("cuts of the target:", ", ".join(target.layers))

stitched = hf_stitch.stitch(
    source,
    target,
    read_data("sklearn:digits", split="train"),
    source_layer=source.layers[2],
    target_layer=target.layers[2],
    matcher="ridge",
    ridge="gcv",
    test_data=read_data("sklearn:digits", split="test"),
)
print(stitched.evaluation)

stitched.stitcher.save_pretrained(folder / "mine")
again = hf_stitch.Stitcher.from_pretrained(folder / "mine").attach(source, target)
print("saved, reloaded and attached:", again.stitcher)
