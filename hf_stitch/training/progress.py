"""What training has reached, so that it can be saved and taken up again."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_stitch.training.stitches import Stitches


class Progress:
    """What training has reached: layers, optimizer, and of each stitch the best layer so far, steps and loss."""

    def __init__(self, stitches: Stitches, optimizer: Any, scaler: Any, patience: int | None) -> None:
        self._stitches, self._optimizer, self._scaler, self._patience = stitches, optimizer, scaler, patience
        count = len(stitches.names)
        self._best = torch.full((count,), math.inf)
        self._since = torch.zeros(count, dtype=torch.long)
        self._states: list[dict[str, Tensor]] = []
        self.steps = torch.zeros(count, dtype=torch.long)
        self.loss = torch.full((count,), math.nan)

    @property
    def active(self) -> Tensor:
        """Which stitches are still trained: of those with patience the ones that have improved of late."""
        return (
            torch.ones_like(self._since, dtype=torch.bool) if self._patience is None else self._since < self._patience
        )

    def note(self, losses: Tensor, step: int, first: bool) -> None:
        """Take a step's losses into the running mean, which the first of their kind begins."""
        losses, active = losses.float().cpu(), self.active
        self.loss = torch.where(active, losses if first else torch.lerp(self.loss, losses, 0.1), self.loss)
        self.steps[active] = step

    def judge(self, losses: Tensor) -> None:
        """Keep the layers that are better than ever."""
        states = [copy.deepcopy(layer.state_dict()) for layer in self._stitches.layers]
        losses, active = losses.cpu(), self.active
        better = active & (losses < self._best)
        self._best = torch.where(better, losses, self._best)
        self._states = [new if b else old for b, new, old in zip(better, states, self._states or states, strict=True)]
        self._since = torch.where(better, 0, self._since + active)

    def restore_best(self) -> None:
        """Leave the best layers, where they were judged."""
        for layer, state in zip(self._stitches.layers, self._states, strict=False):
            layer.load_state_dict(state)

    def state(self) -> dict[str, Tensor]:
        """Everything as tensors."""
        tensors = {f"layers/{key}": value for key, value in self._stitches.layers.state_dict().items()}
        for number, state in self._optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer/{number}/{key}": value for key, value in state.items()}
        for number, best in enumerate(self._states):
            tensors |= {f"best/{number}/{key}": value for key, value in best.items()}
        if self._scaler is not None:
            scale = self._scaler.state_dict().items()
            exact = {float: torch.float64}
            tensors |= {f"scaler/{key}": torch.tensor(value, dtype=exact.get(type(value))) for key, value in scale}
        return tensors | {"loss": self.loss, "steps": self.steps, "judged": self._best, "since": self._since}

    def load(self, step: int, tensors: Mapping[str, Tensor]) -> int:
        """Take up :meth:`state`; gives back the step."""
        held: dict[str, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            kind, _, key = name.partition("/")
            held.setdefault(kind, {})[key] = value
        self._stitches.layers.load_state_dict(held["layers"])
        state = self._optimizer.state_dict()
        state["state"] = _numbered(held.get("optimizer", {}))
        self._optimizer.load_state_dict(state)
        self._states = list(_numbered(held.get("best", {})).values())
        if self._scaler is not None:
            self._scaler.load_state_dict({key: value.item() for key, value in held["scaler"].items()})
        self.loss, self.steps = tensors["loss"].cpu(), tensors["steps"].cpu()
        self._best, self._since = tensors["judged"].cpu(), tensors["since"].cpu()
        return step


def _numbered(tensors: Mapping[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    """``number/key`` taken apart."""
    found: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        number, _, key = name.partition("/")
        found.setdefault(int(number), {})[key] = value
    return dict(sorted(found.items()))
