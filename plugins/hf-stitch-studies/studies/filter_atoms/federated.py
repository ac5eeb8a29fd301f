"""Do similar filter atoms show which clients have similar data? Chen, Miao & Qiu (2023), figures 5 and 7."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import study
import torch
from filter_atoms import ensembles, networks
from filter_atoms.experiment import OPTIONS, TRAINED, above, filled, write_results
from filter_atoms.federated_methods import EVOLVING, FEDAVG, FIXED, Plan, State, federate, snapshot
from filter_atoms.networks import Images, Recipe, alexnet
from filter_atoms.pairwise import Pairs, bootstrap, cell, upper
from hf_stitch_filter_atoms import atomize
from matplotlib.figure import Figure
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score
from study import table
from torch import Tensor, nn

Array = NDArray[np.float64]
CLASSES, DIGITS = 100, 10
CLEAR = 0.9  # minimum AUROC of a distinct cluster
CHEAPER, PROBES = 1_000, 10_000
"""Minimum ratio of operations for "a tiny part"; the paper's number of probes."""
MAIN = "random"
ARMS = (MAIN, "public", "global", "evolving")
"""Origins of the shared coefficients; the paper's figures use random coefficients."""
SIMILARITIES = {"atom": "S_Atom", "atom moved": "S_Atom of the changes since round 0",
                "weights": "cosine of the weights", "cka": "CKA", "cca": "CCA"}  # fmt: skip
KINDS = {"subtask": "same subtask", "digits": "digits"}
MEANS = {"subtask": "same subtask", "not subtask": "other subtask", "digits": "two with digits",
         "not digits": "digits and CIFAR-100"}  # fmt: skip


def local(epochs: int) -> Recipe:
    """Return the paper's local training: SGD with momentum .9 and learning rate .01, here with batches of 10."""
    return Recipe(epochs, lr=0.01, batch=10, schedule="constant")


SIZES: dict[str, Any] = {
    "width": 0.25, "subtasks": 20, "shared_by": 5, "digits": 20, "train": 60, "test": 40, "rounds": 16, "others": 6,
    "shown": (1, 4, 8, 16), "public": (8_000, 4), "probes": 500,
}  # fmt: skip
"""Multiplier of the channels of AlexNet; subtasks of CIFAR-100 with 5 classes each, clients per subtask, clients with
coloured digits; training and test images of a client; rounds of one epoch that train atoms, with random and with other
coefficients, and rounds of the similarities; images and epochs of public pretraining on CIFAR-10; probes."""
SUBTASKS, DIGIT_CLIENTS, RESAMPLES = SIZES["subtasks"], SIZES["digits"], 300
PLAN = Plan(10, 0.1, local(4))
"""FedAvg of the global network."""


@dataclass(frozen=True, eq=False)
class Client:
    """Data of a client."""

    train: Images  # training images
    test: Images  # test images
    group: int  # number of its subtask; clients with digits have the last number


def subtask_clients(data_dir: str | None, random: torch.Generator) -> list[Client]:
    """Deal the images of each subtask of CIFAR-100 to its clients."""
    parts = [networks.read("cifar100_fine", split, data_dir) for split in ("train", "test")]
    order = torch.randperm(CLASSES, generator=random)
    clients = []
    for subtask in range(SUBTASKS):
        classes = order[5 * subtask : 5 * subtask + 5]
        dealt = [dealt_out(part, classes, SIZES["shared_by"], random) for part in parts]
        clients += [
            Client(train.take(SIZES["train"]), test.take(SIZES["test"]), subtask)
            for train, test in zip(*dealt, strict=True)
        ]
    return clients


def digit_clients(data_dir: str | None, random: torch.Generator) -> list[Client]:
    digits = networks.read("mnist", "test", data_dir)
    digits = Images(coloured(digits.pixels, random), digits.labels + CLASSES)
    clients = []
    for number in range(DIGIT_CLIENTS):
        images = digits.select(torch.arange(number, len(digits), DIGIT_CLIENTS))
        rest = images.select(torch.arange(SIZES["train"], len(images)))
        clients.append(Client(images.take(SIZES["train"]), rest.take(SIZES["test"]), SUBTASKS))
    return clients


def dealt_out(images: Images, classes: Tensor, hands: int, random: torch.Generator) -> list[Images]:
    """Deal the images of some classes to several clients, evenly by class and in random order."""
    shares = []
    for hand in range(hands):
        places = torch.cat([torch.nonzero(images.labels == label).flatten()[hand::hands] for label in classes])
        shares.append(images.select(places[torch.randperm(len(places), generator=random)]))
    return shares


def coloured(pixels: Tensor, random: torch.Generator) -> Tensor:
    """Colour the digit and the background of each grey image ``(n, 3, 32, 32)`` at random."""
    ink, ground = 255 * torch.rand(2, len(pixels), 3, 1, 1, generator=random)
    share = pixels / 255
    return (share * ink + (1 - share) * ground).to(torch.uint8)


