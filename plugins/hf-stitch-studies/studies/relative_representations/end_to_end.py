"""End-to-end training with relative and with absolute representations (Moschella et al. 2023, section 4).

Anchors are re-embedded at a fixed interval of steps, without gradients. After training, encoders and heads of different
seeds are combined.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from dr_frankenstein import images
from relative_representations import heads, swapping
from relative_representations.training import train
from torch import Tensor, nn

from hf_stitch.artefacts import Head
from hf_stitch.relative import RelativeProjection
from hf_stitch.training import AnchorRefresh

TRAIN, TEST, ANCHORS = 4_000, 2_000, 300
CHANNELS, EPOCHS = (16, 32, 64, 128), 5


@dataclass(frozen=True)
class Task:
    """Images of Fashion-MNIST, their classes, and the indices of the anchors among the training images."""

    pixels: Tensor
    labels: Tensor
    anchors: Tensor

    @classmethod
    def read(cls, data_dir: str | None) -> "Task":
        """Read the training images, followed by the test images."""
        parts = [images.raw("fashion_mnist", *part, data_dir) for part in (("train", TRAIN), ("test", TEST))]
        pixels = torch.cat([images.pixels(part) for part in parts])
        labels = torch.tensor([label for part in parts for label in part.labels or []])
        return cls(pixels, labels, torch.randperm(TRAIN, generator=torch.Generator().manual_seed(0))[:ANCHORS])

    @property
    def test(self) -> Tensor:
        return torch.arange(TRAIN, len(self.labels))


@dataclass(frozen=True)
class Trained:
    """Parts of a trained network. Without a projection, the head receives absolute vectors."""

    encoder: nn.Module
    projection: RelativeProjection | None
    head: Head

    @torch.no_grad()
    def answers(self, source: "Trained", places: Tensor) -> Tensor:
        """Predict classes with the encoder of another network and the head of this network."""
        codes = torch.cat([source.encoder(some) for some in places.split(500)])
        if self.projection is not None and source.projection is not None:
            codes = self.projection.with_anchors(source.projection.anchors)(codes)
        return heads.answers(self.head, codes)


def fit(task: Task, every: int | None, seed: int) -> Trained:
    """Train encoder and head together, and embed the anchors every ``every`` steps (``None``: absolute vectors)."""
    torch.manual_seed(seed)
    encoder, width = Convolutional(task.pixels), CHANNELS[-1]
    projection = None if every is None else RelativeProjection(width, ANCHORS)
    head = heads.new(width if projection is None else projection.out_features, int(task.labels.max()) + 1)
    whole = nn.ModuleList([encoder, head] if projection is None else [encoder, projection, head])
    options = {"encoder": encoder, "every": every, "batch_size": 10_000}
    refresh = None if every is None else AnchorRefresh(whole, task.anchors, training=True, **options)

    def loss(places: Tensor) -> Tensor:
        if refresh is not None:
            refresh.step()
        codes = encoder(places)
        features = codes if projection is None else projection(codes)
        return head(features=features, labels=task.labels[places]).loss

    train(
        whole, TRAIN, loss, epochs=EPOCHS, batch=128, learning_rate=1e-3, weight_decay=5e-4, seed=seed, name="training"
    )
    if every is not None:
        AnchorRefresh(whole, task.anchors, **options).refresh()
    return Trained(encoder, projection, head)


def exchanged(networks: Sequence[Trained], task: Task) -> list[list[float]]:
    """Return the F1 of every head with every encoder, in percent."""
    truth = task.labels[task.test]
    return [
        [round(swapping.scored(truth, head.answers(encoder, task.test)), 2) for encoder in networks]
        for head in networks
    ]


class Convolutional(nn.Module):
    """Four stride-2 convolutions with BatchNorm and GELU, and a linear layer, on images stored in the module."""

    def __init__(self, pixels: Tensor) -> None:
        super().__init__()
        self._images = (pixels / 255).contiguous(memory_format=torch.channels_last)
        layers: list[nn.Module] = []
        for before, after in pairwise((pixels.shape[1], *CHANNELS)):
            layers += [nn.Conv2d(before, after, 3, 2, 1), nn.BatchNorm2d(after), nn.GELU()]
        self.layers = nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * CHANNELS[-1], CHANNELS[-1]))
        self.to(memory_format=torch.channels_last)

    def forward(self, places: Tensor) -> Tensor:
        """Map indices of images ``(n,)`` to vectors ``(n, width)``."""
        return self.layers(self._images[places])
