"""Run a network up to a layer, and on from there: the outputs equal the whole network's, bit for bit."""

import torch
from networks import images, vit

network = vit()
print("cuts:", ", ".join(network.layers))

inputs = network.preprocess(images(8))
layer = network.layers[1]
representation = network.encode(inputs, [layer])[layer]
print(f"at {layer}: {tuple(representation.values.shape)}, layout {representation.layout}")

with torch.no_grad():
    whole, halves = network.forward(inputs), network.decode(representation, layer)
print("same logits:", torch.equal(whole.logits, halves.logits))
