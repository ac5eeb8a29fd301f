"""Affine stitches: full-rank, sparse, low-rank and the identity."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_stitch.papers import CSISZARIK_2021, Paper
from hf_stitch.stitches.base import Stitch, as_dtype


class AffineStitch(Stitch):
    """Base class of maps with a weight and an optional bias."""

    affine: ClassVar[bool] = True

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, dtype: torch.dtype | str = torch.float32
    ) -> None:
        super().__init__(in_features, out_features)
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=as_dtype(dtype)))
        self.bias = nn.Parameter(torch.empty(out_features, dtype=as_dtype(dtype))) if bias else None
        bound = 1 / math.sqrt(in_features)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    @classmethod
    def of(cls, **tensors: Tensor | None) -> Self:
        """Create a stitch from copies of its tensors, without drawing random numbers.

        Args:
            **tensors: All tensors of the stitch by name: ``weight``, and ``bias`` if the stitch has a bias.

        Example:
            >>> import torch
            >>> LinearStitch.of(weight=torch.eye(2), bias=torch.ones(2))(torch.zeros(1, 2))
            tensor([[1., 1.]], grad_fn=<AddmmBackward0>)
        """
        state = {name: tensor.detach().clone() for name, tensor in tensors.items() if tensor is not None}
        weight = state["weight"]
        with torch.device("meta"):  # initialisation is free and draws no random numbers here
            stitch = cls(weight.shape[1], weight.shape[0], bias="bias" in state, dtype=weight.dtype)
        stitch.load_state_dict(state, assign=True)
        return stitch

    def transform(self, x: Tensor) -> Tensor:
        """``x · weightᵀ + bias``."""
        return functional.linear(x, self.weight, self.bias)

    def matrix(self) -> Tensor:
        """Return the map without its bias, ``(out_features, in_features)``."""
        return self.weight


class LinearStitch(AffineStitch, nn.Linear):  # type: ignore[misc]  # its bias may be None
    """``x ↦ weight · x + bias``: on a grid a 1-by-1 convolution, on tokens a linear layer.

    The parameters are plain, trainable and initialised like ``torch.nn.Linear``. The class is a subclass of
    ``torch.nn.Linear``, so PEFT can add a LoRA to it.

    Attributes:
        weight: ``(out_features, in_features)``.
        bias: ``(out_features,)``, or None.

    Args:
        in_features: Width of the input vectors, at least 1.
        out_features: Width of the output vectors, at least 1.
        bias: Whether to add a bias.
        dtype: Dtype of the parameters, as a ``torch.dtype`` or its name.

    Example:
        >>> import torch
        >>> LinearStitch(3, 2)(torch.zeros(4, 5, 3)).shape
        torch.Size([4, 5, 2])
    """

    name: ClassVar[str] = "linear"
    title: ClassVar[str] = "an affine map"


class MaskedStitch(AffineStitch):
    """``x ↦ (mask ∘ weight) · x + bias``: an affine map that stays sparse during training.

    The full weight is stored; entries with a false mask are not used and do not receive gradients.

    Attributes:
        weight: ``(out_features, in_features)``.
        mask: ``(out_features, in_features)`` bool, a persistent buffer: true for active weights; initially all true.
        bias: ``(out_features,)``, or None.

    Args:
        in_features: Width of the input vectors, at least 1.
        out_features: Width of the output vectors, at least 1.
        bias: Whether to add a bias.
        dtype: Dtype of the parameters, as a ``torch.dtype`` or its name.

    Example:
        >>> import torch
        >>> stitch = MaskedStitch(2, 1, bias=False)
        >>> stitch.mask[0, 1] = False
        >>> bool(stitch(torch.tensor([0.0, 7.0])) == 0)
        True
    """

    name: ClassVar[str] = "masked"
    title: ClassVar[str] = "a sparse affine map"
    papers: ClassVar[tuple[Paper, ...]] = (CSISZARIK_2021,)
    mask: Tensor

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, dtype: torch.dtype | str = torch.float32
    ) -> None:
        super().__init__(in_features, out_features, bias, dtype)
        self.register_buffer("mask", torch.ones(out_features, in_features, dtype=torch.bool))

    def transform(self, x: Tensor) -> Tensor:
        """``x · (mask ∘ weight)ᵀ + bias``."""
        return functional.linear(x, self.matrix(), self.bias)

    def matrix(self) -> Tensor:
        """Return the map without its bias, ``(out_features, in_features)``: zero where the mask is false."""
        return torch.where(self.mask, self.weight, 0)


class IdentityStitch(Stitch):
    """Identity map; for unequal widths it keeps the first ``out_features`` or appends zeros.

    It does not have parameters or do arithmetic: values pass through bit for bit, in any dtype.

    Args:
        in_features: Width of the input vectors, at least 1.
        out_features: Width of the output vectors, at least 1.

    Example:
        >>> import torch
        >>> IdentityStitch(2, 3)(torch.tensor([[1.0, 2.0]]))
        tensor([[1., 2., 0.]])
    """

    name: ClassVar[str] = "identity"
    title: ClassVar[str] = "no map"
    affine: ClassVar[bool] = True

    def transform(self, x: Tensor) -> Tensor:
        """Return the input unchanged for equal widths, otherwise a sliced or zero-padded copy."""
        surplus = self.out_features - self.in_features
        return functional.pad(x, (0, surplus)) if surplus else x

    def matrix(self) -> Tensor:
        """Return the map as ``(out_features, in_features)``, with ones on the diagonal."""
        return torch.eye(self.out_features, self.in_features)


class LowRankStitch(Stitch):
    """``x ↦ up · (down · x) + bias``: an affine map of rank at most ``rank`` (Csiszárik et al. 2021, §7).

    The parameters are plain, trainable and initialised like two layers of ``torch.nn.Linear``.

    Attributes:
        rank: Width of the bottleneck.
        down: ``(rank, in_features)``.
        up: ``(out_features, rank)``.
        bias: ``(out_features,)``, or None.

    Args:
        in_features: Width of the input vectors, at least 1.
        out_features: Width of the output vectors, at least 1.
        rank: Width of the bottleneck, from 1 to the smaller of the two widths.
        bias: Whether to add a bias.
        dtype: Dtype of the parameters, as a ``torch.dtype`` or its name.

    Example:
        >>> stitch = LowRankStitch(64, 64, rank=4)
        >>> sum(parameter.numel() for parameter in stitch.parameters())
        576
    """

    name: ClassVar[str] = "low_rank"
    title: ClassVar[str] = "an affine map through a bottleneck"
    papers: ClassVar[tuple[Paper, ...]] = (CSISZARIK_2021,)
    affine: ClassVar[bool] = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: int,
        bias: bool = True,
        dtype: torch.dtype | str = torch.float32,
    ) -> None:
        super().__init__(in_features, out_features)
        _check_rank(rank, in_features, out_features)
        self.rank = rank
        self.down = nn.Parameter(torch.empty(rank, in_features, dtype=as_dtype(dtype)))
        self.up = nn.Parameter(torch.empty(out_features, rank, dtype=as_dtype(dtype)))
        self.bias = nn.Parameter(torch.empty(out_features, dtype=as_dtype(dtype))) if bias else None
        for parameter, fan_in in zip(self.parameters(), (in_features, rank, rank), strict=False):
            nn.init.uniform_(parameter, -1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in))

    def transform(self, x: Tensor) -> Tensor:
        """``(x · downᵀ) · upᵀ + bias``."""
        return functional.linear(functional.linear(x, self.down), self.up, self.bias)

    def matrix(self) -> Tensor:
        """Return the map without its bias, ``(out_features, in_features)``."""
        return self.up @ self.down


class LowRankResidualStitch(Stitch):
    """``x ↦ Wx + b + V(Ux)``: a frozen affine map plus a trainable correction of rank at most ``rank``.

    This is LoRA (Hu et al. 2022) on the map between two networks: with ``rank`` far below the widths, training changes
    a few directions and leaves the rest of the fitted map unchanged.

    Attributes:
        rank: Width of the bottleneck.
        weight: ``W``, ``(out_features, in_features)``; a buffer.
        bias: ``b``, ``(out_features,)``; a buffer.
        down: ``U``, ``(rank, in_features)``.
        up: ``V``, ``(out_features, rank)``; initially 0.

    Args:
        in_features: Width of the input vectors, at least 1.
        out_features: Width of the output vectors, at least 1.
        rank: Width of the bottleneck, from 1 to the smaller of the two widths.
        dtype: Dtype of the weights, as a ``torch.dtype`` or its name.

    Example:
        >>> stitch = LowRankResidualStitch(64, 32, rank=4)
        >>> sum(parameter.numel() for parameter in stitch.parameters())
        384
    """

    name: ClassVar[str] = "low_rank_residual"
    title: ClassVar[str] = "a fixed affine map plus a low-rank correction"
    affine: ClassVar[bool] = True

    weight: Tensor
    bias: Tensor

    def __init__(
        self, in_features: int, out_features: int, rank: int, dtype: torch.dtype | str = torch.float32
    ) -> None:
        super().__init__(in_features, out_features)
        _check_rank(rank, in_features, out_features)
        self.rank, float_dtype = rank, as_dtype(dtype)
        bound = in_features**-0.5
        self.register_buffer(
            "weight", torch.empty(out_features, in_features, dtype=float_dtype).uniform_(-bound, bound)
        )
        self.register_buffer("bias", torch.zeros(out_features, dtype=float_dtype))
        self.down = nn.Parameter(torch.empty(rank, in_features, dtype=float_dtype).uniform_(-bound, bound))
        self.up = nn.Parameter(torch.zeros(out_features, rank, dtype=float_dtype))

    def transform(self, x: Tensor) -> Tensor:
        """``Wx + b + V(Ux)``."""
        correction = functional.linear(functional.linear(x, self.down), self.up)
        return functional.linear(x, self.weight, self.bias) + correction

    def matrix(self) -> Tensor:
        """Return the map without its bias, ``(out_features, in_features)``."""
        return self.weight + self.up @ self.down


def _check_rank(rank: int, in_features: int, out_features: int) -> None:
    max_rank = min(in_features, out_features)
    if not 1 <= rank <= max_rank:
        raise ValueError(f"rank must be from 1 to {max_rank} for widths {in_features} -> {out_features}, got {rank}")


def as_linear(stitch: Stitch) -> LinearStitch:
    """Convert any affine stitch to a :class:`LinearStitch` with copies of its weight matrix and bias.

    Example:
        >>> as_linear(LowRankStitch(4, 3, rank=1))
        LinearStitch(in_features=4, out_features=3, bias=True, dtype='float32')
    """
    matrix: Callable[[], Tensor] | None = getattr(stitch, "matrix", None)
    if matrix is None:
        raise ValueError(f"{type(stitch).__name__} is not an affine map: it does not have a matrix method")
    return LinearStitch.of(weight=matrix(), bias=getattr(stitch, "bias", None))
