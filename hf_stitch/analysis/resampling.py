"""Samples and their rows, of which whole samples are exchanged or left out."""

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
    return metric(**options) if isinstance(metric, type) else registries.metrics.build(metric, **options)


def check_count(name: str, count: int) -> None:
    if count < 2:
        raise ValueError(f"{name} must be at least 2, got {count}")


def rows_by_sample(samples: Any, n: int) -> list[Places]:
    """Where the rows of each sample are, in order; the samples by their ids."""
    if samples is None:
        return list(np.arange(n)[:, None])
    ids = samples.cpu().numpy() if isinstance(samples, Tensor) else np.asarray(samples)
    if ids.shape != (n,):
        raise ValueError(f"samples must name the sample of each of the {n} rows, got the shape {ids.shape}")
    _, owners, counts = np.unique(ids, return_inverse=True, return_counts=True)
    return np.split(np.argsort(owners, kind="stable"), np.cumsum(counts)[:-1])
