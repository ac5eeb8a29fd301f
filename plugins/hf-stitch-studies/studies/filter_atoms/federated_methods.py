"""Federated training of convolutional networks in plain torch: FedAvg, FedProx, Ditto, FedPer, FedRep, atoms, local.

All methods are one loop. In each round some clients receive what is shared, train on their own images, and return it;
the mean, weighted by numbers of images, is shared next. At the end every client trains its personal network. Methods
differ in which parameters are shared, which are trained and in what order, and in proximal terms.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from filter_atoms import networks
from filter_atoms.networks import Images, Recipe
from torch import Tensor, nn

State = Mapping[str, Tensor]
ATOMS, HEAD, REST = "atoms", "head", "rest"
Kinds = frozenset[str]
EVERYTHING, NOTHING, PERSONAL = frozenset({ATOMS, HEAD, REST}), frozenset[str](), frozenset({ATOMS, HEAD})
BODY, COMMON = EVERYTHING - {HEAD}, EVERYTHING - PERSONAL


def kind_of(name: str) -> str:
    """Return the kind of a parameter: filter atoms, the linear layer, or coefficients and biases."""
    return ATOMS if name.endswith(".atoms") else HEAD if name.startswith("fc.") else REST


@dataclass(frozen=True)
class Phase:
    """A part of local training."""

    share: float  # share of the local epochs
    trained: Kinds  # parameters that are trained


@dataclass(frozen=True)
class Method:
    """A federated method."""

    title: str  # its name
    shared: Kinds  # parameters that clients share
    phases: tuple[Phase, ...]  # local training in a round
    last: tuple[Phase, ...]  # local training of the personal networks, after the last round
    proximal: float = 0.0  # in a round, weight of half the squared distance from the shared parameters
    pull: float = 0.0  # the same, when the personal networks are trained


WHOLE = (Phase(1, EVERYTHING),)
ONLY_ATOMS = (Phase(1, PERSONAL),)
HEAD_FIRST = (Phase(2 / 3, frozenset({HEAD})), Phase(1 / 3, BODY))
METHODS = {
    # McMahan et al. 2017, with local fine-tuning at the end.
    "fedavg": Method("FedAvg", EVERYTHING, WHOLE, WHOLE),
    # Li et al. 2020, "Federated optimization in heterogeneous networks", likewise.
    "fedprox": Method("FedProx", EVERYTHING, WHOLE, WHOLE, proximal=0.1),
    # Arivazhagan et al. 2019: the head stays with the client.
    "fedper": Method("FedPer", BODY, WHOLE, WHOLE),
    # Collins et al. 2021: the same, and first the head is trained, then the rest.
    "fedrep": Method("FedRep", BODY, HEAD_FIRST, HEAD_FIRST),
    # Li et al. 2021: FedAvg's network is shared; personal ones are trained close to it, here to the last one.
    "ditto": Method("Ditto", EVERYTHING, WHOLE, WHOLE, pull=1.0),
    # Chen et al. 2023, evolving coefficients: atoms and head stay with the client.
    "evolving": Method("Ours (atoms)", COMMON, WHOLE, ONLY_ATOMS),
    # Atoms and head on coefficients that stay as they are; nothing is shared.
    "fixed": Method("Atoms on fixed coefficients", NOTHING, ONLY_ATOMS, ONLY_ATOMS),
    "local": Method("Local", NOTHING, WHOLE, WHOLE),
}


@dataclass(frozen=True)
class Plan:
    """Length of federated training."""

    rounds: int  # number of rounds
    participation: float  # share of the clients that take part in a round
    recipe: Recipe  # local training in a round

    def __str__(self) -> str:
        return f"{self.rounds} rounds with {self.participation:.0%} of the clients, each {self.recipe}"


def snapshot(network: nn.Module) -> dict[str, Tensor]:
    """Copy the parameters of a network."""
    return {name: value.detach().clone() for name, value in network.named_parameters()}


def federate(
    network: nn.Module,
    clients: Sequence[Images],
    method: Method,
    plan: Plan,
    seed: int,
    after_round: Callable[[int, State, Sequence[State]], Any] | None = None,
) -> tuple[State, list[State]]:
    """Run the rounds of a method; return what is shared, and what clients own, nothing before they took part."""
    shared: State = snapshot(network)
    own: list[State] = [{} for _ in clients]
    random = torch.Generator().manual_seed(seed)
    for number in range(1, plan.rounds + 1):
        count = max(1, round(plan.participation * len(clients)))
        chosen = torch.randperm(len(clients), generator=random)[:count].tolist()
        total = {name: torch.zeros_like(value) for name, value in shared.items() if kind_of(name) in method.shared}
        for client in chosen:
            trained = train_locally(
                network, {**shared, **own[client]}, clients[client], method.phases, plan.recipe,
                seed=_order(seed, number, client), near=shared, weight=method.proximal,
            )  # fmt: skip
            own[client] = {name: value for name, value in trained.items() if kind_of(name) not in method.shared}
            for name, value in total.items():
                value.add_(trained[name], alpha=len(clients[client]))
        images = sum(len(clients[client]) for client in chosen)
        shared = {**shared, **{name: value / images for name, value in total.items()}}
        if after_round is not None:
            after_round(number, shared, own)
    return shared, own


def train_locally(
    network: nn.Module,
    start: State,
    images: Images,
    phases: Sequence[Phase],
    recipe: Recipe,
    *,
    seed: int,
    near: State,
    weight: float,
) -> dict[str, Tensor]:
    """Train a network on the images of one client, in phases that share the epochs, pulled near to some parameters."""
    network.load_state_dict(start)
    for place, phase in enumerate(phases):
        trained = {}
        for name, parameter in network.named_parameters():
            parameter.requires_grad_(kind_of(name) in phase.trained)
            if parameter.requires_grad:
                trained[name] = parameter

        def proximal(trained: Mapping[str, Tensor] = trained) -> Tensor:
            distances = [(value - near[name]).square().sum() for name, value in trained.items()]
            return 0.5 * weight * torch.stack(distances).sum()

        epochs = max(1, round(phase.share * recipe.epochs))
        networks.train(
            network, images, replace(recipe, epochs=epochs), seed + place, penalty=proximal if weight else None
        )  # fmt: skip
    return snapshot(network)


def _order(seed: int, number: int, client: int) -> int:
    """Return the seed of the order of the images of a client in a round."""
    return (seed * 1009 + number) * 10_007 + 2 * client
