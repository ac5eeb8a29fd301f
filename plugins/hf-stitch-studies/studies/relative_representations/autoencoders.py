"""Autoencoders and variational autoencoders whose decoder receives codes or relative representations."""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from relative_representations.encoders import digest
from relative_representations.training import train
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from hf_stitch.relative import RelativeProjection
from hf_stitch.training import AnchorRefresh

CHANNELS = (32, 64, 128, 256)


@dataclass(frozen=True)
class Recipe:
    """Architecture and training of an autoencoder (Moschella et al. 2023, appendix)."""

    relative: bool  # the decoder receives cosines to anchors
    variational: bool  # the input of the decoder is drawn from a normal distribution that depends on the image
    anchors: int  # also the width of absolute codes
    width: float  # multiplier of 32, 64, 128 and 256 channels
    epochs: int
    every: int = 1  # steps between embeddings of the anchors
    seed: int = 0
    channels: int = 1  # of an image: 1 or 3
    side: int = 28  # of an image: 28 or 32


class Autoencoder(nn.Module):
    """An encoder of four convolutions with stride 2, BatchNorm and GELU, and a mirrored decoder.

    The encoder ends in ``codes``. An absolute network computes them with a linear layer, a relative network without its
    last GELU. Everything after the codes belongs to the decoder, including the mean and variance of a variational one.
    """

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        widths = [recipe.channels, *(round(channels * recipe.width) for channels in CHANNELS)]
        self.recipe, self.features = recipe, 4 * widths[-1]
        blocks: list[nn.Module] = []
        for before, after in pairwise(widths):
            blocks += [nn.Conv2d(before, after, 3, 2, 1), nn.BatchNorm2d(after), nn.GELU()]
        self.encoder = nn.Sequential(
            *(blocks[:-1] if recipe.relative else blocks), nn.Flatten(),
            nn.Identity() if recipe.relative else nn.Linear(self.features, recipe.anchors),
        )  # fmt: skip
        width = recipe.anchors
        self.projection = RelativeProjection(self.features, width) if recipe.relative else nn.Identity()
        self.mean = nn.Linear(width, width) if recipe.variational else nn.Identity()
        self.log_variance = nn.Linear(width, width) if recipe.variational else None
        self.enter = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, self.features), nn.GELU())
        back = list(reversed(widths[1:]))
        # From 2 × 2 to 4 × 4, 7 × 7, 14 × 14 and 28 × 28, or to 4 × 4, 8 × 8, 16 × 16 and 32 × 32.
        blocks = []
        for before, after, extra in zip(back, [*back[1:], back[-1]], (1, int(recipe.side == 32), 1, 1), strict=True):
            up = nn.ConvTranspose2d(before, after, 3, 2, 1, output_padding=extra)
            blocks += [up, nn.BatchNorm2d(after), nn.GELU()]
        self.decoder = nn.Sequential(
            nn.Unflatten(1, (back[0], 2, 2)), *blocks, nn.Conv2d(back[-1], recipe.channels, 3, padding=1), nn.Sigmoid()
        )
        self.to(memory_format=torch.channels_last)  # faster on a CPU

    def codes(self, images: Tensor) -> Tensor:
        """Encode images ``(n, channels, side, side)`` to codes ``(n, width)``."""
        return self.encoder(images)

    def decode(self, codes: Tensor) -> Tensor:
        """Decode codes ``(n, width)`` to images; codes of another encoder require that its anchors are set."""
        return self.decoder(self.enter(self.mean(self.projection(codes))))

    def loss(self, images: Tensor) -> Tensor:
        """Return the mean squared error, or if variational the negative evidence bound with the best pixel variance."""
        projected = self.projection(self.codes(images))
        mean = self.mean(projected)
        if self.log_variance is None:
            return functional.mse_loss(self.decoder(self.enter(mean)), images)
        log_variance = self.log_variance(projected)
        drawn = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        error = functional.mse_loss(self.decoder(self.enter(drawn)), images)
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1).mean()
        return 0.5 * images[0].numel() * error.log() + divergence


def trained(recipe: Recipe, images: Tensor, anchors: Tensor, cache: Path) -> Autoencoder:
    """Load a network, trained on images in [0, 1], with embedded anchors from the cache, or train and save it."""
    torch.manual_seed(recipe.seed)
    network = Autoencoder(recipe)
    made_by = digest(str(recipe), images.shape, images.sum().item(), anchors.shape, anchors.sum().item())
    path = cache / "autoencoders" / f"{made_by}.safetensors"
    if not path.is_file():
        options = {"encoder": network.codes, "every": recipe.every, "batch_size": len(anchors)}
        # In training, BatchNorm normalises anchors by batch, as it does images.
        refresh = AnchorRefresh(network, anchors, training=True, **options) if recipe.relative else None

        def loss(places: Tensor) -> Tensor:
            if refresh is not None:
                refresh.step()
            return network.loss(images[places])

        train(
            network, len(images), loss, epochs=recipe.epochs, batch=128, learning_rate=1e-3, clip=10.0,
            seed=recipe.seed, name="training an autoencoder",
        )  # fmt: skip
        if recipe.relative:
            AnchorRefresh(network, anchors, **options).refresh()
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: value.contiguous() for name, value in network.state_dict().items()}, path)
    network.load_state_dict(load_file(path))
    return network.eval()
