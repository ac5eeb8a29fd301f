"""Convolutional networks for images of 32×32 pixels, datasets, and the training loop of these experiments."""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import study
import torch
from dr_frankenstein import images, networks
from dr_frankenstein.networks import normalised
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from tqdm.auto import tqdm

from hf_stitch.storage.files import write_whole


class Convolutions(nn.Module):
    """3×3 convolutions ``conv1``, … with ReLU ``relu1``, … and max pooling, and a linear layer ``fc``.

    Accepts images of 32×32 pixels.
    """

    def __init__(self, channels: Sequence[int], classes: int) -> None:
        super().__init__()
        self.count, before = len(channels), 3
        for i, wide in enumerate(channels, 1):
            self.add_module(f"conv{i}", nn.Conv2d(before, wide, 3, padding=1))
            self.add_module(f"relu{i}", nn.ReLU())
            before = wide
        for i in range(1, self.count + 1):
            nn.init.kaiming_normal_(self.get_parameter(f"conv{i}.weight"), nonlinearity="relu")
        self.fc = nn.Linear(before * (32 >> len(channels)) ** 2, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images ``(batch, 3, 32, 32)`` to logits ``(batch, classes)``."""
        for i in range(1, self.count + 1):
            x = functional.max_pool2d(self.get_submodule(f"relu{i}")(self.get_submodule(f"conv{i}")(x)), 2)
        return self.fc(x.flatten(1))


def alexnet(classes: int, width: float) -> nn.Module:
    """Create AlexNet for small images, with channels multiplied by ``width``."""
    return Convolutions([round(channels * width) for channels in (64, 128, 256)], classes)


def seeded(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Create a network with a seed, without changing the global random state."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build()


def fresh_head(network: nn.Module, classes: int, seed: int) -> None:
    """Replace the linear layer ``fc`` by a randomly initialised layer."""
    features = network.get_parameter("fc.weight").shape[1]
    network.add_module("fc", seeded(lambda: nn.Linear(features, classes), seed))


def published(folder: Path, number: int) -> nn.Module:
    """Load a published Tiny-10, trained on CIFAR-10, from the folder that contains ``drfrankenstein_tiny10``."""
    return networks.read(folder / "drfrankenstein_tiny10" / f"in{number}-gn{number}.safetensors")[0]


def load_or_train(path: Path, network: nn.Module, fit: Callable[[nn.Module], None]) -> nn.Module:
    """Load trained weights into a network from a file; train the network and save it first if the file is missing."""
    if not path.is_file():
        fit(network)
        state = {name: value.contiguous() for name, value in network.state_dict().items()}
        write_whole(path, lambda whole: save_file(state, whole))
    network.load_state_dict(load_file(path))
    return network.eval()


@dataclass(frozen=True, eq=False)
class Images:
    """Images with their classes."""

    pixels: Tensor  # the images ``(n, 3, 32, 32)`` uint8
    labels: Tensor  # their classes ``(n,)`` int64

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, count: int) -> "Images":
        return Images(self.pixels[:count], self.labels[:count])

    def select(self, places: Tensor) -> "Images":
        """Return the images at indices ``(m,)``, or where a mask ``(n,)`` is true."""
        return Images(self.pixels[places], self.labels[places])

    def of_classes(self, classes: Sequence[int]) -> "Images":
        """Return the images of some classes, renumbered 0, 1, … in the given order."""
        hits = self.labels[:, None] == torch.tensor(list(classes))
        inside = hits.any(1)
        return Images(self.pixels[inside], hits[inside].int().argmax(1))

    def inputs(self) -> Tensor:
        """Return the images as network inputs, ``(n, 3, 32, 32)`` float32."""
        return normalised(self.pixels)


def read(name: str, split: str, data_dir: str | None, count: int | None = None) -> Images:
    return Images(*images.read(name, split, count, data_dir))


@dataclass(frozen=True)
class Recipe:
    """Hyperparameters of training."""

    epochs: int  # passes over the images
    lr: float = 0.01  # learning rate, at its maximum
    batch: int = 64  # batch size; the last batch may be smaller
    schedule: Literal["constant", "cosine"] = "cosine"  # of the learning rate; ``cosine``: down to 0
    weight_decay: float = 0.0  # L2 penalty
    augment: bool = False  # whether images are flipped and cropped at random
    frozen_statistics: bool = False  # whether BatchNorm keeps its running statistics and uses them in training

    def share(self, done: float) -> float:
        """Return the factor of the learning rate after a share of the steps."""
        return 0.5 * (1 + math.cos(math.pi * done)) if self.schedule == "cosine" else 1.0

    def __str__(self) -> str:
        rate = f"learning rate {self.lr:g} ({self.schedule})"
        return f"{self.epochs} epochs of SGD with momentum .9, {rate}, batches of {self.batch}"


def train(network: nn.Module, data: Images, recipe: Recipe, seed: int, *, name: str = "training") -> None:
    """Minimise cross-entropy in bfloat16, and switch the network to eval mode."""
    generator = torch.Generator().manual_seed(seed)
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(parameters, recipe.lr, momentum=0.9, weight_decay=recipe.weight_decay)
    steps = recipe.epochs * math.ceil(len(data) / recipe.batch)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: recipe.share(step / steps))
    inputs = data.pixels if recipe.augment else data.inputs()
    with tqdm(total=steps, desc=name, delay=3, disable=not sys.stderr.isatty()) as bar:
        for _ in range(recipe.epochs):
            network.train()
            for module in network.modules() if recipe.frozen_statistics else ():
                module.train(not isinstance(module, nn.BatchNorm2d))
            for places in torch.randperm(len(data), generator=generator).split(recipe.batch):
                some = inputs[places]
                if recipe.augment:
                    some = normalised(images.augmented(some, generator))
                with torch.autocast("cpu", torch.bfloat16):
                    logits = network(some.contiguous(memory_format=torch.channels_last))
                study.descend(optimizer, functional.cross_entropy(logits.float(), data.labels[places]))
                rates.step()
                bar.update()
    network.eval()


@torch.no_grad()
def logits(network: nn.Module, data: Images) -> Tensor:
    """Return the outputs of a network ``(n, classes)`` in float32."""
    network.eval()
    return torch.cat([network(normalised(some)) for some in data.pixels.split(250)])


def accuracy(network: nn.Module, data: Images) -> float:
    """Return the share of correctly classified images."""
    return float((logits(network, data).argmax(1) == data.labels).float().mean())
