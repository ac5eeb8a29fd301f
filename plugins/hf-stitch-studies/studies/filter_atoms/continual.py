"""Continual learning with filter atoms, and ensembles of the most similar members: table 2 of Chen, Miao & Qiu (2023).

python -m filter_atoms.continual --data-dir DATA --networks NETWORKS --out OUT
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import study
import torch
from filter_atoms import ensembles, networks
from filter_atoms.experiment import OPTIONS, TRAINED, Claim, filled, leave
from filter_atoms.federated import atomic
from filter_atoms.federated_ensembles import MEMBERS, Gain, gain
from filter_atoms.federated_methods import PERSONAL, State, kind_of, snapshot
from filter_atoms.networks import Images, Recipe, alexnet
from hf_stitch_filter_atoms import train_atoms_only
from study import parser, table
from torch import nn

NAME = "continual"
CLASSES = 10
OWN = "own"
DRAWS = 4  # draws of random members, whose accuracies are averaged
CHEAPER, FASTER = 1_000, 100  # ratios of operations and of time from which on S_Atom takes a tiny part
CHOICES = {
    "atom": "S_Atom",
    "cca": "CCA",
    "cka": "CKA",
    "weights": "cosine of the weights",
    "random": "random members",
    "least": "least similar (S_Atom)",
    "all": "all members",
}
COMPARED = (
    ("atom", "random"), ("cca", "random"), ("cka", "random"), ("all", "random"), ("atom", "cca"), ("atom", "cka"),
    ("atom", "weights"), ("atom", "least"),
)  # fmt: skip
PUBLISHED = {
    OWN: ("78.11 ± 0.13", "–", "–"), "cca": ("79.83 ± 0.04", "35.2", "0.26"), "cka": ("80.01 ± 0.06", "111", "0.3"),
    "atom": ("80.19 ± 0.09", "0.007", "0.0008"),
}  # fmt: skip
"""Choice -> accuracy, MFLOP and seconds in table 2."""


@dataclass(frozen=True)
class Preset:
    """Sizes of the experiment."""

    width: float  # multiplier of the channels of AlexNet with 5 convolutions
    tasks: int  # number of tasks
    train: int  # largest number of training images of a task
    test: int  # largest number of test images of a task
    first: Recipe  # training of all parameters on the first task
    later: Recipe  # training of atoms and head on each other task
    head: Recipe  # fine-tuning of the heads of an ensemble
    probes: int  # number of probing images for CKA and CCA
    streams: int  # number of streams of tasks, with another order of classes and other initial weights
    resamples: int  # number of bootstrap resamples


def _head(epochs: int) -> Recipe:
    return Recipe(epochs, lr=0.01, batch=50, schedule="constant")


PRESETS = {
    "small": Preset(
        0.25, 10, 600, 400, Recipe(30, lr=0.005, batch=30), Recipe(20, lr=0.01, batch=30), _head(30), 500, 3, 2000,
    ),
    "paper": Preset(1, 10, 5000, 1000, Recipe(100), Recipe(100), _head(100), 1000, 5, 2000),
    "test": Preset(0.0625, 4, 20, 20, Recipe(1), Recipe(1), _head(2), 20, 1, 20),
}  # fmt: skip


def main() -> None:
    """Run the experiment from the command line."""
    arguments = parser(__doc__, *OPTIONS).parse_args()
    preset = PRESETS[arguments.preset]
    train, test = (networks.read("cifar100", split, arguments.data_dir) for split in ("train", "test"))
    streams = [measured(stream, preset, train, test) for stream in range(preset.streams)]
    record = {
        "preset": arguments.preset, "sizes": preset, "first": str(preset.first), "later": str(preset.later),
        "head": str(preset.head), "streams": streams,
    }  # fmt: skip
    leave(NAME, record, page, {}, arguments.out)


@dataclass(frozen=True, eq=False)
class Task:
    """Images of ten classes, numbered from 0 on."""

    train: Images
    test: Images


def tasks_of(stream: int, preset: Preset, train: Images, test: Images) -> list[Task]:
    """Split CIFAR-100 into tasks of ten classes."""
    random = torch.Generator().manual_seed(stream)
    order = torch.randperm(100, generator=random).tolist()
    found = []
    for number in range(preset.tasks):
        classes = order[CLASSES * number : CLASSES * (number + 1)]
        parts = []
        for images, most in ((train, preset.train), (test, preset.test)):
            some = images.of_classes(classes)
            parts.append(some.select(torch.randperm(len(some), generator=random)[:most]))
        found.append(Task(*parts))
    return found


def learned(stream: int, preset: Preset, tasks: Sequence[Task]) -> tuple[nn.Module, list[State]]:
    """Train a network on the first task, and its atoms and a new head on each other one, from the first's atoms."""
    network = atomic(networks.seeded(lambda: alexnet(5, CLASSES, preset.width), stream))
    networks.train(network, tasks[0].train, preset.first, stream)
    states: list[State] = [snapshot(network)]
    for number, task in enumerate(tasks[1:], 1):
        network.load_state_dict(states[0])
        networks.fresh_head(network, CLASSES, 100 * stream + number)
        train_atoms_only(network, also=["fc"])
        networks.train(network, task.train, preset.later, 100 * stream + number)
        states.append(snapshot(network))
    return network, states


