"""Gradient descent on paired rows, with early stopping; shared by matchers that are trained on rows."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from hf_stitch.stitches import Stitch

_Stitch = TypeVar("_Stitch", bound=Stitch)
HELD_OUT = 0.1
"""Share of the rows that decides when to stop."""


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
    """Train a stitch with Adam, and keep the weights of the epoch with the least loss on held-out rows.

    Training stops after five epochs without improvement. The initial weights count as epoch 0, so that a stitch never
    gets worse on the held-out rows.
    """
    generator = torch.Generator().manual_seed(seed)
    order, held = torch.randperm(len(x), generator=generator), max(2, round(HELD_OUT * len(x)))
    if len(x) - held < 2:
        raise ValueError(f"training needs at least 4 rows, of which some are held out, got {len(x)}")
    held_x, held_y = x[order[:held]], y[order[:held]]
    x, y = x[order[held:]], y[order[held:]]
    trained = copy.deepcopy(stitch).train()
    optimizer = torch.optim.Adam(trained.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)

    def held_out() -> float:
        with torch.no_grad():
            return loss(trained(held_x), held_y).item()

    before = least = held_out()
    kept, chosen = copy.deepcopy(trained.state_dict()), 0
    with torch.enable_grad():
        for epoch in range(1, epochs + 1):
            for rows in torch.randperm(len(x), generator=generator).split(batch_size):
                if len(rows) < 2:  # nothing to tell a row from
                    continue
                optimizer.zero_grad()
                loss(trained(x[rows]), y[rows]).backward()
                optimizer.step()
            schedule.step()
            if (now := held_out()) < least:
                least, kept, chosen = now, copy.deepcopy(trained.state_dict()), epoch
            elif not now < float("inf") or epoch - chosen >= 5:  # diverged, or no longer better
                break
    trained.load_state_dict(kept)
    return trained.eval(), {"epochs": chosen, "held_out_loss": least, "held_out_loss_before": before}
