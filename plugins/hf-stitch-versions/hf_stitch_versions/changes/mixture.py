"""Shares of the parent networks in a merged network."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Mixture:
    """Shares of the parents in a network, and the residual relative to the distance from the nearest parent."""

    shares: tuple[float, ...]
    residual: float


def mixture(network: Mapping[str, Tensor], parents: Sequence[Mapping[str, Tensor]]) -> Mixture:
    """Estimate the shares of the parents in a merged network, by least squares over all common weights.

    Task arithmetic is such a sum, too: if one parent is the base, the shares of the rest are their coefficients.

    Args:
        network: name of parameter -> weight of the merged network.
        parents: weights of at least two networks under the same names.

    Raises:
        ValueError: if there are fewer than two parents, if no weight has the same shape in all networks, or if the
            parents are linearly dependent.

    >>> one, two = {"weight": torch.tensor([1.0, 0.0])}, {"weight": torch.tensor([0.0, 1.0])}
    >>> mixture({"weight": torch.tensor([0.25, 0.75])}, [one, two])
    Mixture(shares=(0.25, 0.75), residual=0.0)
    """
    networks = [network, *parents]
    if len(parents) < 2:
        raise ValueError(f"mixture requires at least two parents, got {len(parents)}.")
    names = [name for name, x in network.items() if all(name in y and y[name].shape == x.shape for y in parents)]
    if not names:
        raise ValueError("No weight has the same name and shape in the network and all parents: are these its parents?")
    # Weights are relative to the first parent, which has the remaining share: parents of one base are nearly parallel.
    products = torch.zeros(len(networks), len(networks), dtype=torch.float64)
    for name in names:
        flat = torch.stack([x[name].detach().cpu().double().flatten() for x in networks])
        products += (flat - flat[1]) @ (flat - flat[1]).T
    gram, target = products[2:, 2:], products[2:, 0]
    if int(torch.linalg.matrix_rank(gram, hermitian=True)) < len(gram):
        raise ValueError(
            "The parents are linearly dependent (are two of them the same?), so their shares are not determined."
        )
    shares = torch.linalg.solve(gram, target)
    residual = max(float(products[0, 0] - target @ shares), 0.0)
    nearest = min(float(products[0, 0] - 2 * products[0, i] + products[i, i]) for i in range(1, len(networks)))
    relative = math.sqrt(residual / nearest) if nearest > residual else float(residual > 0)
    return Mixture((1 - float(shares.sum()), *shares.tolist()), relative)
