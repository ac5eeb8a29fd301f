"""Pairs of networks with S_Atom = 1 but different functions, and one function with many values of S_Atom."""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import study
import torch
from filter_atoms import networks, task_networks
from filter_atoms.experiment import OPTIONS, filled, write_results
from filter_atoms.networks import Images
from filter_atoms.task_networks import SIZES, TUNED, Cifar100
from hf_stitch_filter_atoms import FilterAtoms, gauge_bounds
from study import table
from torch import nn

from hf_stitch.metrics import linear_cka

ONE = 1 - 1e-6
DIFFERENT = 0.1  # minimum disagreement of different functions, as a share of images
MOVED = 0.95  # maximum CKA of different representations
SEEDS = 3


def main() -> None:
    arguments = study.parser(__doc__, *OPTIONS).parse_args()
    test = networks.read("cifar10", "test", arguments.data_dir, 2 * SIZES["probe"])
    pairs: dict[str, list[dict[str, float]]] = {about: [] for about in CHANGES}
    bounds = []
    for number in range(SEEDS):
        common, _ = task_networks.atomic(task_networks.start(arguments, number))
        for about, change in CHANGES.items():
            changed = copy.deepcopy(common)
            with torch.no_grad(), torch.random.fork_rng():
                torch.manual_seed(number)
                change(changed)
            pairs[about].append(compared(common, changed, test))
        bounds.append(gauges(common, number))
    record = {
        "sizes": SIZES, "origin": task_networks.origin(arguments), "images": len(test), "pairs": pairs,
        "trained": on_two_tasks(Cifar100.read(arguments.data_dir), arguments), "bounds": bounds,
    }  # fmt: skip
    write_results("blindness", record, page, arguments.out)


def _scale(network: nn.Module) -> None:
    """Multiply the scales of all BatchNorm layers by random factors."""
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.weight.mul_(torch.exp(0.7 * torch.randn(module.num_features)))


def _pointwise(network: nn.Module) -> None:
    """Permute the output channels of all 1×1 convolutions, which lack atoms to compare."""
    for module in network.modules():
        if not isinstance(module, nn.Conv2d) or max(module.kernel_size) > 1:
            continue
        order = torch.randperm(module.out_channels)
        for name, value in module.state_dict(keep_vars=True).items():
            if name in ("weight", "coefficients", "bias"):
                value.copy_(value[order])


def _head(network: nn.Module) -> None:
    for name in ("fc.weight", "fc.bias"):
        value = network.get_parameter(name)
        value.copy_(value.roll(1, 0))


def _length(network: nn.Module) -> None:
    """Multiply the atoms of each layer by a random factor, without adjusting the statistics of BatchNorm."""
    for layer in task_networks.spatial(network):
        network.get_parameter(f"{layer}.atoms").mul_(float(torch.exp(0.7 * torch.randn(()))))


RESCALED = "length of the atoms of each layer × exp(.7 ε)"
CHANGES: Mapping[str, Callable[[nn.Module], None]] = {
    "scales of BatchNorm × exp(.7 ε)": _scale,
    "coefficients of 1×1 convolutions: output channels permuted": _pointwise,
    "head: classes permuted": _head,
    RESCALED: _length,
}


def similarity(first: nn.Module, second: nn.Module) -> float:
    return float(np.mean([matrix[0, 1] for matrix in task_networks.by_weights([first, second], FilterAtoms())]))


def compared(first: nn.Module, second: nn.Module, images: Images) -> dict[str, float]:
    """Compare two networks by their atoms, activations and outputs."""
    layers = [name for name, module in first.named_modules() if isinstance(module, nn.Conv2d)]
    rows = [task_networks.features(network, layers, images) for network in (first, second)]
    outputs = [networks.logits(network, images) for network in (first, second)]
    return {
        "atom": similarity(first, second),
        "cka": float(np.mean([linear_cka(rows[0][n], rows[1][n], debiased=True) for n in layers])),
        "cka_last": float(linear_cka(rows[0][layers[-1]], rows[1][layers[-1]], debiased=True)),
        "cka_outputs": float(linear_cka(*(output.double() for output in outputs), debiased=True)),
        "disagreement": float((outputs[0].argmax(1) != outputs[1].argmax(1)).float().mean()),
    }


