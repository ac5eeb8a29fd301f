"""Random halves, positions, and noise of known size to calibrate detectors, seeded by the ids of samples."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_stitch.data.samples import Id
from hf_stitch.detectors.base import Reads
from hf_stitch.representation import Representation

POSITIONS = 8
"""Number of stored positions per sample for detectors of stitched activations."""

DOSES = (0.01, 0.03, 0.1, 0.3, 1.0)
"""Relative residuals ``‖noise‖² / ‖g‖²`` of the target's own activations g with noise."""
MAX_DOSE = 0.2
"""Largest dose of coloured noise that does not count as out of distribution."""
KINDS = ("coloured", "isotropic", "residual")
"""Kinds of noise: centred activations of the target for another sample, with the covariance of the activations, also
between positions; normal noise with the same variance in all directions and positions; least-squares residuals of
another sample. The size of the noise is set separately for each prefix token."""
DONORS = 64
"""Number of samples with activations or residuals that serve as noise."""


def generator(id_: Id, seed: int, purpose: str) -> np.random.Generator:
    """Return the random generator of one sample."""
    key = hashlib.sha256(f"{seed} {purpose} {id_!r}".encode()).digest()
    return np.random.default_rng(int.from_bytes(key[:8]))


@lru_cache(maxsize=8)
def _uniform_by_id(ids: tuple[Id, ...], seed: int, purpose: str) -> NDArray[np.float64]:
    numbers = np.array([generator(id_, seed, purpose).random() for id_ in ids])
    numbers.flags.writeable = False
    return numbers


def uniform_by_id(ids: Sequence[Id], seed: int, purpose: str) -> NDArray[np.float64]:
    """Return a random number for each sample. The last few calls are cached: hashing 10,000 ids takes half a second."""
    return _uniform_by_id(tuple(ids), seed, purpose)


def folds(ids: Sequence[Id], seed: int) -> NDArray[np.bool_]:
    """Return the folds of samples for fitting and scoring detectors of stitched activations.

    Returns ``(n,)``, true for the second fold. The fold of a sample depends on its id alone, so that the noise of a
    batch can differ between folds. Folds are therefore only approximately equal in size.
    """
    return uniform_by_id(ids, seed, "fold") >= 0.5