def initial() -> nn.Module:
    return networks.seeded(lambda: alexnet(CLASSES + DIGITS, SIZES["width"]), 0)


def pretrained(arguments: argparse.Namespace) -> nn.Module:
    """Train a network on CIFAR-10, or load it, and replace its linear layer by the initial one."""

    def fit(network: nn.Module) -> None:
        count, epochs = SIZES["public"]
        data = networks.read("cifar10", "train", arguments.data_dir, count)
        networks.train(network, data, Recipe(epochs, lr=0.005), 0)

    public = networks.seeded(lambda: alexnet(10, SIZES["width"]), 0)
    networks.load_or_train(arguments.networks / "federated" / "public.safetensors", public, fit)
    public.add_module("fc", initial().get_submodule("fc"))
    return public


def start(arm: str, clients: Sequence[Client], arguments: argparse.Namespace) -> nn.Module:
    """Return the atomic network that starts the clients of an arm."""
    network = pretrained(arguments) if arm == "public" else initial()
    if arm == "global":
        shared, _ = federate(network, [client.train for client in clients], FEDAVG, PLAN, seed=1)
        network.load_state_dict(shared)
    atomize(network)
    return network


def auroc(pairs: Pairs) -> float:
    """Return the AUROC of ``similarity`` for pairs ``inside`` a cluster against the remaining ``counted`` pairs."""
    counted = pairs("counted") > 0
    inside = pairs("inside")[counted] > 0
    return float(roc_auc_score(inside, pairs("similarity")[counted])) if 0 < inside.sum() < len(inside) else math.nan


def clusters(groups: Array, digits: int) -> dict[str, dict[str, Array]]:
    """Return masks of the pairs of clients inside a cluster and of the counted pairs: kind -> matrices."""
    same = np.equal.outer(groups, groups)
    digit = groups == digits
    either = np.logical_or.outer(digit, digit)
    return {
        "subtask": {"inside": same.astype(float), "counted": (~either).astype(float)},
        "digits": {"inside": same.astype(float), "counted": either.astype(float)},
    }


def pairs_of(matrix: Array, kind: Mapping[str, Array]) -> Pairs:
    """Return the values of all pairs of clients for :func:`auroc`."""
    return lambda name: upper({"similarity": matrix, **kind}[name])


def means(matrix: Array, kinds: Mapping[str, Mapping[str, Array]]) -> dict[str, float]:
    by_pair = {}
    for name, kind in kinds.items():
        pairs = pairs_of(matrix, kind)
        counted, inside = pairs("counted") > 0, pairs("inside") > 0
        by_pair[name] = float(pairs("similarity")[counted & inside].mean())
        by_pair[f"not {name}"] = float(pairs("similarity")[counted & ~inside].mean())
    return by_pair


def shuffled(matrix: Array, groups: Array, digits: int, draws: int) -> dict[str, list[float]]:
    """Return the mean and the 97.5% quantile of the AUROC for permuted groups of clients."""
    random = np.random.default_rng(0)
    aurocs: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(draws):
        for kind, masks in clusters(random.permutation(groups), digits).items():
            aurocs[kind].append(auroc(pairs_of(matrix, masks)))
    return {kind: [float(np.mean(values)), float(np.quantile(values, 0.975))] for kind, values in aurocs.items()}


def main() -> None:
    arguments = study.parser(__doc__, *OPTIONS).parse_args()
    random = torch.Generator().manual_seed(0)
    clients = [*subtask_clients(arguments.data_dir, random), *digit_clients(arguments.data_dir, random)]
    public = networks.read("cifar100_fine", "train", arguments.data_dir)
    places = torch.randperm(len(public), generator=torch.Generator().manual_seed(1))[: SIZES["probes"]]
    arms, matrices = {}, {}
    for arm in ARMS:
        network = start(arm, clients, arguments)
        arms[arm], matrices[arm] = related(arm, network, clients, public.select(places).inputs())
    record = {"sizes": SIZES, "plan": str(PLAN), "arms": arms}
    write_results("federated", record, page, arguments.out, {"federated": picture(matrices)})


