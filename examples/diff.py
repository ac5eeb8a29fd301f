"""Find the block that carries the change of a fine-tuned network, although all weights were quantized to int8."""

import copy

import torch
from hf_stitch_versions import diff
from networks import digits, vit

import hf_stitch

original, images = vit(), digits("test").take(200)
tuned = copy.deepcopy(original.model)
optimizer = torch.optim.Adam(tuned.vit.layers[1].parameters(), lr=1e-3)
batch = next(iter(digits().batches(100)))
inputs, labels = original.preprocess(batch.samples), torch.tensor(batch.labels)
for _ in range(10):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(tuned(**inputs).logits, 9 - labels).backward()
    optimizer.step()
for weight in tuned.parameters():
    if weight.dim() > 1:
        step = weight.data.flatten(1).abs().amax(1).view(-1, *[1] * (weight.dim() - 1)) / 127
        weight.data = (weight.data / step).round() * step

change = diff(original, hf_stitch.load(tuned, processor=original.processor), images, progress=False)
print(change.named("original", "tuned and rounded"))
