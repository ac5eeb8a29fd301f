"""Centred second moments of paired rows, streamed in float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

import torch
from torch import Tensor

from hf_stitch.statistics.base import Rows, Statistic, as_tensor, product
from hf_stitch.statistics.spectrum import EPS, eps_of

# Rows converted to float64 at a time: enough for full BLAS speed, small compared with the batch and the moments.
_BLOCK_ROWS = 4096


class Moments(Statistic):
    """Count, means and co-moments of paired rows x (width ``dx``) and y (width ``dy``).

    Batches are centred before they are multiplied and combined by the pairwise update of Chan, Golub and LeVeque
    (1979, "Updating formulae and a pairwise algorithm for computing sample variances", eq. 2.1), so that means far
    from zero do not reduce precision. Everything is float64. Memory is ``8 · (dx + dy)²`` bytes for any number of rows.

    Attributes:
        dx: Width of the x rows.
        dy: Width of the y rows.
        n: Number of rows seen.
        count: Number of rows seen, as a tensor.
        mean: ``(dx + dy,)``: mean of x and y side by side.
        scatter: ``(dx + dy, dx + dy)``: co-moments of x and y side by side.
        eps: ``(2,)`` float64: machine epsilon of the coarsest dtype of the x rows and of the y rows, 0 without rows.
            :func:`hf_stitch.statistics.spectrum.rounding` derives the scatter of rounding errors from it.

    Args:
        dx: Width of the x rows, at least 1.
        dy: Width of the y rows, at least 1.
        device: Device of the moments; the CPU by default. Rows may be on any device.

    Example:
        >>> import torch
        >>> x = torch.tensor([[1.0], [2.0], [3.0]])
        >>> moments = Moments(1, 1).update(x, 2 * x)
        >>> moments.n, moments.mean_y.item(), moments.sxx.item(), moments.sxy.item()
        (3, 4.0, 2.0, 4.0)
    """

    def __init__(self, dx: int, dy: int, device: torch.device | str | None = None) -> None:
        if dx < 1 or dy < 1:
            raise ValueError(f"dx and dy must be at least 1, got dx={dx} and dy={dy}")
        super().__init__()
        self.dx, self.dy = dx, dy
        # x and y side by side: one symmetric product of [x|y] costs half of three separate ones.
        device = torch.device(device or "cpu")
        self.add_state("widths", torch.tensor([dx, dy]), "same")
        self.add_state("count", torch.tensor(0), "own")
        self.add_state("mean", torch.zeros(dx + dy, dtype=torch.float64, device=device), "own")
        self.add_state("scatter", torch.zeros(dx + dy, dx + dy, dtype=torch.float64, device=device), "own")
        self.add_state("eps", torch.zeros(2, dtype=torch.float64), "max")

    count: Tensor
    mean: Tensor
    scatter: Tensor
    eps: Tensor

    @classmethod
    def _like(cls, state: Mapping[str, Tensor]) -> Self:
        dx, dy = state["widths"].tolist()
        return cls(dx, dy, state["mean"].device)

    @classmethod
    def of(
        cls, n: int, mean_x: Tensor, mean_y: Tensor, sxx: Tensor, syy: Tensor, sxy: Tensor,
        eps: Sequence[float] | Tensor = (EPS, EPS),
    ) -> Self:  # fmt: skip
        """Create moments from known values, which are copied.

        Args:
            n: Number of rows.
            mean_x: ``(dx,)`` float64.
            mean_y: ``(dy,)`` float64.
            sxx: ``(dx, dx)`` float64.
            syy: ``(dy, dy)`` float64.
            sxy: ``(dx, dy)`` float64.
            eps: Machine epsilon of the dtypes of the computation of x rows and y rows. Default: float64.

        Example:
            >>> Moments.of(4, torch.zeros(1), torch.zeros(1), torch.ones(1, 1), torch.ones(1, 1), torch.ones(1, 1))
            Moments(dx=1, dy=1, n=4, device='cpu')
        """
        moments = cls(mean_x.numel(), mean_y.numel(), mean_x.device)
        for key, value in (("mean_x", mean_x), ("mean_y", mean_y), ("sxx", sxx), ("syy", syy), ("sxy", sxy)):
            destination: Tensor = getattr(moments, key)
            if value.shape != destination.shape or not value.isfinite().all():
                raise ValueError(
                    f"{key} must be finite and of shape {tuple(destination.shape)}, got shape {tuple(value.shape)}"
                    + ("" if value.isfinite().all() else " with NaN or infinity")
                )
            destination.copy_(value)
        moments.count, moments.eps = torch.tensor(int(n)), torch.as_tensor(eps, dtype=torch.float64).cpu()
        moments.scatter[moments.dx :, : moments.dx] = moments.sxy.T
        return moments

    @property
    def n(self) -> int:
        """Number of rows seen."""
        return int(self.count)

    @property
    def device(self) -> torch.device:
        """Device of the moments."""
        return self.mean.device

    @property
    def mean_x(self) -> Tensor:
        """Mean of the x rows, ``(dx,)`` float64."""
        return self.mean[: self.dx]

    @property
    def mean_y(self) -> Tensor:
        """Mean of the y rows, ``(dy,)`` float64."""
        return self.mean[self.dx :]

    @property
    def sxx(self) -> Tensor:
        """``Σ (x - mean_x)(x - mean_x)ᵀ``, ``(dx, dx)`` float64."""
        return self.scatter[: self.dx, : self.dx]

    @property
    def syy(self) -> Tensor:
        """``Σ (y - mean_y)(y - mean_y)ᵀ``, ``(dy, dy)`` float64."""
        return self.scatter[self.dx :, self.dx :]

    @property
    def sxy(self) -> Tensor:
        """``Σ (x - mean_x)(y - mean_y)ᵀ``, ``(dx, dy)`` float64."""
        return self.scatter[: self.dx, self.dx :]

    @torch.no_grad()
    def update(self, x_rows: Rows, y_rows: Rows) -> Moments:
        """Add a batch of paired rows. On an error, no row of the batch is added.

        Args:
            x_rows: ``(n, dx)`` tensor of any float dtype and device, or array; n may be 0.
            y_rows: ``(n, dy)``, in the same way; row i is paired with row i of ``x_rows``.
        """
        x_rows = _checked("x_rows", x_rows, self.dx, self.device)
        y_rows = _checked("y_rows", y_rows, self.dy, self.device)
        if len(x_rows) != len(y_rows):
            raise ValueError(f"x_rows and y_rows must pair up row by row, got {len(x_rows)} and {len(y_rows)} rows")
        self.eps = torch.maximum(self.eps, eps_of(x_rows, y_rows))
        rows = torch.empty(min(len(x_rows), _BLOCK_ROWS), self.dx + self.dy, dtype=torch.float64, device=self.device)
        for x, y in zip(torch.split(x_rows, _BLOCK_ROWS), torch.split(y_rows, _BLOCK_ROWS), strict=True):
            chunk = rows[: len(x)]
            chunk[:, : self.dx] = x
            chunk[:, self.dx :] = y
            mean = chunk.mean(0)
            self._absorb(len(x), mean, _gram(chunk.sub_(mean)))
        return self

    def _combine(self, other: Self) -> None:
        self._absorb(other.n, other.mean.to(self.device), other.scatter.to(self.device))

    def about_origin(self) -> Moments:
        """Return the moments of the same rows about the origin: means 0 and ``sxx = Σ x xᵀ``.

        A fit from these moments does not centre, that is, it lacks an intercept.

        Example:
            >>> import torch
            >>> Moments(1, 1).update(torch.ones(4, 1), torch.ones(4, 1)).about_origin().sxx.item()
            4.0
        """
        uncentred = Moments(self.dx, self.dy, self.device)
        uncentred.count, uncentred.eps = self.count.clone(), self.eps.clone()
        uncentred.scatter = self.scatter.addr(self.mean, self.mean, alpha=self.n)
        return uncentred

    def __repr__(self) -> str:
        return f"Moments(dx={self.dx}, dy={self.dy}, n={self.n}, device='{self.device}')"

    def _absorb(self, n: int, mean: Tensor, scatter: Tensor) -> None:
        """Apply Chan's update: means are weighted by counts, and their difference adds to the scatter."""
        if n == 0:
            return
        total = self.n + n
        delta = mean - self.mean
        self.scatter += scatter
        self.scatter.addr_(delta, delta, alpha=self.n * n / total)
        self.mean += delta * (n / total)
        self.count = torch.tensor(total)


def _checked(name: str, raw_rows: Rows, width: int, device: torch.device) -> Tensor:
    """Check the rows and move them to the device, without changing the dtype."""
    rows = as_tensor(name, raw_rows)
    if not rows.is_floating_point():
        raise TypeError(f"{name} must contain real floating-point numbers, got {rows.dtype}")
    if rows.ndim != 2 or rows.shape[1] != width:
        raise ValueError(f"{name} must have shape (n, {width}), got {tuple(rows.shape)}")
    rows = rows.to(device)
    for number, chunk in enumerate(torch.split(rows, _BLOCK_ROWS)):
        # The norm also detects numbers that overflow when squared.
        is_finite = torch.linalg.vector_norm(chunk.double(), dim=1).isfinite()
        if not is_finite.all():
            row = number * _BLOCK_ROWS + int(is_finite.logical_not().nonzero()[0])
            raise ValueError(
                f"{name}: row {row} of {len(rows)} contains NaN, infinity or a number too large to square; "
                "drop such rows (on both sides) or run the network in a wider dtype"
            )
    return rows


def _gram(rows: Tensor) -> Tensor:
    return product(rows.T, rows)
