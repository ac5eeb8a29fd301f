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
Choice = Callable[[str], bool]
"""Which parameters, by name."""


def everything(name: str) -> bool:
    """Choose all parameters."""
    del name
    return True


def nothing(name: str) -> bool:
    """Choose no parameter."""
    del name
    return False


def head(name: str) -> bool:
    """Choose the linear layer."""
    return name.startswith("fc.")


def body(name: str) -> bool:
    """Choose all parameters but those of the linear layer."""
    return not head(name)


def personal(name: str) -> bool:
    """Choose the filter atoms and the linear layer."""
    return name.endswith(".atoms") or head(name)


def common(name: str) -> bool:
    """Choose coefficients and biases of the convolutions."""
    return not personal(name)


@dataclass(frozen=True)
class Phase:
    """A part of local training.

    Attributes:
        share: Share of the local epochs.
        trained: Parameters that are trained.
    """

    share: float
    trained: Choice


@dataclass(frozen=True)
class Method:
    """A federated method.

    Attributes:
        title: Its name.
        shared: Parameters that clients share.
        phases: Local training in a round.
        last: Local training of the personal networks, after the last round.
        proximal: In a round, weight of half the squared distance from the shared parameters.
        pull: The same, when the personal networks are trained.
    """

    title: str
    shared: Choice
    phases: tuple[Phase, ...]
    last: tuple[Phase, ...]
    proximal: float = 0.0
    pull: float = 0.0


WHOLE = (Phase(1, everything),)
ATOMS = (Phase(1, personal),)
HEAD_FIRST = (Phase(2 / 3, head), Phase(1 / 3, body))
METHODS = {
    # McMahan et al. 2017, with local fine-tuning at the end.
    "fedavg": Method("FedAvg", everything, WHOLE, WHOLE),
    # Li et al. 2020, "Federated optimization in heterogeneous networks", likewise.
    "fedprox": Method("FedProx", everything, WHOLE, WHOLE, proximal=0.1),
    # Arivazhagan et al. 2019: the head stays with the client.
    "fedper": Method("FedPer", body, WHOLE, WHOLE),
    # Collins et al. 2021: the same, and first the head is trained, then the rest.
    "fedrep": Method("FedRep", body, HEAD_FIRST, HEAD_FIRST),
    # Li et al. 2021: FedAvg's network is shared; personal ones are trained close to it, here to the last one.
    "ditto": Method("Ditto", everything, WHOLE, WHOLE, pull=1.0),
    # Chen et al. 2023, evolving coefficients: atoms and head stay with the client.
    "evolving": Method("Ours (atoms)", common, WHOLE, ATOMS),
    # Atoms and head on coefficients that stay as they are; nothing is shared.
    "fixed": Method("Atoms on fixed coefficients", nothing, ATOMS, ATOMS),
    "local": Method("Local", nothing, WHOLE, WHOLE),
}


@dataclass(frozen=True)
class Plan:
    """Length of federated training.

    Attributes:
        rounds: Number of rounds.
        participation: Share of the clients that take part in a round.
        recipe: Local training in a round.
    """

    rounds: int
    participation: float
    recipe: Recipe

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
    """Run the rounds of a method.

    Args:
        network: Network without buffers, with the initial parameters of all clients. Its parameters change.
        clients: Training images of each client.
        method: The method.
        plan: Length of training.
        seed: Seed of the choice of clients and of the order of images.
        after_round: Called after each round, with its number from 1 on and what is returned.

    Returns:
        Parameters that are shared, or initial where they are not, and for each client its own ones, none before it has
        taken part.
    """
    shared: State = snapshot(network)
    own: list[State] = [{} for _ in clients]
    random = torch.Generator().manual_seed(seed)
    for number in range(1, plan.rounds + 1):
        count = max(1, round(plan.participation * len(clients)))
        chosen = torch.randperm(len(clients), generator=random)[:count].tolist()
        total = {name: torch.zeros_like(value) for name, value in shared.items() if method.shared(name)}
        for client in chosen:
            trained = train_locally(
                network, {**shared, **own[client]}, clients[client], method.phases, plan.recipe,
                seed=_order(seed, number, client), near=shared, weight=method.proximal,
            )  # fmt: skip
            own[client] = {name: value for name, value in trained.items() if not method.shared(name)}
            for name, value in total.items():
                value.add_(trained[name], alpha=len(clients[client]))
        images = sum(len(clients[client]) for client in chosen)
        shared = {**shared, **{name: value / images for name, value in total.items()}}
        if after_round is not None:
            after_round(number, shared, own)
    return shared, own


def personalised(
    network: nn.Module,
    clients: Mapping[int, Images],
    method: Method,
    shared: State,
    own: Sequence[State],
    recipe: Recipe,
    seed: int,
    only: Choice = everything,
) -> dict[int, State]:
    """Train the personal network of every client, from what is shared and what it owns.

    Args:
        network: Network of the parameters' shapes. Its parameters change.
        clients: Number -> training images.
        method: The method.
        shared: Shared parameters.
        own: For each client, its own parameters.
        recipe: Local training.
        seed: Seed of the order of images.
        only: Parameters that may be trained.

    Returns:
        Number of the client -> all parameters of its network.
    """
    phases = tuple(Phase(phase.share, _both(phase.trained, only)) for phase in method.last)
    return {
        client: train_locally(
            network, {**shared, **own[client]}, images, phases, recipe, seed=_order(seed, 0, client), near=shared,
            weight=method.pull,
        )
        for client, images in clients.items()
    }  # fmt: skip


def _both(one: Choice, other: Choice) -> Choice:
    return lambda name: one(name) and other(name)


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
    """Train a network on the images of one client.

    Args:
        network: Network of the parameters' shapes. Its parameters change.
        start: Parameters to start from.
        images: Training images.
        phases: Parts of the training.
        recipe: Hyperparameters; its epochs are divided among the phases, with at least one for each.
        seed: Seed of the order of images.
        near: Parameters that the proximal term pulls to.
        weight: Its weight.

    Returns:
        All parameters of the trained network.
    """
    network.load_state_dict(start)
    for place, phase in enumerate(phases):
        trained = {}
        for name, parameter in network.named_parameters():
            parameter.requires_grad_(phase.trained(name))
            if phase.trained(name):
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
