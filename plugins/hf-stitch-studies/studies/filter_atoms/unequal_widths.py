"""Can networks of unequal width be compared by their filters?

An open question of Chen, Miao & Qiu 2023. Coefficients of networks of unequal width differ in shape, so that S_Atom is
undefined. The metric ``filter_gram`` takes the Gram matrix of the spatial filters of a layer, which is k² × k² whatever
the width is.

    python -m filter_atoms.unequal_widths --networks NETWORKS --data-dir DATA --out OUT
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import study
from filter_atoms import networks, task_networks
from filter_atoms.experiment import OPTIONS, TRAINED, filled, leave
from filter_atoms.networks import Images, Recipe
from filter_atoms.pairwise import spearman
from hf_stitch_filter_atoms import FilterGram
from numpy.typing import NDArray
from study import parser, table
from torch import nn

from hf_stitch.metrics import linear_cka

from dr_frankenstein.networks import ResNet20  # isort: skip  # networks has made the folder known

NAME = "unequal_widths"
Array = NDArray[np.float64]
FOUND, FOLLOWS = 0.5, 0.5
"""The proposal works if the same layer is found for this share of layers, and the rank correlation with CKA is this."""
KINDS = ("unequal widths", "equal widths", "unequal widths, untrained")


@dataclass(frozen=True)
class Preset:
    """Sizes of the experiment."""

    epochs: Mapping[float, int]  # width of ResNet-20 -> epochs of training on CIFAR-10
    images: int  # number of training images
    seeds: int  # networks of each width
    probe: int  # number of test images for CKA
    positions: int = 8  # positions in each image


PRESETS = {
    "small": Preset({0.25: 12, 0.5: 6, 1: 3}, 50_000, 2, 500),
    "paper": Preset({0.25: 300, 0.5: 300, 1: 300, 2: 300}, 50_000, 5, 10_000),
    "test": Preset({0.25: 1, 0.5: 1}, 60, 2, 40, 2),
}


@dataclass(frozen=True, eq=False)
class Compared:
    """A network with what is compared of it."""

    width: float
    trained: bool
    read: Mapping[str, Any]
    rows: Mapping[str, Any]


def main() -> None:
    """Run the experiment from the command line."""
    arguments = parser(__doc__, *OPTIONS).parse_args()
    preset = PRESETS[arguments.preset]
    probe = networks.read("cifar10", "test", arguments.data_dir, preset.probe)
    found, accuracies = [], {}
    for width in preset.epochs:
        models = [trained(width, seed, preset, arguments) for seed in range(preset.seeds)]
        accuracies[f"{width:g}"] = [networks.accuracy(model, probe) for model in models]
        fresh = [networks.seeded(partial(ResNet20, width), 100 + seed) for seed in range(preset.seeds)]
        found += [prepared(model, width, True, probe, preset) for model in models]
        found += [prepared(model, width, False, probe, preset) for model in fresh]
    pairs: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    for i, one in enumerate(found):
        for other in found[:i]:
            if one.trained == other.trained and (kind := _kind(one, other)):
                pairs[kind].append(compared(other, one))
    record = {
        "preset": arguments.preset, "sizes": preset, "accuracies": accuracies, "layers": len(found[0].rows),
        "pairs": pairs,
    }  # fmt: skip
    leave(NAME, record, page, {}, arguments.out)


def trained(width: float, seed: int, preset: Preset, arguments: argparse.Namespace) -> nn.Module:
    """Load a ResNet-20, by the name that ``dr_frankenstein/base_training.py`` gives it, or train it."""
    epochs = preset.epochs[width]
    path = arguments.networks / f"resnet20-w{width:g}-cifar10-sgd-{preset.images}x{epochs}-seed{seed}.safetensors"

    def fit(network: nn.Module) -> None:
        images = networks.read("cifar10", "train", arguments.data_dir, preset.images)
        recipe = Recipe(epochs, 0.1, 128, schedule="step", weight_decay=1e-4, augment=True)
        networks.train(network, images, recipe, seed, name=path.stem)

    return networks.kept(path, networks.seeded(partial(ResNet20, width), seed), fit)


def prepared(model: nn.Module, width: float, is_trained: bool, probe: Images, preset: Preset) -> Compared:
    """Read filters and activations of a network."""
    model, _ = task_networks.atomic(model.eval())
    layers = task_networks.spatial(model)
    read = FilterGram().read(model)
    rows = task_networks.features(model, layers, probe, preset.positions)
    return Compared(width, is_trained, {layer: read[layer] for layer in layers}, rows)


def _kind(one: Compared, other: Compared) -> str:
    """Return the kind of a pair; empty for pairs that are left out."""
    if one.width != other.width:
        return KINDS[0] if one.trained else KINDS[2]
    return KINDS[1] if one.trained else ""


def compared(one: Compared, other: Compared) -> dict[str, float]:
    """Compare all layers of two networks by filters and by CKA."""
    metric = FilterGram()
    gram = _all(one.read, other.read, metric.value)
    cka = _all(one.rows, other.rows, lambda x, y: float(linear_cka(x, y, debiased=True)))
    apart = ~np.eye(len(gram), dtype=bool)
    return {
        "same": float(np.diag(gram).mean()),
        "other": float(gram[apart].mean()),
        "found": float((_away(gram) == 0).mean()),
        "distance": float(_away(gram).mean()),
        "found_cka": float((_away(cka) == 0).mean()),
        "spearman": spearman(gram.ravel(), cka.ravel()),
        "spearman_same": spearman(np.diag(gram), np.diag(cka)),
    }


def _all(one: Mapping[str, Any], other: Mapping[str, Any], value: Any) -> Array:
    return np.array([[value(x, y) for y in other.values()] for x in one.values()])


def _away(matrix: Array) -> Array:
    """Return, for each layer in both directions, how many layers away the most similar one is."""
    return np.abs(np.stack([side.argmax(1) for side in (matrix, matrix.T)]) - np.arange(len(matrix)))


COMPARED = study.Claim(
    study.OWN, "after paper 3", "Networks of unequal width can be compared by the Gram matrices of their filters.", "–",
    f"of networks of unequal width, the same layer is found for at least {FOUND:g} of the layers, and the rank "
    f"correlation with CKA over all pairs of layers is at least {FOLLOWS:g}, both on average; in part: twice as many "
    "layers are found as by chance and in untrained networks; not known within two standard deviations of this bar",
    stand_in=False,
)  # fmt: skip


def _mean(pairs: Sequence[Mapping[str, float]], key: str) -> float:
    return float(np.mean([pair[key] for pair in pairs]))


def parts(record: Mapping[str, Any]) -> list[bool | None]:
    """Return whether enough layers are found to compare networks in part, and to compare them."""
    unequal = record["pairs"][KINDS[0]]
    if _mean(unequal, "found") >= FOUND and _mean(unequal, "spearman") >= FOLLOWS:
        return [True]
    hits, bar, margin = counted(record)
    return [None] if abs(hits - bar) <= margin else [hits > bar, False]


def counted(record: Mapping[str, Any]) -> tuple[float, float, float]:
    """Return the hits of networks of unequal width, twice those of chance or untrained ones, and two deviations."""
    unequal, untrained = record["pairs"][KINDS[0]], record["pairs"][KINDS[2]]
    asked = 2 * record["layers"] * len(unequal)
    share = 2 * max(1 / record["layers"], _mean(untrained, "found"))
    return asked * _mean(unequal, "found"), asked * share, 2 * (asked * share * (1 - share)) ** 0.5


def claims(record: dict[str, Any]) -> list[dict[str, str]]:
    """Return the rows of the table of all experiments."""
    unequal = record["pairs"][KINDS[0]]
    ours = (
        f"same layer found {_shown(unequal, 'found')}, by CKA {_shown(unequal, 'found_cka')}; rank correlation "
        f"with CKA {_shown(unequal, 'spearman')}"
    )
    return [COMPARED.row(ours, f"{len(unequal)} pairs, {record['layers']} layers", parts(record), len(unequal))]


PAGE = """# Coefficients of unequal dimension

