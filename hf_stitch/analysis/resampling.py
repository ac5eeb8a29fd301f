"""Helpers that permutation tests and the bootstrap share: grouping of rows by sample, validation of arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hf_stitch.metrics.base import Metric
from hf_stitch.registry import registries

Array = NDArray[np.float64]
Places = NDArray[np.intp]


def chosen_metric(metric: str | Metric | type[Metric], options: Mapping[str, Any]) -> Metric:
    """Return a metric instance from a name, an instance or a class, with ``options`` applied."""
    return metric(**options) if isinstance(metric, type) else registries.metrics.build(metric, **options)


def check_count(name: str, count: int) -> None:
    """Raise a ``ValueError`` if fewer than 2 resamples or permutations are requested."""
    if count < 2:
        raise ValueError(f"{name} must be at least 2, got {count}")


def rows_by_sample(samples: Any, n: int) -> list[Places]:
    """Return the row indices of each sample, with the samples sorted by id.

    Args:
        samples: (n,) id of the sample that each row belongs to; ``None`` treats each row as a sample.
        n: Number of rows.

    Returns:
        One array of ascending row indices per sample.

    Raises:
        ValueError: If ``samples`` does not have the shape (n,).
    """
    if samples is None:
        return list(np.arange(n)[:, None])
    ids = samples.cpu().numpy() if isinstance(samples, Tensor) else np.asarray(samples)
    if ids.shape != (n,):
        raise ValueError(f"samples must have the shape ({n},), one sample id per row, got the shape {ids.shape}")
    _, owners, counts = np.unique(ids, return_inverse=True, return_counts=True)
    return np.split(np.argsort(owners, kind="stable"), np.cumsum(counts)[:-1])
