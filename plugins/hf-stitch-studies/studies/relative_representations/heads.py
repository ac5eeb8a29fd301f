"""Heads on precomputed vectors of encoders."""

import torch
from relative_representations.training import train
from torch import Tensor

from hf_stitch.artefacts import Head, HeadConfig

HIDDEN = 256


def new(width: int, classes: int) -> Head:
    return Head(HeadConfig(in_features=width, hidden_size=HIDDEN, num_labels=classes))


def trained(vectors: Tensor, labels: Tensor, classes: int, epochs: int) -> Head:
    """Train a head on vectors ``(n, width)`` and classes ``(n,)``."""
    torch.manual_seed(0)
    head = new(vectors.shape[1], classes)
    train(
        head, len(vectors), lambda places: head(features=vectors[places], labels=labels[places]).loss,
        epochs=epochs, batch=128, learning_rate=2e-3, seed=0, name="training a head",
    )  # fmt: skip
    return head


@torch.no_grad()
def answers(head: Head, vectors: Tensor) -> Tensor:
    """Predict classes ``(n,)``."""
    return torch.cat([head(features=some).logits.argmax(1) for some in vectors.split(100)])
