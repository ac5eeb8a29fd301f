"""Reconstruct images with the encoder of one seed and the decoder of another (Moschella et al. 2023, section 5.1).

Autoencoders and variational autoencoders on MNIST, Fashion-MNIST, CIFAR-10 and CIFAR-100, absolute and relative, for
all ordered pairs of seeds.

    python -m relative_representations.reconstruction --data-dir DATA --cache CACHE --out OUT
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import study
import torch
from matplotlib.figure import Figure
from relative_representations import autoencoders, images
from relative_representations.autoencoders import Autoencoder, Recipe
from relative_representations.images import TITLES
from relative_representations.kept import ABSOLUTE, RELATIVE, Array, Claim, Exchange, Pairs, footer, span
from relative_representations.swapping import INVERSE, TRANSLATIONS, TRUNCATED
from torch import Tensor

from hf_stitch.relative import select_anchors
from hf_stitch.statistics import Moments


@dataclass(frozen=True)
class Preset:
    """Sizes and hyperparameters of the experiment on one data set."""

    train: int  # images, at most
    test: int
    anchors: int  # also the width of absolute codes
    width: float  # multiplier of the channels in the paper
    epochs: int
    seeds: int  # networks of each kind


SMALL = Preset(6_000, 1_000, 200, 0.25, 8, 3)
PRESETS = {
    "small": {
        **dict.fromkeys(TITLES, SMALL),
        "fashion_mnist": Preset(8_000, 1_000, 300, 0.5, 6, 3),
        "mnist": replace(SMALL, epochs=20),
    },
    "test": dict.fromkeys(TITLES, Preset(100, 40, 20, 0.25, 1, 2)),
    "paper": dict.fromkeys(TITLES, Preset(60_000, 10_000, 500, 1.0, 50, 5)),
}
PAPER = {
    "mnist": ("0.66, 97.79", "1.18, 2.83"),
    "fashion_mnist": ("1.57, 120.54", "3.59, 6.37"),
    "cifar10": ("1.94, 86.74", "2.83, 5.39"),
    "cifar100": ("2.13, 97.17", "3.50, 18.03"),
}
"""Results of the paper for autoencoders, non-stitched and stitched: absolute and relative. It prints none for VAEs."""
KINDS = ("AE", "VAE")
OWN, OTHER = "non-stitched", "stitched"
WIDE = "lstsq"
MUCH, LITTLE = 0.8, 0.2
"""Shares of the gain over the mean image: at least kept by relative networks, at most kept by absolute ones."""
SHOWN = 10
"""Number of images per row of the figure."""
DRAWN = [(method, way) for method in (ABSOLUTE, RELATIVE) for way in (OWN, OTHER)] + [
    (method, OTHER) for method in (INVERSE, TRUNCATED, "ridge")
]
"""Rows of the figure."""


def main() -> None:
    """Run the experiment from the command line."""
    arguments = study.parser(__doc__, "data-dir", "cache").parse_args()
    presets = PRESETS[arguments.preset]
    errors, sizes, pictures = [], {}, {}
    for name, preset in presets.items():
        found, sizes[name], drawn = errors_of(name, preset, arguments)
        errors += found
        pictures[f"reconstruction_{name}"] = _grid(drawn)
        print(f"{name}: done", flush=True)
    record = {"preset": arguments.preset, "sizes": sizes, "errors": errors}
    study.leave("reconstruction", record, page, pictures, arguments.out)


def errors_of(
    name: str, preset: Preset, arguments: Any
) -> tuple[list[dict[str, Any]], dict[str, float], dict[str, Tensor]]:
    """Train all networks of a data set and reconstruct its test images with every pair.

    Returns:
        For each kind and method, ``mse`` × 10³ (rows of decoders by columns of encoders); sizes; images of the figure.
    """
    train, test = images.parts(name, preset.train, preset.test, arguments.data_dir)
    seen, held = images.pixels(train) / 255, images.pixels(test) / 255
    anchors = images.pixels(select_anchors(train, preset.anchors, "random")) / 255
    sizes = {
        "train": len(seen), "test": len(held), "anchors": len(anchors), "width": preset.width, "epochs": preset.epochs,
        "steps": preset.epochs * max(1, len(seen) // 128), "seeds": preset.seeds,
        "mean": 1000 * (seen.mean(0) - held).square().mean().item(),
    }  # fmt: skip
    rows, drawn = [], {"image": held[:SHOWN]}
    for kind in KINDS:
        networks = {
            relative: [
                autoencoders.trained(
                    Recipe(
                        relative, kind == "VAE", preset.anchors, preset.width, preset.epochs, seed=seed,
                        channels=seen.shape[1], side=seen.shape[2],
                    ),
                    seen, anchors, arguments.cache,
                )
                for seed in range(preset.seeds)
            ]
            for relative in (False, True)
        }  # fmt: skip
        errors: dict[str, dict[tuple[int, int], float]] = {}
        for source, target in product(range(preset.seeds), repeat=2):
            for method, decode in _ways(networks, source, target, anchors, seen):
                found = _batched(decode, held)
                errors.setdefault(method, {})[target, source] = 1000 * (found - held).square().mean().item()
                way = OWN if source == target else OTHER
                if (source, target) in ((0, 0), (0, 1)) and (method, way) in DRAWN:
                    drawn[f"{kind}, {method}, {way}"] = found[:SHOWN]
        places = range(preset.seeds)
        for method, pairs in errors.items():
            mse = [[round(pairs[target, source], 2) for source in places] for target in places]
            rows.append({"data": name, "network": kind, "method": method, "mse": mse})
    return rows, sizes, drawn


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


def _grid(drawn: dict[str, Tensor]) -> Figure:
    """Draw one row of images for each method."""
    figure = Figure(figsize=(0.55 * SHOWN + 2.6, 0.58 * len(drawn)), layout="constrained")
    axes = figure.add_subplot()
    rows = [torch.cat(list(pictures), dim=2) for pictures in drawn.values()]
    axes.imshow(torch.cat(rows, dim=1).permute(1, 2, 0), cmap="gray", vmin=0, vmax=1)
    side = rows[0].shape[1]
    axes.set_xticks([])
    axes.set_yticks([(place + 0.5) * side for place in range(len(rows))], list(drawn), fontsize=8)
    return figure


class Cell(Exchange):
    """The errors of one kind of network on one data set: scores are negative errors, chance is the mean image."""

    def __init__(self, record: dict[str, Any], data: str, network: str) -> None:
        rows = [row for row in record["errors"] if (row["data"], row["network"]) == (data, network)]
        self.mse: dict[str, Array] = {row["method"]: np.array(row["mse"]) for row in rows}
        self.mean, pairs = record["sizes"][data]["mean"], Pairs(["network"] * record["sizes"][data]["seeds"])
        super().__init__({method: -values for method, values in self.mse.items()}, pairs, -self.mean)
        self.name, self.title = f"{network} on {TITLES[data]}", (TITLES[data], network)
        self.paper = PAPER[data] if network == "AE" else ("–", "–")

    def error(self, method: str) -> float:
        """Return the mean error of decoders with their own encoders."""
        return -self.own(method)

    def stitched_error(self, method: str) -> str:
        """Return the mean error over pairs of different networks as text."""
        return self.pairs.mean(self.mse[method]).shown()

    @property
    def learnt(self) -> bool:
        """Whether networks with their own halves are better than the mean image."""
        return max(self.error(RELATIVE), self.error(ABSOLUTE)) < self.mean

    @property
    def claim_holds(self) -> bool:
        """Whether the claim holds by the rule of the page."""
        return self.learnt and self.holds(MUCH, LITTLE)

    @property
    def better(self) -> bool:
        """Whether relative networks keep more than absolute ones."""
        return self.learnt and self.kept_more(RELATIVE, ABSOLUTE).low > 0


def cells(record: dict[str, Any]) -> list[Cell]:
    """Return the cells of a record."""
    return [Cell(record, data, network) for data, network in product(record["sizes"], KINDS)]


SWAPPED = Claim(
    "section 5.1", "Decoders on relative representations, not on absolute ones, accept encoders of other seeds",
    "MSE × 10³ stitched: relative 2.8 to 18.0, absolute 87 to 121",
    f"for each kind of network on each data set, relative networks keep {MUCH:.0%} or more of the gain over the mean "
    f"image, and absolute ones at most {LITTLE:.0%}, by the interval; in part: for some, or relative ones keep more, "
    "by the paired interval",
)  # fmt: skip

PAGE = """# Reconstruct with the encoder of another seed (after Moschella et al., ICLR 2023, section 5.1)

