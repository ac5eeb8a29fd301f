"""Represent images by their similarities to anchors: a head trained on one encoder accepts another encoder."""

import torch
from networks import cnn, digits

from hf_stitch.analysis import extract_activations
from hf_stitch.relative import AnchorSet, RelativeProjection, select_anchors

train, test, layer = digits(), digits("test"), "layer3.0"
chosen = select_anchors(train, 100, "stratified")
anchors = AnchorSet.of(chosen)
for network in (cnn(0), cnn(1)):
    anchors = anchors.encode(network, layer, chosen, pooling="mean")


def relative(network, samples):
    """Return one vector of similarities for each image."""
    rows = extract_activations(network, samples, layers=[layer], pooling="mean").values[layer]
    project = RelativeProjection.of(anchors.values(network, layer), "cosine", center=True, ids=anchors.ids)
    return project(torch.as_tensor(rows))


head = torch.nn.Sequential(torch.nn.LayerNorm(100), torch.nn.Linear(100, 10))
optimizer = torch.optim.Adam(head.parameters(), lr=0.02)
rows, labels = relative(cnn(0), train), torch.tensor(train.labels)
for _ in range(100):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(head(rows), labels).backward()
    optimizer.step()

for seed, name in enumerate(("its own encoder", "another encoder, no training")):
    correct = head(relative(cnn(seed), test)).argmax(-1) == torch.tensor(test.labels)
    print(f"accuracy with {name}: {correct.float().mean():.2f}")
