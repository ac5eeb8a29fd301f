"""Linear HSIC of all pairs of layers of two sides, from which linear CKA is computed."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class HSIC(NamedTuple):
    """Linear HSIC of every pair of layers, and of every layer with itself, up to a common factor; float64."""

    xx: Tensor  # of each layer of x with itself, (layers of x,)
    xy: Tensor  # of each pair, (layers of x, layers of y)
    yy: Tensor  # of each layer of y with itself, (layers of y,)


def inner_products(x: Tensor, y: Tensor) -> HSIC:
    """Inner products of the rows of two matrices, and of each row with itself."""
    own_x, own_y = (torch.linalg.vector_norm(side, dim=1).square() for side in (x, y))
    return HSIC(own_x, x @ y.T, own_y)


def unbiased_hsic(n: int, squares: Tensor, traces: Tensor, kk: Tensor) -> Tensor:
    """Compute unbiased linear HSIC of x with x, x with y, and y with y from sums over centred rows.

    With the diagonals of the Gram matrices K and L omitted, ``HSIC = [tr KL + 1ᵀK1 1ᵀL1 / ((n-1)(n-2))
    - 2/(n-2) 1ᵀKL1] / (n(n-3))`` (Song et al. 2012). For centred rows ``1ᵀK1 = -Σ‖x‖²`` and ``1ᵀKL1 =
    Σ‖x‖²‖y‖²``.

    ``squares``: ``‖XᵀX‖²``, ``‖XᵀY‖²``, ``‖YᵀY‖²``. ``traces``: ``Σ‖x‖²``, ``Σ‖y‖²``. ``kk``: ``Σ‖x‖⁴``, ``Σ‖y‖⁴``
    on the diagonal, ``Σ‖x‖²‖y‖²`` off it.
    """
    if n < 4:
        raise ValueError(f"an unbiased estimate of HSIC takes at least 4 rows, got {n}; give more rows")
    pairs = torch.stack([traces[0] ** 2, traces[0] * traces[1], traces[1] ** 2])
    fourth = torch.stack([kk[0, 0], kk[0, 1], kk[1, 1]])
    terms = torch.stack([squares, -n / (n - 2) * fourth, pairs / ((n - 1) * (n - 2))])
    total = terms.sum(0)
    rounding = 64 * torch.finfo(total.dtype).eps * terms.abs().sum(0)
    return torch.where(total.abs() <= rounding, 0, total) / (n * (n - 3))


def unbiased_pairs(n: int, squares: HSIC, traces_x: Tensor, traces_y: Tensor, lengths: HSIC) -> HSIC:
    """Apply :func:`unbiased_hsic` to all pairs; every sum is a matrix of pairs."""
    shape = squares.xy.shape
    traces = torch.stack([traces_x[:, None].expand(shape), traces_y.expand(shape)])
    xx, xy, yy = _spread(lengths)
    fourth = torch.stack([torch.stack([xx, xy]), torch.stack([xy, yy])])
    xx, xy, yy = unbiased_hsic(n, torch.stack(_spread(squares)), traces, fourth)
    return HSIC(xx[:, 0], xy, yy[0])


def _spread(hsic: HSIC) -> tuple[Tensor, Tensor, Tensor]:
    """Expand everything to the shape of the pairs."""
    shape = hsic.xy.shape
    return hsic.xx[:, None].expand(shape), hsic.xy, hsic.yy.expand(shape)
