"""Federated training of convolutional networks in plain torch.

All methods share one loop. In each round, some clients receive the shared parameters, train on their own images, and
return the parameters; their mean, weighted by the numbers of images, is shared next.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from filter_atoms import networks
from filter_atoms.networks import Images, Recipe
from torch import Tensor, nn

State = Mapping[str, Tensor]
ATOMS, HEAD, REST = "atoms", "head", "rest"
EVERYTHING, PERSONAL = frozenset({ATOMS, HEAD, REST}), frozenset({ATOMS, HEAD})


def kind_of(name: str) -> str:
    """Return the kind of a parameter: filter atoms, the linear layer, or coefficients and biases."""
    return ATOMS if name.endswith(".atoms") else HEAD if name.startswith("fc.") else REST


@dataclass(frozen=True)
class Method:
    """Federated method."""

    shared: frozenset[str]  # kinds of shared parameters
    trained: frozenset[str]  # kinds of trained parameters


FEDAVG = Method(EVERYTHING, EVERYTHING)  # McMahan et al. 2017
EVOLVING = Method(frozenset({REST}), EVERYTHING)  # Chen et al. 2023: atoms and head stay with the client
FIXED = Method(frozenset(), PERSONAL)  # atoms and head on fixed coefficients, without sharing


@dataclass(frozen=True)
class Plan:
    """Length of federated training."""

    rounds: int  # number of rounds
    participation: float  # share of the clients in a round
    recipe: Recipe  # local training in a round

    def __str__(self) -> str:
        return f"{self.rounds} rounds with {self.participation:.0%} of the clients, each {self.recipe}"


def snapshot(network: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in network.named_parameters()}


def federate(
    network: nn.Module, clients: Sequence[Images], method: Method, plan: Plan, seed: int,
    after_round: Callable[[int, State, Sequence[State]], Any] | None = None,
) -> tuple[State, list[State]]:  # fmt: skip
    """Run the rounds of a method; return the shared parameters and the parameters of each client (empty at first)."""
    shared: State = snapshot(network)
    states: list[State] = [{} for _ in clients]
    random = torch.Generator().manual_seed(seed)
    for number in range(1, plan.rounds + 1):
        count = max(1, round(plan.participation * len(clients)))
        chosen = torch.randperm(len(clients), generator=random)[:count].tolist()
        total = {name: torch.zeros_like(value) for name, value in shared.items() if kind_of(name) in method.shared}
        for client in chosen:
            network.load_state_dict({**shared, **states[client]})
            for name, parameter in network.named_parameters():
                parameter.requires_grad_(kind_of(name) in method.trained)
            networks.train(network, clients[client], plan.recipe, (seed * 1009 + number) * 10_007 + 2 * client)
            trained = snapshot(network)
            states[client] = {name: value for name, value in trained.items() if kind_of(name) not in method.shared}
            for name, value in total.items():
                value.add_(trained[name], alpha=len(clients[client]))
        images = sum(len(clients[client]) for client in chosen)
        shared = {**shared, **{name: value / images for name, value in total.items()}}
        if after_round is not None:
            after_round(number, shared, states)
    return shared, states
