"""Centred second moments of paired rows, streamed in float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from accelerate import Accelerator

# Rows turned to float64 at a time: enough for BLAS to run at full speed, little beside the batch and the moments.
_CHUNK = 4096


class Moments:
    """Count, means and co-moments of paired rows x (width ``dx``) and y (width ``dy``).

    Batches are centred before they are multiplied and combined by the pairwise update of Chan, Golub and LeVeque
    (1979, "Updating formulae and a pairwise algorithm for computing sample variances", eq. 2.1), so that means far
    from zero cost no precision. Everything is float64. Memory is ``8 · (dx + dy)²`` bytes however many rows pass.

    Attributes:
        dx: Width of the x rows.
        dy: Width of the y rows.
        n: Number of rows seen.

    Args:
        dx: Width of the x rows, at least 1.
        dy: Width of the y rows, at least 1.
        device: Where the moments are kept and computed; the CPU by default. Rows may come from any device.

    Raises:
        ValueError: A width is below 1.

    Example:
        >>> import torch
        >>> x = torch.tensor([[1.0], [2.0], [3.0]])
        >>> moments = Moments(1, 1).update(x, 2 * x)
        >>> moments.n, moments.mean_y.item(), moments.sxx.item(), moments.sxy.item()
        (3, 4.0, 2.0, 4.0)
    """

    def __init__(self, dx: int, dy: int, device: torch.device | str | None = None) -> None:
        if dx < 1 or dy < 1:
            raise ValueError(f"Moments needs widths >= 1, got dx={dx} and dy={dy}")
        self.dx, self.dy, self.n = dx, dy, 0
        # x and y side by side: one symmetric product of [x|y] costs half of three separate ones.
        device = torch.device(device or "cpu")
        self._mean = torch.zeros(dx + dy, dtype=torch.float64, device=device)
        self._scatter = torch.zeros(dx + dy, dx + dy, dtype=torch.float64, device=device)

    @property
    def device(self) -> torch.device:
        """Where the moments are kept."""
        return self._mean.device

    @property
    def mean_x(self) -> Tensor:
        """Mean of the x rows, ``(dx,)`` float64."""
        return self._mean[: self.dx]

    @property
    def mean_y(self) -> Tensor:
        """Mean of the y rows, ``(dy,)`` float64."""
        return self._mean[self.dx :]

    @property
    def sxx(self) -> Tensor:
        """``Σ (x - mean_x)(x - mean_x)ᵀ``, ``(dx, dx)`` float64."""
        return self._scatter[: self.dx, : self.dx]

    @property
    def syy(self) -> Tensor:
        """``Σ (y - mean_y)(y - mean_y)ᵀ``, ``(dy, dy)`` float64."""
        return self._scatter[self.dx :, self.dx :]

    @property
    def sxy(self) -> Tensor:
        """``Σ (x - mean_x)(y - mean_y)ᵀ``, ``(dx, dy)`` float64."""
        return self._scatter[: self.dx, self.dx :]

    @torch.no_grad()
    def update(self, x_rows: Tensor, y_rows: Tensor) -> Moments:
        """Add a batch of paired rows; either all of it or, on an error, none of it.

        Args:
            x_rows: ``(n, dx)``, any float dtype and device; n may be 0.
            y_rows: ``(n, dy)``, any float dtype and device; row i belongs to row i of ``x_rows``.

        Returns:
            These moments.

        Raises:
            TypeError: A side is not a tensor of real floating-point numbers.
            ValueError: A side has the wrong shape, the sides differ in length, or a row holds NaN or infinity.
        """
        x_rows = _checked("x_rows", x_rows, self.dx, self.device)
        y_rows = _checked("y_rows", y_rows, self.dy, self.device)
        if len(x_rows) != len(y_rows):
            raise ValueError(f"x_rows and y_rows must pair up row by row, got {len(x_rows)} and {len(y_rows)} rows")
        rows = torch.empty(min(len(x_rows), _CHUNK), self.dx + self.dy, dtype=torch.float64, device=self.device)
        for x, y in zip(torch.split(x_rows, _CHUNK), torch.split(y_rows, _CHUNK), strict=True):
            chunk = rows[: len(x)]
            chunk[:, : self.dx] = x
            chunk[:, self.dx :] = y
            mean = chunk.mean(0)
            self._absorb(len(x), mean, _gram(chunk.sub_(mean)))
        return self

    def merge(self, other: Moments) -> Moments:
        """Add the rows that ``other`` has seen, as if they had come here; ``other`` stays as it is.

        Args:
            other: Moments of the same widths, on any device.

        Returns:
            These moments.

        Raises:
            ValueError: The widths differ.
        """
        if (other.dx, other.dy) != (self.dx, self.dy):
            raise ValueError(
                f"only moments of equal widths merge, got dx={self.dx}, dy={self.dy} and dx={other.dx}, dy={other.dy}"
            )
        self._absorb(other.n, other._mean.to(self.device), other._scatter.to(self.device))
        return self

    def all_reduce(self, accelerator: Accelerator) -> Moments:
        """Give every process the moments of the rows of all processes; to be called once, by all, after the last row.

        The processes' states are merged in the order of their ranks, so that all end with the same bits. One state
        at a time is sent: memory does not grow with the number of processes. With one process nothing happens. Rows
        count as often as they are given: a loader that evens out its last batch with repeated samples (accelerate's
        ``even_batches``) makes them count twice.

        Args:
            accelerator: The ``accelerate.Accelerator`` that knows the processes.

        Returns:
            These moments.
        """
        if accelerator.num_processes == 1:
            return self
        from accelerate.utils import broadcast

        total = Moments(self.dx, self.dy, self.device)
        for rank in range(accelerator.num_processes):
            mine = (torch.tensor(self.n), self._mean, self._scatter)
            sent = (broadcast(part.to(accelerator.device, copy=True), from_process=rank) for part in mine)
            n, mean, scatter = (part.to(self.device) for part in sent)
            total._absorb(int(n), mean, scatter)
        self.n, self._mean, self._scatter = total.n, total._mean, total._scatter
        return self

    def about_origin(self) -> Moments:
        """The same rows with their moments taken about the origin: means 0 and ``sxx = Σ x xᵀ``.

        What a method does on these is what it does without centring, that is, without an intercept.

        Example:
            >>> import torch
            >>> Moments(1, 1).update(torch.ones(4, 1), torch.ones(4, 1)).about_origin().sxx.item()
            4.0
        """
        raw = Moments(self.dx, self.dy, self.device)
        raw.n = self.n
        raw._scatter = self._scatter.addr(self._mean, self._mean, alpha=self.n)
        return raw

    def state_dict(self) -> dict[str, Tensor]:
        """A copy as contiguous tensors, ready for safetensors: ``n`` (int64), ``mean_x`` … ``sxy`` (float64)."""
        state = {key: getattr(self, key).clone(memory_format=torch.contiguous_format) for key in self._shapes()}
        return {"n": torch.tensor(self.n), **state}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Tensor]) -> Moments:
        """Rebuild what ``state_dict`` gave, bit for bit, on the device of its tensors.

        Args:
            state: The dict, e.g. from ``safetensors.torch.load_file``.

        Raises:
            ValueError: A key is missing or unknown, or a tensor has another dtype or shape than it should, or holds NaN
                or infinity.

        Example:
            >>> import torch
            >>> moments = Moments(2, 1).update(torch.rand(5, 2), torch.rand(5, 1))
            >>> torch.equal(Moments.from_state_dict(moments.state_dict()).sxy, moments.sxy)
            True
        """
        expected = {"n", "mean_x", "mean_y", "sxx", "syy", "sxy"}
        if state.keys() != expected:
            raise ValueError(f"a state of Moments has the keys {sorted(expected)}, got {sorted(state)}")
        moments = cls(state["mean_x"].numel(), state["mean_y"].numel(), state["mean_x"].device)
        for key, shape in moments._shapes().items():
            tensor = state[key]
            if tensor.shape != shape or tensor.dtype != torch.float64 or not tensor.isfinite().all():
                raise ValueError(
                    f"{key} in a state of Moments must be finite float64 of shape {tuple(shape)}, "
                    f"got {tensor.dtype} of shape {tuple(tensor.shape)}"
                    + ("" if tensor.isfinite().all() else " with NaN or infinity")
                )
            getattr(moments, key).copy_(tensor)
        moments.n = int(state["n"])
        moments._scatter[moments.dx :, : moments.dx] = moments.sxy.T
        return moments

    def __repr__(self) -> str:
        """Widths, rows seen and device."""
        return f"Moments(dx={self.dx}, dy={self.dy}, n={self.n}, device='{self.device}')"

    def _shapes(self) -> dict[str, torch.Size]:
        return {key: getattr(self, key).shape for key in ("mean_x", "mean_y", "sxx", "syy", "sxy")}

    def _absorb(self, n: int, mean: Tensor, scatter: Tensor) -> None:
        """Chan's update: means weigh by their counts, and the distance between them joins the scatter."""
        if n == 0:
            return
        total = self.n + n
        delta = mean - self._mean
        self._scatter += scatter
        self._scatter.addr_(delta, delta, alpha=self.n * n / total)
        self._mean += delta * (n / total)
        self.n = total


