"""How long and how fast a stitch is trained, and in which order it sees the samples."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Literal

import torch
from torch import Tensor

from hf_stitch.processes import Processes

Schedule = Literal["step", "constant", "linear", "cosine"]


@dataclass(frozen=True)
class TrainingSchedule:
    """How long and how fast.

    Attributes:
        max_steps: Optimizer steps.
        feature_steps: Those before them that match final features.
        batch_size: Samples of a step over all processes; with gradient accumulation, of each of its parts.
        lr: Learning rate of Adam.
        weight_decay: Its L2 penalty.
        schedule: What becomes of the learning rate.
        max_grad_norm: Norm that the gradient of a stitch is cut to, if any.
        seed: Of the order of the samples and of augmentation.
        shuffle: Whether the order changes from epoch to epoch.
        patience: Evaluations without improvement before a stitch is done.
    """

    max_steps: int
    feature_steps: int
    batch_size: int
    lr: float
    weight_decay: float
    schedule: Schedule
    max_grad_norm: float | None
    seed: int
    shuffle: bool
    patience: int | None

    def rate(self, step: int) -> float:
        """The learning rate of a step."""
        done = max(step - self.feature_steps, 0) / self.max_steps
        factor = {
            "step": 0.1 ** ((done >= 1 / 3) + (done >= 2 / 3)),
            "constant": 1.0,
            "linear": 1 - done,
            "cosine": (1 + math.cos(math.pi * done)) / 2,
        }[self.schedule]
        return self.lr * factor

    def batches(self, n: int, start: int, every: int, processes: Processes) -> Iterator[list[tuple[Tensor, int]]]:
        """From step ``start`` on, without end: this process's places in each part of it, and how many all have.

        A process that a part is too small for gets none.
        """
        size = self.batch_size * every
        per_epoch = math.ceil(n / size)
        order, epoch = torch.arange(n), -1
        for number in count(start):
            if self.shuffle and number // per_epoch != epoch:
                epoch = number // per_epoch
                order = torch.randperm(n, generator=torch.Generator().manual_seed(self.seed * 1_000_003 + epoch))
            place = number % per_epoch * size
            parts = order[place : place + size].split(self.batch_size)
            yield [(part[processes.rank :: processes.count], len(part)) for part in parts]
