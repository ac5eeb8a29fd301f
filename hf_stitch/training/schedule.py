"""Training schedule: number of steps, learning rate and order of the samples."""

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
    """Number of steps, learning rate and order of the samples of a training run.

    Attributes:
        max_steps: Number of optimizer steps on the objective.
        feature_steps: Number of additional steps before them, which match final features.
        batch_size: Number of samples of a step over all processes; with gradient accumulation, of each part of a step.
        lr: Initial learning rate of Adam.
        weight_decay: L2 penalty of Adam.
        schedule: Learning rate schedule: ``step``, ``constant``, ``linear`` or ``cosine``.
        max_grad_norm: Maximal gradient norm of each stitch; ``None`` for no clipping.
        seed: Seed of the sample order and of augmentation.
        shuffle: Whether to shuffle the samples in every epoch.
        patience: Number of evaluations without improvement after which a stitch stops; ``None`` for no limit.

    Example:
        >>> schedule = TrainingSchedule(30, 0, 8, 0.1, 0.0, "cosine", None, 0, True, None)
        >>> [round(schedule.rate(step), 3) for step in (0, 15, 30)]
        [0.1, 0.05, 0.0]
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
        """Compute the learning rate of a step.

        Args:
            step: Number of completed steps.

        Returns:
            The learning rate; during the feature steps, the initial one.
        """
        done = max(step - self.feature_steps, 0) / self.max_steps
        factor = {
            "step": 0.1 ** ((done >= 1 / 3) + (done >= 2 / 3)),
            "constant": 1.0,
            "linear": 1 - done,
            "cosine": (1 + math.cos(math.pi * done)) / 2,
        }[self.schedule]
        return self.lr * factor

    def batches(self, n: int, start: int, every: int, processes: Processes) -> Iterator[list[tuple[Tensor, int]]]:
        """Iterate endlessly over the sample indices of each step.

        Args:
            n: Number of samples.
            start: First step.
            every: Number of gradient accumulation parts of a step.
            processes: The processes that share the samples.

        Yields:
            For each part of a step, the indices of this process, ``(m,)`` int64, and the number of samples over all
            processes. If a part has fewer samples than there are processes, some processes get no indices.
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
