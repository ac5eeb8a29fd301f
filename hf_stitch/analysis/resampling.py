"""What tests and intervals share: rows by sample and moments of some samples, checks of arguments, Holm's procedure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_stitch.metrics.base import ActivationMetric, Metric, activation_metric
from hf_stitch.statistics import Moments
from hf_stitch.statistics.spectrum import eps_of

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


class SampleRows:
    """Rows of one side by sample, or by group of samples, about the mean of all rows.

    This mean is close to that of most of the samples, which keeps the sums of their products accurate.
    """

    def __init__(self, rows: Tensor, groups: Sequence[Places]) -> None:
        self.eps, rows = eps_of(rows), rows.double()
        self.mean = rows.mean(0)
        self.parts = [rows[torch.from_numpy(places).to(rows.device)] - self.mean for places in groups]
        self.sums = torch.stack([part.sum(0) for part in self.parts])
        self.products = self.products_with(self)

    def products_with(self, other: SampleRows) -> Tensor:
        """Return the products with the rows of another side, (samples, d, d of the other)."""
        return torch.stack([own.T @ part for own, part in zip(self.parts, other.parts, strict=True)])


class SampleMoments:
    """Moments of the paired rows of some of the samples, without another pass over the rows."""

    def __init__(self, x: SampleRows, y: SampleRows) -> None:
        self._counts = torch.tensor([len(part) for part in x.parts], device=x.sums.device)
        self._means, self._eps = (x.mean, y.mean), torch.cat([x.eps, y.eps])
        self._parts = x.sums, y.sums, x.products, y.products, x.products_with(y)
        self._all = [part.sum(0) for part in self._parts[2:]]

    def of(self, samples: Places) -> Moments:
        """Return the moments of some samples."""
        chosen = torch.from_numpy(samples).to(self._counts.device)
        return self._moments(int(self._counts[chosen].sum()), *(part[chosen].sum(0) for part in self._parts))

    def without(self, sample: int) -> Moments:
        """Return the moments of all samples but one."""
        x, y, *products = (part[sample] for part in self._parts)
        rest = (whole - own for whole, own in zip(self._all, products, strict=True))
        return self._moments(int(self._counts.sum() - self._counts[sample]), -x, -y, *rest)

    def _moments(self, n: int, x: Tensor, y: Tensor, xx: Tensor, yy: Tensor, xy: Tensor) -> Moments:
        mean_x, mean_y = (mean + total / n for mean, total in zip(self._means, (x, y), strict=True))
        sxx, syy, sxy = (part - torch.outer(a, b) / n for part, a, b in ((xx, x, x), (yy, y, y), (xy, x, y)))
        return Moments.of(n, mean_x, mean_y, sxx, syy, sxy, self._eps)


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
