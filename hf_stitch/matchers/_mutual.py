"""Pairs of mutual neighbours in two spaces, found and refitted in turn."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

ROUNDING = 8 * torch.finfo(torch.float32).eps
"""Singular values below this share of the largest, times the width, are rounding."""


def unit(rows: Tensor) -> Tensor:
    """Divide rows by their lengths; a row of zeros stays."""
    return functional.normalize(rows, dim=1)


def mutual_neighbours(x: Tensor, y: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Find the rows that are each other's nearest by cross-domain similarity local scaling (Lample et al. 2018, eq. 3).

    ``CSLS(x, y) = 2 cos(x, y) - r(x) - r(y)``, where r is the mean cosine to the k nearest rows of the other side, so
    that rows that are near to everything are not nearest to everything. All similarities are in memory.
    """
    cosines = unit(x) @ unit(y).T
    of_x = cosines.topk(min(k, len(y)), dim=1).values.mean(1)
    of_y = cosines.topk(min(k, len(x)), dim=0).values.mean(0)
    scaled = cosines.mul_(2).sub_(of_x[:, None]).sub_(of_y)
    partner, back = scaled.argmax(1), scaled.argmax(0)
    mutual = (back[partner] == torch.arange(len(x), device=x.device)).nonzero()[:, 0]
    return mutual, partner[mutual]


def span(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the directions of x and of y in which pairs of centred rows agree, most first.

    They are the singular vectors of ``xᵀy`` without those that rounding determines. Few pairs say nothing about the
    other directions, in which an orthogonal map of full rank would be arbitrary.
    """
    left, values, right = torch.linalg.svd(x.T @ y, full_matrices=False)
    kept = values > values[0] * max(x.shape[1], y.shape[1]) * ROUNDING
    return left[:, kept], right.T[:, kept]


@dataclass(frozen=True)
class Refined:
    """Pairs of a refinement."""

    x: Tensor  # numbers of rows of x
    y: Tensor  # numbers of their partners
    rounds: int  # number of rounds with all rows
    stable: bool  # whether the last of them changed no pair


def refined(
    start: tuple[Tensor, Tensor], x: Tensor, y: Tensor, *, neighbours: int, iterations: int, seed: int,
    keep: bool = False, whole: bool = True,
) -> Refined:  # fmt: skip
    """Find mutual neighbours under the map of some pairs, take them as the pairs, and so on.

    First ``iterations`` rounds with random halves of the rows, each with another half, so that pairs that are wrong do
    not confirm themselves; then rounds with all rows until no pair changes, ``iterations`` at most.
    """
    generator = torch.Generator().manual_seed(seed)
    pairs, found = start, (torch.empty(0), torch.empty(0))
    rounds, stable = 0, False
    for number in range(2 * iterations if whole else iterations):
        halves = number < iterations
        some, other = (
            torch.randperm(count, generator=generator)[: max(2, count // 2)] if halves else torch.arange(count)
            for count in (len(x), len(y))
        )
        left, right = span(*pairs)
        i, j = mutual_neighbours(x[some] @ left, y[other] @ right, neighbours)
        i, j = some[i], other[j]
        if not halves:
            rounds += 1
            stable = torch.equal(i, found[0]) and torch.equal(j, found[1])
        found = i, j
        if stable:
            break
        pairs = (torch.cat([start[0], x[i]]), torch.cat([start[1], y[j]])) if keep else (x[i], y[j])
    return Refined(*found, rounds, stable)