def _checked(name: str, rows: Tensor, width: int, device: torch.device) -> Tensor:
    """The rows on the device, in their own dtype, once nothing speaks against them."""
    if not isinstance(rows, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(rows).__name__}; use torch.as_tensor")
    if not rows.is_floating_point():
        raise TypeError(f"{name} must hold real floating-point numbers, got {rows.dtype}")
    if rows.ndim != 2 or rows.shape[1] != width:
        raise ValueError(f"{name} must have shape (n, {width}), got {tuple(rows.shape)}")
    rows = rows.to(device)
    for number, chunk in enumerate(torch.split(rows, _CHUNK)):
        # The norm also catches what would overflow when squared.
        finite = torch.linalg.vector_norm(chunk.double(), dim=1).isfinite()
        if not finite.all():
            row = number * _CHUNK + int(finite.logical_not().nonzero()[0])
            raise ValueError(
                f"{name}: row {row} of {len(rows)} holds NaN, infinity or a number too large to square; "
                "leave such rows out (on both sides) or run the network in a wider dtype"
            )
    return rows


def _gram(rows: Tensor) -> Tensor:
    """``rowsᵀ rows``. NumPy's product of a matrix with its own transpose does half the work of torch's."""
    if rows.device.type == "cpu":
        array = rows.numpy()
        return torch.from_numpy(array.T @ array)
    return rows.T @ rows
