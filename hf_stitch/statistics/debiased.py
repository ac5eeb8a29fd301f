"""What full-data debiased linear CKA needs, streamed in float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_stitch.statistics.moments import Moments

if TYPE_CHECKING:
    from accelerate import Accelerator


class DebiasedMoments:
    """Moments of paired rows up to the fourth order, as far as unbiased estimates of linear HSIC go.

    Beside ``Moments`` they hold, with ``k = (‖x‖², ‖y‖²)`` and ``z = [x|y]`` both about the mean, ``Σ k zᵀ`` and
    ``Σ k kᵀ``. Batches are centred first and then moved to the common mean, so that means far from zero cost no
    precision. The estimator is that of Song et al. (2012, "Feature selection via dependence maximization"),
    which leaves out the diagonals of the n × n Gram matrices: one row must be one sample.

    Attributes:
        moments: Counts, means and co-moments of the rows.

    Args:
        dx: Width of the x rows, at least 1.
        dy: Width of the y rows, at least 1.
        device: Where all is kept and computed; the CPU by default.

    Raises:
        ValueError: A width is below 1.

    Example:
        >>> import torch
        >>> x = torch.randn(20, 3)
        >>> kept = DebiasedMoments(3, 3).update(x[:9], x[:9]).update(x[9:], x[9:])
        >>> kept.moments.n, bool(kept.hsic().std() < 1e-12)
        (20, True)
    """

    def __init__(self, dx: int, dy: int, device: torch.device | str | None = None) -> None:
        self.moments = Moments(dx, dy, device)
        self._kz = torch.zeros(2, dx + dy, dtype=torch.float64, device=self.moments.device)
        self._kk = torch.zeros(2, 2, dtype=torch.float64, device=self.moments.device)

    def update(self, x_rows: Tensor, y_rows: Tensor) -> DebiasedMoments:
        """Add a batch of paired rows, as ``Moments.update`` does and with its errors.

        Args:
            x_rows: ``(n, dx)``, any float dtype and device; n may be 0.
            y_rows: ``(n, dy)``, any float dtype and device.

        Returns:
            These moments.
        """
        batch = DebiasedMoments(self.moments.dx, self.moments.dy, self.moments.device)
        batch.moments.update(x_rows, y_rows)
        with torch.no_grad():
            x = x_rows.to(self._kk) - batch.moments.mean_x
            y = y_rows.to(self._kk) - batch.moments.mean_y
            k = torch.stack([x.square().sum(1), y.square().sum(1)])
            batch._kz, batch._kk = k @ torch.cat([x, y], 1), k @ k.T
        return self.merge(batch)

    @torch.no_grad()
    def merge(self, other: DebiasedMoments) -> DebiasedMoments:
        """Add the rows that ``other`` has seen, as if they had come here; ``other`` stays as it is.

        Raises:
            ValueError: The widths differ.
        """
        total = Moments(self.moments.dx, self.moments.dy, self.moments.device).merge(self.moments).merge(other.moments)
        parts = [part._about(total) for part in (self, other) if part.moments.n]
        self.moments = total
        self._kz = sum((kz for kz, _ in parts), torch.zeros_like(self._kz))
        self._kk = sum((kk for _, kk in parts), torch.zeros_like(self._kk))
        return self

    def all_reduce(self, accelerator: Accelerator) -> DebiasedMoments:
        """Give every process the moments of the rows of all; to be called once, by all, after the last row.

        The states are merged in the order of the ranks, so that all processes end with the same bits.

        Args:
            accelerator: The ``accelerate.Accelerator`` that knows the processes.

        Returns:
            These moments.
        """
        if accelerator.num_processes == 1:
            return self
        from accelerate.utils import broadcast

        device = self.moments.device
        total = DebiasedMoments(self.moments.dx, self.moments.dy, device)
        mine = self.state_dict()
        for rank in range(accelerator.num_processes):
            sent = {
                key: broadcast(part.to(accelerator.device, copy=True), from_process=rank) for key, part in mine.items()
            }
            total.merge(DebiasedMoments.from_state_dict({key: part.to(device) for key, part in sent.items()}))
        self.moments, self._kz, self._kk = total.moments, total._kz, total._kk
        return self

    def hsic(self) -> Tensor:
        """Unbiased linear HSIC of x with x, x with y, and y with y: ``(3,)`` float64.

        Raises:
            ValueError: There are fewer than 4 rows.
        """
        m = self.moments
        return unbiased_hsic(
            m.n, torch.stack([s.square().sum() for s in (m.sxx, m.sxy, m.syy)]), self._traces(), self._kk
        )

    def state_dict(self) -> dict[str, Tensor]:
        """A copy as tensors, ready for safetensors: that of ``Moments``, ``kz`` and ``kk``."""
        return {**self.moments.state_dict(), "kz": self._kz.clone(), "kk": self._kk.clone()}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Tensor]) -> DebiasedMoments:
        """Rebuild what ``state_dict`` gave, bit for bit, on the device of its tensors.

        Raises:
            ValueError: A key is missing or unknown, or a tensor is not what it should be.
        """
        moments = Moments.from_state_dict({key: part for key, part in state.items() if key not in ("kz", "kk")})
        built = cls(moments.dx, moments.dy, moments.device)
        for key, own in (("kz", built._kz), ("kk", built._kk)):
            part = state.get(key)
            if part is None or part.shape != own.shape or part.dtype != own.dtype or not part.isfinite().all():
                raise ValueError(
                    f"{key} of a state of DebiasedMoments must be finite float64 of shape {tuple(own.shape)}"
                )
            own.copy_(part)
        built.moments = moments
        return built

    def __repr__(self) -> str:
        """Widths and rows seen."""
        return f"DebiasedMoments(dx={self.moments.dx}, dy={self.moments.dy}, n={self.moments.n})"

    def _traces(self) -> Tensor:
        """``Σ k``, ``(2,)``."""
        return torch.stack([self.moments.sxx.trace(), self.moments.syy.trace()])

    def _about(self, other: Moments) -> tuple[Tensor, Tensor]:
        """``Σ k zᵀ`` and ``Σ k kᵀ`` about the mean of ``other``: z becomes z - δ, and k becomes k - 2Dz + a."""
        mine, dx, device = self.moments, self.moments.dx, other.device
        scatter = torch.cat([torch.cat([mine.sxx, mine.sxy], 1), torch.cat([mine.sxy.T, mine.syy], 1)]).to(device)
        kz, kk, sum_k = (part.to(device) for part in (self._kz, self._kk, self._traces()))
        delta = torch.cat([other.mean_x, other.mean_y]) - torch.cat([mine.mean_x, mine.mean_y]).to(device)
        sides = torch.stack([delta, delta])  # D: for each side a row, 0 where the features of the other are
        sides[0, dx:] = sides[1, :dx] = 0
        a = sides.square().sum(1)
        once = sum_k[:, None] * a - 2 * kz @ sides.T  # terms that stand beside their transpose
        moved_kk = kk + once + once.T + 4 * sides @ scatter @ sides.T + mine.n * torch.outer(a, a)
        return kz - 2 * sides @ scatter - torch.outer(sum_k + mine.n * a, delta), moved_kk


def unbiased_hsic(n: int, squares: Tensor, traces: Tensor, kk: Tensor) -> Tensor:
    """Unbiased linear HSIC of x with x, x with y, and y with y from sums over centred rows.

    With the diagonals of the Gram matrices K and L left out, ``HSIC = [tr KL + 1ᵀK1 1ᵀL1 / ((n-1)(n-2))
    - 2/(n-2) 1ᵀKL1] / (n(n-3))`` (Song et al. 2012); for centred rows ``1ᵀK1 = -Σ‖x‖²`` and ``1ᵀKL1 =
    Σ‖x‖²‖y‖²``.

    Args:
        n: Number of rows, at least 4.
        squares: ``(3,)``: ``‖XᵀX‖²``, ``‖XᵀY‖²``, ``‖YᵀY‖²``, or equally ``⟨K, K⟩``, ``⟨K, L⟩``, ``⟨L, L⟩``.
        traces: ``(2,)``: ``Σ‖x‖²`` and ``Σ‖y‖²``.
        kk: ``(2, 2)``: ``Σ‖x‖⁴`` and ``Σ‖y‖⁴`` on the diagonal, ``Σ‖x‖²‖y‖²`` beside it.

    Returns:
        ``(3,)``; what is 0 but for rounding is 0.

    Raises:
        ValueError: There are fewer than 4 rows.

    Example:
        >>> unbiased_hsic(4, torch.ones(3), torch.ones(2), torch.zeros(2, 2))[1].item()  # (1 + 1/6) / 4
        0.2916666567325592
    """
    if n < 4:
        raise ValueError(f"an unbiased estimate of HSIC takes at least 4 rows, got {n}; give more rows")
    pairs = torch.stack([traces[0] ** 2, traces[0] * traces[1], traces[1] ** 2])
    fourth = torch.stack([kk[0, 0], kk[0, 1], kk[1, 1]])
    terms = torch.stack([squares, -n / (n - 2) * fourth, pairs / ((n - 1) * (n - 2))])
    total = terms.sum(0)
    rounding = 64 * torch.finfo(total.dtype).eps * terms.abs().sum(0)
    return torch.where(total.abs() <= rounding, 0, total) / (n * (n - 3))
