"""Maps that compensate for removed blocks: changes of the weights of the last projection before them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
"""Ridge penalties of the change, relative to the mean of the diagonal of the moments."""

SINGULAR = 1e-9
"""Share of the largest moment below which regressions without a penalty omit a direction."""


# -- projections ------------------------------------------------------------------------------------------------------
def matrix_of(projection: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Return the weights of a projection as (width, inputs) in float64, and its bias."""
    module: Any = projection
    weight = module.weight.detach().double()
    weight = weight.T if isinstance(module, Conv1D) else weight.flatten(1)
    return weight, None if module.bias is None else module.bias.detach().double()


@torch.no_grad()
def add_to(projection: nn.Module, weight: Tensor, bias: Tensor | None) -> None:
    """Add a change to the weights of a projection, in place."""
    module: Any = projection
    change = weight.T if isinstance(module, Conv1D) else weight.reshape(module.weight.shape)
    module.weight.copy_((module.weight.double() + change).to(module.weight.dtype))
    if bias is not None:
        module.bias.copy_((module.bias.double() + bias).to(module.bias.dtype))


def input_rows(projection: nn.Module, values: Tensor) -> Tensor:
    """Return the inputs of a projection as rows, one per position: (rows, inputs)."""
    module: Any = projection
    if not isinstance(module, nn.Conv2d):
        return values.flatten(0, -2)
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    padded = functional.pad(values, module._reversed_padding_repeated_twice, mode)
    patches = functional.unfold(padded, module.kernel_size, module.dilation, 0, module.stride)
    return patches.movedim(1, -1).flatten(0, -2)


# -- moments ----------------------------------------------------------------------------------------------------------
@dataclass
class Moments:
    """Sums for the regression of the missing part of the stream on the inputs of a projection.

    Attributes:
        count: Number of rows.
        inputs: Sum of ``[a, 1]ᵀ [a, 1]``, (inputs + 1, inputs + 1), where a is the input of the projection.
        cross: Last removed block -> sum of ``dᵀ [a, 1]``, (width, inputs + 1), where d is the stream after it minus the
            stream after the block of the projection, over the factor of the channel.
        squares: Last removed block -> sum of ``d²``, (width,).
    """

    count: int = 0
    inputs: Tensor | float = 0.0
    cross: dict[str, Tensor | float] = field(default_factory=dict)
    squares: dict[str, Tensor | float] = field(default_factory=dict)

    def add(self, inputs: Tensor, gaps: Mapping[str, Tensor]) -> None:
        """Add rows: inputs of the projection (rows, inputs), and last removed block -> missing part (rows, width)."""
        with_one = functional.pad(inputs.detach().double(), (0, 1), value=1.0)
        self.count += len(with_one)
        self.inputs = self.inputs + with_one.T @ with_one
        for name, gap in gaps.items():
            difference = gap.detach().double()
            self.cross[name] = self.cross.get(name, 0.0) + difference.T @ with_one
            self.squares[name] = self.squares.get(name, 0.0) + difference.square().sum(0)

    def __add__(self, other: Moments) -> Moments:
        """Return the moments of both sets of rows."""
        return Moments(
            self.count + other.count, self.inputs + other.inputs,
            {name: self.cross.get(name, 0.0) + other.cross.get(name, 0.0) for name in {**self.cross, **other.cross}},
            {name: self.squares.get(name, 0.0) + other.squares.get(name, 0.0)
             for name in {**self.squares, **other.squares}},
        )  # fmt: skip


# -- maps -------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Change:
    """A change of a projection: of its weights, (width, inputs), and of its bias, (width,)."""

    weight: Tensor
    bias: Tensor | None
    penalty: float | None = None


