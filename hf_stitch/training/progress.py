"""State of a training run that can be saved and restored."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_stitch.training.stitches import Stitches

FIGURES = ("loss", "validation loss")
"""What must stay finite."""


class Progress:
    """State of a training run: layers, optimizer, gradient scaler, and best weights, steps and loss of each stitch.

    A stitch whose loss is NaN or infinite is trained no further, and the others go on.
    """

    def __init__(self, stitches: Stitches, optimizer: Any, scaler: Any, patience: int | None) -> None:
        self._stitches, self._optimizer, self._scaler, self._patience = stitches, optimizer, scaler, patience
        count = len(stitches.names)
        self._best = torch.full((count,), math.inf)
        self._since = torch.zeros(count, dtype=torch.long)
        self._states: list[dict[str, Tensor]] = []
        self.steps = torch.zeros(count, dtype=torch.long)
        self.loss = torch.full((count,), math.nan)
        self._diverged = torch.full((count, 3), math.nan, dtype=torch.float64)  # step, place in FIGURES, value

    @property
    def active(self) -> Tensor:
        """Which stitches are still being trained, ``(stitches,)`` bool."""
        going = self._diverged[:, 0].isnan()
        return going if self._patience is None else going & (self._since < self._patience)

    def check(self, losses: Tensor, step: int, figure: str) -> None:
        """Stop the stitches whose loss is NaN or infinite."""
        losses = losses.cpu().double()
        for place in (self.active & ~losses.isfinite()).nonzero().flatten().tolist():
            self._diverged[place] = torch.tensor([step, FIGURES.index(figure), losses[place]], dtype=torch.float64)

    def diverged(self) -> dict[str, str]:
        """Return the names of the stitches that diverged, and how.

        These are the stitches that :meth:`check` has stopped, and those whose last step made their weights NaN or
        infinite.
        """
        found = {}
        stitches = zip(self._stitches.names, self._stitches.layers, self._diverged.tolist(), strict=True)
        for number, (name, layer, (step, figure, value)) in enumerate(stitches):
            if not math.isnan(step):
                found[name] = f"the {FIGURES[int(figure)]} is {value} at step {step:.0f}"
            elif not all(bool(parameter.isfinite().all()) for parameter in layer.parameters()):
                found[name] = f"weights are NaN or infinite after step {self.steps[number]}"
        return found

    def note(self, losses: Tensor, step: int, first: bool) -> None:
        """Update the moving average of the losses after a step."""
        losses, active = losses.float().cpu(), self.active
        self.loss = torch.where(active, losses if first else torch.lerp(self.loss, losses, 0.1), self.loss)
        self.steps[active] = step

    def judge(self, losses: Tensor) -> None:
        """Store the weights of stitches with a new lowest validation loss."""
        states = [copy.deepcopy(layer.state_dict()) for layer in self._stitches.layers]
        losses, active = losses.cpu(), self.active
        better = active & (losses < self._best)
        self._best = torch.where(better, losses, self._best)
        self._states = [new if b else old for b, new, old in zip(better, states, self._states or states, strict=True)]
        self._since = torch.where(better, 0, self._since + active)

    def restore_best(self) -> None:
        """Load the best weights into the stitches, if they were evaluated."""
        for layer, state in zip(self._stitches.layers, self._states, strict=False):
            layer.load_state_dict(state)

    def state(self) -> dict[str, Tensor]:
        """Return the whole state as tensors by name."""
        tensors = {f"layers/{key}": value for key, value in self._stitches.layers.state_dict().items()}
        for number, state in self._optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer/{number}/{key}": value for key, value in state.items()}
        for number, best in enumerate(self._states):
            tensors |= {f"best/{number}/{key}": value for key, value in best.items()}
        if self._scaler is not None:
            scale = self._scaler.state_dict().items()
            exact = {float: torch.float64}
            tensors |= {f"scaler/{key}": torch.tensor(value, dtype=exact.get(type(value))) for key, value in scale}
        if not bool(self._diverged.isnan().all()):
            tensors["diverged"] = self._diverged
        return tensors | {"loss": self.loss, "steps": self.steps, "judged": self._best, "since": self._since}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the output of :meth:`state`."""
        held: dict[str, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            kind, _, key = name.partition("/")
            held.setdefault(kind, {})[key] = value
        own = self.state()
        moments = _numbered(held.get("optimizer", {}))
        weights = [each for group in self._optimizer.param_groups for each in group["params"]]
        for name in ("loss", "steps", "judged", "since"):
            if tensors[name].shape != own[name].shape:
                raise ValueError(
                    f"{name} must have the shape {tuple(own[name].shape)}, got {tuple(tensors[name].shape)}"
                )
        for number, of_weight in moments.items():
            for name, value in of_weight.items():
                if value.dim() and value.shape != weights[number].shape:
                    raise ValueError(f"{name} of weight {number} has the shape {tuple(value.shape)}")
        self._stitches.layers.load_state_dict(held["layers"])
        state = self._optimizer.state_dict()
        state["state"] = moments
        self._optimizer.load_state_dict(state)
        self._states = list(_numbered(held.get("best", {})).values())
        if self._scaler is not None:
            self._scaler.load_state_dict({key: value.item() for key, value in held["scaler"].items()})
        self.loss, self.steps = tensors["loss"].cpu(), tensors["steps"].cpu()
        self._best, self._since = tensors["judged"].cpu(), tensors["since"].cpu()
        if "diverged" in tensors:
            self._diverged = tensors["diverged"].cpu()


def _numbered(tensors: Mapping[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    found: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        number, _, key = name.partition("/")
        found.setdefault(int(number), {})[key] = value
    return dict(sorted(found.items()))