**What to do**: train autoencoders on relative representations if their encoders must be exchanged. Absolute codes of
another seed are worse than the mean image.

{verdicts}

In the paper, the error of relative autoencoders grows by a factor of 2 to 5.

Setting: the architecture of the paper (four convolutions with stride 2 and a mirrored decoder) with fewer channels,
fewer images and a short training:

{sizes}

Of MNIST only 3,000 test images are at hand, 2,000 for training and the rest for testing; the split of CIFAR-100 is not
the official one. Anchors are random training images, embedded at every step; absolute codes are as wide as there are
anchors. The loss of the VAE uses the optimal variance of pixels, as the authors' code does. Mean squared error × 10³ on
test images, over all ordered pairs of seeds. *Own*: encoder and decoder of one network. *Stitched*: of two. *Mean
image*: the error of the mean training image. *Kept*: (mean image − error) / (mean image − own error), negative if worse
than the mean image. Intervals are 95% over networks (both of a pair are drawn), not over images; there are few.

The rule was fixed before the figures of this run were seen (those of an earlier, smaller run were known), with intervals
that do not overlap in place of paired ones until this version; networks must be better than the mean image with their
own halves. It holds in {holds} of {count} cases.

{summary}

{findings}

Maps between the codes of absolute networks, fitted on the anchors (least squares: on all training images, because the
anchors are too few). *Inverse relative* truncates only rounding errors (`rcond=1e-7`), *truncated* directions below a
tenth of the largest (`rcond=.1`):

