"""Compare and stitch your own networks: any module, and a function from an image to a tensor."""

import numpy as np
import torch
from networks import digits
from torch import nn

import hf_stitch


def pixels(image):
    """Convert an image to the input of the networks."""
    return torch.from_numpy(np.array(image.convert("L").resize((8, 8)))).float().flatten() / 255


def trained(width):
    """Train a small network."""
    torch.manual_seed(width)
    net = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    inputs = torch.stack([pixels(image) for batch in digits().batches(256) for image in batch.samples])
    optimizer, labels = torch.optim.Adam(net.parameters(), lr=0.01), torch.tensor(digits().labels)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs), labels).backward()
        optimizer.step()
    return hf_stitch.load(net.eval(), processor=pixels)


small, large = trained(32), trained(64)
print("cuts:", small.layers, "task:", small.task)
print(hf_stitch.compare(small, large, digits("test")))
print(hf_stitch.stitch(small, large, digits(), source_layer="3", target_layer="3").evaluation)
