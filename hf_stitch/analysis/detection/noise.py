"""Noise of known sizes on a target's own activations, with which detectors are calibrated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import torch
from torch import Tensor

from hf_stitch.analysis.detection.drawing import generator
from hf_stitch.data.samples import Id
from hf_stitch.representation import Representation
from hf_stitch.statistics import LayerMoments

DOSES = (0.01, 0.03, 0.1, 0.3, 1.0)
"""Relative residuals ``‖noise‖² / ‖g‖²`` of the target's own activations g with noise."""

KINDS = ("coloured", "isotropic", "residual")
"""Kinds of noise: with the covariance of the activations; with the same variance in all directions; and residuals of
least squares on other samples."""


@dataclass(frozen=True)
class Noise:
    """Noise for the activations of a layer, with a mean square equal to theirs.

    Attributes:
        root: ``(d, d)`` float64; times standard normal vectors, it gives noise with the covariance of the activations.
        scale: Standard deviation of isotropic noise.
        residuals: ``(positions, d)`` float64 for each of some samples: what least squares from another network leaves.
            Empty if there are none.
    """

    root: Tensor
    scale: float
    residuals: Sequence[Tensor] = field(default=())

    @classmethod
    def of(cls, activations: Iterable[Representation], residuals: Sequence[Tensor] = ()) -> Self:
        """Measure the activations.

        Args:
            activations: Batches of activations of the layer.
            residuals: ``(positions, d)`` for each of some samples, of any size.

        Raises:
            ValueError: If all positions are equal.
        """
        kept: LayerMoments | None = None
        for batch in activations:
            rows = batch.rows("none")
            kept = kept or LayerMoments([rows[:1024].double().mean(0)])
            kept.update([rows])
        if kept is None:
            raise ValueError("there are no activations")
        moments = kept.moments(0, 0)
        values, vectors = torch.linalg.eigh(moments.sxx)
        values = values.clamp(min=0)  # rounding
        if not values.any():
            raise ValueError(f"all {moments.n} positions are equal: is the layer dead?")
        square = float(moments.sxx.trace() / moments.n + moments.mean_x @ moments.mean_x)
        root = vectors * (values * square / values.sum()).sqrt()
        own = [part.to(root) for part in residuals]
        if own and (found := float(torch.cat(own).square().sum(1).mean())) > 0:
            return cls(root, (square / len(root)) ** 0.5, [part * (square / found) ** 0.5 for part in own])
        return cls(root, (square / len(root)) ** 0.5)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of noise that can be drawn."""
        return KINDS if self.residuals else KINDS[:2]

    def draw(self, activations: Representation, ids: Sequence[Id], seed: int) -> dict[str, Tensor]:
        """Draw noise of every kind.

        Args:
            activations: Activations of the target. Prefix tokens and padding get no noise.
            ids: Ids of the samples, on which alone the noise of each depends.
            seed: Seed of the noise.

        Returns:
            Kind -> noise in the shape of the values.
        """
        prefix, (batch, length, width) = activations.prefix_tokens, activations.positions().shape
        real = torch.ones(batch, length, dtype=torch.bool, device=self.root.device)
        if activations.mask is not None:
            real = activations.mask[:, prefix:].to(real)
        counts = real.sum(1).tolist()
        normal = torch.from_numpy(
            np.concatenate(
                [generator(i, seed, "noise").standard_normal((n, width)) for i, n in zip(ids, counts, strict=True)]
            )
        ).to(self.root)
        rows = {"coloured": normal @ self.root.T, "isotropic": normal * self.scale}
        if self.residuals:
            rows["residual"] = torch.cat([self._residual(i, n, seed) for i, n in zip(ids, counts, strict=True)])
        found = {}
        for kind, values in rows.items():
            noise = self.root.new_zeros(batch, length, width)
            noise[real] = values
            found[kind] = _laid_out(noise, activations)
        return found

    def _residual(self, id_: Id, count: int, seed: int) -> Tensor:
        """Residual of another sample; a shorter one is repeated."""
        donor = self.residuals[int(generator(id_, seed, "residual").integers(len(self.residuals)))]
        return donor[torch.arange(count, device=donor.device) % len(donor)]


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
