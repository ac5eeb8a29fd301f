"""End-to-end training with relative and with absolute representations (Moschella et al. 2023, section 4).

Anchors are embedded again every so many steps, without gradients. After training, encoders and heads of different seeds
are combined.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from relative_representations import heads, images, swapping
from relative_representations.training import train
from torch import Tensor, nn

from hf_stitch.artefacts import Head
from hf_stitch.relative import RelativeProjection
from hf_stitch.training import AnchorRefresh


@dataclass(frozen=True)
class Preset:
    """Sizes and hyperparameters of the experiment."""

    train: int  # images
    test: int
    anchors: int
    width: float  # multiplier of 32, 64, 128 and 256 channels
    epochs: int


PRESETS = {
    "small": Preset(4_000, 2_000, 300, 0.5, 5),
    "paper": Preset(60_000, 10_000, 300, 1.0, 30),
}
CHANNELS = (32, 64, 128, 256)


@dataclass(frozen=True)
class Task:
    """A classification task and its training."""

    build: Callable[[int], tuple[nn.Module, int]]  # seed -> network from indices of samples to vectors, and their width
    labels: Tensor
    train: Tensor  # indices of samples, as the next two
    test: Tensor
    different: Tensor  # training samples that networks can distinguish: candidates for anchors
    batch: int
    epochs: int
    learning_rate: float
    batch_norm: bool  # then the network embeds anchors in training mode


@dataclass(frozen=True)
class Trained:
    """A trained network in parts. Without a projection, the head receives absolute vectors."""

    encoder: nn.Module
    projection: RelativeProjection | None
    head: Head

    @torch.no_grad()
    def answers(self, other: "Trained", places: Tensor) -> Tensor:
        """Predict classes with the encoder of another network and the head of this one."""
        codes = torch.cat([other.encoder(some) for some in places.split(500)])
        if self.projection is not None and other.projection is not None:
            codes = self.projection.with_anchors(other.projection.anchors)(codes)
        return heads.answers(self.head, codes)


def fit(task: Task, anchors: Tensor | None, seed: int, every: int = 1) -> Trained:
    """Train encoder and head together; anchors, unless the network is absolute, are embedded every so many steps."""
    encoder, width = task.build(seed)
    projection = None if anchors is None else RelativeProjection(width, len(anchors))
    head = heads.new(width if projection is None else projection.out_features, int(task.labels.max()) + 1)
    whole = nn.ModuleList([encoder, head] if projection is None else [encoder, projection, head])
    options = {"encoder": encoder, "every": every, "batch_size": 10_000}
    refresh = None if anchors is None else AnchorRefresh(whole, anchors, training=task.batch_norm, **options)

    def loss(places: Tensor) -> Tensor:
        if refresh is not None:
            refresh.step()
        places = task.train[places]
        codes = encoder(places)
        features = codes if projection is None else projection(codes)
        return head(features=features, labels=task.labels[places]).loss

    train(
        whole, len(task.train), loss, epochs=task.epochs, batch=task.batch,
        learning_rate=task.learning_rate, weight_decay=5e-4, seed=seed, name="training",
    )  # fmt: skip
    if anchors is not None:
        AnchorRefresh(whole, anchors, **options).refresh()
    return Trained(encoder, projection, head)


def exchanged(networks: Sequence[Trained], task: Task) -> list[list[float]]:
    """Return the F1 of every head with every encoder, in percent."""
    truth = task.labels[task.test]
    return [[_f1(truth, head.answers(encoder, task.test)) for encoder in networks] for head in networks]


def _f1(truth: Tensor, predictions: Tensor) -> float:
    return round(swapping.scored(truth, predictions)["f1"], 2)


class Convolutional(nn.Module):
    """Four convolutions with stride 2, BatchNorm and GELU, and a linear layer, on images stored in the module."""

    def __init__(self, pixels: Tensor, width: float) -> None:
        super().__init__()
        self._images = (pixels / 255).contiguous(memory_format=torch.channels_last)
        widths = [pixels.shape[1], *(round(channels * width) for channels in CHANNELS)]
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            layers += [nn.Conv2d(before, after, 3, 2, 1), nn.BatchNorm2d(after), nn.GELU()]
        self.layers = nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * widths[-1], widths[-1]))
        self.to(memory_format=torch.channels_last)

    def forward(self, places: Tensor) -> Tensor:
        """Map indices of images ``(n,)`` to vectors ``(n, width)``."""
        return self.layers(self._images[places])


def of_images(name: str, preset: Preset, data_dir: str | None) -> Task:
    """Create an image classification task."""
    parts = images.parts(name, preset.train, preset.test, data_dir)
    pixels = torch.cat([images.pixels(part) for part in parts])
    labels = torch.tensor([label for part in parts for label in part.labels or []])
    places, count = torch.arange(len(pixels)), len(parts[0])

    def build(seed: int) -> tuple[nn.Module, int]:
        torch.manual_seed(seed)
        network = Convolutional(pixels, preset.width)
        return network, network.layers[-1].out_features

    return Task(build, labels, places[:count], places[count:], places[:count], 128, preset.epochs, 1e-3, True)


def anchors_of(task: Task, count: int) -> Tensor:
    """Select the indices of random training samples."""
    return task.different[torch.randperm(len(task.different), generator=torch.Generator().manual_seed(0))[:count]]
