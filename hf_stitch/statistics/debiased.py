"""Statistics of debiased linear CKA over the full data, streamed in float64."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from hf_stitch.statistics.base import Rows, as_tensor
from hf_stitch.statistics.moments import Moments


class DebiasedMoments(Moments):
    """Moments of paired rows up to fourth order, as needed for the unbiased estimate of linear HSIC.

    In addition to the sums of ``Moments``, they contain ``Σ k zᵀ`` and ``Σ k kᵀ`` with ``k = (‖x‖², ‖y‖²)`` and
    ``z = [x|y]``, both about the mean. Batches are centred first and then shifted to the common mean, so that means far
    from zero do not reduce precision. The estimator of Song et al. (2012, "Feature selection via dependence
    maximization") omits the diagonals of the n × n Gram matrices, so each row must be a different sample.

    Attributes:
        kz: ``(2, dx + dy)``: ``Σ k zᵀ``.
        kk: ``(2, 2)``: ``Σ k kᵀ``.

    Args:
        dx: Width of the x rows, at least 1.
        dy: Width of the y rows, at least 1.
        device: Device of all sums; the CPU by default.

    Raises:
        ValueError: A width is below 1.

    Example:
        >>> import torch
        >>> x = torch.randn(20, 3)
        >>> kept = DebiasedMoments(3, 3).update(x[:9], x[:9]).update(x[9:], x[9:])
        >>> kept.n, bool(kept.hsic().std() < 1e-12)
        (20, True)
    """

    kz: Tensor
    kk: Tensor

    def __init__(self, dx: int, dy: int, device: torch.device | str | None = None) -> None:
        super().__init__(dx, dy, device)
        self.add_state("kz", torch.zeros(2, dx + dy, dtype=torch.float64, device=self.device), "own")
        self.add_state("kk", torch.zeros(2, 2, dtype=torch.float64, device=self.device), "own")

    def update(self, x_rows: Rows, y_rows: Rows) -> Self:
        """Add a batch of paired rows."""
        batch = type(self)(self.dx, self.dy, self.device)
        x_rows, y_rows = as_tensor("x_rows", x_rows), as_tensor("y_rows", y_rows)
        Moments.update(batch, x_rows, y_rows)
        with torch.no_grad():
            x = x_rows.to(self.kk) - batch.mean_x
            y = y_rows.to(self.kk) - batch.mean_y
            k = torch.stack([x.square().sum(1), y.square().sum(1)])
            batch.kz, batch.kk = k @ torch.cat([x, y], 1), k @ k.T
        return self.merge(batch)

    @torch.no_grad()
    def _combine(self, other: Self) -> None:
        before = Moments(self.dx, self.dy, self.device)
        before._absorb(self.n, self.mean, self.scatter)
        mine = (before, self.kz, self.kk)
        super()._combine(other)
        parts = [_about(*part, self.mean) for part in (mine, (other, other.kz, other.kk)) if part[0].n]
        self.kz = sum((kz for kz, _ in parts), torch.zeros_like(self.kz))
        self.kk = sum((kk for _, kk in parts), torch.zeros_like(self.kk))

    def hsic(self) -> Tensor:
        """Compute unbiased linear HSIC.

        Returns:
            HSIC of x with x, x with y, and y with y: ``(3,)`` float64.

        Raises:
            ValueError: There are fewer than 4 rows.
        """
        squares = torch.stack([s.square().sum() for s in (self.sxx, self.sxy, self.syy)])
        return unbiased_hsic(self.n, squares, _traces(self), self.kk)


def _traces(moments: Moments) -> Tensor:
    """``Σ k``, ``(2,)``."""
    return torch.stack([moments.sxx.trace(), moments.syy.trace()])


def _about(moments: Moments, kz: Tensor, kk: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """Shift ``Σ k zᵀ`` and ``Σ k kᵀ`` to another mean: z becomes z - δ, and k becomes k - 2Dz + a."""
    dx, device = moments.dx, mean.device
    scatter = moments.scatter.to(device)
    kz, kk, sum_k = (part.to(device) for part in (kz, kk, _traces(moments)))
    delta = mean - moments.mean.to(device)
    sides = torch.stack([delta, delta])  # D: one row per side, 0 for the features of the other side
    sides[0, dx:] = sides[1, :dx] = 0
    a = sides.square().sum(1)
    once = sum_k[:, None] * a - 2 * kz @ sides.T  # these terms appear together with their transpose
    moved_kk = kk + once + once.T + 4 * sides @ scatter @ sides.T + moments.n * torch.outer(a, a)
    return kz - 2 * sides @ scatter - torch.outer(sum_k + moments.n * a, delta), moved_kk


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
