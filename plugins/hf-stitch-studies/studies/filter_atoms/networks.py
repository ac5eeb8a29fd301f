"""Convolutional networks for images of 32×32 pixels, the data sets, and the training loop of all experiments here."""

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import timm
import torch
from dr_frankenstein.networks import Tiny10, normalised
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from tqdm.auto import tqdm

import hf_stitch
from hf_stitch.data import read_data
from hf_stitch.storage.files import write_whole

# -- networks ----------------------------------------------------------------------------------------------------------


class AlexNet(nn.Module):
    """AlexNet for small images: 3×3 convolutions with ReLU, three of them with max pooling, and one linear layer.

    Layers are ``conv1`` to ``conv3`` or ``conv5``, and ``fc``. Activations are ``relu1`` and so on.

    Args:
        convolutions: 3 or 5.
        classes: Number of outputs.
        width: Multiplier of the channels.
    """

    CHANNELS: ClassVar = {3: (64, 128, 256), 5: (64, 192, 384, 256, 256)}
    POOLED: ClassVar = {3: (1, 2, 3), 5: (1, 2, 5)}

    def __init__(self, convolutions: Literal[3, 5] = 5, classes: int = 10, width: float = 1) -> None:
        super().__init__()
        self._pooled = self.POOLED[convolutions]
        before = 3
        for i, channels in enumerate(self.CHANNELS[convolutions], 1):
            wide = round(channels * width)
            self.add_module(f"conv{i}", nn.Conv2d(before, wide, 3, padding=1))
            self.add_module(f"relu{i}", nn.ReLU())
            before = wide
        _initialise(self)
        self.count = convolutions
        self.fc = nn.Linear(before * 16, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images ``(batch, 3, 32, 32)`` to logits ``(batch, classes)``."""
        for i in range(1, self.count + 1):
            x = self.get_submodule(f"relu{i}")(self.get_submodule(f"conv{i}")(x))
            if i in self._pooled:
                x = functional.max_pool2d(x, 2)
        return self.fc(x.flatten(1))


class VGG11(nn.Module):
    """VGG-11 for small images: eight 3×3 convolutions, each with BatchNorm and ReLU, and one linear layer.

    Layers are ``conv1`` to ``conv8``, ``bn1`` to ``bn8`` and ``fc``. Activations are ``relu1`` and so on.

    Args:
        classes: Number of outputs.
        width: Multiplier of the channels.
    """

    CHANNELS = (64, 128, 256, 256, 512, 512, 512, 512)
    POOLED = (1, 2, 4, 6, 8)

    def __init__(self, classes: int = 10, width: float = 1) -> None:
        super().__init__()
        before = 3
        for i, channels in enumerate(self.CHANNELS, 1):
            wide = round(channels * width)
            self.add_module(f"conv{i}", nn.Conv2d(before, wide, 3, padding=1, bias=False))
            self.add_module(f"bn{i}", nn.BatchNorm2d(wide))
            self.add_module(f"relu{i}", nn.ReLU())
            before = wide
        _initialise(self)
        self.fc = nn.Linear(before, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images ``(batch, 3, 32, 32)`` to logits ``(batch, classes)``."""
        for i in range(1, len(self.CHANNELS) + 1):
            x = self.get_submodule(f"bn{i}")(self.get_submodule(f"conv{i}")(x))
            x = self.get_submodule(f"relu{i}")(x)
            if i in self.POOLED:
                x = functional.max_pool2d(x, 2)
        return self.fc(x.flatten(1))


def _initialise(network: nn.Module) -> None:
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")


def resnet18(classes: int = 10) -> nn.Module:
    """Create a ResNet-18 with the stem for small images: a 3×3 convolution with stride 1 and no pooling."""
    network = timm.create_model("resnet18", num_classes=classes)
    network.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    network.maxpool = nn.Identity()
    return network


def seeded(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Create a network from the random numbers of a seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build()


def fresh_head(network: nn.Module, classes: int, seed: int) -> None:
    """Replace the linear layer ``fc`` with one of random weights."""
    features = network.get_parameter("fc.weight").shape[1]
    network.add_module("fc", seeded(lambda: nn.Linear(features, classes), seed))


def published(folder: Path, number: int) -> Tiny10:
    """Load a published Tiny-10, trained on CIFAR-10, from the folder that contains ``drfrankenstein_tiny10``."""
    return Tiny10.from_file(folder / "drfrankenstein_tiny10" / f"in{number}-gn{number}.safetensors")


def kept(path: Path, network: nn.Module, fit: Callable[[nn.Module], None]) -> nn.Module:
    """Load trained weights into a network from a file, after training and saving it if the file is missing.

    Returns:
        The network in eval mode.
    """
    if not path.is_file():
        fit(network)
        state = {name: value.contiguous() for name, value in network.state_dict().items()}
        write_whole(path, lambda whole: save_file(state, whole))
    network.load_state_dict(load_file(path))
    return network.eval()


# -- images ------------------------------------------------------------------------------------------------------------

SOURCES = {
    "cifar10": ("uoft-cs/cifar10", "label"),
    "cifar100": ("uoft-cs/cifar100", "fine_label"),
    "cifar100_coarse": ("uoft-cs/cifar100", "coarse_label"),
    "fashion_mnist": ("zalando-datasets/fashion_mnist", "label"),
    "mnist": ("ylecun/mnist", "label"),
}
"""Name -> data set on the Hub and its label column."""
TITLES = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "fashion_mnist": "Fashion-MNIST", "mnist": "MNIST"}


@dataclass(frozen=True, eq=False)
class Images:
    """Images with their classes.

    Attributes:
        pixels: The images ``(n, 3, 32, 32)`` uint8.
        labels: Their classes ``(n,)`` int64.
    """

    pixels: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, count: int) -> "Images":
        """Return the first images."""
        return Images(self.pixels[:count], self.labels[:count])

    def select(self, places: Tensor) -> "Images":
        """Return the images at places ``(m,)``, or where a mask ``(n,)`` is true."""
        return Images(self.pixels[places], self.labels[places])

    def of_classes(self, classes: Sequence[int]) -> "Images":
        """Return the images of some classes, which are numbered 0, 1, … in the order given."""
        wanted = torch.tensor(list(classes))
        hits = self.labels[:, None] == wanted
        inside = hits.any(1)
        return Images(self.pixels[inside], hits[inside].int().argmax(1))

    def inputs(self) -> Tensor:
        """Return the images as networks take them, ``(n, 3, 32, 32)`` float32."""
        return normalised(self.pixels)

    def samples(self) -> hf_stitch.Samples:
        """Return the images as samples of normalised tensors, with their labels."""
        return hf_stitch.Samples.of(self.inputs(), label=self.labels.tolist())