class Fits:
    """Maps of one projection, for all possible last removed blocks.

    Args:
        projection: The module.
        scale: Factor of each channel between its output and the stream; errors are errors of the stream.
        fit_moments: Moments of the rows for fitting.
        held_out: Moments of the held-out rows, which choose the penalty.
    """

    def __init__(self, projection: nn.Module, scale: Tensor, fit_moments: Moments, held_out: Moments) -> None:
        self.weight, self.bias = matrix_of(projection)
        self.scale, self.fit_moments, self.held_out = scale.to(self.weight), fit_moments, held_out
        self._spectrum: tuple[Tensor, Tensor] | None = None

    def replaceme(self, last: str) -> Change:
        """Return the least-squares map of the output of the projection, folded into it (ReplaceMe, arXiv 2505.02819).

        With y = W a + b: the T that minimises ‖T y − (y + d)‖², and (T − 1)(W, b) as the change.
        """
        moments = self.fit_moments + self.held_out
        wide = _wide(self.weight, self.bias)
        gram, cross = wide @ torch.as_tensor(moments.inputs) @ wide.T, torch.as_tensor(moments.cross[last]) @ wide.T
        change = cross @ torch.linalg.pinv(gram, rtol=SINGULAR, hermitian=True) @ wide
        return Change(change[:, :-1], None if self.bias is None else change[:, -1])

    def refit(self, last: str) -> Change:
        """Return the ridge regression of the missing part of the stream on the inputs of the projection.

        The penalty pulls towards the current weights, and is chosen on held-out rows; without an improvement there, the
        change is zero. The change is fitted on all rows.
        """
        errors = {penalty: self._error(self._solved(last, penalty), last) for penalty in PENALTIES}
        best = min(errors, key=lambda penalty: errors[penalty])
        no_change = Change(torch.zeros_like(self.weight), None if self.bias is None else torch.zeros_like(self.bias))
        if not errors[best] < self._error(no_change, last):
            return no_change
        gram, cross = self._centred(self.fit_moments + self.held_out, last)
        gram = gram + best * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        weight = torch.linalg.solve(gram, cross.T).T
        return self._with_bias(weight, self.fit_moments + self.held_out, last, best)

    def _centred(self, moments: Moments, last: str) -> tuple[Tensor, Tensor]:
        """Return centred moments, or moments about 0 if the projection does not have a bias."""
        inputs, cross = torch.as_tensor(moments.inputs), torch.as_tensor(moments.cross[last])
        gram, centred_cross = inputs[:-1, :-1], cross[:, :-1]
        if self.bias is None:
            return gram, centred_cross
        mean, lack = inputs[:-1, -1] / moments.count, cross[:, -1] / moments.count
        return gram - moments.count * mean[:, None] * mean, centred_cross - moments.count * lack[:, None] * mean

    def _with_bias(self, weight: Tensor, moments: Moments, last: str, penalty: float) -> Change:
        """Return a change with the matching bias."""
        if self.bias is None:
            return Change(weight, None, penalty)
        inputs, cross = torch.as_tensor(moments.inputs), torch.as_tensor(moments.cross[last])
        return Change(weight, (cross[:, -1] - weight @ inputs[:-1, -1]) / moments.count, penalty)

    def _solved(self, last: str, penalty: float) -> Change:
        """Return the change with one penalty, fitted on the rows for fitting."""
        gram, cross = self._centred(self.fit_moments, last)
        if self._spectrum is None:
            values, vectors = torch.linalg.eigh(gram)
            self._spectrum = values.clamp(min=0), vectors
        values, vectors = self._spectrum
        weight = (cross @ vectors / (values + penalty * gram.diagonal().mean())) @ vectors.T
        return self._with_bias(weight, self.fit_moments, last, penalty)

    def _error(self, change: Change, last: str) -> float:
        """Return the sum of squared errors of the stream on held-out rows."""
        wide = _wide(change.weight, change.bias)
        inputs, cross = torch.as_tensor(self.held_out.inputs), torch.as_tensor(self.held_out.cross[last])
        residual = torch.as_tensor(self.held_out.squares[last]) + ((wide @ inputs - 2 * cross) * wide).sum(1)
        return float((self.scale.square() * residual).sum())


def _wide(weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return weights with the bias as the last column, 0 without a bias."""
    return torch.cat((weight, weight.new_zeros(len(weight), 1) if bias is None else bias[:, None]), 1)


LATER = "refit_later"
"""Map that also refits the projections of the blocks after removed blocks, in sequence."""

REFITS = ("refit", LATER)
"""Maps that are omitted where dropping the blocks scores better; other maps always apply, as published."""

MAPS: Mapping[str, Callable[[Fits, str], Change]] = {
    "refit": Fits.refit, LATER: Fits.refit, "replaceme": Fits.replaceme,
}  # fmt: skip
"""Name of a map -> function that computes the change of the projection before removed blocks."""