def measured(stream: int, preset: Preset, train: Images, test: Images) -> dict[str, Any]:
    """Learn a stream of tasks, and measure all ensembles."""
    tasks = tasks_of(stream, preset, train, test)
    network, states = learned(stream, preset, tasks)
    probing = torch.cat([task.train.pixels for task in tasks])
    places = torch.randperm(len(probing), generator=torch.Generator().manual_seed(stream))[: preset.probes]
    probes = Images(probing[places], torch.zeros(len(places))).inputs()
    similarities, costs = ensembles.measured(network, states, probes)
    similarities["weights"] = ensembles.cosines(ensembles.filters(states))
    random = np.random.default_rng(stream)
    accuracies: dict[str, list[float]] = {}
    for number, task in enumerate(tasks):
        others = [other for other in range(len(tasks)) if other != number]
        chosen = {
            name: ensembles.most_similar(similarities[name], number, MEMBERS)
            for name in ("atom", "cca", "cka", "weights")
        }
        chosen["least"] = ensembles.most_similar(similarities["atom"], number, MEMBERS, least=True)
        chosen["all"] = others
        draws = [f"random {draw}" for draw in range(DRAWS)]
        chosen |= {draw: random.choice(others, MEMBERS, replace=False).tolist() for draw in draws}
        choices = {OWN: [number], **{name: [number, *found] for name, found in chosen.items()}}
        found = ensembles.ensemble_accuracies(
            network, states, task.train, task.test, choices, preset.head, seed=number
        )  # fmt: skip
        found["random"] = float(np.mean([found.pop(draw) for draw in draws]))
        for name, accuracy in found.items():
            accuracies.setdefault(name, []).append(accuracy)
    atoms = similarities["atom"].numpy()
    return {
        "accuracies": accuracies,
        "atom": float(atoms[np.triu_indices(len(atoms), 1)].mean()),
        "costs": costs,
        "parameters": sum(value.numel() for value in states[0].values()),
        "own": sum(value.numel() for name, value in states[0].items() if kind_of(name) in PERSONAL),
    }


GAINS = Claim(
    "3.4, table 2", "In continual learning, an ensemble of the members with the most similar atoms gains.", "78.1 → "
    "80.2",
    "the gain of S_Atom over the base and its gain over random members have intervals above 0; in part: the first",
)  # fmt: skip
CHEAP = Claim(
    "3.4, table 2, cost", "S_Atom takes a tiny part of the operations and of the time of CCA and CKA.",
    "1/5,000 (CCA) and 1/16,000 (CKA) of the operations, 1/325 and 1/375 of the time; no GPU memory",
    f"CCA and CKA take more than {CHEAPER:,} times the operations and {FASTER:,} times the time",
)  # fmt: skip

PAGE = """# Continual learning with filter atoms

**What to do**: join the networks of all other tasks; if only three may run, any three do. Selection by S_Atom costs
nothing, and gains nothing over random members.

{verdicts}

After {title}, section 3.4 and table 2. AlexNet learns the first of ten tasks of CIFAR-100 with all parameters, and
each later task with atoms and linear layer only. The network of a task is joined by those of the 3 most similar other
tasks. The paper's claim: the accuracy rises from 78.1 to 80.2 with S_Atom, about as with CCA and CKA, at a tiny part
of the cost. It has no control: an ensemble of any members may gain.

{demonstration} {streams} streams of {tasks} tasks, each with {train} training and {test} test images ({paper} in
CIFAR-100 itself). AlexNet with 5 convolutions and {width:g} of its width. First task: {first}. Later ones: {later};
they own {own:,} of {parameters:,} parameters, most of them of the linear layer. The linear layers of all members are
fine-tuned on the task's images ({head}), that of the task's own network, "base", too; ensembles average
probabilities. Members come from all other tasks, earlier and later: a strict stream would have only the earlier ones.
Probes: {probes} training images of all tasks. Mean S_Atom of pairs: {atom:.3f}.

{table}

Gains over the base in points, with 95% intervals from a bootstrap over all tasks of all streams, for these streams
only (tasks of a stream share a start and networks); random members: mean of {draws} draws. MFLOP and CPU seconds:
similarities of all {pairs} pairs of one stream, with one run of each network (first stream).

Differences between selections, in points: {differences}.

The rule on gains was fixed before any figure was seen; that on costs, which had no row until this version, when they
were known. GPU memory was not measured: these networks run on a processor.

{footer}"""


