"""Ridge regression with a trained network beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from hf_stitch.matchers._descent import descend
from hf_stitch.matchers._rows import affine_part, moments_of, recorded_rows
from hf_stitch.matchers._solve import require
from hf_stitch.matchers.base import RowsMatcher
from hf_stitch.options import Count, Natural, Positive
from hf_stitch.stitches.nonlinear import ResidualMLPStitch


@dataclass(frozen=True)
class ResidualMLP(RowsMatcher):
    """Ridge regression, and a network with one hidden layer beside it that both are trained on the squared error.

    A tenth of the rows is held out and decides when to stop; the ridge regression is the start, and the result where
    training does not improve on it.

    ``fitted`` contains ``n``, ``r2``, the ``epochs`` of the weights, and the loss on the held-out rows before and
    after.

    Attributes:
        width: Width of the hidden layer, at least 1.
        epochs: Greatest number of epochs.
        batch_size: Rows per step.
        rate: Learning rate of Adam.
        seed: Seed of the initial weights, the held-out rows and the batches.

    Example:
        >>> x = torch.randn(400, 2, generator=torch.Generator().manual_seed(0))
        >>> ResidualMLP(width=32, rate=0.01).fit(x, x.abs()).fitted["r2"] > 0.7
        True
    """

    name: ClassVar[str] = "residual_mlp"
    title: ClassVar[str] = "ridge regression with a network beside it"

    width: Count = 256
    epochs: Count = 60
    batch_size: Count = 256
    rate: Positive = 1e-3
    seed: Natural = 0

    def fit(self, x: Tensor, y: Tensor, dtype: torch.dtype = torch.float32) -> ResidualMLPStitch:
        """Train the map, in float32."""
        moments = moments_of(x, y)
        require(moments, 4)
        x, y = x.detach().cpu().float(), y.detach().cpu().float()
        common = affine_part(moments)
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(self.seed)
            stitch = ResidualMLPStitch(x.shape[1], y.shape[1], hidden=self.width)
            stitch.weight.copy_(common.weight)
            stitch.bias.copy_(common.bias if common.bias is not None else torch.zeros_like(stitch.bias))
            # Hidden units see inputs of unit scale, wherever and however long the vectors are.
            scale = (moments.sxx.trace() / (moments.n * moments.dx)).sqrt().float()
            stitch.down.div_(scale)
            stitch.down_bias.copy_(-stitch.down @ moments.mean_x.float())
        trained, found = descend(
            stitch, x, y, functional.mse_loss, epochs=self.epochs, batch_size=self.batch_size, rate=self.rate,
            seed=self.seed,
        )  # fmt: skip
        return recorded_rows(trained.to(dtype), x, y, **found)