def joined(parts: Iterable[Images]) -> Images:
    """Return the images of several sets as one."""
    listed = list(parts)
    return Images(torch.cat([part.pixels for part in listed]), torch.cat([part.labels for part in listed]))


def read(name: str, split: str, data_dir: str | None, count: int | None = None) -> Images:
    """Read images of a data set as RGB of 32×32 pixels; smaller ones get a black frame.

    Args:
        name: A key of ``SOURCES``. Labels of ``cifar100`` are its 100 classes, of ``cifar100_coarse`` its 20.
        split: ``train`` or ``test``.
        data_dir: Local folder of the data sets. ``None``: the Hub.
        count: Number of images, from the first on. ``None``: all.
    """
    source, label = SOURCES[name]
    samples = hf_stitch.Samples.of(read_data(source, data_dir=data_dir, split=split), label=label)
    samples = samples if count is None else samples.take(min(count, len(samples)))
    batches = samples.batches(500, progress=f"{name} {split}")
    arrays = [np.asarray(image.convert("RGB")) for batch in batches for image in batch.samples]
    pixels = torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2)
    border = (32 - pixels.shape[-1]) // 2
    return Images(functional.pad(pixels, [border] * 4).contiguous(), torch.tensor(samples.labels))


def noise(count: int, seed: int = 0) -> Images:
    """Draw images of uniform noise, all of class 0."""
    pixels = torch.randint(0, 256, (count, 3, 32, 32), generator=torch.Generator().manual_seed(seed))
    return Images(pixels.to(torch.uint8), torch.zeros(count, dtype=torch.int64))


