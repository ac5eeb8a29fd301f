"""How far the activations after each block moved, without a map and after an orthogonal or affine map."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_stitch.registry import registries
from hf_stitch.running import Processes
from hf_stitch.statistics import Moments
from hf_stitch_versions.recording import values_of

POSITIONS = 16
"""Maximum number of positions per sample, evenly spaced; their activations are the rows."""

WIDEST = 1024
"""Maximum number of features; wider activations are not compared."""

MAPS = {"orthogonal": "procrustes", "affine": "ridge_to_identity"}
"""Kind of map -> matcher that fits it."""


@dataclass(frozen=True)
class Move:
    """Distance of the activations after a block in the second network from the same activations in the first.

    All errors are mean squares over the variance of the first network's activations, on held-out samples. Rows are up
    to 16 positions of each sample.

    Attributes:
        error: Without a map.
        orthogonal: After the best orthogonal map from the second network to the first, with a shift.
        affine: After an affine map (ridge regression towards the identity).
        cosine: Cosine of the centred activations, over all rows.
        cka: Linear CKA, biased.
    """

    error: float
    orthogonal: float
    affine: float
    cosine: float
    cka: float


class Moved:
    """Moments of the activations after blocks: every second sample fits the maps, the rest test them."""

    def __init__(self) -> None:
        self.moments: dict[str, list[Moments]] = {}
        self.seen: dict[str, int] = {}

    def add(self, name: str, output_a: Any, output_b: Any, mask: Tensor | None) -> None:
        """Add a batch of the outputs of a block in both networks."""
        x, y = (_rows(output, mask) for output in (output_b, output_a))
        if x is None or y is None or x.shape[1:] != y.shape[1:]:
            return
        width, count = y.shape[-1], self.seen.get(name, 0)
        self.seen[name] = count + len(y)
        if width > WIDEST:
            return
        train_and_test = self.moments.setdefault(name, [Moments(width, width), Moments(width, width)])
        finite = y.isfinite().all(-1)
        for half in (0, 1):
            rows = torch.arange(half if count % 2 == 0 else 1 - half, len(y), 2, device=y.device)
            if len(rows) and bool(finite[rows].any()):
                train_and_test[half].update(x[rows][finite[rows]], y[rows][finite[rows]])

    def gather(self, processes: Processes) -> None:
        """Merge the moments of all processes."""
        gathered = processes.gather(self.moments)
        self.moments = gathered[0]
        for moments in gathered[1:]:
            for name, train_and_test in moments.items():
                pairs = zip(self.moments[name], train_and_test, strict=True)
                self.moments[name] = [mine.merge(theirs) for mine, theirs in pairs]

    def move(self, name: str) -> Move | None:
        """Return how far activations have moved; ``None`` if they were not compared or are constant."""
        train, test = self.moments.get(name, (None, None))
        if train is None or test is None or min(train.n, test.n) < 2:
            return None
        variance = float(test.syy.trace())
        if not variance:
            return None
        scale = math.sqrt(float(test.sxx.trace()) * variance)
        cosine = float(test.sxy.trace()) / scale if scale else math.nan
        norms = float(torch.linalg.matrix_norm(test.sxx) * torch.linalg.matrix_norm(test.syy))
        cka = float(test.sxy.square().sum()) / norms if norms else math.nan
        identity = torch.eye(test.dx, dtype=torch.float64)
        errors = [_error(test, identity, torch.zeros(test.dx, dtype=torch.float64)) / variance]
        for matcher in MAPS.values():
            try:
                closed_form: Any = registries.matchers.build(matcher)
                stitch = closed_form.fit(train, torch.float64)
            except ValueError:  # constant activations
                errors.append(math.nan)
                continue
            errors.append(_error(test, stitch.weight.detach(), stitch.bias.detach()) / variance)
        return Move(errors[0], errors[1], errors[2], cosine, cka)


def _error(moments: Moments, weight: Tensor, bias: Tensor) -> float:
    """Return the sum of squared residuals of y after an affine map of x."""
    shift = moments.mean_y - weight @ moments.mean_x - bias
    residual = moments.syy.trace() - 2 * (weight * moments.sxy.T).sum() + ((weight @ moments.sxx) * weight).sum()
    return max(float(residual), 0.0) + moments.n * float(shift.square().sum())


def _rows(output: Any, mask: Tensor | None) -> Tensor | None:
    """Return the activations of a block, (samples, positions, features), NaN at padding; ``None`` without them."""
    values = next(iter(values_of(output).values()), None)
    if values is None or values.dim() not in (2, 3, 4):
        return None
    if values.dim() == 4:  # channels come first, or last if only the first two axes form a square grid
        channels_last = values.shape[1] == values.shape[2] != values.shape[3]
        values = values.flatten(1, 2) if channels_last else values.flatten(2).transpose(1, 2)
    if values.dim() == 2:
        return values[:, None]
    mask = mask.to(values.device) if mask is not None and mask.shape == values.shape[:2] else None
    real = values.new_ones(values.shape[:2], dtype=torch.bool) if mask is None else mask
    count = real.sum(1, keepdim=True)
    positions = torch.arange(POSITIONS, device=values.device)
    spaced = torch.where(count > POSITIONS, (positions * (count - 1) / (POSITIONS - 1)).round().long(), positions)
    order = real.int().sort(dim=1, descending=True, stable=True).indices  # real tokens first
    indices = order.gather(1, spaced.clamp(max=values.shape[1] - 1))
    rows = values.gather(1, indices[..., None].expand(-1, -1, values.shape[2]))
    return rows.masked_fill((positions >= count)[..., None], torch.nan)
