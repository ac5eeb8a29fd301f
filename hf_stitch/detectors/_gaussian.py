"""Normal distributions of positions, from their moments."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from hf_stitch.representation import Representation
from hf_stitch.statistics import Moments
from hf_stitch.statistics.layer_moments import LayerMoments
from hf_stitch.statistics.spectrum import above_rounding, rounding


def position_moments(activations: Iterable[Representation], what: str) -> Moments:
    """Collect the moments of all positions, as both sides of one :class:`Moments`."""
    kept: LayerMoments | None = None
    for batch in activations:
        rows = batch.rows("none")
        kept = kept or LayerMoments([rows[:1024].double().mean(0)])
        kept.update([rows])
    if kept is None or kept.n <= (width := len(kept.moments(0, 0).mean_x)):
        count, needed = (0, 2) if kept is None else (kept.n, width + 1)
        raise ValueError(f"the covariance needs at least {needed} {what}, got {count}: give more samples")
    return kept.moments(0, 0)


@dataclass(frozen=True)
class Gaussian:
    """A normal distribution of positions."""

    mean: Tensor  # (d,) float64
    whitening: Tensor  # (d, d) float64, lower triangular; rows times its transpose have the covariance 1

    @classmethod
    def of(cls, moments: Moments, added: Tensor) -> Self:
        """Make the normal distribution with given moments."""
        covariance = moments.sxx / moments.n + torch.diag(added)
        root, failed = torch.linalg.cholesky_ex(covariance)
        if not failed and not added.any():  # a direction that is rounding has a root, too
            values, vectors = torch.linalg.eigh(covariance)
            failed = ~above_rounding(values, vectors, rounding(moments, "x") / moments.n).all()
        if failed:
            raise ValueError("the covariance is singular, features depend on each other: use a larger tolerance")
        identity = torch.eye(len(root), dtype=root.dtype, device=root.device)
        return cls(moments.mean_x, torch.linalg.solve_triangular(root, identity, upper=False))

    def distances(self, rows: Tensor) -> Tensor:
        """Return the squared Mahalanobis distance of each row from the mean."""
        if rows.shape[1] != len(self.mean):
            raise ValueError(f"the detector was fitted to {len(self.mean)} features, got {rows.shape[1]}")
        return torch.linalg.vector_norm((rows.to(self.mean) - self.mean) @ self.whitening.T, dim=1).square()

    def log_density(self, rows: Tensor) -> Tensor:
        """Return the log density of each row, without the term that depends on the dimension only."""
        return -self.distances(rows) / 2 + self.whitening.diagonal().log().sum()


def added_variance(moments: Moments, tolerance: float) -> Tensor:
    """Return the variance to add to each feature: a share of its own, and at least that of rounding errors."""
    variances = moments.sxx.diagonal() / moments.n
    if not variances.any():
        raise ValueError(f"all {moments.n} positions are equal: is the layer dead?")
    dead = variances.mean() * max(tolerance, 1e-6) * (1 + tolerance)
    share = tolerance * variances
    if tolerance:
        share = torch.maximum(share, rounding(moments, "x") / moments.n)
    return torch.where(variances == 0, dead, share)


def sample_means(activations: Representation, values: Tensor) -> Tensor:
    """Return the mean over the positions of each sample."""
    owners = activations.row_samples("none").to(values.device)
    counts = values.new_zeros(activations.batch).index_add(0, owners, torch.ones_like(values))
    if activations.mask is not None and not bool(counts.all()):
        raise ValueError(
            f"sample {int((counts == 0).nonzero()[0])} of the batch has no position, so it has no score: leave it out"
        )
    totals = values.new_zeros(activations.batch).index_add(0, owners, values)
    return totals / counts
