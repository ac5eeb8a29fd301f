"""Metrics of outputs: agreement of predictions, from one row of logits or probabilities per sample."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from hf_stitch.metrics._catalogue import built_in
from hf_stitch.metrics._rows import check_widths, of_rows
from hf_stitch.metrics.base import MeanMetric
from hf_stitch.papers import KLABUNDE_2023


@of_rows
def disagreement(x: Tensor, y: Tensor) -> Tensor:
    """Share of the samples with different predicted classes of the two networks (Klabunde et al. 2023).

    Args:
        x: Outputs of the first network, ``(n, classes)``, logits or probabilities. The first of equal maxima counts.
        y: Outputs of the second network, ``(n, classes)``.

    Example:
        >>> import torch
        >>> disagreement(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([[0.0, 2.0], [1.0, 3.0]])).item()
        0.5
    """
    return _differ(x, y).mean()


def _differ(x: Tensor, y: Tensor) -> Tensor:
    check_widths("disagreement", x, y)
    return (x.argmax(1) != y.argmax(1)).to(x)


@built_in("disagreement")
class Disagreement(MeanMetric):
    """Streaming ``disagreement``; it stores only a sum."""

    papers = (KLABUNDE_2023,)
    function = staticmethod(disagreement)
    values = staticmethod(_differ)
    statistic = "outputs"
    triangle_inequality = True
    equal_widths = True


@of_rows
def jensen_shannon(x: Tensor, y: Tensor, *, inputs: Literal["logits", "probabilities"] = "logits") -> Tensor:
    """Mean Jensen-Shannon divergence, 0 to ln 2 nats: ``H((p + q) / 2) - (H(p) + H(q)) / 2`` (Lin 1991).

    Args:
        x: Outputs of the first network, ``(n, classes)``.
        y: Outputs of the second network, ``(n, classes)``.
        inputs: ``"logits"``, for outputs before the softmax, or ``"probabilities"``, which must sum to 1 within 0.01
            and are normalised to sum to 1.

    Example:
        >>> import math, torch
        >>> jensen_shannon(torch.eye(2), torch.eye(2).flip(1), inputs="probabilities").item() / math.log(2)
        1.0
    """
    return _divergences(x, y, inputs=inputs).mean()


def _divergences(x: Tensor, y: Tensor, *, inputs: str) -> Tensor:
    check_widths("jensen_shannon", x, y)
    p, q = (
        rows.softmax(1) if inputs == "logits" else _probabilities(side, rows) for side, rows in (("x", x), ("y", y))
    )
    h_mean, h_p, h_q = (torch.special.entr(probabilities).sum(1) for probabilities in ((p + q) / 2, p, q))
    return h_mean - (h_p + h_q) / 2


def _probabilities(side: str, rows: Tensor) -> Tensor:
    sums = rows.sum(1, keepdim=True)
    wrong = (rows < 0).any(1) | ((sums[:, 0] - 1).abs() > 0.01)
    if wrong.any():
        row = int(wrong.nonzero()[0])
        raise ValueError(
            f"jensen_shannon: row {row} of {side} must contain probabilities, got minimum {rows[row].min().item():.3g} "
            f'and sum {sums[row].item():.3g}; for logits, pass inputs="logits"'
        )
    return rows / sums


@built_in("jensen_shannon")
class JensenShannon(MeanMetric):
    """Streaming ``jensen_shannon``; it stores only a sum."""

    papers = (KLABUNDE_2023,)
    function = staticmethod(jensen_shannon)
    values = staticmethod(_divergences)
    statistic = "outputs"
    differentiable = True
    equal_widths = True
