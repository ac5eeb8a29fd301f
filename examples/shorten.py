"""Remove half of the blocks of a transformer without training; then train it, and the same blocks only dropped."""

import tempfile

import torch
from hf_stitch_shorten import shorten
from networks import digits, vit
from torch.nn.functional import kl_div
from transformers import ViTForImageClassification

import hf_stitch

whole, images, test = vit(), digits(), digits("test")
short = shorten(whole, images, remove=2, test_data=test, progress=False)
print(short)

with tempfile.TemporaryDirectory() as folder:
    short.save_pretrained(folder)
    model = ViTForImageClassification.from_pretrained(folder)  # an ordinary model of two blocks
print("blocks:", model.config.num_hidden_layers)

keep = [layer for layer in whole.layers[1:] if layer not in short.removed]
dropped = shorten(whole, images, remove=2, keep=keep, matcher="drop", test_data=test, progress=False)


def divergence(network: hf_stitch.Adapter, batch: hf_stitch.data.Batch) -> torch.Tensor:
    """Return the divergence of a network's outputs from the whole network's."""
    inputs = whole.preprocess(batch.samples)
    with torch.no_grad():
        reference = whole.forward(inputs).logits.log_softmax(-1)
    return kl_div(network.model(**inputs).logits.log_softmax(-1), reference, log_target=True, reduction="batchmean")


for name, network in (("refitted", hf_stitch.load(model, processor=whole.processor)), ("dropped", dropped.model)):
    optimizer = torch.optim.AdamW(network.model.parameters(), lr=1e-4)
    for batch in images.batches(100):
        optimizer.zero_grad()
        divergence(network, batch).backward()
        optimizer.step()
    (held_out,) = test.batches(len(test))
    print(f"{name}, trained on: divergence from the whole network {divergence(network, held_out).item():.3f}")
