"""Matchers on paired rows: affine maps with cluster corrections, and maps trained by gradient descent."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from hf_stitch.matchers._affine import require
from hf_stitch.matchers.base import RowsMatcher
from hf_stitch.matchers.regression import Ridge, penalised
from hf_stitch.options import Count, Natural, Positive
from hf_stitch.statistics import Moments
from hf_stitch.stitches import LinearStitch, PiecewiseStitch, ResidualMLPStitch, Stitch

_Stitch = TypeVar("_Stitch", bound=Stitch)
HELD_OUT = 0.1
"""Share of the rows held out for early stopping."""


@dataclass(frozen=True)
class Piecewise(RowsMatcher):
    """Ridge regression on all rows, with a ridge correction on the residuals of each cluster of x rows.

    k-means finds the clusters. Each correction is fitted to the rows of its cluster, with the penalty of the least
    generalised cross-validation error, and its weight falls with the distance from the centre
    (:class:`~hf_stitch.stitches.PiecewiseStitch`). Clusters with fewer than two rows are not corrected.

    ``fitted`` contains ``n``, ``r2``, the number of ``clusters`` used and the ``width`` over which corrections blend.

    Attributes:
        clusters: Number of clusters, at least 1; reduced to keep ten rows per cluster on average.
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
        x_rows = x.detach().cpu()
        x, y = x_rows.double(), y.detach().cpu().double()
        affine = affine_part(moments)
        with torch.no_grad():
            residuals = y - affine(x)
        count = max(1, min(self.clusters, len(x) // 10))
        kmeans = KMeans(count, n_init=1, random_state=self.seed).fit(x.numpy())
        labels = torch.from_numpy(kmeans.labels_).long()
        width = (kmeans.inertia_ / len(x)) ** 0.5
        weights, biases = x.new_zeros(count, y.shape[1], x.shape[1]), x.new_zeros(count, y.shape[1])
        for cluster in range(count):
            rows = labels == cluster
            cluster_moments = moments_of(x_rows[rows], residuals[rows])
            if cluster_moments.n > 1 and cluster_moments.sxx.trace() > 0:
                weights[cluster], _ = penalised(cluster_moments, "gcv")
                biases[cluster] = cluster_moments.mean_y - weights[cluster] @ cluster_moments.mean_x
        state = affine.state_dict() | {
            "weights": weights,
            "biases": biases,
            "centres": torch.from_numpy(kmeans.cluster_centers_),
            "width": x.new_tensor(max(width, 1e-12)),
        }
        with torch.device("meta"):  # initialisation is free and draws no random numbers here
            stitch = PiecewiseStitch(x.shape[1], y.shape[1], pieces=count, dtype=torch.float64)
        stitch.load_state_dict(state, assign=True)
        return recorded_rows(stitch.to(dtype), x, y, clusters=count, width=width)


@dataclass(frozen=True)
class ResidualMLP(RowsMatcher):
    """Ridge regression in parallel with a network of one hidden layer, trained together on the squared error.

    Training starts from ridge regression and stops early on a held-out tenth of the rows. If training does not improve
    on ridge regression, the result is ridge regression.

    ``fitted`` contains ``n``, ``r2``, the epoch of the selected weights (``epochs``), and the loss on the held-out rows
    before and after training.

    Attributes:
        width: Width of the hidden layer, at least 1.
        epochs: Maximum number of epochs.
        batch_size: Rows per step.
        rate: Learning rate of Adam.
        seed: Seed of the initial weights, the held-out rows and the batches.

    Example:
        >>> x = torch.randn(400, 2, generator=torch.Generator().manual_seed(0))
        >>> ResidualMLP(width=32, rate=0.01).fit(x, x.abs()).fitted["r2"] > 0.7
        True
    """

    name: ClassVar[str] = "residual_mlp"
    title: ClassVar[str] = "ridge regression with a parallel network"

    width: Count = 256
    epochs: Count = 60
    batch_size: Count = 256
    rate: Positive = 1e-3
    seed: Natural = 0

    def fit(self, x: Tensor, y: Tensor, dtype: torch.dtype = torch.float32) -> ResidualMLPStitch:
        """Train the map in float32."""
        moments = moments_of(x, y)
        require(moments, 4)
        x, y = x.detach().cpu().float(), y.detach().cpu().float()
        affine = affine_part(moments)
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(self.seed)
            stitch = ResidualMLPStitch(x.shape[1], y.shape[1], hidden=self.width)
            stitch.weight.copy_(affine.weight)
            stitch.bias.copy_(affine.bias if affine.bias is not None else torch.zeros_like(stitch.bias))
            # Hidden units see centred inputs of unit scale.
            scale = (moments.sxx.trace() / (moments.n * moments.dx)).sqrt().float()
            stitch.down.div_(scale)
            stitch.down_bias.copy_(-stitch.down @ moments.mean_x.float())
        trained, losses = descend(
            stitch, x, y, functional.mse_loss, epochs=self.epochs, batch_size=self.batch_size, rate=self.rate,
            seed=self.seed,
        )  # fmt: skip
        return recorded_rows(trained.to(dtype), x, y, **losses)


@dataclass(frozen=True)
class Retrieval(RowsMatcher):
    """Affine map, trained so that mapped rows have the same neighbours as target rows.

    Each row of y in a batch is a query. The loss is the mean Kullback-Leibler divergence between two softmax
    distributions of its cosines: over the rows of y, and over the mapped rows of the batch, its own row included.
    Training starts from ridge regression and stops early on a held-out tenth of the rows.

    ``fitted`` contains ``n``, ``r2``, the epoch of the selected weights (``epochs``), and the loss on the held-out rows
    before and after training. Outputs reproduce the neighbours of y by cosine but not its lengths, so that ``r2`` does
    not measure their quality.

    Attributes:
        temperature: Divisor of the similarities, above 0. Smaller values emphasise the nearest rows.
        epochs: Maximum number of epochs.
        batch_size: Rows per step.
        rate: Learning rate of Adam, relative to the mean absolute initial weight.
        seed: Seed of the held-out rows and the batches.

    Example:
        >>> x = torch.randn(400, 4, generator=torch.Generator().manual_seed(0))
        >>> fitted = Retrieval().fit(x, x @ x.T[:, :4]).fitted
        >>> fitted["held_out_loss"] <= fitted["held_out_loss_before"]
        True
    """

    name: ClassVar[str] = "retrieval"
    title: ClassVar[str] = "affine map trained to preserve neighbours"

    temperature: Positive = 0.05
    epochs: Count = 60
    batch_size: Count = 512
    rate: Positive = 0.03
    seed: Natural = 0

    def fit(self, x: Tensor, y: Tensor, dtype: torch.dtype = torch.float32) -> LinearStitch:
        """Train the map in float32."""
        moments = moments_of(x, y)
        require(moments, 4)
        x, y = x.detach().cpu().float(), y.detach().cpu().float()
        start = affine_part(moments).float()
        trained, losses = descend(
            start, x, y, self._divergence, epochs=self.epochs, batch_size=self.batch_size,
            rate=self.rate * start.weight.abs().mean().item(), seed=self.seed,
        )  # fmt: skip
        return recorded_rows(trained.to(dtype), x, y, **losses)

    def _divergence(self, mapped: Tensor, y: Tensor) -> Tensor:
        y, mapped = functional.normalize(y, dim=1), functional.normalize(mapped, dim=1)
        expected, actual = ((y @ rows.T / self.temperature).log_softmax(1) for rows in (y, mapped))
        return functional.kl_div(actual, expected, reduction="batchmean", log_target=True)


def descend(
    stitch: _Stitch,
    x: Tensor,
    y: Tensor,
    loss: Callable[[Tensor, Tensor], Tensor],
    *,
    epochs: int,
    batch_size: int,
    rate: float,
    seed: int,
) -> tuple[_Stitch, dict[str, float]]:
    """Train a stitch with Adam, and return the weights of the epoch with the least loss on held-out rows.

    Training stops after five epochs without improvement. The initial weights count as epoch 0, so that the loss on the
    held-out rows never increases.
    """
    generator = torch.Generator().manual_seed(seed)
    order, held_count = torch.randperm(len(x), generator=generator), max(2, round(HELD_OUT * len(x)))
    if len(x) - held_count < 2:
        raise ValueError(f"training requires at least 4 rows, including held-out rows, got {len(x)}")
    held_x, held_y = x[order[:held_count]], y[order[:held_count]]
    x, y = x[order[held_count:]], y[order[held_count:]]
    trained = copy.deepcopy(stitch).train()
    optimizer = torch.optim.Adam(trained.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)

    def held_out_loss() -> float:
        with torch.no_grad():
            return loss(trained(held_x), held_y).item()

    initial_loss = least_loss = held_out_loss()
    best_state, best_epoch = copy.deepcopy(trained.state_dict()), 0
    with torch.enable_grad():
        for epoch in range(1, epochs + 1):
            for rows in torch.randperm(len(x), generator=generator).split(batch_size):
                if len(rows) < 2:  # a single row has no contrast
                    continue
                optimizer.zero_grad()
                loss(trained(x[rows]), y[rows]).backward()
                optimizer.step()
            schedule.step()
            if (held_loss := held_out_loss()) < least_loss:
                least_loss, best_state, best_epoch = held_loss, copy.deepcopy(trained.state_dict()), epoch
            elif not held_loss < float("inf") or epoch - best_epoch >= 5:  # diverged, or no longer better
                break
    trained.load_state_dict(best_state)
    return trained.eval(), {"epochs": best_epoch, "held_out_loss": least_loss, "held_out_loss_before": initial_loss}


def moments_of(x: Tensor, y: Tensor) -> Moments:
    """Check paired rows and return their moments."""
    for name, rows in (("x", x), ("y", y)):
        if rows.ndim != 2:
            raise ValueError(f"{name} must have shape (n, d), got {tuple(rows.shape)}")
    return Moments(x.shape[1], y.shape[1]).update(x, y)


def affine_part(moments: Moments) -> LinearStitch:
    """Return ridge regression in float64, with the penalty of the least generalised cross-validation error."""
    return Ridge().fit(moments, dtype=torch.float64)


@torch.no_grad()
def recorded_rows(stitch: _Stitch, x: Tensor, y: Tensor, **figures: float | int) -> _Stitch:
    """Fill ``stitch.fitted`` with ``n``, ``r2`` over all outputs, and further figures."""
    y = y.double()
    residual = sum(
        (stitch(x_chunk.to(next(stitch.parameters()).dtype)).double() - y_chunk).square().sum().item()
        for x_chunk, y_chunk in zip(x.split(8192), y.split(8192), strict=True)
    )
    stitch.fitted = {"n": len(x), "r2": 1 - residual / (y - y.mean(0)).square().sum().item(), **figures}
    return stitch.eval()