def halves(ids: Sequence[Id], seed: int, purpose: str) -> NDArray[np.bool_]:
    """Split samples at random into two halves of equal size."""
    second = np.zeros(len(ids), bool)
    second[np.argsort(uniform_by_id(ids, seed, purpose))[len(ids) // 2 :]] = True
    return second


def random_rows(activations: Representation, ids: Sequence[Id], seed: int, reads: Reads) -> torch.Tensor:
    """Return random rows of each sample, for detectors of stitched activations."""
    if reads == "samples" or activations.layout == "bd":
        return activations.rows("mean").float().cpu()[:, None]
    rows, owners = activations.rows("none"), activations.row_samples("none").cpu()
    counts = torch.bincount(owners, minlength=activations.batch)
    if not bool(counts.all()):
        raise ValueError(f"sample {ids[int((counts == 0).nonzero()[0])]!r} lacks positions; leave it out")
    starts = counts.cumsum(0) - counts
    drawn = [
        start + generator(id_, seed, "positions").choice(count, POSITIONS, replace=count < POSITIONS)
        for id_, start, count in zip(ids, starts.tolist(), counts.tolist(), strict=True)
    ]
    return rows[torch.from_numpy(np.stack(drawn)).to(rows.device)].float().cpu()


def donors_among(ids: Sequence[Id], seed: int) -> list[int]:
    """Return the indices of the samples with activations or residuals that serve as noise."""
    return sorted(range(len(ids)), key=uniform_by_id(ids, seed, "donor").__getitem__)[:DONORS]


@dataclass(frozen=True)
class Noise:
    """Noise with the mean square of the activations of a layer, in each prefix token and over all positions."""

    scales: Tensor  # (prefix tokens + 1,) standard deviations of isotropic noise
    donors: Mapping[str, Sequence[Tensor]]  # kind -> (prefix tokens + positions, d) float64 for each donor

    @classmethod
    def of(
        cls, activations: Iterable[Representation], ids: Sequence[Id], seed: int, residuals: Sequence[Tensor] = ()
    ) -> Self:
        """Measure the activations."""
        if len(ids) < 2:
            raise ValueError(f"noise requires at least 2 samples, got {len(ids)}; pass more samples")
        means, squares = _moments(activations)
        prefix = len(means) - 1
        donor_rows = _samples(activations, donors_among(ids, seed))
        centred = [rows - means[_part_of(rows, prefix)] for rows in donor_rows]
        donors = {"coloured": centred, "residual": [rows.to(means) for rows in residuals]}
        scaled_donors = {}
        for kind, samples in donors.items():
            if samples:
                parts, norms = torch.cat([_part_of(s, prefix) for s in samples]), torch.cat([*samples]).square().sum(1)
                mean_squares = norms.new_zeros(prefix + 1).index_add(0, parts, norms) / torch.bincount(parts)
                if mean_squares[-1] == 0 and kind == "coloured":
                    raise ValueError(f"all positions of {len(samples)} samples are equal: is the layer dead?")
                if mean_squares[-1] > 0:
                    # A prefix token that is equal in all samples, as before the first block, does not get such noise.
                    factors = torch.where(mean_squares > 0, squares / mean_squares, 0).sqrt()
                    scaled_donors[kind] = [rows * factors[_part_of(rows, prefix), None] for rows in samples]
        return cls((squares / means.shape[1]).sqrt(), scaled_donors)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of noise that can be sampled."""
        return tuple(kind for kind in KINDS if kind == "isotropic" or kind in self.donors)

    def sample(self, kind: str, activations: Representation, ids: Sequence[Id], seed: int) -> Tensor:
        """Sample noise for a batch of activations."""
        (batch, length, width), device = activations.positions().shape, self.scales.device
        prefix = len(self.scales) - 1
        real = torch.ones(batch, prefix + length, dtype=torch.bool, device=device)
        if activations.mask is not None:
            real[:, prefix:] = activations.mask[:, prefix:].to(device)
        counts = [length] * batch if activations.mask is None else (real.sum(1) - prefix).tolist()
        second = folds(ids, seed).tolist()
        rows = [
            self._rows(kind, generator(id_, seed, kind), (count, width), fold)
            for id_, count, fold in zip(ids, counts, second, strict=True)
        ]
        noise = torch.zeros(batch, prefix + length, width, dtype=torch.float64, device=device)
        return _laid_out(noise.masked_scatter(real[..., None], torch.cat(rows)), activations)

    def _rows(self, kind: str, random: np.random.Generator, shape: tuple[int, int], fold: int) -> Tensor:
        """Return the noise of one sample, ``(prefix tokens + positions, d)``."""
        prefix, (count, width) = len(self.scales) - 1, shape
        if kind == "isotropic":
            normal = torch.from_numpy(random.standard_normal((prefix + count, width))).to(self.scales)
            return normal * self.scales[_part_of(normal, prefix), None]
        donors_of_fold = self.donors[kind][fold::2]
        donor = donors_of_fold[int(random.integers(len(donors_of_fold)))]
        positions = torch.arange(count, device=donor.device) % (len(donor) - prefix)  # a shorter one is repeated
        return torch.cat([donor[:prefix], donor[prefix + positions]])


def _part_of(rows: Tensor, prefix: int) -> Tensor:
    """Return the part of each row of a sample: the number of the prefix token; positions are the last part."""
    return torch.arange(len(rows), device=rows.device).clamp(max=prefix)


def _moments(activations: Iterable[Representation]) -> tuple[Tensor, Tensor]:
    """Return means ``(prefix tokens + 1, d)`` and mean square norms of each prefix token and of all positions."""
    sums_by_batch: list[tuple[Tensor, Tensor, Tensor]] = []
    for batch in activations:
        row_sets = [rows.double() for rows in (*batch.prefix().unbind(1), batch.rows("none"))]
        sums, squares = torch.stack([rows.sum(0) for rows in row_sets]), [rows.square().sum() for rows in row_sets]
        sums_by_batch.append((sums, torch.stack(squares), sums.new_tensor([len(rows) for rows in row_sets])))
    total, square, counts = (torch.stack(by_batch).sum(0) for by_batch in zip(*sums_by_batch, strict=True))
    return total / counts[:, None], square / counts


def _samples(activations: Iterable[Representation], indices: Sequence[int]) -> list[Tensor]:
    """Return the rows of the samples at ``places``, ``(prefix tokens + positions, d)`` float64, in this order."""
    rows, start = {}, 0
    for batch in activations:
        for index in indices:
            if start <= index < start + batch.batch:
                only = slice(index - start, index - start + 1)
                mask = None if batch.mask is None else batch.mask[only]
                rows[index] = batch.replace(values=batch.values[only], mask=mask).rows("none", prefix=True).double()
        start += batch.batch
    return [rows[index] for index in indices]


def _laid_out(noise: Tensor, activations: Representation) -> Tensor:
    """Return noise, ``(batch, prefix tokens + positions, d)``, in the shape of the activations."""
    if activations.layout == "bd":
        noise = noise[:, 0]
    elif activations.layout != "bnd":
        noise = noise.unflatten(1, activations.grid)
        noise = noise if activations.layout == "bhwc" else noise.permute(0, 3, 1, 2)
    return noise.to(activations.values)
