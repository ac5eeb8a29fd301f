"""Training loop for several stitches into one frozen target half, with its schedule and state."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hf_stitch.printing import progress_bar
from hf_stitch.running import Processes
from hf_stitch.stitches import StitchingLayer
from hf_stitch.storage.checkpoint import Checkpoint
from hf_stitch.tasks.base import IGNORED
from hf_stitch.training.prepared import Prepared, PreparedBatch
from hf_stitch.training.stitches import Stitches

if TYPE_CHECKING:
    from accelerate import Accelerator

Schedule = Literal["step", "constant", "linear", "cosine"]

FIGURES = ("loss", "validation loss")
"""Losses that must stay finite."""
StepCallback = Callable[[int, Sequence[StitchingLayer]], None]
"""Function of the number of completed steps and the stitching layers. Training changes the layers in place."""


@dataclass(frozen=True)
class TrainingSchedule:
    """Number of steps, learning rate and order of the samples of a training run."""

    max_steps: int  # number of optimizer steps on the objective
    feature_steps: int  # number of additional steps before these, to match final features
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
        share_done = max(step - self.feature_steps, 0) / self.max_steps
        factor = {
            "step": 0.1 ** ((share_done >= 1 / 3) + (share_done >= 2 / 3)),
            "constant": 1.0,
            "linear": 1 - share_done,
            "cosine": (1 + math.cos(math.pi * share_done)) / 2,
        }[self.schedule]
        return self.lr * factor

    def batches(self, n: int, start: int, every: int, processes: Processes) -> Iterator[list[tuple[Tensor, int]]]:
        """Yield steps endlessly: for each part, the sample indices of this process, and the number of all processes."""
        size = self.batch_size * every
        per_epoch = math.ceil(n / size)
        order, epoch = torch.arange(n), -1
        for number in count(start):
            if self.shuffle and number // per_epoch != epoch:
                epoch = number // per_epoch
                order = torch.randperm(n, generator=torch.Generator().manual_seed(self.seed * 1_000_003 + epoch))
            offset = number % per_epoch * size
            index_parts = order[offset : offset + size].split(self.batch_size)
            yield [(indices[processes.rank :: processes.count], len(indices)) for indices in index_parts]


class Progress:
    """State of a training run: layers, optimizer, gradient scaler, and best weights, steps and loss of each stitch.

    Training stops for a stitch with a NaN or infinite loss and continues for the rest.
    """

    def __init__(self, stitches: Stitches, optimizer: Any, scaler: Any, patience: int | None) -> None:
        self._stitches, self._optimizer, self._scaler, self._patience = stitches, optimizer, scaler, patience
        count = len(stitches.names)
        self._best = torch.full((count,), math.inf)  # lowest validation loss
        self._since = torch.zeros(count, dtype=torch.long)  # evaluations since the lowest loss
        self._states: list[dict[str, Tensor]] = []  # weights with the lowest loss
        self.steps = torch.zeros(count, dtype=torch.long)
        self.loss = torch.full((count,), math.nan)
        self._diverged = torch.full((count, 3), math.nan, dtype=torch.float64)  # step, place in FIGURES, value

    @property
    def active(self) -> Tensor:
        """Mask of the stitches that are still being trained, ``(stitches,)`` bool."""
        has_not_diverged = self._diverged[:, 0].isnan()
        return has_not_diverged if self._patience is None else has_not_diverged & (self._since < self._patience)

    def check(self, losses: Tensor, step: int, figure: str) -> None:
        """Stop the stitches with a NaN or infinite loss."""
        losses = losses.cpu().double()
        for number in (self.active & ~losses.isfinite()).nonzero().flatten().tolist():
            self._diverged[number] = torch.tensor([step, FIGURES.index(figure), losses[number]], dtype=torch.float64)

    def diverged(self) -> dict[str, str]:
        """Return the reason of each diverged stitch, by name.

        A stitch has diverged if :meth:`check` has stopped it, or if its last step made its weights NaN or infinite.
        """
        reasons = {}
        stitches = zip(self._stitches.names, self._stitches.layers, self._diverged.tolist(), strict=True)
        for number, (name, layer, (step, figure, value)) in enumerate(stitches):
            if not math.isnan(step):
                reasons[name] = f"the {FIGURES[int(figure)]} is {value} at step {step:.0f}"
            elif not all(bool(parameter.isfinite().all()) for parameter in layer.parameters()):
                reasons[name] = f"weights are NaN or infinite after step {self.steps[number]}"
        return reasons

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
        self._states = [
            new if wins else old for wins, new, old in zip(better, states, self._states or states, strict=True)
        ]
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
            dtypes = {float: torch.float64}
            tensors |= {f"scaler/{key}": torch.tensor(value, dtype=dtypes.get(type(value))) for key, value in scale}
        if not bool(self._diverged.isnan().all()):
            tensors["diverged"] = self._diverged
        return tensors | {"loss": self.loss, "steps": self.steps, "judged": self._best, "since": self._since}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the output of :meth:`state`."""
        by_group: dict[str, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            group_name, _, key = name.partition("/")
            by_group.setdefault(group_name, {})[key] = value
        current = self.state()
        optimizer_state = _numbered(by_group.get("optimizer", {}))
        weights = [parameter for param_group in self._optimizer.param_groups for parameter in param_group["params"]]
        for name in ("loss", "steps", "judged", "since"):
            if tensors[name].shape != current[name].shape:
                raise ValueError(
                    f"{name} must have the shape {tuple(current[name].shape)}, got {tuple(tensors[name].shape)}"
                )
        for number, weight_state in optimizer_state.items():
            for name, value in weight_state.items():
                if value.dim() and value.shape != weights[number].shape:
                    raise ValueError(f"{name} of weight {number} has the shape {tuple(value.shape)}")
        self._stitches.layers.load_state_dict(by_group["layers"])
        state = self._optimizer.state_dict()
        state["state"] = optimizer_state
        self._optimizer.load_state_dict(state)
        self._states = list(_numbered(by_group.get("best", {})).values())
        if self._scaler is not None:
            self._scaler.load_state_dict({key: value.item() for key, value in by_group["scaler"].items()})
        self.loss, self.steps = tensors["loss"].cpu(), tensors["steps"].cpu()
        self._best, self._since = tensors["judged"].cpu(), tensors["since"].cpu()
        if "diverged" in tensors:
            self._diverged = tensors["diverged"].cpu()


def _numbered(tensors: Mapping[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    by_number: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        number, _, key = name.partition("/")
        by_number.setdefault(int(number), {})[key] = value
    return dict(sorted(by_number.items()))


class DivergedError(FloatingPointError):
    """Raised if a loss or the weights of a stitch are NaN or infinite. Other stitches are first trained to the end.

    Attributes:
        reasons: Index of each diverged stitch -> the reason, and what to do.
        trained: The trained stitching layers in order, with ``None`` for each diverged stitch.

    Args:
        message: The message.
        reasons: As the attribute.
        trained: As the attribute.

    Example:
        >>> issubclass(DivergedError, FloatingPointError)
        True
    """

    def __init__(
        self, message: str, reasons: Mapping[int, str] | None = None, trained: Sequence[StitchingLayer | None] = ()
    ) -> None:
        super().__init__(message)
        self.reasons, self.trained = dict(reasons or {}), list(trained)


def train(
    stitches: Stitches,
    prepared: Prepared,
    schedule: TrainingSchedule,
    *,
    accelerator: Accelerator,
    processes: Processes,
    checkpoint: Checkpoint | None,
    save_every: int,
    validation: Prepared | None,
    callback: StepCallback | None,
    progress: bool,
) -> tuple[Tensor, Tensor, dict[str, str]]:
    """Train the stitches in place.

    With validation samples, each stitch ends with the weights of its lowest validation loss, otherwise with the weights
    of the last step. Training stops for a stitch with a NaN or infinite loss and continues for the rest. After all
    stitches have diverged, the last saved state is kept.
    """
    every, samples = accelerator.gradient_accumulation_steps, len(prepared.samples)
    end, per_epoch = (schedule.feature_steps + schedule.max_steps, math.ceil(samples / (schedule.batch_size * every)))
    label = "training" if progress and accelerator.is_main_process else None
    with _prepared(accelerator, processes, stitches, schedule) as (model, optimizer):
        run = Progress(stitches, optimizer, accelerator.scaler, schedule.patience)
        step = 0
        if checkpoint is not None:
            step = checkpoint.load(accelerator.device, range(end + 1), lambda _, tensors: run.load(tensors)) or 0
        accelerator.wait_for_everyone()  # rank 0 must not overwrite a state that other ranks still read
        if callback is not None and step == 0:
            callback(0, stitches.trained)
        with progress_bar(label, end, "step", step) as bar:
            for parts in schedule.batches(samples, step, every, processes):
                if step >= end or not bool(run.active.any()):
                    break
                features = step < schedule.feature_steps
                for group in optimizer.param_groups:
                    group["lr"] = schedule.rate(step)
                batches = [_read(prepared, indices, schedule.seed + step, accelerator) for indices, _ in parts]
                losses = _gradients(model, batches, parts, features, accelerator, processes).cpu()
                run.check(losses, step, "loss")
                if not bool(run.active.any()):
                    break
                for layer, active in zip(stitches.layers, run.active.tolist(), strict=True):
                    if not active:
                        layer.zero_grad()  # without gradient, Adam does not change the weights
                if schedule.max_grad_norm is not None:
                    accelerator.unscale_gradients(optimizer)
                    for layer in stitches.layers:
                        nn.utils.clip_grad_norm_(layer.parameters(), schedule.max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()
                if not features and not optimizer.step_was_skipped:
                    stitches.shrink(schedule.rate(step), run.active)
                step += 1
                run.note(losses, step, first=step in (1, schedule.feature_steps + 1))
                bar.update()
                bar.set_postfix(loss=f"{run.loss[run.active].mean().item():.3f}", refresh=False)
                _log(accelerator, stitches.names, losses, step, "loss", run.active, lr=schedule.rate(step - 1))
                if validation is not None and not features and (step % per_epoch == 0 or step == end):
                    loss, accuracy = _validate(stitches, validation, schedule, accelerator, processes)
                    run.check(loss, step, "validation loss")
                    if not bool(run.active.any()):
                        break
                    _log(accelerator, stitches.names, loss, step, "validation loss", run.active)
                    if not bool(accuracy.isnan().all()):
                        _log(accelerator, stitches.names, accuracy, step, "validation accuracy", run.active)
                    run.judge(loss)
                if callback is not None:
                    callback(step, stitches.trained)
                if checkpoint is not None and accelerator.is_main_process and (step == end or step % save_every == 0):
                    checkpoint.save(step, run.state())
    run.restore_best()
    return run.loss, run.steps, run.diverged()


@contextmanager
def _prepared(
    accelerator: Accelerator, processes: Processes, stitches: Stitches, schedule: TrainingSchedule
) -> Iterator[tuple[Any, Any]]:
    """Prepare model and optimizer; the accelerator drops its references afterwards, so that both can be freed."""
    optimizer = torch.optim.Adam(
        [p for p in stitches.layers.parameters() if p.requires_grad], lr=schedule.lr, weight_decay=schedule.weight_decay
    )
    lists = accelerator._models, accelerator._optimizers
    lengths = [len(references) for references in lists]
    # The wrapper of several processes must not compare and send frozen weights, which may be distributed.
    frozen = [f"back.{name}" for name in stitches.back.state_dict()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(stitches, frozen)
    try:
        model, optimizer = accelerator.prepare(stitches, optimizer)
        yield model.train(), optimizer
    finally:
        for references, length in zip(lists, lengths, strict=True):
            del references[length:]


def _gradients(
    model: Any,
    batches: Sequence[PreparedBatch],
    parts: Sequence[tuple[Tensor, int]],
    features: bool,
    accelerator: Accelerator,
    processes: Processes,
) -> Tensor:
    """Accumulate the gradients of a step over its parts and all processes; return the loss of each stitch."""
    samples = sum(count for _, count in parts)
    total = float(samples) if features else _count_all_predictions(batches, parts, accelerator)
    accumulated = torch.zeros((), device=accelerator.device)
    for number, (batch, (indices, _)) in enumerate(zip(batches, parts, strict=True)):
        with nullcontext() if number == len(parts) - 1 else accelerator.no_sync(model):
            share = len(indices) * processes.count / samples
            losses = model(batch, total / processes.count, share, features) * float(bool(len(indices)))
            accumulated = accumulated + losses.detach().float()
            accelerator.backward(losses.sum() * accelerator.gradient_accumulation_steps)  # which divides by it
    return accelerator.reduce(accumulated, reduction="mean")


def _read(prepared: Prepared, indices: Tensor, seed: int, accelerator: Accelerator) -> PreparedBatch:
    """Read the samples at the indices; without indices, read one sample, which the loss ignores."""
    return prepared.read(indices if len(indices) else torch.zeros(1, dtype=torch.long), seed).to(accelerator.device)


def _count_all_predictions(
    batches: Sequence[PreparedBatch], parts: Sequence[tuple[Tensor, int]], accelerator: Accelerator
) -> float:
    """Return the number of predictions of a step, over its parts and all processes."""
    if _predicts_per_sample(batches[0]):
        return float(sum(count for _, count in parts))
    local = [one for one, (indices, _) in zip(batches, parts, strict=True) if len(indices)]
    tokens = sum(((one.answers["hard"] != IGNORED).sum() for one in local), torch.zeros((), device=accelerator.device))
    return max(accelerator.reduce(tokens, reduction="sum").item(), 1)


@torch.no_grad()
def _validate(
    stitches: Stitches, prepared: Prepared, schedule: TrainingSchedule, accelerator: Accelerator, processes: Processes
) -> tuple[Tensor, Tensor]:
    """Compute the loss and accuracy of each stitch on held-out samples, distributed over the processes."""
    sums = torch.zeros(3, len(stitches.names), dtype=torch.float64, device=accelerator.device)
    stitches.eval()
    batches = torch.arange(len(prepared.samples)).split(schedule.batch_size)
    local = batches[processes.rank :: processes.count]
    if prepared.in_step:  # processes without a batch run one of another process
        missing = -(-len(batches) // processes.count) - len(local)
        for indices in batches[:missing]:
            batch = _read(prepared, indices, 0, accelerator)
            stitches(batch, _count_predictions(batch))
            stitches.right(batch)
    for indices in local:
        batch = _read(prepared, indices, 0, accelerator)
        predictions = _count_predictions(batch)
        sums[0] += predictions * stitches(batch, predictions).double()
        sums[1] += stitches.right(batch)
        sums[2] += predictions
    stitches.train()
    sums = accelerator.reduce(sums, reduction="sum")
    return (sums[0] / sums[2]).float(), (sums[1] / sums[2]).float()


def _count_predictions(batch: PreparedBatch) -> float:
    """Return the number of predictions: of samples, or for language models of tokens with a next token."""
    return batch.count if _predicts_per_sample(batch) else max((batch.answers["hard"] != IGNORED).sum().item(), 1)


def _predicts_per_sample(batch: PreparedBatch) -> bool:
    """Return whether the task has one prediction for each sample, not one for each token."""
    return "hard" not in batch.answers or batch.answers["hard"].dim() == 1 or batch.answers["hard"].is_floating_point()


def _log(
    accelerator: Accelerator,
    names: Sequence[str],
    values: Tensor,
    step: int,
    figure: str,
    active: Tensor,
    **more: float,
) -> None:
    if accelerator.trackers:
        by_stitch = zip(names, values.tolist(), active.tolist(), strict=True)
        figures = {figure if len(names) == 1 else f"{figure}/{name}": value for name, value, on in by_stitch if on}
        accelerator.log({**figures, **more}, step=step)
