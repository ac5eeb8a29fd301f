"""Distances between the values of two networks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_stitch_versions.recording import Event, Key, Values


def _none() -> list[float]:
    """Return the initial sums of squares."""
    return [0.0, 0.0]


@dataclass
class Deviation:
    """Relative difference of one call between two networks, summed over batches.

    It is the root mean square of the difference over the root mean square of the reference, over all rows and features
    of a tensor. With several tensors, the largest difference counts.
    """

    outputs: dict[str, list[float]] = field(default_factory=lambda: defaultdict(_none))
    inputs: dict[str, list[float]] = field(default_factory=lambda: defaultdict(_none))
    masks: tuple[int, int] = (0, 0)  # number of positions where masks differ, and of all compared positions

    def add(self, reference: Event, compared: Event, mask: Tensor | None) -> None:
        """Add a batch. ``mask`` (batch, positions) is true for real tokens; padding is left out."""
        _add(self.outputs, reference.outputs, compared.outputs, mask)
        _add(self.inputs, reference.inputs, compared.inputs, mask)
        self._add_masks(_unequal(reference.masks, compared.masks, mask))

    def join(self, other: Deviation) -> None:
        """Add the sums of another process."""
        for mine, theirs in ((self.outputs, other.outputs), (self.inputs, other.inputs)):
            for place, (gap, size) in theirs.items():
                mine[place][0] += gap
                mine[place][1] += size
        self._add_masks(other.masks)

    def _add_masks(self, counts: tuple[int, int]) -> None:
        self.masks = self.masks[0] + counts[0], self.masks[1] + counts[1]

    @property
    def output(self) -> float:
        """Relative difference of the outputs; infinite if their shapes or the positions of finite values differ."""
        return _relative(self.outputs)

    @property
    def input(self) -> float:
        """Relative difference of the inputs."""
        return _relative(self.inputs)


Deviations = dict[Key, Deviation]


def join(parts: list[Deviations]) -> Deviations:
    """Add up the deviations of several processes."""
    first, *rest = parts
    for deviations in rest:
        for key, deviation in deviations.items():
            first.setdefault(key, Deviation()).join(deviation)
    return first


def rows_of(values: Tensor, mask: Tensor | None) -> Tensor:
    """Return the values of real tokens as float64; all values of a tensor without tokens."""
    by_token = values.dim() == 3 or (values.dim() == 2 and not values.is_floating_point())
    if mask is not None and by_token and values.shape[:2] == mask.shape:
        values = values[mask.to(values.device)]
    return values.double()


def _add(sums: dict[str, list[float]], one: Values, two: Values, mask: Tensor | None) -> None:
    for place, (x, y) in matched(one, two).items():
        gap, size = _difference(x, y, mask)
        sums[place][0] += gap
        sums[place][1] += size


def _unequal(one: Values, two: Values, mask: Tensor | None) -> tuple[int, int]:
    """Return the number of positions where masks differ, and of compared positions: queries of real tokens."""
    unequal_count = compared_count = 0
    for place, x in (one or two).items():
        y = two.get(place) if one and two else _unmasked(x)
        if y is None or x.shape != y.shape:
            continue
        unequal = x != y.to(x.device)
        if mask is not None and unequal.dim() == 4 and (unequal.shape[0], unequal.shape[2]) == mask.shape:
            unequal = unequal.transpose(1, 2)[mask.to(x.device)]
        unequal_count, compared_count = unequal_count + int(unequal.sum()), compared_count + unequal.numel()
    return unequal_count, compared_count


def _unmasked(mask: Tensor) -> Tensor:
    """Return the mask that equals no mask: everything or, if ``mask`` is causal, the past."""
    everything = torch.ones_like(mask)
    past = everything.tril(mask.shape[-1] - mask.shape[-2]) if mask.dim() > 1 else everything
    return everything if bool((mask & ~past).any()) else past


def matched(one: Values, two: Values) -> Mapping[str, tuple[Tensor, Tensor]]:
    """Return the paired values, by their places in the first network."""
    return {place: (one[place], two[partner]) for place, partner in partners(one, two).items()}


def partners(one: Values, two: Values) -> dict[str, str]:
    """Pair the places of two outputs by name.

    Without a common name, tensors of equal size are paired, nearest first and each once; without tensors of equal
    size, the first tensors are a pair.
    """
    if common := {place: place for place in one if place in two}:
        return common
    gaps = sorted(
        (float((x.double() - y.to(x.device, torch.float64).reshape(x.shape)).nan_to_num().norm()), place, partner)
        for place, x in one.items() for partner, y in two.items() if _fit(x, y)
    )  # fmt: skip
    pairs = dict[str, str]()
    for _, place, partner in gaps:
        if place not in pairs and partner not in pairs.values():
            pairs[place] = partner
    return pairs or dict(zip(list(one)[:1], list(two)[:1], strict=False))


def _fit(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors have the same shape, or the same size with a different number of axes."""
    return x.shape == y.shape or (x.dim() != y.dim() and x.numel() == y.numel())


def _difference(x: Tensor, y: Tensor, mask: Tensor | None) -> tuple[float, float]:
    """Return the sums of squares of the difference of two tensors and of the first tensor."""
    if not _fit(x, y):
        return math.inf, 1.0
    y = y.to(x.device).reshape(x.shape)  # axes of length 1 do not matter
    x, y = rows_of(x, mask), rows_of(y, mask)
    gap, squares = float((x - y).square_().sum()), float(x.square().sum())
    if math.isfinite(gap) and math.isfinite(squares):
        return gap, squares
    finite = x.isfinite()
    if not torch.equal(finite, y.isfinite()) or not torch.equal(x[~finite].nan_to_num(), y[~finite].nan_to_num()):
        return math.inf, 1.0
    x, y = x[finite], y[finite]
    return float((x - y).square().sum()), float(x.square().sum())


def _relative(sums: Mapping[str, list[float]]) -> float:
    ratios = (0.0 if gap == 0 else math.inf if size == 0 else math.sqrt(gap / size) for gap, size in sums.values())
    return max(ratios, default=0.0)
