"""Heads on precomputed vectors of encoders."""

import torch
from relative_representations.training import train
from torch import Tensor

from hf_stitch.artefacts import Head, HeadConfig

HIDDEN = 256


def new(width: int, classes: int, *, paper: bool = False) -> Head:
    """Create an untrained head: inductive, or with the normalisation of the authors' code."""
    kind = "paper" if paper else "inductive"
    return Head(HeadConfig(in_features=width, hidden_size=HIDDEN, num_labels=classes, kind=kind))


def trained(
    vectors: Tensor, labels: Tensor, classes: int, *, epochs: int, batch: int, learning_rate: float, seed: int,
    paper: bool = False,
) -> Head:  # fmt: skip
    """Train a head on vectors ``(n, width)`` and classes ``(n,)``."""
    torch.manual_seed(seed)
    head = new(vectors.shape[1], classes, paper=paper)
    train(
        head, len(vectors), lambda places: head(features=vectors[places], labels=labels[places]).loss,
        epochs=epochs, batch=batch, learning_rate=learning_rate, seed=seed, name="training a head",
    )  # fmt: skip
    return head


@torch.no_grad()
def answers(head: Head, vectors: Tensor) -> Tensor:
    """Predict classes ``(n,)`` in batches of 100, because the predictions of the paper's head depend on the batch."""
    return torch.cat([head(features=some).logits.argmax(1) for some in vectors.split(100)])
