"""Image encoders, from the Hub through timm or trained here."""

from dataclasses import asdict, dataclass
from pathlib import Path

import images
import timm
import torch
from encoders import Encoder, digest
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from training import train

import hf_stitch

HUB = ("rexnet_100", "vit_base_patch16_224", "vit_base_resnet50_384", "vit_small_patch16_224")
"""Encoders of Moschella et al. 2023, section 5.2."""
FAMILIES = ("resnet", "rexnet", "vit")
SHAPES = {
    "resnet": ("resnet18", {"layers": (1, 1, 1, 1), "channels": (16, 32, 64, 128)}),
    "rexnet": ("rexnet_100", {"width_mult": 0.35, "depth_mult": 0.5}),
    "vit": ("vit_tiny_patch16_224", {"img_size": 32, "patch_size": 8, "embed_dim": 128, "depth": 3, "num_heads": 4}),
}
"""Family -> timm architecture and arguments that reduce its size."""
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


@dataclass(frozen=True)
class Recipe:
    """Architecture and training of a local encoder.

    Attributes:
        family: One of ``FAMILIES``.
        epochs: Training epochs as a classifier.
        seed: Seed of weights, order and augmentation.
    """

    family: str
    epochs: int
    seed: int = 0


def hub(name: str) -> Encoder:
    """Load a pretrained encoder. Its vectors are the pooled features, as in the paper."""
    return Encoder(name, hf_stitch.load(f"timm:{name}", pretrained=True, num_classes=0), None)


def local(recipe: Recipe, corpus: hf_stitch.Samples, cache: Path, name: str = "") -> Encoder:
    """Load a classifier of 32 × 32 images from the cache, or train it. Its vectors are the pooled features."""
    shape = SHAPES[recipe.family]
    path = cache / "encoders" / f"{recipe.family}-{digest(asdict(recipe), shape, corpus.fingerprint)}.safetensors"
    torch.manual_seed(recipe.seed)
    architecture, options = shape
    network = timm.create_model(architecture, num_classes=corpus.num_classes, **options)
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
    from torchvision.transforms.functional import pil_to_tensor

    return normalised(pil_to_tensor(image.convert("RGB")))
