"""Sketch of the contents of fitted samples, which an artefact stores to detect scores on its own fitting data."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from hf_stitch.data.samples import Samples

MOST_SHARED = 0.05
"""Maximum share of samples that also occur among fitted samples; datasets have duplicates."""
FITTED = "fitted_samples"
"""Key of the sketch of the fitted samples in a recipe."""

SIZE = 1024
"""Maximum number of hashes in a sketch."""

FEWEST = 10
"""Minimum number of samples for an estimate."""

WIDTH = 6
"""Bytes of a hash: the probability that any two of a million different samples share a hash is below 1%."""


@dataclass(frozen=True)
class ContentSketch:
    """Smallest hashes of the contents of samples, to recognise them later, in at most eight kilobytes.

    Contents are compared, because default ids are only positions. Up to :data:`SIZE` samples are all recognised. In
    larger sets, only samples with the smallest hashes are recognised, and shares are estimates (the bottom-k sketch of
    Broder 1997).
    """

    n: int  # number of samples
    hashes: NDArray[np.uint64]  # the smallest hashes, sorted: (min(n, SIZE),) uint64; fewer if contents repeat

    @classmethod
    def of(cls, *parts: Samples) -> Self:
        """Create the sketch of all samples in ``parts``."""
        return cls(sum(map(len, parts)), np.unique(np.concatenate([_hashes(samples) for samples in parts]))[:SIZE])

    def share(self, samples: Samples) -> float | None:
        """Return the share of samples with contents in the sketch.

        Exact if at most :data:`SIZE` samples are sketched, otherwise an estimate. ``None`` if fewer than :data:`FEWEST`
        of the samples can be compared, because the rest have larger hashes than the sketch.
        """
        hashes = _hashes(samples)
        if self.n > SIZE and len(self.hashes) == SIZE:  # the sketch does not contain larger hashes
            hashes = hashes[hashes <= self.hashes[-1]]
            if len(hashes) < FEWEST:
                return None
        return float(np.isin(hashes, self.hashes).mean())

    def among(self, samples: Samples) -> list[int]:
        """Return the indices of samples with contents in the sketch.

        For more than :data:`SIZE` sketched samples, the sketch only contains the smallest hashes.
        """
        indices: list[int] = np.isin(_hashes(samples), self.hashes).nonzero()[0].tolist()
        return indices

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        packed = self.hashes.astype(">u8").view(np.uint8).reshape(-1, 8)[:, 8 - WIDTH :].tobytes()
        return {"n": self.n, "hashes": base64.b64encode(packed).decode()}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Self:
        """Create a sketch from the output of :meth:`to_dict`."""
        try:
            packed = np.frombuffer(base64.b64decode(record["hashes"], validate=True), np.uint8).reshape(-1, WIDTH)
            wide = np.pad(packed, ((0, 0), (8 - WIDTH, 0)))
            return cls(int(record["n"]), np.ascontiguousarray(wide).view(">u8")[:, 0].astype(np.uint64)[:SIZE])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"invalid record of fitted samples: {error}") from error


def samples_text(n: int, fitted_share: float | None) -> str:
    """Return the number of samples of an evaluation as text, and whether they are held-out or were used for fitting."""
    if not fitted_share:
        return f"{n} samples" if fitted_share is None else f"{n} held-out samples"
    return f"{n} samples, {max(fitted_share, 0.01):.0%} of them used for fitting"


def _hashes(samples: Samples) -> NDArray[np.uint64]:
    return np.array([int.from_bytes(hashed[:WIDTH]) for hashed in samples.content_hashes], np.uint64)
