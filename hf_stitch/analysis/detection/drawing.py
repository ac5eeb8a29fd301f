"""Random choices that depend on the id of a sample alone: positions, noise, halves of the samples."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from hf_stitch.data.samples import Id
from hf_stitch.detectors.base import Reads
from hf_stitch.representation import Representation

POSITIONS = 8
"""Positions that are kept of each sample for detectors of stitched activations."""


def generator(id_: Id, seed: int, purpose: str) -> np.random.Generator:
    """Return the random numbers of one sample."""
    key = hashlib.sha256(f"{seed} {purpose} {id_!r}".encode()).digest()
    return np.random.default_rng(int.from_bytes(key[:8]))


@lru_cache(maxsize=8)
def _drawn(ids: tuple[Id, ...], seed: int, purpose: str) -> NDArray[np.float64]:
    numbers = np.array([generator(id_, seed, purpose).random() for id_ in ids])
    numbers.flags.writeable = False
    return numbers


def drawn(ids: Sequence[Id], seed: int, purpose: str) -> NDArray[np.float64]:
    """Draw a number for each sample. The last few draws are kept: hashing 10,000 ids takes half a second."""
    return _drawn(tuple(ids), seed, purpose)


def folds(ids: Sequence[Id], seed: int) -> NDArray[np.bool_]:
    """Return the folds of samples in which detectors of stitched activations are fitted and score.

    Returns ``(n,)``, true for the second fold. That of a sample depends on its id alone, whatever the other samples
    are, so that the noise of a batch can differ between folds. Folds are therefore of nearly equal size only.
    """
    return drawn(ids, seed, "fold") >= 0.5


def halves(ids: Sequence[Id], seed: int, purpose: str) -> NDArray[np.bool_]:
    """Split samples at random into two halves of equal size."""
    second = np.zeros(len(ids), bool)
    second[np.argsort(drawn(ids, seed, purpose))[len(ids) // 2 :]] = True
    return second


def drawn_rows(activations: Representation, ids: Sequence[Id], seed: int, reads: Reads) -> torch.Tensor:
    """Return some rows of each sample, for detectors of stitched activations."""
    if reads == "samples" or activations.layout == "bd":
        return activations.rows("mean").float().cpu()[:, None]
    rows, owners = activations.rows("none"), activations.row_samples("none").cpu()
    counts = torch.bincount(owners, minlength=activations.batch)
    if not bool(counts.all()):
        raise ValueError(f"sample {ids[int((counts == 0).nonzero()[0])]!r} has no position: leave it out")
    starts = counts.cumsum(0) - counts
    places = [
        start + generator(id_, seed, "positions").choice(count, POSITIONS, replace=count < POSITIONS)
        for id_, start, count in zip(ids, starts.tolist(), counts.tolist(), strict=True)
    ]
    return rows[torch.from_numpy(np.stack(places)).to(rows.device)].float().cpu()
