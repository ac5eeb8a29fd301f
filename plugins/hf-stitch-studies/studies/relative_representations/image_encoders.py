"""Image encoders: published networks, from the Hub through timm, or trained here."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache as remembered
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from dr_frankenstein import networks
from PIL import Image
from relative_representations import images
from relative_representations.encoders import Encoder, digest
from relative_representations.training import train
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

import hf_stitch

HUB = ("rexnet_100", "vit_base_patch16_224", "vit_base_resnet50_384", "vit_small_patch16_224")
"""Encoders of Moschella et al. 2023, section 5.2."""
FAMILIES = ("resnet", "rexnet", "vit")
SHAPES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "resnet": ("resnet18", {"layers": (1, 1, 1, 1), "channels": (16, 32, 64, 128)}),
    "rexnet": ("rexnet_100", {"width_mult": 0.35, "depth_mult": 0.5}),
    "vit": ("vit_tiny_patch16_224", {"img_size": 32, "patch_size": 8, "embed_dim": 128, "depth": 3, "num_heads": 4}),
}
"""Family -> timm architecture and arguments that reduce its size."""
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)

FINAL = "final"
"""The pooled features before the classifier."""
PUBLISHED: Mapping[str, Mapping[str, str]] = {
    "tiny10": {"bn5": "bn5", "bn6": "bn6", FINAL: "bn8"},
    "resnet20": {"bn5": "layer2.2", "bn6": "layer3.0", FINAL: "layer3.2"},
}
"""Architecture -> cut -> layer. Both architectures have 32 features at ``bn5``, and 64 at the other cuts."""


@dataclass(frozen=True)
class Recipe:
    """Architecture and training of a local encoder."""

    family: str  # one of FAMILIES
    epochs: int  # as a classifier
    seed: int = 0  # of weights, order and augmentation


@dataclass(frozen=True)
class Published(Encoder):
    """A published network, encoded at all cuts of its architecture in one pass.

    Its vectors are the means over the positions of a layer; at the last cut, after the ReLU, they are the features of
    the classifier.
    """

    cuts: Mapping[str, str] | None = None  # cut -> layer of the architecture
    cut: str = FINAL  # whose vectors are wanted

    @torch.no_grad()
    def vectors(self, samples: hf_stitch.Samples, cache: Path) -> Tensor:
        """Encode samples as ``(n, width)`` float32, or read them from the cache."""
        assert self.cuts is not None
        weights = self.adapter.pinned.weights_hash
        path = cache / "vectors" / f"{digest(weights, dict(self.cuts), samples.fingerprint)}.safetensors"
        if not path.is_file():
            parts = [
                self._cuts_of(networks.normalised(some).contiguous(memory_format=torch.channels_last))
                for some in _squares(samples).split(250)
            ]
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file({cut: torch.cat([part[cut] for part in parts]) for cut in self.cuts}, path)
        return load_file(path)[self.cut]

    def _cuts_of(self, inputs: Tensor) -> dict[str, Tensor]:
        assert self.cuts is not None
        network, found = self.adapter.model, {}

        def keep(cut: str, values: Tensor) -> None:
            found[cut] = (functional.relu(values) if cut == FINAL else values).mean((2, 3))

        hooks = [
            network.get_submodule(layer).register_forward_hook(lambda _, inputs, output, cut=cut: keep(cut, output))
            for cut, layer in self.cuts.items()
        ]
        network(inputs)
        for hook in hooks:
            hook.remove()
        return found


@remembered
def _squares(samples: hf_stitch.Samples) -> Tensor:
    return images.squares(samples)


def published(folder: Path, architecture: str, count: int) -> list[Published]:
    """Load networks of Csiszárik et al. 2021, trained on CIFAR-10, by the numbers in the names of their files."""
    files = sorted((folder / f"drfrankenstein_{architecture}").glob("in*.safetensors"), key=_number)[:count]
    if len(files) < min(count, 2):
        raise FileNotFoundError(f"{folder} has too few networks in drfrankenstein_{architecture}")
    return [
        Published(
            f"{architecture} {_number(file)}", networks.adapted(networks.read(file)[0]), None,
            cuts=PUBLISHED[architecture],
        )
        for file in files
    ]  # fmt: skip


def _number(file: Path) -> int:
    return int(file.stem.split("-")[0].removeprefix("in"))


@torch.no_grad()
def untrained(architecture: str, seed: int, samples: hf_stitch.Samples) -> Published:
    """Create an untrained twin of a published architecture, with the statistics of images in BatchNorm."""
    torch.manual_seed(seed)
    network = (networks.Tiny10 if architecture == "tiny10" else networks.ResNet20)()
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None  # the mean over all batches
    network.train()
    for some in _squares(samples).split(250):
        network(networks.normalised(some))
    return Published(f"untrained {architecture} {seed}", networks.adapted(network), None, cuts=PUBLISHED[architecture])


def at(encoder: Encoder, cut: str) -> Encoder:
    """Return the encoder at another cut; encoders trained here have the last one only."""
    return replace(encoder, cut=cut) if isinstance(encoder, Published) else encoder


def hub(name: str) -> Encoder:
    """Load a pretrained encoder. Its vectors are the pooled features, as in the paper."""
    return Encoder(name, hf_stitch.load(f"timm:{name}", pretrained=True, num_classes=0), None)


def local(recipe: Recipe, corpus: hf_stitch.Samples, cache: Path, name: str = "") -> Encoder:
    """Load a classifier of 32 × 32 images from the cache, or train it. Its vectors are the pooled features."""
    shape = SHAPES[recipe.family]
    path = cache / "encoders" / f"{recipe.family}-{digest(asdict(recipe), shape, corpus.fingerprint)}.safetensors"
    torch.manual_seed(recipe.seed)
    architecture, options = shape
    network: Any = timm.create_model(architecture, num_classes=corpus.num_classes, **options)
    if recipe.family == "resnet":
        network.maxpool = nn.Identity()  # keeps enough resolution for 32 × 32 images
    if not path.is_file():
        _train(recipe, network, images.pixels(corpus), torch.tensor(corpus.labels))
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({key: value.contiguous() for key, value in network.state_dict().items()}, path)
    network.load_state_dict(load_file(path))
    network.reset_classifier(0)
    adapter = hf_stitch.load(network.eval(), example_inputs=torch.randn(2, 3, 32, 32), processor=_prepared)
    return Encoder(name or recipe.family, adapter, None)


def _train(recipe: Recipe, network: nn.Module, pixels: Tensor, labels: Tensor) -> None:
    network.to(memory_format=torch.channels_last)

    def loss(places: Tensor) -> Tensor:
        some = normalised(_augmented(pixels[places])).contiguous(memory_format=torch.channels_last)
        with torch.autocast("cpu", torch.bfloat16, enabled=recipe.family == "resnet"):
            logits = network(some)
        return functional.cross_entropy(logits.float(), labels[places])

    train(
        network, len(pixels), loss, epochs=recipe.epochs, batch=128, learning_rate=3e-3, weight_decay=0.05,
        schedule=True, clip=1.0, seed=recipe.seed, name=f"training {recipe.family}",
    )  # fmt: skip
    network.to(memory_format=torch.contiguous_format)


def _augmented(pixels: Tensor) -> Tensor:
    """Shift the batch by up to 4 pixels, and flip each image with probability 0.5."""
    rows, columns = torch.randint(-4, 5, (2,)).tolist()
    shifted = pixels.roll((rows, columns), (2, 3))
    return torch.where(torch.rand(len(pixels), 1, 1, 1) < 0.5, shifted.flip(3), shifted)


def normalised(pixels: Tensor) -> Tensor:
    """Normalise images ``(…, 3, height, width)`` uint8 for local encoders."""
    return (pixels / 255 - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]


def _prepared(image: Image.Image) -> Tensor:
    pixels = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
    return normalised(functional.pad(pixels, [(32 - pixels.shape[-1]) // 2] * 4))
