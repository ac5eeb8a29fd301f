"""Helpers that tests and intervals share: grouping of rows by sample, validation of arguments, Holm's procedure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hf_stitch.metrics.base import ActivationMetric, Metric, activation_metric

Array = NDArray[np.float64]
Places = NDArray[np.intp]


def chosen_metric(metric: str | Metric | type[Metric], options: Mapping[str, Any]) -> ActivationMetric:
    """Return a metric instance from a name, an instance or a class, with ``options`` applied."""
    return activation_metric(metric(**options)) if isinstance(metric, type) else activation_metric(metric, **options)


def rows_by_sample(samples: Any, n: int) -> list[Places]:
    """Return the row indices of each sample, with the samples sorted by id."""
    if samples is None:
        return list(np.arange(n)[:, None])
    ids = samples.cpu().numpy() if isinstance(samples, Tensor) else np.asarray(samples)
    if ids.shape != (n,):
        raise ValueError(f"samples must have the shape ({n},), one sample id per row, got the shape {ids.shape}")
    _, owners, counts = np.unique(ids, return_inverse=True, return_counts=True)
    return np.split(np.argsort(owners, kind="stable"), np.cumsum(counts)[:-1])


def not_rejected(p_values: Array, level: float) -> NDArray[np.bool_]:
    """Return which candidates of each row Holm's procedure (1979) does not tell from the best one."""
    found = np.zeros(p_values.shape, bool)
    for row, kept in zip(p_values, found, strict=True):
        rivals = np.flatnonzero(~np.isnan(row))
        ordered = rivals[np.argsort(row[rivals], kind="stable")]
        tests = max(len(rivals) - 1, 1)  # without the best itself
        rejected = 0
        while rejected < len(ordered) and row[ordered[rejected]] <= level / max(tests - rejected, 1):
            rejected += 1
        kept[ordered[rejected:]] = True
    return found
