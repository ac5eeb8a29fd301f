"""Stitch every layer of one network into every layer of another, and ask a detector which activations are strange."""

from networks import cnn, digits, noise, vit

import hf_stitch

grid = hf_stitch.stitch_grid(
    cnn(),
    vit(),
    digits(),
    test_data=digits("test"),
    layers_a=["layer2.0", "layer3.0", "layer4.0"],  # default: all
    layers_b=["vit.layers.1", "vit.layers.2"],
    matchers=["lstsq", "procrustes"],
    detectors=["knn"],
    far_data=noise(),  # a control: the detector counts only if it finds these strange
)
print(grid)
print("out of distribution:", grid.is_strange("lstsq").tolist())
grid.to_html("grid.html")