def page(record: dict[str, Any]) -> str:
    """Return the page of the results from the record, as it is read from JSON."""
    sizes, streams = record["sizes"], record["streams"]
    costs, pairs = streams[0]["costs"], sizes["tasks"] * (sizes["tasks"] - 1) // 2

    def cost(name: str, spent: str, scale: float, digits: str) -> str:
        return f"{costs[name][spent] / scale:{digits}}" if name in costs else "–"

    return filled(
        PAGE, NAME, claims(record), TRAINED, streams=len(streams), paper="5,000 and 1,000",
        **{key: sizes[key] for key in ("tasks", "train", "test", "width", "probes")},
        **{key: record[key] for key in ("first", "later", "head")}, own=streams[0]["own"],
        parameters=streams[0]["parameters"], atom=np.mean([one["atom"] for one in streams]), draws=DRAWS, pairs=pairs,
        table=table([(OWN, "base"), *CHOICES.items()], {
            "members": "{1}",
            "accuracy": lambda name, _: f"{points(record, name).mean():.2f}",
            "gain": lambda name, _: "–" if name == OWN else over(record, name, OWN),
            "MFLOP": lambda name, _: cost(name, "operations", 1e6, ".4g"),
            "CPU s": lambda name, _: cost(name, "seconds", 1, ".3g"),
        } | {
            f"paper: {title}": lambda name, _, place=place: PUBLISHED.get(name, ("–", "–", "–"))[place]
            for place, title in enumerate(("accuracy", "MFLOP", "s"))
        }),
        differences="; ".join(
            f"{CHOICES[one]} − {CHOICES[other]}: {over(record, one, other)}" for one, other in COMPARED
        ),
    )  # fmt: skip


def points(record: Mapping[str, Any], choice: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the accuracies of all tasks of all streams in points."""
    return 100 * np.concatenate([one["accuracies"][choice] for one in record["streams"]])


def over(record: Mapping[str, Any], choice: str, against: str) -> Gain:
    """Return how much better a choice of members is than another one."""
    differences = points(record, choice) - points(record, against)
    return gain(differences, range(len(differences)), record["sizes"]["resamples"])


def parts(record: Mapping[str, Any]) -> list[bool | None]:
    """Return whether S_Atom gains over the base, and whether it gains over random members."""
    over_base, over_random = (over(record, "atom", against) for against in (OWN, "random"))
    above = study.above(vars(over_base), 0)
    return [above, over_random.low > 0] if above else [above]


def claims(record: dict[str, Any]) -> list[dict[str, str]]:
    """Return the rows of this experiment in the table of all experiments."""
    accuracies = " → ".join(f"{points(record, name).mean():.1f}" for name in (OWN, "atom"))
    ours = (
        f"{accuracies}, gain {over(record, 'atom', OWN)}; over random members {over(record, 'atom', 'random')}; "
        f"CKA {over(record, 'cka', OWN)}, CCA {over(record, 'cca', OWN)}"
    )
    streams, tasks = len(record["streams"]), record["sizes"]["tasks"]
    all_costs = [one["costs"] for one in record["streams"]]
    ratios = {
        (name, spent): float(np.mean([cost[name][spent] / cost["atom"][spent] for cost in all_costs]))
        for name in ("cca", "cka") for spent in ("operations", "seconds")
    }  # fmt: skip
    costs = ", ".join(f"{CHOICES[name]} {value:.1e} ({spent})" for (name, spent), value in ratios.items())
    cheap = [value > (CHEAPER if spent == "operations" else FASTER) for (_, spent), value in ratios.items()]
    return [
        GAINS.row(ours, f"{streams * tasks} tasks of {streams} streams", parts(record), streams),
        CHEAP.row(
            f"times S_Atom's: {costs}", f"{streams} streams, {tasks * (tasks - 1) // 2} pairs each", cheap, streams
        ),
    ]


if __name__ == "__main__":
    main()