{maps}

{footer}"""  # noqa: E501


def page(record: dict[str, Any]) -> str:
    """Return the page of the results from the record, as it is read from JSON."""
    found = cells(record)
    sizes = [
        (
            TITLES[name], f"{size['train']:,}", f"{size['test']:,}", size["anchors"],
            f"{size['width']:g} of the paper's", size["epochs"], f"{size['steps']:,}", size["seeds"],
        )
        for name, size in record["sizes"].items()
    ]  # fmt: skip
    header = ("data", "training images", "test images", "anchors", "channels", "epochs", "steps", "seeds")
    maps = [
        (*cell.title, method, cell.stitched_error(method), cell.kept(method).shown(2))
        for cell in found for method in cell.mse if method not in (ABSOLUTE, RELATIVE)
    ]  # fmt: skip
    return PAGE.format(
        footer=footer("reconstruction"),
        sizes=study.markdown(header, sizes), verdicts=study.verdicts(claims(record)),
        holds=sum(cell.claim_holds for cell in found), count=len(found),
        summary=_summary(found), findings="\n".join(f"- {finding}" for finding in _findings(found)),
        maps=study.markdown(("data", "network", "method", "stitched", "kept"), maps),
    )  # fmt: skip


def _summary(found: list[Cell]) -> str:
    rows = []
    for cell in found:
        stitched, own = cell.stitched(RELATIVE).value, cell.own(RELATIVE)
        errors = [
            text for method in (ABSOLUTE, RELATIVE)
            for text in (f"{cell.error(method):.1f}", cell.stitched_error(method))
        ]  # fmt: skip
        kept = [cell.kept(method).shown(2) for method in (ABSOLUTE, RELATIVE)]
        held = "yes" if cell.claim_holds else "no"
        rows.append((*cell.title, f"{cell.mean:.1f}", *errors, f"{stitched / own:.2f}", *kept, held, *cell.paper))
    header = (
        "data", "network", "mean image", "absolute, own", "stitched", "relative, own", "stitched", "stitched / own",
        "absolute, kept", "relative, kept", "holds", "paper, absolute: own, stitched", "relative: own, stitched",
    )  # fmt: skip
    return study.markdown(header, rows)


def _findings(found: list[Cell]) -> Iterator[str]:
    for reason, where in (
        ("the networks are not better than the mean image", [cell for cell in found if not cell.learnt]),
        ("relative networks keep too little", [cell for cell in found if cell.kept(RELATIVE).low < MUCH]),
        ("absolute networks keep too much", [cell for cell in found if cell.kept(ABSOLUTE).high > LITTLE]),
    ):
        if where:
            yield f"The claim misses because {reason}: {', '.join(cell.name for cell in where)}."
    worse = span(cell.own(RELATIVE) / cell.own(ABSOLUTE) for cell in found)
    yield f"Without stitching, the error of relative networks is {worse} times that of absolute ones."
    ridge = sum(cell.stitched("ridge").value > cell.stitched(RELATIVE).value for cell in found)
    yield (
        f"Ridge between absolute networks has a lower stitched error than relative networks in {ridge} of {len(found)} "
        "cases."
    )


def claims(record: dict[str, Any]) -> list[dict[str, str]]:
    """Return the rows of this experiment in the table of all experiments."""
    found, seeds = cells(record), [size["seeds"] for size in record["sizes"].values()]
    ours = ", ".join(f"{name} {span(cell.kept(name).value for cell in found)}" for name in (RELATIVE, ABSOLUTE))
    held = [all(cell.claim_holds for cell in found), any(cell.better for cell in found)]
    n = f"{len(seeds)} data sets, AE and VAE, {max(seeds)} seeds"
    return [SWAPPED.row(f"gain over the mean image kept: {ours}", n, held, min(seeds))]


if __name__ == "__main__":
    main()
