"""Are networks alike across data sets, and unlike untrained ones (Chen, Miao & Qiu 2023, figure 10a)?

Networks share their coefficients. Atoms are trained on CIFAR-10 or CIFAR-100 from the same atoms, as in the paper, or
each network from its own random atoms: only this control separates what networks have learnt from where they began.

    python -m filter_atoms.across_data_sets_atoms --networks NETWORKS --data-dir DATA --out OUT
"""

import argparse
import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from filter_atoms import networks, task_networks
from filter_atoms.experiment import OPTIONS, Claim, filled, leave
from filter_atoms.networks import Images, Recipe
from hf_stitch_filter_atoms import FilterAtoms, train_atoms_only
from study import parser, table
from torch import nn

NAME = "across_data_sets_atoms"
SETS = {"cifar10": 10, "cifar100": 100}  # data set -> number of classes
MIXED = "trained, untrained"
KINDS = ("CIFAR-10, CIFAR-10", "CIFAR-100, CIFAR-100", "CIFAR-10, CIFAR-100", MIXED, "untrained, untrained")
STARTS = {"same": "from the same atoms", "own": "each from its own random atoms"}
APART = 0.2  # trained pairs are more alike than pairs with an untrained network by at least this


@dataclass(frozen=True)
class Preset:
    """Sizes of the experiment."""

    recipe: Recipe  # how atoms and head are trained
    images: int  # number of training images of each data set
    seeds: int  # networks of each data set and start, and untrained networks


PRESETS = {
    "small": Preset(Recipe(6, 0.05, augment=True), 6_000, 3),
    "paper": Preset(Recipe(100, 0.05, augment=True), 50_000, 5),
    "test": Preset(Recipe(1, 0.05, 20), 60, 2),
}


def main() -> None:
    """Run the experiment from the command line."""
    arguments = parser(__doc__, *OPTIONS).parse_args()
    preset, sizes = PRESETS[arguments.preset], task_networks.PRESETS[arguments.preset]
    common, _ = task_networks.atomic(task_networks.start(arguments, sizes, 0))
    train = {name: networks.read(name, "train", arguments.data_dir, preset.images) for name in SETS}
    test = {name: networks.read(name, "test", arguments.data_dir, 4 * sizes.probe) for name in SETS}
    half = sizes.probe // 2
    probe = networks.joined(images.take(half) for images in test.values())
    found = {}
    for start in STARTS:
        models = {name: [trained(common, name, start, seed, preset, train[name], arguments) for seed in
                         range(preset.seeds)] for name in SETS}  # fmt: skip
        untrained = [fresh(common, 5000 + seed) for seed in range(preset.seeds)]
        accuracy = {n: np.mean([networks.accuracy(model, test[n]) for model in each]) for n, each in models.items()}
        groups = {**models, "untrained": untrained}
        found[start] = {"accuracy": accuracy, **similarities(groups, probe, sizes.positions)}
    record = {
        "preset": arguments.preset, "sizes": preset, "recipe": str(preset.recipe), "starts": found,
        "origin": task_networks.origin(arguments, sizes), "probe": len(probe),
    }  # fmt: skip
    leave(NAME, record, page, {}, arguments.out)


def fresh(common: nn.Module, seed: int) -> nn.Module:
    """Return a copy of a network with random atoms of the same norm in each layer."""
    network, random = copy.deepcopy(common), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in task_networks.spatial(network):
            atoms = network.get_parameter(f"{layer}.atoms")
            drawn = torch.randn(atoms.shape, generator=random)
            atoms.copy_(drawn * atoms.norm() / drawn.norm())
    return network


def trained(
    common: nn.Module, name: str, start: str, seed: int, preset: Preset, images: Images, arguments: argparse.Namespace
) -> nn.Module:
    """Train atoms and head on a data set, or load the network."""
    network = fresh(common, 10 * SETS[name] + seed) if start == "own" else copy.deepcopy(common)
    networks.fresh_head(network, SETS[name], seed)

    def fit(model: nn.Module) -> None:
        train_atoms_only(model, also=("fc",))
        networks.train(model, images, preset.recipe, seed, name=f"{name}, {start}, {seed}")

    path = arguments.networks / f"atoms-{arguments.preset}-{name}-{start}-{seed}.safetensors"
    return networks.kept(path, network, fit)


