"""Are angles between encodings preserved across seeds (Moschella et al. 2023, section 3)?

For pairs of encoders, the script compares the angles between pairs of test images under both encoders, measured at the
origin and at the mean. Untrained encoders and randomly paired images serve as baselines.

    python examples/relative_representations/angles.py --data-dir DATA --cache CACHE --out OUT
"""

from collections.abc import Mapping
from itertools import combinations

import cross_architecture
import cross_seed
import experiment
import image_encoders
import images
import numpy as np
import torch
from encoders import Encoder
from experiment import CHECK, spread
from image_encoders import Recipe
from matplotlib.figure import Figure
from torch import Tensor

from hf_stitch.metrics import relative_cosine
from hf_stitch.registry import registries

SAMPLES = {"small": 500, "test": 60, "paper": 2000}


def main() -> None:
    """Run the experiment from the command line."""
    arguments = experiment.parser(__doc__).parse_args()
    preset = cross_seed.PRESETS[arguments.preset]
    corpus = images.read("cifar10", "train", preset.corpus, arguments.data_dir)

    def encoder(family: str, epochs: int, seed: int) -> Encoder:
        return image_encoders.local(Recipe(family, epochs, seed), corpus, arguments.cache)

    groups = {
        "three seeds": [encoder("resnet", preset.pretraining, seed) for seed in range(3)],
        "three seeds, not trained": [encoder("resnet", 0, seed) for seed in range(3)],
        "three architectures": [
            encoder(family, cross_architecture.PRESETS["images", arguments.preset].pretraining, 0)
            for family in image_encoders.FAMILIES
        ],
    }
    rows, record, drawn = [], {"preset": arguments.preset, "images": SAMPLES[arguments.preset]}, {}
    for data in ("cifar10", "cifar100"):
        test = images.read(data, "test", SAMPLES[arguments.preset], arguments.data_dir)
        for name, encoders in groups.items():
            vectors = [each.vectors(test, arguments.cache) for each in encoders]
            for centred in (False, True):
                figures = [likeness(x, y, centred) for x, y in combinations(vectors, 2)]
                rows.append((data, name, "mean" if centred else "origin", *(
                    spread([figure[kind] for figure in figures], digits) for kind, digits in FIGURES.items()
                )))  # fmt: skip
                record[f"{data}, {name}, about the {rows[-1][2]}"] = figures
            drawn[data, name] = [angles(x - x.mean(0)) for x in vectors[:2]]
    header = ("images", "encoders", "angles about the", *FIGURES)
    text = "\n\n".join([f"**{CHECK}**", experiment.markdown(rows, header)])
    pictures = {"angles": _scattered({name: pair for (data, name), pair in drawn.items() if data == "cifar10"})}
    experiment.leave("angles", text, record, pictures, arguments.out)


FIGURES = {"correlation": 3, "difference": 1, "difference, paired at random": 1, "relative cosine": 3}
"""Measure -> number of digits in the table."""


def likeness(x: Tensor, y: Tensor, centred: bool) -> dict[str, float]:
    """Compare the angles between the same pairs of rows under two encoders.

    Args:
        x: Vectors of one encoder ``(n, d)``.
        y: Vectors of the other encoder ``(n, e)``, with corresponding rows.
        centred: Whether to measure angles at the mean instead of the origin.

    Returns:
        The Pearson correlation of the angles, their mean absolute difference in degrees, the same difference after
        shuffling one side as a baseline, and the mean relative cosine.
    """
    one, other = (angles(side - side.mean(0) if centred else side) for side in (x, y))
    shuffled = np.random.default_rng(0).permutation(other)
    return {
        "correlation": float(np.corrcoef(one, other)[0, 1]),
        "difference": float(np.abs(one - other).mean()),
        "difference, paired at random": float(np.abs(one - shuffled).mean()),
        "relative cosine": relative_cosine(x, y, center=centred).item(),
    }


def angles(rows: Tensor) -> np.ndarray:
    """Return the angles between all pairs of different rows in degrees ``(n · (n - 1) / 2,)``."""
    first, second = torch.triu_indices(len(rows), len(rows), 1)
    return registries.similarities.build("angular")(rows, rows)[first, second].rad2deg().double().numpy()


def _scattered(pairs: Mapping[str, list[np.ndarray]]) -> Figure:
    figure = Figure(figsize=(3.6 * len(pairs), 3.9), layout="constrained")
    for column, (name, (one, other)) in enumerate(pairs.items()):
        axes = figure.add_subplot(1, len(pairs), column + 1)
        axes.hexbin(one, other, gridsize=50, bins="log", cmap="viridis", linewidths=0)
        ends = [min(one.min(), other.min()), max(one.max(), other.max())]
        axes.plot(ends, ends, color="#e6550d", linewidth=1)
        axes.set(
            title=name,
            xlabel="angle under one encoder, degrees",
            ylabel="angle under the other, degrees",
            aspect="equal",
        )
        axes.spines[["top", "right"]].set_visible(False)
    return figure


if __name__ == "__main__":
    main()
