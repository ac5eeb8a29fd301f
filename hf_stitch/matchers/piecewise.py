"""Ridge regression with corrections for regions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hf_stitch.matchers._rows import affine_part, moments_of, recorded_rows
from hf_stitch.matchers._solve import require
from hf_stitch.matchers.base import RowsMatcher
from hf_stitch.matchers.ridge import penalised
from hf_stitch.options import Count, Natural
from hf_stitch.stitches.nonlinear import PiecewiseStitch


@dataclass(frozen=True)
class Piecewise(RowsMatcher):
    """Ridge regression on all rows, and another one on the residuals of each cluster of x rows.

    Clusters are those of k-means. A correction is fitted to the rows of its cluster, and applies with a weight that
    falls with the distance from the centre (:class:`~hf_stitch.stitches.PiecewiseStitch`); its penalty has the least
    generalised cross-validation error on them. A cluster with fewer than two rows has no correction.

    ``fitted`` contains ``n``, ``r2``, the number of ``clusters`` used and the ``width`` over which corrections mix.

    Attributes:
        clusters: Number of clusters, at least 1. With fewer than ten rows for each, fewer are used.
        seed: Seed of k-means.

    Example:
        >>> x = torch.randn(300, 2, generator=torch.Generator().manual_seed(0))
        >>> stitch = Piecewise(clusters=4).fit(x, x.abs())
        >>> stitch.fitted["r2"] > 0.7
        True
    """

    name: ClassVar[str] = "piecewise"
    title: ClassVar[str] = "ridge regression with corrections for clusters"

    clusters: Count = 16
    seed: Natural = 0

    def fit(self, x: Tensor, y: Tensor, dtype: torch.dtype = torch.float32) -> PiecewiseStitch:
        """Fit the map."""
        from sklearn.cluster import KMeans

        moments = moments_of(x, y)
        require(moments, 2)
        rounded = x.detach().cpu()
        x, y = rounded.double(), y.detach().cpu().double()
        common = affine_part(moments)
        with torch.no_grad():
            residual = y - common(x)
        count = max(1, min(self.clusters, len(x) // 10))
        found = KMeans(count, n_init=1, random_state=self.seed).fit(x.numpy())
        labels = torch.from_numpy(found.labels_).long()
        width = (found.inertia_ / len(x)) ** 0.5
        weights, biases = x.new_zeros(count, y.shape[1], x.shape[1]), x.new_zeros(count, y.shape[1])
        for piece in range(count):
            rows = labels == piece
            inside = moments_of(rounded[rows], residual[rows])
            if inside.n > 1 and inside.sxx.trace() > 0:
                weights[piece], _ = penalised(inside, "gcv")
                biases[piece] = inside.mean_y - weights[piece] @ inside.mean_x
        state = common.state_dict() | {
            "weights": weights,
            "biases": biases,
            "centres": torch.from_numpy(found.cluster_centers_),
            "width": x.new_tensor(max(width, 1e-12)),
        }
        with torch.device("meta"):  # initialisation is free and draws no random numbers here
            stitch = PiecewiseStitch(x.shape[1], y.shape[1], pieces=count, dtype=torch.float64)
        stitch.load_state_dict(state, assign=True)
        return recorded_rows(stitch.to(dtype), x, y, clusters=count, width=width)
