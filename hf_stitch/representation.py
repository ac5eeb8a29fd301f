"""Activations at a layer (:class:`Representation`), and their shape (:class:`RepresentationSpec`).

A representation separates the activations (``values``, with ``mask`` and ``prefix_tokens``) from the additional
arguments of the rest of the network (``context``). :meth:`Representation.rows` pools it to an n x d matrix for
matchers and metrics.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from hf_stitch.options import Count, Natural, check, checked
from hf_stitch.records import Record

Layout = Literal["bd", "bnd", "bchw", "bhwc"]
Pooling = Literal["none", "flatten", "mean", "cls", "last"]
POOLINGS: tuple[str, ...] = get_args(Pooling)


@dataclass(frozen=True)
class RepresentationSpec(Record):
    """Shape of a representation, without the batch size and the number of tokens of a text.

    Attributes:
        layout: Order of the axes: ``bd`` vectors, ``bnd`` tokens, ``bchw`` and ``bhwc`` grids.
        width: Number of features d (channels).
        grid: Height and width of the grid of positions; None for vectors and text.
        prefix_tokens: Number of leading tokens without a position (CLS, registers, distillation); layout ``bnd`` only.

    Example:
        >>> RepresentationSpec("bnd", 192, grid=(14, 14), prefix_tokens=1)
        RepresentationSpec(layout='bnd', width=192, grid=(14, 14), prefix_tokens=1)
    """

    layout: Layout
    width: Count
    grid: tuple[Count, Count] | None = None
    prefix_tokens: Natural = 0

    def __post_init__(self) -> None:
        check(Layout, layout=self.layout)
        if self.prefix_tokens and self.layout != "bnd":
            raise ValueError(f"prefix tokens require the layout bnd, got {self.prefix_tokens} in {self.layout}")
        if self.grid is not None:
            object.__setattr__(self, "grid", tuple(self.grid))

    def __str__(self) -> str:
        """Return for example ``bnd 192 14x14 +1``."""
        grid = f" {self.grid[0]}x{self.grid[1]}" if self.grid else ""
        return f"{self.layout} {self.width}{grid}" + (f" +{self.prefix_tokens}" if self.prefix_tokens else "")


@dataclass(frozen=True)
class Representation:
    """Activations of a batch at a cut.

    Attributes:
        values: The activations, with the axes in the order of ``layout``.
        layout: ``bd``, ``bnd``, ``bchw`` or ``bhwc``.
        mask: For ``bnd``: (batch, tokens) bool, true for real tokens. None if all tokens are real.
        prefix_tokens: For ``bnd``: number of leading tokens without a position.
        grid: For ``bnd`` of an image model: height and width of the grid of the tokens after the prefix, without a
            mask.
        context: Further keyword arguments for the forward pass of the rest of the network, with the content of the
            input erased.
        padding_unknown: Whether there are padding positions at unknown places (the network merged or padded tokens).
            :meth:`rows` then raises an error for poolings that would include padding.

    Example:
        >>> r = Representation(torch.zeros(2, 8, 4, 4), "bchw")
        >>> r.spec
        RepresentationSpec(layout='bchw', width=8, grid=(4, 4), prefix_tokens=0)
        >>> r.rows("none").shape, r.rows("mean").shape
        (torch.Size([32, 8]), torch.Size([2, 8]))
    """

    values: Tensor
    layout: Layout
    mask: Tensor | None = None
    prefix_tokens: int = 0
    grid: tuple[int, int] | None = None
    context: Mapping[str, Any] = field(default_factory=dict)
    padding_unknown: bool = False

    def __post_init__(self) -> None:
        check(Layout, layout=self.layout)
        if self.values.dim() != len(self.layout):
            raise ValueError(
                f"layout {self.layout} requires {len(self.layout)} axes, got shape {tuple(self.values.shape)}"
            )
        if self.layout in ("bchw", "bhwc"):
            h = 2 if self.layout == "bchw" else 1
            object.__setattr__(self, "grid", (int(self.values.shape[h]), int(self.values.shape[h + 1])))
        if self.layout != "bnd" and (self.mask is not None or self.prefix_tokens):
            raise ValueError(f"mask and prefix tokens require the layout bnd, got {self.layout}")
        if self.mask is not None and (self.mask.shape != self.values.shape[:2] or self.mask.dtype != torch.bool):
            raise ValueError(
                f"mask must be bool of the shape (batch, tokens) = {tuple(self.values.shape[:2])}, got "
                f"{self.mask.dtype} of shape {tuple(self.mask.shape)}"
            )
        if self.layout == "bnd":
            tokens = self.values.shape[1] - self.prefix_tokens
            if tokens < 0 or (self.grid is not None and tokens != self.grid[0] * self.grid[1]):
                spec = f" and a grid of {self.grid[0]}x{self.grid[1]}" if self.grid else ""
                raise ValueError(f"{self.values.shape[1]} tokens do not match {self.prefix_tokens} prefix tokens{spec}")
            if self.grid is not None and self.mask is not None:
                raise ValueError("tokens with a grid cannot have a mask: every position of an image is real")

    # -- shape ------------------------------------------------------------------------------------------------------
    @property
    def spec(self) -> RepresentationSpec:
        """Layout, width, grid and prefix tokens."""
        return RepresentationSpec(self.layout, self.width, self.grid, self.prefix_tokens)

    @property
    def batch(self) -> int:
        """Number of samples."""
        return self.values.shape[0]

    @property
    def width(self) -> int:
        """Number of features d."""
        return self.values.shape[1 if self.layout == "bchw" else -1]

    def replace(self, **changes: Any) -> Representation:
        """Return a copy with some fields replaced."""
        return replace(self, **changes)

    # -- as a matrix ------------------------------------------------------------------------------------------------
    def to(self, device: torch.device | str) -> Representation:
        """Return the representation with values and mask on a device; the context is not moved.

        Example:
            >>> Representation(torch.zeros(2, 3), "bd").to("meta").values.device
            device(type='meta')
        """
        return self.replace(values=self.values.to(device), mask=None if self.mask is None else self.mask.to(device))

    @checked
    def rows(self, pooling: Pooling = "none", *, prefix: bool = False) -> Tensor:
        """Convert to an n x d matrix with a pooling, in the order of the samples.

        Args:
            pooling: ``none``: one row per grid position or unmasked token. ``flatten``: the concatenated features of
                all positions of a sample. ``mean``: the mean over the positions of a sample. ``cls``: the first token.
                ``last``: the last real token.
            prefix: Whether prefix tokens count as positions (for ``none``, ``flatten`` and ``mean``).
        """
        self.check_padding_known(pooling)
        if self.layout == "bd":
            return self.values
        if pooling in ("cls", "last"):
            return self._one_token(pooling)
        tokens, mask = self._positions(prefix)
        if pooling == "none":
            return tokens.flatten(0, 1) if mask is None else tokens[mask]
        if pooling == "flatten":
            if mask is not None and not bool(mask.all()):
                raise ValueError(
                    "pooling 'flatten' requires texts of equal length; use 'none', 'mean', 'cls' or 'last'"
                )
            return tokens.flatten(1)
        if mask is None:
            return tokens.mean(1)
        _check_none_empty(mask)
        total = torch.where(mask.unsqueeze(-1), tokens, 0).sum(
            1, dtype=torch.promote_types(tokens.dtype, torch.float32)
        )
        return (total / mask.sum(1, keepdim=True)).to(tokens.dtype)

    @checked
    def check_padding_known(self, pooling: Pooling) -> None:
        """Raise an error if a pooling would include padding."""
        if self.padding_unknown and pooling != "cls":
            raise ValueError(
                f"pooling {pooling!r} would include padding: the network merged or padded the positions at this layer, "
                f"of shape {tuple(self.values.shape)}, so padding cannot be recognised; use 'cls' or another layer, or "
                "leave out the mask if no text is padded"
            )

    @checked
    def row_samples(self, pooling: Pooling = "none", *, prefix: bool = False) -> Tensor:
        """Return the sample index of each row of :meth:`rows`: (n,) int64."""
        samples = torch.arange(self.batch, device=self.values.device)
        if self.layout == "bd" or pooling != "none":
            return samples
        self.check_padding_known(pooling)
        tokens, mask = self._positions(prefix)
        indices = samples[:, None].expand(tokens.shape[:2])
        return indices.flatten() if mask is None else indices[mask]

    def prefix(self) -> Tensor:
        """Return the prefix tokens: (batch, prefix tokens, d)."""
        return (
            self.values[:, : self.prefix_tokens]
            if self.layout == "bnd"
            else self.values.new_empty(self.batch, 0, self.width)
        )

    def positions(self) -> Tensor:
        """Return all positions except prefix tokens, also masked positions, with features last: (batch, n, d)."""
        return self._positions(False)[0]

    def _positions(self, prefix: bool) -> tuple[Tensor, Tensor | None]:
        """Return positions as (batch, n, d), and their mask."""
        if self.layout == "bchw":
            return self.values.permute(0, 2, 3, 1).flatten(1, 2), None  # a view; rows and columns stay recognisable
        if self.layout == "bhwc":
            return self.values.flatten(1, 2), None
        if self.layout == "bd":
            return self.values[:, None], None
        skip = 0 if prefix else self.prefix_tokens
        return self.values[:, skip:], None if self.mask is None else self.mask[:, skip:]

    def _one_token(self, pooling: str) -> Tensor:
        if self.layout != "bnd":
            raise ValueError(
                f"pooling {pooling!r} requires tokens (layout bnd), got {self.layout}; use 'none', 'flatten' or 'mean'"
            )
        if pooling == "cls" and self.grid is not None and self.prefix_tokens == 0:
            raise ValueError("pooling 'cls' requires a representation with a prefix token; use 'mean'")
        if self.mask is None:
            return self.values[:, 0 if pooling == "cls" else -1]
        _check_none_empty(self.mask)
        # argmax returns the first real token, with padding on either side
        index = (
            self.mask.int().argmax(1)
            if pooling == "cls"
            else self.mask.shape[1] - 1 - self.mask.flip(1).int().argmax(1)
        )
        return self.values[torch.arange(self.batch, device=self.values.device), index]

    # -- conversion -------------------------------------------------------------------------------------------------
    @checked
    def to_layout(self, layout: Layout) -> Representation:
        """Convert to another layout of tokens or grids, without prefix tokens."""
        if layout == self.layout:
            return self
        if "bd" in (layout, self.layout):
            raise ValueError(f"cannot convert layout {self.layout} to {layout}: vectors do not have positions")
        tokens = self.positions()
        if layout == "bnd":
            return Representation(tokens, "bnd", grid=self.grid, context=self.context)
        h, w = self._grid()
        grid = tokens.reshape(self.batch, h, w, self.width)
        return Representation(grid if layout == "bhwc" else grid.permute(0, 3, 1, 2), layout, context=self.context)

    def resize(self, grid: tuple[int, int]) -> Representation:
        """Resample the positions to another grid by bilinear interpolation; prefix tokens are unchanged."""
        if self.grid == tuple(grid):
            return self
        self._grid()
        channels_first = self.to_layout("bchw").values
        if math.prod(grid) > math.prod(self._grid()):  # several times faster with channels last in memory
            channels_first = channels_first.contiguous(memory_format=torch.channels_last)
        resized = functional.interpolate(
            channels_first, size=grid, mode="bilinear", align_corners=False, antialias=False
        )
        positions = Representation(resized, "bchw", context=self.context).to_layout(self.layout)
        if not self.prefix_tokens:
            return positions
        values = torch.cat([self.prefix(), positions.values], 1)
        return positions.replace(values=values, prefix_tokens=self.prefix_tokens)

    def _grid(self) -> tuple[int, int]:
        if self.grid is None:
            raise ValueError(f"these positions (layout {self.layout}) are vectors or tokens of a text, without a grid")
        return self.grid


def finite(values: Tensor) -> Tensor:
    """Return whether all values are finite, from minimum and maximum, as a flag on the device of the values."""
    return torch.stack(torch.aminmax(values)).isfinite().all() if values.numel() else torch.tensor(True)


def all_set(flags: Sequence[Tensor]) -> bool:
    """Return whether all flags are set, with a single synchronisation of a GPU."""
    return not flags or bool(torch.stack([flag.to(flags[0].device) for flag in flags]).all())


def _check_none_empty(mask: Tensor) -> None:
    empty = ~mask.any(1)
    if bool(empty.any()):
        raise ValueError(f"sample {int(empty.nonzero()[0])} of the batch is completely masked")


def concatenate(batches: Sequence[Tensor]) -> Tensor:
    """Concatenate batches of activations or masks; shorter texts are padded with zeros.

    Args:
        batches: Each ``(batch, ...)`` or ``(batch, tokens, ...)``; only the number of tokens may differ.

    Example:
        >>> concatenate([torch.ones(1, 2, 3), torch.ones(2, 4, 3)]).shape
        torch.Size([3, 4, 3])
    """
    if len({batch.shape[1:] for batch in batches}) > 1:
        longest = max(batch.shape[1] for batch in batches)
        trailing = [0, 0] * (batches[0].dim() - 2)
        batches = [functional.pad(batch, [*trailing, 0, longest - batch.shape[1]]) for batch in batches]
    return torch.cat(list(batches))