def similarities(groups: Mapping[str, Sequence[nn.Module]], probe: Images, positions: int) -> dict[str, Any]:
    """Compare all pairs: ``atom`` and ``cka`` -> kind of pair -> values of the pairs, averaged over layers."""
    models = [model for group in groups.values() for model in group]
    names = [name for name, group in groups.items() for _ in group]
    matrices = {
        "atom": np.mean(task_networks.by_weights(models, FilterAtoms()), axis=0),
        "cka": np.mean(task_networks.probed(models, probe, positions)["cka"], axis=0),
    }
    kinds = [(kind, i, j) for i in range(len(models)) for j in range(i) for kind in [_kind(names[i], names[j])]]
    return {
        name: {kind: [matrix[i, j] for each, i, j in kinds if each == kind] for kind in KINDS}
        for name, matrix in matrices.items()
    }


def _kind(one: str, other: str) -> str:
    if one == other:
        return "untrained, untrained" if one == "untrained" else ", ".join([networks.TITLES[one]] * 2)
    return MIXED if "untrained" in (one, other) else "CIFAR-10, CIFAR-100"


ALIKE = Claim(
    "appendix A.3, figure 10a", "Networks trained on two data sets are alike, unlike untrained ones.",
    "high, low (plot)",
    "with both starts, all three kinds of trained pairs are on average more alike by S_Atom than trained with "
    f"untrained networks, by at least {APART:g}; in part: with the same atoms only, since similarity is then that of "
    "the start",
)  # fmt: skip


def parts(record: Mapping[str, Any]) -> list[bool]:
    """Return whether trained pairs are more alike with the same atoms at the start, and with own ones, too."""
    found = {
        start: all(np.mean(one["atom"][kind]) - np.mean(one["atom"][MIXED]) >= APART for kind in KINDS[:3])
        for start, one in record["starts"].items()
    }
    return [found["same"], all(found.values())]


def claims(record: dict[str, Any]) -> list[dict[str, str]]:
    """Return the rows of the table of all experiments."""
    means = {
        start: f"{np.mean(one['atom'][KINDS[2]]):.2f}, with untrained {np.mean(one['atom'][MIXED]):.2f}"
        for start, one in record["starts"].items()
    }
    ours = f"same atoms at the start: {means['same']}; own random atoms: {means['own']}"
    seeds = record["sizes"]["seeds"]
    return [ALIKE.row(ours, f"{seeds} networks of each kind", parts(record), seeds)]


PAGE = """# Across data sets

**What to do**: read S_Atom only between networks that began with the same atoms: from other atoms, trained networks are
no more alike than untrained ones.

{verdicts}

{title}, appendix A.3, figure 10a: by S_Atom, networks trained on CIFAR-10 and on CIFAR-100 are alike among themselves
and with each other, and unlike untrained networks.

{demonstration} All networks share the coefficients of {origin}. Atoms and head are trained on {images} images of
CIFAR-10 or CIFAR-100 ({recipe}), {seeds} networks of each; an untrained network has random atoms of the same norm.
"From the same atoms": from those of the start, as networks with a common initialisation in the paper. "Each from its
own random atoms": the control that the paper does not have. CKA: outputs of convolutions for {probe} test images of
both sets. Means over pairs, least and greatest value.

{table}

{footer}"""


def page(record: dict[str, Any]) -> str:
    """Return the page of the results from the record, as it is read from JSON."""
    shown = table([(start, kind, found) for start, found in record["starts"].items() for kind in KINDS], {
        "trained": lambda start, *_: STARTS[start],
        "pair": lambda _, kind, __: kind,
        "S_Atom": lambda _, kind, found: _shown(found["atom"][kind]),
        "CKA": lambda _, kind, found: _shown(found["cka"][kind]),
        "pairs": lambda _, kind, found: len(found["atom"][kind]),
    })  # fmt: skip
    accuracies = "; ".join(
        f"{STARTS[start]}: " + ", ".join(f"{networks.TITLES[n]} {value:.3f}" for n, value in found["accuracy"].items())
        for start, found in record["starts"].items()
    )
    return filled(
        PAGE, NAME, claims(record), origin=record["origin"], images=f"{record['sizes']['images']:,}",
        recipe=record["recipe"], seeds=record["sizes"]["seeds"], probe=record["probe"],
        table=f"{shown}\n\nAccuracy, {accuracies}.",
    )  # fmt: skip


def _shown(values: Sequence[float]) -> str:
    return f"{np.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


if __name__ == "__main__":
    main()
