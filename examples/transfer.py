"""Carry a probe from one network to another through a stitch, without labels."""

import torch
from hf_stitch_transfer import transfer_probe
from networks import cnn, digits, vit
from sklearn.linear_model import LogisticRegression

import hf_stitch
from hf_stitch.analysis import extract_activations

a, b, train, test = cnn(), vit(), digits(), digits("test")
layer_a, layer_b = "layer3.0", "vit.layers.2"


def rows(network, layer, samples):
    """Return the mean activation of each image."""
    return torch.as_tensor(extract_activations(network, samples, layers=[layer], pooling="mean").values[layer]).numpy()


probe = LogisticRegression(max_iter=2000).fit(rows(a, layer_a, train), train.labels)
options = {"pooling": "mean", "task": None}
forward = hf_stitch.stitch(a, b, train, source_layer=layer_a, target_layer=layer_b, **options)
back = hf_stitch.stitch(b, a, train, source_layer=layer_b, target_layer=layer_a, **options)

carried = transfer_probe(probe, forward, reverse=back)
print(f"in the network of the probe: {probe.score(rows(a, layer_a, test), test.labels):.2f}")
print(f"in the second network:       {carried.score(rows(b, layer_b, test), test.labels):.2f}")
