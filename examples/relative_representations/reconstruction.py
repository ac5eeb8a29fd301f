"""Reconstruct images with the encoder of one seed and the decoder of another (Moschella et al. 2023, section 5.1).

Autoencoders and variational autoencoders on Fashion-MNIST, absolute and relative, for all ordered pairs of seeds.

    python examples/relative_representations/reconstruction.py --data-dir DATA --cache CACHE --out OUT
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import product

import autoencoders
import experiment
import images
import pandas as pd
import torch
from autoencoders import Autoencoder, Recipe
from experiment import spread
from matplotlib.figure import Figure
from swapping import ABSOLUTE, INVERSE, OTHER, OWN, RELATIVE, TRANSLATIONS, TRUNCATED
from torch import Tensor

from hf_stitch.relative import select_anchors
from hf_stitch.statistics import Moments


@dataclass(frozen=True)
class Preset:
    """Sizes and hyperparameters of the experiment.

    Attributes:
        train: Number of training images.
        test: Number of test images.
        anchors: Number of anchors, and width of absolute codes.
        width: Multiplier of the channels in the paper.
        epochs: Passes over the training images.
        seeds: Number of networks of each kind.
    """

    train: int
    test: int
    anchors: int
    width: float
    epochs: int
    seeds: int


PRESETS = {
    "small": Preset(4_000, 2_000, 300, 0.5, 6, 3),
    "test": Preset(150, 60, 20, 0.25, 1, 2),
    "paper": Preset(60_000, 10_000, 500, 1.0, 50, 5),
}
PAPER = {
    ("AE", ABSOLUTE): ("1.57 ± 0.03", "120.54 ± 6.81"),
    ("AE", RELATIVE): ("3.59 ± 0.04", "6.37 ± 0.29"),
}
"""Results of the paper on Fashion-MNIST. The paper prints no rows for the VAE."""
WIDE = "lstsq"
MEAN = "mean image"
SHOWN = 10
"""Number of images per row of the figure."""
DRAWN = [(method, way) for method in (ABSOLUTE, RELATIVE) for way in (OWN, OTHER)] + [
    (method, OTHER) for method in (INVERSE, TRUNCATED, "ridge")
]
"""Rows of the figure."""


def main() -> None:
    """Run the experiment from the command line."""
    arguments = experiment.parser(__doc__).parse_args()
    preset = PRESETS[arguments.preset]
    train, test = (
        images.read("fashion_mnist", split, n, arguments.data_dir)
        for split, n in (("train", preset.train), ("test", preset.test))
    )
    seen, held = images.pixels(train) / 255, images.pixels(test) / 255
    anchors = images.pixels(select_anchors(train, preset.anchors, "random")) / 255
    rows, drawn = [], {"image": held[:SHOWN]}
    for variational in (False, True):
        kind = "VAE" if variational else "AE"
        networks = {
            relative: [
                autoencoders.trained(
                    Recipe(relative, variational, preset.anchors, preset.width, preset.epochs, seed=seed),
                    seen, anchors, arguments.cache,
                )
                for seed in range(preset.seeds)
            ]
            for relative in (False, True)
        }  # fmt: skip
        for source, target in product(range(preset.seeds), repeat=2):
            for method, decode in _ways(networks, source, target, anchors, seen):
                found = _batched(decode, held)
                error = 1000 * (found - held).square().mean().item()
                rows.append({"kind": kind, "method": method, "source": source, "target": target, "mse": error})
                way = OWN if source == target else OTHER
                if (source, target) in ((0, 0), (0, 1)) and (method, way) in DRAWN:
                    drawn[f"{kind}, {method}, {way}"] = found[:SHOWN]
        for target in range(preset.seeds):  # baseline without an encoder
            error = 1000 * (seen.mean(0) - held).square().mean().item()
            rows.append({"kind": kind, "method": MEAN, "source": -1, "target": target, "mse": error})
    found = pd.DataFrame(rows)
    record = {"preset": asdict(preset), "mse": found.to_dict("records")}
    experiment.leave("reconstruction", _table(found), record, {"reconstruction": _grid(drawn)}, arguments.out)


def _ways(
    networks: dict[bool, list[Autoencoder]], source: int, target: int, anchors: Tensor, seen: Tensor
) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    """Yield methods to reconstruct images with the encoder of one network and the decoder of another."""
    encoder, decoder = networks[False][source], networks[False][target]
    yield ABSOLUTE, lambda x: decoder.decode(encoder.codes(x))
    far, near = networks[True][source], networks[True][target]
    projection = near.projection.with_anchors(far.projection.anchors)
    yield RELATIVE, lambda x: near.decoder(near.enter(near.mean(projection(far.codes(x)))))
    for name, matcher in TRANSLATIONS.items():
        # Least squares is fitted on all images, because the anchors are too few.
        x, y = (_batched(network.codes, seen if name == WIDE else anchors) for network in (encoder, decoder))
        if name == WIDE and len(x) <= x.shape[1]:
            continue
        stitch = matcher.fit(Moments(x.shape[1], y.shape[1]).update(x, y))
        yield name, lambda x, stitch=stitch: decoder.decode(stitch(encoder.codes(x)))


@torch.no_grad()
def _batched(function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    return torch.cat([function(some) for some in rows.split(500)])


def _table(found: pd.DataFrame) -> str:
    rows = []
    for (kind, method), part in found.groupby(["kind", "method"], sort=False):
        own, other = part[part.source == part.target].mse.tolist(), part[part.source != part.target].mse.tolist()
        cells = [spread(values, 2) if values else "–" for values in (own, other)]
        rows.append((kind, method, *cells, *PAPER.get((kind, method), ("", ""))))
    return experiment.markdown(rows, ("network", "method", OWN, OTHER, f"paper, {OWN}", f"paper, {OTHER}"))


def _grid(drawn: dict[str, Tensor]) -> Figure:
    """Draw a grid with one row of images for each method."""
    figure = Figure(figsize=(0.55 * SHOWN + 2.6, 0.58 * len(drawn)), layout="constrained")
    for row, (name, pictures) in enumerate(drawn.items()):
        for column, picture in enumerate(pictures):
            axes = figure.add_subplot(len(drawn), len(pictures), row * len(pictures) + column + 1)
            axes.imshow(picture[0], cmap="gray", vmin=0, vmax=1)
            axes.set_xticks([])
            axes.set_yticks([])
            if column == 0:
                axes.set_ylabel(name, rotation=0, ha="right", va="center", fontsize=8)
    return figure


if __name__ == "__main__":
    main()
