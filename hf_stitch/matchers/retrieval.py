"""An affine map that is trained to find the same neighbours."""

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
from hf_stitch.stitches import LinearStitch


@dataclass(frozen=True)
class Retrieval(RowsMatcher):
    """An affine map, trained so that mapped rows have the same neighbours as the target's rows.

    Each row of y of a batch asks for its neighbours by cosine. The loss is the mean Kullback-Leibler divergence from
    the softmax of its similarities to the batch's rows of y to that of its similarities to the mapped rows. Its own row
    counts, too. The start is ridge regression. A tenth of the rows is held out and decides when to stop.

    ``fitted`` contains ``n``, ``r2``, the ``epochs`` of the weights, and the loss on the held-out rows before and
    after. Outputs have the neighbours of y by cosine, but not its lengths: ``r2`` tells nothing about them.

    Attributes:
        temperature: What similarities are divided by, above 0. The smaller it is, the more the nearest rows count.
        epochs: Greatest number of epochs.
        batch_size: Rows per step.
        rate: Learning rate of Adam, relative to the mean absolute weight of the start.
        seed: Seed of the held-out rows and the batches.

    Example:
        >>> x = torch.randn(400, 4, generator=torch.Generator().manual_seed(0))
        >>> fitted = Retrieval().fit(x, x @ x.T[:, :4]).fitted
        >>> fitted["held_out_loss"] <= fitted["held_out_loss_before"]
        True
    """

    name: ClassVar[str] = "retrieval"
    title: ClassVar[str] = "an affine map trained to find the same neighbours"

    temperature: Positive = 0.05
    epochs: Count = 60
    batch_size: Count = 512
    rate: Positive = 0.03
    seed: Natural = 0

    def fit(self, x: Tensor, y: Tensor, dtype: torch.dtype = torch.float32) -> LinearStitch:
        """Train the map, in float32."""
        moments = moments_of(x, y)
        require(moments, 4)
        x, y = x.detach().cpu().float(), y.detach().cpu().float()
        start = affine_part(moments).float()
        trained, found = descend(
            start, x, y, self._divergence, epochs=self.epochs, batch_size=self.batch_size,
            rate=self.rate * start.weight.abs().mean().item(), seed=self.seed,
        )  # fmt: skip
        return recorded_rows(trained.to(dtype), x, y, **found)

    def _divergence(self, mapped: Tensor, y: Tensor) -> Tensor:
        y, mapped = functional.normalize(y, dim=1), functional.normalize(mapped, dim=1)
        wanted, got = ((y @ rows.T / self.temperature).log_softmax(1) for rows in (y, mapped))
        return functional.kl_div(got, wanted, reduction="batchmean", log_target=True)