def related(
    arm: str, network: nn.Module, clients: Sequence[Client], probes: Tensor
) -> tuple[dict[str, Any], dict[int, Array]]:
    """Train the atoms of all clients; return the figures of their similarities, and S_Atom by round."""
    groups = np.array([client.group for client in clients], dtype=float)
    kinds = clusters(groups, SUBTASKS)
    first = snapshot(network)
    matrices: dict[int, Array] = {}

    def read(number: int, shared: State, client_states: Sequence[State]) -> None:
        if number in SIZES["shown"]:
            states = [{**shared, **state} for state in client_states]
            matrices[number] = ensembles.cosines(ensembles.atoms(states)).numpy()

    method = EVOLVING if arm == "evolving" else FIXED
    plan = Plan(SIZES["rounds"] if arm == MAIN else SIZES["others"], 1.0, local(1))
    shared, own_states = federate(network, [client.train for client in clients], method, plan, seed=2, after_round=read)
    states = [{**shared, **state} for state in own_states]
    similarities, costs = ensembles.measured(network, states, probes)
    atoms = ensembles.atoms(states)
    start = ensembles.atoms([first])
    similarities["atom moved"] = ensembles.cosines({layer: values - start[layer] for layer, values in atoms.items()})
    similarities["weights"] = ensembles.cosines(ensembles.filters(states))
    scores = {}
    for name in SIMILARITIES:
        scores[name] = {
            kind: bootstrap([{"similarity": similarities[name].numpy(), **masks}], auroc, RESAMPLES)
            for kind, masks in kinds.items()
        }
    return {
        "accuracy": accuracies(network, states, clients),
        "auroc": scores,
        "shuffled": shuffled(similarities["atom"].numpy(), groups, SUBTASKS, RESAMPLES),
        "through": {
            number: {
                "mean": means(matrix, kinds),
                **{kind: auroc(pairs_of(matrix, masks)) for kind, masks in kinds.items()},
            }
            for number, matrix in {0: np.ones((len(clients),) * 2), **matrices}.items()
        },
        "costs": costs,
    }, matrices


def accuracies(network: nn.Module, states: Sequence[State], clients: Sequence[Client]) -> dict[str, float]:
    """Return the mean accuracy of clients on their own test images, for subtasks and for digits."""
    by_kind: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for state, client in zip(states, clients, strict=True):
        network.load_state_dict(state)
        by_kind["digits" if client.group == SUBTASKS else "subtask"].append(networks.accuracy(network, client.test))
    return {kind: float(np.mean(values)) for kind, values in by_kind.items()}


def picture(matrices: Mapping[str, Mapping[int, Array]]) -> Figure:
    """Plot S_Atom of all clients through the rounds (figure 7), and of the last clients in all arms (figure 5)."""
    rounds = matrices[MAIN]
    columns = max(len(rounds), len(ARMS))
    figure = Figure(figsize=(3.2 * columns, 6.8), layout="constrained")
    axes = figure.subplots(2, columns, squeeze=False)
    last = 3 * DIGIT_CLIENTS
    upper_row = [(f"round {number}", matrix) for number, matrix in rounds.items()]
    lower_row = [(f"{arm}: last {last} clients", of[max(of)][-last:, -last:]) for arm, of in matrices.items()]
    for place, row in enumerate((upper_row, lower_row)):
        for axis, (title, matrix) in zip(axes[place], row, strict=False):
            low, high = np.quantile(upper(matrix), [0.02, 0.98])
            figure.colorbar(axis.imshow(matrix, vmin=low, vmax=high), ax=axis, shrink=0.8)
            axis.set_title(title, fontsize="small")
    for axis in axes.flat:
        axis.set_axis_off()
    return figure


OF_DIGITS, OF_SUBTASK, THROUGH, SOURCES, CHEAP, MILLIONS, MEMORY, MORE = study.stated(__file__)


def claims(record: dict[str, Any]) -> list[dict[str, str]]:
    sizes, arms = record["sizes"], record["arms"]
    scores, costs, through = arms[MAIN]["auroc"], arms[MAIN]["costs"], arms[MAIN]["through"]
    count = sizes["subtasks"] * sizes["shared_by"] + sizes["digits"]
    clients = f"{count} clients"

    def auroc_in(arm: str, kind: str) -> str:
        return cell(arms[arm]["auroc"]["atom"][kind])

    rows = [
        claim.row(
            f"AUROC {auroc_in(MAIN, kind)}; cosine of the weights {cell(scores['weights'][kind])}, CKA "
            f"{cell(scores['cka'][kind])}; with coefficients of a global network {auroc_in('global', kind)}",
            clients, [above(scores["atom"][kind], bound) for bound in (0.5, CLEAR)], count,
        )
        for kind, claim in (("digits", OF_DIGITS), ("subtask", OF_SUBTASK))
    ]  # fmt: skip
    rounds = [one for number, one in through.items() if number != "0"]
    seen = {kind: [one[kind] for one in rounds] for kind in KINDS}
    parts = [
        all(min(values) > bound for values, bound in zip(seen.values(), bounds, strict=True))
        for bounds in ([arms[MAIN]["shuffled"][kind][1] for kind in KINDS], [CLEAR] * len(KINDS))
    ]
    ours = "; ".join(f"{KINDS[kind]} {min(values):.2f} to {max(values):.2f}" for kind, values in seen.items())
    rows.append(THROUGH.row(f"AUROC: {ours}", f"{clients}, {len(rounds)} rounds", parts, count))
    others = [arm for arm in arms if arm != MAIN]
    ours = "; ".join(f"{arm}: " + ", ".join(f"{KINDS[kind]} {auroc_in(arm, kind)}" for kind in KINDS) for arm in others)
    parts = [study.every(above(arms[arm]["auroc"]["atom"][kind], 0.5) for kind in KINDS) for arm in others]
    rows.append(SOURCES.row(f"AUROC: {ours}", clients, parts, count))
    n = f"{count * (count - 1) // 2} pairs, {sizes['probes']} probes"
    for claim, spent, bound in ((CHEAP, "operations", CHEAPER), (MILLIONS, "seconds", 1e6)):
        ratios = {name: costs[name][spent] / costs["atom"][spent] for name in ("cca", "cka")}
        decidable = claim is CHEAP or sizes["probes"] >= PROBES
        ours = f"times S_Atom's {spent}: " + ", ".join(f"{SIMILARITIES[k]} {ratio:.1e}" for k, ratio in ratios.items())
        rows.append(claim.row(ours, n, [ratio > bound if decidable else None for ratio in ratios.values()], count))
    return [*rows, MEMORY.untested("a GPU"), MORE.untested("the costs of several numbers of networks")]


