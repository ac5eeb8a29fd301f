"""Training schedule: number of steps, learning rate and order of the samples."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Literal

import torch
from torch import Tensor

from hf_stitch.running import Processes

Schedule = Literal["step", "constant", "linear", "cosine"]


@dataclass(frozen=True)
class TrainingSchedule:
    """Number of steps, learning rate and order of the samples of a training run."""

    max_steps: int  # number of optimizer steps on the objective
    feature_steps: int  # number of additional steps before them, which match final features
    batch_size: int  # number of samples of a step over all processes
    lr: float  # initial learning rate of Adam
    weight_decay: float  # L2 penalty of Adam
    schedule: Schedule  # learning rate schedule: step, constant, linear or cosine
    max_grad_norm: float | None  # maximal gradient norm of each stitch; None for no clipping
    seed: int  # seed of the sample order and of augmentation
    shuffle: bool  # whether to shuffle the samples in every epoch
    patience: int | None  # number of evaluations without improvement after which a stitch stops; None for no limit

    def rate(self, step: int) -> float:
        """Compute the learning rate of a step."""
        done = max(step - self.feature_steps, 0) / self.max_steps
        factor = {
            "step": 0.1 ** ((done >= 1 / 3) + (done >= 2 / 3)),
            "constant": 1.0,
            "linear": 1 - done,
            "cosine": (1 + math.cos(math.pi * done)) / 2,
        }[self.schedule]
        return self.lr * factor

    def batches(self, n: int, start: int, every: int, processes: Processes) -> Iterator[list[tuple[Tensor, int]]]:
        """Iterate endlessly over the parts of each step: indices of this process, maybe none, and the number of all."""
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