def augmented(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """Flip images ``(n, 3, 32, 32)`` at random and crop them after padding with 4 zeros."""
    n = len(pixels)
    rows, columns = torch.randint(0, 9, (2, n, 1), generator=generator) + torch.arange(32)
    columns = torch.where(torch.rand(n, 1, generator=generator) < 0.5, columns.flip(1), columns)
    padded = functional.pad(pixels, (4, 4, 4, 4))
    # Advanced indices around a slice come first: (n, 32, 32, 3).
    chosen = padded[torch.arange(n)[:, None, None], :, rows[:, :, None], columns[:, None, :]]
    return chosen.permute(0, 3, 1, 2)


# -- training ----------------------------------------------------------------------------------------------------------

Schedule = Literal["constant", "cosine", "step"]


@dataclass(frozen=True)
class Recipe:
    """Hyperparameters of training.

    Attributes:
        epochs: Passes over the images.
        lr: Learning rate, at its maximum.
        batch: Batch size. The last batch may be smaller.
        optimizer: ``sgd`` (with momentum .9) or ``adam``.
        schedule: ``constant``; ``cosine``: down to 0; ``step``: ÷ 10 after a third and after two thirds of the steps.
        weight_decay: L2 penalty.
        augment: Whether images are flipped and cropped at random.
        frozen_statistics: Whether BatchNorm keeps its running statistics and uses them in training.
    """

    epochs: int
    lr: float = 0.01
    batch: int = 64
    optimizer: Literal["sgd", "adam"] = "sgd"
    schedule: Schedule = "cosine"
    weight_decay: float = 0.0
    augment: bool = False
    frozen_statistics: bool = False

    def share(self, done: float) -> float:
        """Return the factor of the learning rate after a share of the steps."""
        if self.schedule == "cosine":
            return 0.5 * (1 + math.cos(math.pi * done))
        return 0.1 ** int(3 * done) if self.schedule == "step" else 1.0

    def __str__(self) -> str:
        name = "SGD with momentum .9" if self.optimizer == "sgd" else "Adam"
        return f"{self.epochs} epochs of {name}, learning rate {self.lr:g} ({self.schedule}), batches of {self.batch}"


def train(
    network: nn.Module,
    data: Images,
    recipe: Recipe,
    seed: int,
    *,
    penalty: Callable[[], Tensor] | None = None,
    after_epoch: Callable[[int], None] | None = None,
    name: str = "training",
) -> None:
    """Minimise cross-entropy in bfloat16, and switch the network to eval mode.

    Args:
        network: The network. Parameters that require a gradient are trained.
        data: Training images.
        recipe: Hyperparameters.
        seed: Seed of order and augmentation.
        penalty: Called after each forward pass, returns a scalar that is added to the loss.
        after_epoch: Called after each epoch with its number, from 1 on, with the network in eval mode.
        name: Label of the progress bar.
    """
    generator = torch.Generator().manual_seed(seed)
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    optimizer: torch.optim.Optimizer
    if recipe.optimizer == "sgd":
        optimizer = torch.optim.SGD(parameters, recipe.lr, momentum=0.9, weight_decay=recipe.weight_decay)
    else:
        optimizer = torch.optim.Adam(parameters, recipe.lr, weight_decay=recipe.weight_decay)
    steps = recipe.epochs * math.ceil(len(data) / recipe.batch)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: recipe.share(step / steps))
    inputs = data.pixels if recipe.augment else data.inputs()
    with tqdm(total=steps, desc=name, delay=3, disable=not sys.stderr.isatty()) as bar:
        for epoch in range(1, recipe.epochs + 1):
            _training_mode(network, recipe.frozen_statistics)
            for places in torch.randperm(len(data), generator=generator).split(recipe.batch):
                some = inputs[places]
                if recipe.augment:
                    some = normalised(augmented(some, generator))
                with torch.autocast("cpu", torch.bfloat16):
                    logits = network(some.contiguous(memory_format=torch.channels_last))
                loss = functional.cross_entropy(logits.float(), data.labels[places])
                if penalty is not None:
                    loss = loss + penalty()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                rates.step()
                bar.update()
            network.eval()
            if after_epoch is not None:
                after_epoch(epoch)


def _training_mode(network: nn.Module, frozen_statistics: bool) -> None:
    network.train()
    for module in network.modules():
        if frozen_statistics and isinstance(module, nn.BatchNorm2d):
            module.eval()


@torch.no_grad()
def logits(network: nn.Module, data: Images) -> Tensor:
    """Return the outputs of a network ``(n, classes)`` in float32."""
    network.eval()
    return torch.cat([network(normalised(some)) for some in data.pixels.split(250)])


def accuracy(network: nn.Module, data: Images) -> float:
    """Return the share of images that a network classifies right."""
    return float((logits(network, data).argmax(1) == data.labels).float().mean())