def page(record: dict[str, Any]) -> str:
    sizes, arms = record["sizes"], record["arms"]
    main, least = arms[MAIN], arms[MAIN]["costs"]["atom"]
    count = sizes["subtasks"] * sizes["shared_by"] + sizes["digits"]
    null = {f"null_{kind}": f"{mean:.2f}, {high:.2f}" for kind, (mean, high) in main["shuffled"].items()}
    scores = [arm["auroc"] for arm in arms.values()]
    last = {f"last_{key}": max(n for n in sizes["shown"] if n <= sizes[key]) for key in ("rounds", "others")}
    return filled(
        __file__, claims(record), TRAINED, **sizes, **null, **last, clients=count, classes=CLASSES + DIGITS,
        arms="\n".join(f"- {arm}: {about}" for arm, about in _arms(record).items()), main=MAIN,
        table=table(
            [(name, kind, arm["auroc"]) for name, arm in arms.items() for kind in KINDS],
            {"coefficients": "{0}", "pairs": lambda _, kind, __: KINDS[kind]}
            | {title: lambda _, kind, auroc, key=key: cell(auroc[key][kind]) for key, title in SIMILARITIES.items()},
        ),
        through_rounds=table(
            main["through"].items(),
            {"round": "{0}"} | {f"AUROC, {title}": f"{{1[{kind}]:.3f}}" for kind, title in KINDS.items()}
            | {f"mean: {title}": f"{{1[mean][{key}]:.4f}}" for key, title in MEANS.items()},
        ),
        accuracy=table(arms.items(), {
            "coefficients": "{0}", "CIFAR-100": "{1[accuracy][subtask]:.3f}", "digits": "{1[accuracy][digits]:.3f}",
        }),
        pairs=count * (count - 1) // 2, grid=ensembles.GRID,
        costs=table(
            [(SIMILARITIES[name], cost["operations"], cost["seconds"]) for name, cost in main["costs"].items()],
            {"": "{0}", "GFLOP": lambda _, operations, __: f"{operations / 1e9:.4g}", "CPU seconds": "{2:.3g}",
             "operations / S_Atom": lambda _, operations, __: f"{operations / least['operations']:.2g}",
             "time / S_Atom": lambda _, __, seconds: f"{seconds / least['seconds']:.2g}"},
        ),
        formula=formula(PROBES),
        like_weights=max(abs(one["atom"][kind]["value"] - one["weights"][kind]["value"])
                         for one in scores for kind in KINDS),
    )  # fmt: skip


def _arms(record: Mapping[str, Any]) -> dict[str, str]:
    count, epochs = record["sizes"]["public"]
    return {
        "random": "from the random start",
        "public": f"from a network trained on {count:,} images of CIFAR-10 for {epochs} epochs (retrained at a lower "
        "rate: in a first run of this experiment, that network collapsed to constant outputs)",
        "global": f"from a network trained by FedAvg on all clients: {record['plan']}",
        "evolving": "random at first; all parameters are trained, and coefficients are averaged over clients",
    }


def formula(probes: int) -> float:
    """Return the paper's ratio of operations, CCA to S_Atom, for AlexNet with 3 convolutions at full width."""
    layers = [(3, 64, 32), (64, 128, 16), (128, 256, 8)]
    spent = sum(probes * side**2 * 9 * before * after + probes**2 * side**2 * after for before, after, side in layers)
    return spent / (len(layers) * 9 * 9)