**What to do**: use CKA to find corresponding layers of networks of unequal width; the Gram matrices of filters find
few.

{verdicts}

{title}: S_Atom needs equal coefficients, hence networks of one width; the paper leaves others open. A proposal,
without a figure of the paper to compare with: the cosine of the Gram matrices of the spatial filters, DᵀαᵀαD /
(out · in), which are k² × k² for any width and the same in every gauge (metric `filter_gram`).

ResNet-20 of {widths} times the usual width, trained on CIFAR-10 for {epochs} epochs (accuracy {accuracies}), {seeds}
seeds. All {layers} 3×3 convolutions of one network are compared with all of the other. CKA (linear, debiased): outputs
of the convolutions at {positions} positions of {probe} test images. Mean over pairs of networks, least and greatest.

{table}

"Same layer found": share of layers whose most similar layer in the other network is the one with the same name, in both
directions; by chance {chance:.2f}. Untrained networks show what shapes alone give.

Within two standard deviations of the bar, the claim is undecided: this was added after the figures were seen. Here are
{hits:.0f} hits of {asked}, and the bar is {bar:.0f} ± {margin:.0f}.

{footer}"""


COLUMNS = {
    "same layer found": "found", "layers off": "distance", "same layer found by CKA": "found_cka",
    "filter_gram, same layer": "same", "filter_gram, other layers": "other",
    "rank correlation with CKA, all pairs of layers": "spearman", "rank correlation with CKA, same layers":
    "spearman_same",
}  # fmt: skip


def page(record: dict[str, Any]) -> str:
    """Return the page of the results from the record, as it is read from JSON."""
    sizes = record["sizes"]
    hits, bar, margin = counted(record)
    return filled(
        PAGE, NAME, claims(record), TRAINED, widths=", ".join(sizes["epochs"]),
        epochs=", ".join(map(str, sizes["epochs"].values())),
        accuracies="; ".join(", ".join(f"{a:.2f}" for a in each) for each in record["accuracies"].values()),
        seeds=sizes["seeds"], layers=record["layers"], positions=sizes["positions"], probe=sizes["probe"],
        table=table(
            [(kind, pairs) for kind, pairs in record["pairs"].items() if pairs],
            {"networks": lambda kind, _: kind, "pairs": lambda _, pairs: len(pairs)}
            | {title: lambda _, pairs, key=key: _shown(pairs, key) for title, key in COLUMNS.items()},
        ),
        chance=1 / record["layers"], hits=hits, bar=bar, margin=margin,
        asked=2 * record["layers"] * len(record["pairs"][KINDS[0]]),
    )  # fmt: skip


def _shown(pairs: Sequence[Mapping[str, float]], key: str) -> str:
    values = [pair[key] for pair in pairs]
    return f"{np.mean(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    main()
