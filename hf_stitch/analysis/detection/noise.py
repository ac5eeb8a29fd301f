"""Noise of known sizes on a target's own activations, with which detectors are calibrated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from hf_stitch.analysis.detection.drawing import generator
from hf_stitch.data.samples import Id
from hf_stitch.representation import Representation

DOSES = (0.01, 0.03, 0.1, 0.3, 1.0)
"""Relative residuals ``‖noise‖² / ‖g‖²`` of the target's own activations g with noise."""

KINDS = ("coloured", "isotropic", "residual")
"""Kinds of noise: centred activations of the target of another sample, which have its covariance in all respects, also
between positions; normal with the same variance in all directions and positions; residuals of least squares of another
sample."""

DONORS = 64
"""Number of other samples whose activations or residuals are added."""


def donors_among(ids: Sequence[Id], seed: int) -> list[int]:
    """Return the places of the samples whose activations or residuals are added to those of others.

    Args:
        ids: Ids of the samples to which detectors are fitted.
        seed: Seed of the draw, which depends on the ids alone.
    """
    drawn = [generator(id_, seed, "donor").random() for id_ in ids]
    return sorted(range(len(ids)), key=drawn.__getitem__)[:DONORS]


@dataclass(frozen=True)
class Noise:
    """Noise for the activations of a layer, with a mean square equal to theirs.

    Attributes:
        scale: Standard deviation of isotropic noise.
        donors: Kind -> ``(positions, d)`` float64 for each of some samples.
    """

    scale: float
    donors: Mapping[str, Sequence[Tensor]]

    @classmethod
    def of(
        cls, activations: Sequence[Representation], ids: Sequence[Id], seed: int, residuals: Sequence[Tensor] = ()
    ) -> Self:
        """Measure the activations.

        Args:
            activations: Batches of activations of the layer.
            ids: Ids of their samples.
            seed: Seed of the draw of donors of coloured noise.
            residuals: ``(positions, d)`` for each of some samples, of any size: donors of residual noise.

        Raises:
            ValueError: If all positions are equal, or those of the donors are.
        """
        mean, square = _moments(activations)
        samples = [(batch, place) for batch in activations for place in range(batch.batch)]
        drawn = [_rows_of(*samples[place]) - mean for place in donors_among(ids, seed)]
        donors = {"coloured": drawn, "residual": list(residuals)}
        scaled = {}
        for kind, rows in donors.items():
            if rows:
                found = float(torch.cat(list(rows)).square().sum(1).mean())
                if found == 0 and kind == "coloured":
                    raise ValueError(f"all positions of {len(rows)} samples are equal: is the layer dead?")
                if found > 0:
                    scaled[kind] = [part.to(mean) * (square / found) ** 0.5 for part in rows]
        return cls((square / len(mean)) ** 0.5, scaled)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of noise that can be drawn."""
        return tuple(kind for kind in KINDS if kind == "isotropic" or kind in self.donors)

    def draw(self, kind: str, activations: Representation, ids: Sequence[Id], seed: int) -> Tensor:
        """Draw noise.

        Args:
            kind: One of :attr:`kinds`.
            activations: Activations of the target. Prefix tokens and padding get no noise.
            ids: Ids of the samples, on which alone the noise of each depends.
            seed: Seed of the noise.

        Returns:
            The noise, in the shape of the values.
        """
        prefix, (batch, length, width) = activations.prefix_tokens, activations.positions().shape
        device = self.donors["coloured"][0].device
        real = torch.ones(batch, length, dtype=torch.bool, device=device)
        if activations.mask is not None:
            real = activations.mask[:, prefix:].to(real)
        counts = real.sum(1).tolist()
        rows = [self._rows(kind, id_, count, width, seed) for id_, count in zip(ids, counts, strict=True)]
        noise = torch.zeros(batch, length, width, dtype=torch.float64, device=device)
        noise[real] = torch.cat(rows).to(device)
        return _laid_out(noise, activations)

    def _rows(self, kind: str, id_: Id, count: int, width: int, seed: int) -> Tensor:
        random = generator(id_, seed, kind)
        if kind == "isotropic":
            return torch.from_numpy(self.scale * random.standard_normal((count, width)))
        donor = self.donors[kind][int(random.integers(len(self.donors[kind])))]
        return donor[torch.arange(count, device=donor.device) % len(donor)]  # a shorter one is repeated


def _moments(activations: Sequence[Representation]) -> tuple[Tensor, float]:
    """Return mean and mean square of all positions."""
    total, square, count = None, 0.0, 0
    for batch in activations:
        rows = batch.rows("none").double()
        total = rows.sum(0) + (0 if total is None else total)
        square, count = square + float(rows.square().sum()), count + len(rows)
    if total is None or not count:
        raise ValueError("there are no activations: give more samples")
    return total / count, square / count


def _rows_of(batch: Representation, place: int) -> Tensor:
    """Return the positions of one sample of a batch, ``(positions, d)`` float64."""
    mask = None if batch.mask is None else batch.mask[place : place + 1]
    return batch.replace(values=batch.values[place : place + 1], mask=mask).rows("none").double()


def _laid_out(noise: Tensor, activations: Representation) -> Tensor:
    """Return noise of positions, ``(batch, positions, d)``, in the shape of the activations."""
    if activations.layout == "bd":
        noise = noise[:, 0]
    elif activations.layout == "bnd":
        noise = torch.nn.functional.pad(noise, (0, 0, activations.prefix_tokens, 0))
    else:
        noise = noise.unflatten(1, activations.grid)
        noise = noise if activations.layout == "bhwc" else noise.permute(0, 3, 1, 2)
    return noise.to(activations.values)
