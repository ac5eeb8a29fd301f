"""Similarities between many networks of one architecture, and their costs."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import study
import torch
from filter_atoms.federated_methods import State
from torch import Tensor, nn
from torch.nn import functional

T = TypeVar("T")
GRID = 2  # activations are averaged over GRID × GRID regions of the image; regions count as samples


def atoms(states: Sequence[State]) -> dict[str, Tensor]:
    """Return the atoms of networks: layer -> ``(networks, atoms · 9)``."""
    return _stacked(states, lambda state, layer: state[f"{layer}.atoms"])


def filters(states: Sequence[State]) -> dict[str, Tensor]:
    """Return the weights of the convolutions of networks: layer -> ``(networks, out · in · 9)``."""
    return _stacked(
        states,
        lambda state, layer: torch.einsum("oim,mxy->oixy", state[f"{layer}.coefficients"], state[f"{layer}.atoms"]),
    )


def _stacked(states: Sequence[State], read: Callable[[State, str], Tensor]) -> dict[str, Tensor]:
    layers = [name.removesuffix(".atoms") for name in states[0] if name.endswith(".atoms")]
    return {layer: torch.stack([read(state, layer).flatten() for state in states]) for layer in layers}


def cosines(stacked: Mapping[str, Tensor]) -> Tensor:
    """Return the cosines of all pairs, averaged over layers: ``(networks, networks)``. With atoms, this is S_Atom."""
    units = [functional.normalize(values.double(), dim=1) for values in stacked.values()]
    return torch.stack([values @ values.T for values in units]).mean(0)


@torch.no_grad()
def activations(network: nn.Module, states: Sequence[State], probes: Tensor) -> dict[str, Tensor]:
    """Run probes through networks: layer ``relu1``, … -> centred activations ``(networks, n · GRID², channels)``."""
    read: dict[str, list[Tensor]] = {}
    watched = {name: module for name, module in network.named_modules() if isinstance(module, nn.ReLU)}

    def keep(name: str, output: Tensor) -> None:
        pooled = functional.adaptive_avg_pool2d(output.float(), GRID)
        read.setdefault(name, []).append(pooled.permute(0, 2, 3, 1).flatten(0, 2))

    with study.watched(watched, keep):
        for state in states:
            network.load_state_dict(state)
            network(probes.contiguous(memory_format=torch.channels_last))
    stacked = {name: torch.stack(values) for name, values in read.items()}
    return {name: rows - rows.mean(1, keepdim=True) for name, rows in stacked.items()}


def cka(layers: Mapping[str, Tensor]) -> Tensor:
    """Return the linear CKA of all pairs, averaged over layers: ``(networks, networks)``."""
    by_layer = []
    for rows in layers.values():
        shared = _squared_products(rows)
        norms = shared.diagonal().sqrt()
        by_layer.append(shared / norms[:, None] / norms)
    return torch.stack(by_layer).mean(0)


def cca(layers: Mapping[str, Tensor]) -> Tensor:
    """Return the root mean square canonical correlation of all pairs (equation 1 of the paper), averaged over layers.

    Directions without variance (for example channels that are 0 for all probes) are left out; the mean is over the
    directions of the network with fewer directions.
    """
    by_layer = []
    for rows in layers.values():
        bases, ranks = zip(*(_basis(network_rows) for network_rows in rows), strict=True)
        count = torch.tensor(ranks, dtype=torch.float64)
        by_layer.append((_squared_products(torch.stack(bases)) / torch.minimum(count[:, None], count)).sqrt())
    return torch.stack(by_layer).mean(0)


def _basis(rows: Tensor) -> tuple[Tensor, int]:
    """Return an orthonormal basis of the columns of ``(n, channels)``, padded with zeros, and its rank."""
    values, vectors = torch.linalg.eigh((rows.T @ rows).double())
    nonzero = values > 1e-6 * values[-1].clamp_min(1e-300)
    scales = torch.where(nonzero, values.clamp_min(1e-300).rsqrt(), 0.0)
    return rows @ (vectors * scales).float(), int(nonzero.sum())


def _squared_products(rows: Tensor) -> Tensor:
    """Return ‖Xᵤᵀ Xᵥ‖² for all pairs of ``(networks, n, channels)``."""
    count, _, channels = rows.shape
    beside = rows.permute(1, 0, 2).flatten(1)
    squares = torch.empty(count, count, dtype=torch.float64)
    for u in range(count):
        products = (rows[u].T @ beside[:, u * channels :]).view(channels, count - u, channels)
        squares[u, u:] = squares[u:, u] = products.double().square().sum((0, 2))
    return squares


def measured(
    network: nn.Module, states: Sequence[State], probes: Tensor
) -> tuple[dict[str, Tensor], dict[str, dict[str, float]]]:
    """Compute S_Atom, CKA and CCA of all pairs of networks, with their costs.

    Costs are operations by formula, and CPU seconds. Each network processes the probes once, for both CKA and CCA.
    """
    count, pairs = len(states), len(states) * (len(states) - 1) / 2
    read, seconds = _timed(lambda: atoms(states))
    similarities = {}
    cosines(read)  # warm-up call
    similarities["atom"], more = _timed(lambda: cosines(read))
    operations = pairs * sum(2 * values.shape[1] for values in read.values())
    costs = {"atom": {"operations": operations, "seconds": seconds + more}}
    layers, forward = _timed(lambda: activations(network, states, probes))
    forwards = count * len(probes) * 2 * multiplications(network, probes[:1])
    sizes = [(values.shape[1], values.shape[2]) for values in layers.values()]
    products = sum(2 * pairs * n * channels**2 for n, channels in sizes)
    bases = sum(count * (4 * n * channels**2 + 10 * channels**3) for n, channels in sizes)
    for name, compute, extra in (("cka", cka, 0.0), ("cca", cca, bases)):
        similarities[name], seconds = _timed(partial(compute, layers))
        costs[name] = {"operations": forwards + products + extra, "seconds": forward + seconds}
    return similarities, costs


def _timed(compute: Callable[[], T]) -> tuple[T, float]:
    start = time.process_time()
    return compute(), time.process_time() - start


@torch.no_grad()
def multiplications(network: nn.Module, image: Tensor) -> int:
    """Count the multiplications of the convolutions of a network for one image."""
    total, convolutions = 0, {name: m for name, m in network.named_modules() if isinstance(m, nn.Conv2d)}

    def count(name: str, output: Tensor) -> None:
        nonlocal total
        total += 9 * convolutions[name].in_channels * output[0].numel()

    with study.watched(convolutions, count):
        network(image)
    return total
