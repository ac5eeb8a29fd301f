"""See what a job takes before it runs, and keep activations on the disk for the next one."""

import tempfile

from networks import cnn, digits, vit

import hf_stitch
from hf_stitch.analysis import extract_activations

print(hf_stitch.plan(hf_stitch.stitch_grid, cnn(), vit(), digits(), test_data=digits("test")))

with tempfile.TemporaryDirectory() as folder:
    for _ in range(2):  # the second time, the network does not run
        kept = extract_activations(cnn(), digits("test"), layers=["layer3.0"], cache=folder)
        print(kept.values["layer3.0"].shape, kept.layers)