def on_two_tasks(data: Cifar100, arguments: Any) -> dict[str, float]:
    """Train the scales and shifts of BatchNorm and the head of one start on two tasks, and compare the networks."""
    tasks = task_networks.disjoint_tasks(2, 0)
    common, _ = task_networks.atomic(task_networks.start(arguments, 0))
    trained = []
    for place, task in enumerate(tasks):
        network = copy.deepcopy(common)
        networks.fresh_head(network, task_networks.PER_TASK, place)
        for parameter in network.parameters():
            parameter.requires_grad_(False)
        for module in network.modules():
            if isinstance(module, nn.BatchNorm2d | nn.Linear):
                module.requires_grad_(True)
        networks.train(network, data.train.of_classes(task), TUNED, place)
        trained.append(network)
    comparison = compared(trained[0], trained[1], data.probe(tasks, 2 * SIZES["probe"]))
    tests = [data.test.of_classes(task) for task in tasks]
    accuracies = [networks.accuracy(network, test) for network, test in zip(trained, tests, strict=True)]
    return {**comparison, "accuracy": float(np.mean(accuracies))}


def gauges(common: nn.Module, seed: int) -> dict[str, float]:
    """Perturb the atoms of a network, and compute the range of S_Atom of the pair over gauges of the same functions."""
    moved = copy.deepcopy(common)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in task_networks.spatial(moved):
            atoms = moved.get_parameter(f"{layer}.atoms")
            atoms.add_(0.5 * atoms.std() * torch.randn(atoms.shape, generator=random))
    ends = list(gauge_bounds(common, moved).values())
    least, greatest = (float(np.mean([end[side] for end in ends])) for side in (0, 1))
    return {"atom": similarity(common, moved), "least": least, "greatest": greatest}


DOMINATED, METRIC = study.stated(__file__)
COLUMNS = {"S_Atom": "atom", "CKA, mean of layers": "cka", "CKA, last convolution": "cka_last",
           "CKA, outputs": "cka_outputs", "disagreement": "disagreement"}  # fmt: skip


def page(record: dict[str, Any]) -> str:
    trained, count = "scales, shifts and head trained on two tasks", len(record["bounds"])

    def cell(about: str, pairs: Sequence[Mapping[str, float]], key: str) -> str:
        if about == trained and key == "disagreement":
            return "–"
        return f"{_mean(pairs, key):.{6 if key == 'atom' else 3}f}"

    return filled(
        __file__, claims(record), origin=record["origin"], seeds=f"{count} network{'s' * (count > 1)}",
        images=record["images"], positions=record["sizes"]["positions"],
        table=table(
            [*record["pairs"].items(), (trained, [record["trained"]])],
            {"what differs": "{0}"} | {title: partial(cell, key=key) for title, key in COLUMNS.items()},
        ),
        accuracy=record["trained"]["accuracy"], functions=len(_blind(record, 1.0)), changes=len(record["pairs"]),
        **{key: _mean(record["bounds"], key) for key in ("atom", "least", "greatest")},
    )  # fmt: skip


def _mean(pairs: Sequence[Mapping[str, float]], key: str) -> float:
    return float(np.mean([pair[key] for pair in pairs]))


def _blind(record: Mapping[str, Any], moved: float = MOVED) -> list[str]:
    """Return the changes that S_Atom misses, although functions change and CKA is at most ``moved``."""
    return [
        about for about, pairs in record["pairs"].items()
        if _mean(pairs, "atom") >= ONE and _mean(pairs, "disagreement") >= DIFFERENT and _mean(pairs, "cka") <= moved
    ]  # fmt: skip


def claims(record: dict[str, Any]) -> list[dict[str, str]]:
    blind, count = _blind(record), len(record["bounds"])
    worst = [_mean(record["pairs"][about], "disagreement") for about in blind]
    ours = (
        f"S_Atom 1 and CKA at most {MOVED:g} in {len(blind)} of {len(record['pairs'])} changes, different classes for "
        f"{min(worst, default=0):.0%} to {max(worst, default=0):.0%} of images"
    )
    rescaled = record["pairs"][RESCALED]
    held = [pair["atom"] < ONE or pair["disagreement"] < DIFFERENT for pair in rescaled]
    distance = max(float(np.arccos(min(pair["atom"], 1.0))) for pair in rescaled)
    least = min(pair["disagreement"] for pair in rescaled)
    return [
        DOMINATED.row(ours, f"{count} networks", [not blind, len(blind) < 3], count),
        METRIC.row(
            f"rescaled atoms: distance {distance:.0e} at most, different classes for {least:.0%} of images or more",
            f"{count} networks", held, count,
        ),
    ]  # fmt: skip
