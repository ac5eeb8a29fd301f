"""Training loop for several stitches into one frozen target half, with accelerate and checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hf_stitch.running import Processes
from hf_stitch.stitches import StitchingLayer
from hf_stitch.storage.checkpoint import Checkpoint
from hf_stitch.tasks.base import IGNORED
from hf_stitch.training.prepared import Prepared, PreparedBatch
from hf_stitch.training.progress import Progress
from hf_stitch.training.schedule import TrainingSchedule
from hf_stitch.training.stitches import Stitches

if TYPE_CHECKING:
    from accelerate import Accelerator


StepCallback = Callable[[int, Sequence[StitchingLayer]], None]
"""Receives the number of completed steps and the stitching layers. Training changes the layers: copy to keep them."""


class DivergedError(FloatingPointError):
    """Raised if a loss or the weights of a stitch are NaN or infinite. Other stitches are first trained to the end.

    Attributes:
        reasons: Place of each such stitch in the list that is trained -> how it diverged, and what to do.
        trained: The trained stitching layers in the order of the list, with ``None`` for those that diverged.

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

    With validation samples, each stitch ends with the weights of its lowest validation loss, otherwise with those of
    the last step. A stitch whose loss is NaN or infinite is trained no further, and the others go on. If no stitch
    goes on, the last saved state is kept.
    """
    from tqdm.auto import tqdm

    every, samples = accelerator.gradient_accumulation_steps, len(prepared.samples)
    last, per_epoch = schedule.feature_steps + schedule.max_steps, math.ceil(samples / (schedule.batch_size * every))
    hide = None if progress and accelerator.is_main_process else True
    with _prepared(accelerator, processes, stitches, schedule) as (model, optimizer):
        run = Progress(stitches, optimizer, accelerator.scaler, schedule.patience)
        step = 0
        if checkpoint is not None:
            step = checkpoint.load(accelerator.device, range(last + 1), lambda _, tensors: run.load(tensors)) or 0
        accelerator.wait_for_everyone()  # rank 0 must not overwrite a state that others still read
        if callback is not None and step == 0:
            callback(0, stitches.trained)
        with tqdm(total=last, initial=step, desc="training", unit="step", delay=3, disable=hide) as bar:
            for parts in schedule.batches(samples, step, every, processes):
                if step >= last or not bool(run.active.any()):
                    break
                features = step < schedule.feature_steps
                for group in optimizer.param_groups:
                    group["lr"] = schedule.rate(step)
                batches = [_read(prepared, places, schedule.seed + step, accelerator) for places, _ in parts]
                found = _gradients(model, batches, parts, features, accelerator, processes).cpu()
                run.check(found, step, "loss")
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
                run.note(found, step, first=step in (1, schedule.feature_steps + 1))
                bar.update()
                bar.set_postfix(loss=f"{run.loss[run.active].mean().item():.3f}", refresh=False)
                _log(accelerator, stitches.names, found, step, "loss", run.active, lr=schedule.rate(step - 1))
                if validation is not None and not features and (step % per_epoch == 0 or step == last):
                    loss, right = _validate(stitches, validation, schedule, accelerator, processes)
                    run.check(loss, step, "validation loss")
                    if not bool(run.active.any()):
                        break
                    _log(accelerator, stitches.names, loss, step, "validation loss", run.active)
                    if not bool(right.isnan().all()):
                        _log(accelerator, stitches.names, right, step, "validation accuracy", run.active)
                    run.judge(loss)
                if callback is not None:
                    callback(step, stitches.trained)
                if checkpoint is not None and accelerator.is_main_process and (step == last or step % save_every == 0):
                    checkpoint.save(step, run.state())
    run.restore_best()
    return run.loss, run.steps, run.diverged()


@contextmanager
def _prepared(
    accelerator: Accelerator, processes: Processes, stitches: Stitches, schedule: TrainingSchedule
) -> Iterator[tuple[Any, Any]]:
    """Prepare model and optimizer; afterwards the accelerator drops its references, which would keep them alive."""
    optimizer = torch.optim.Adam(
        [p for p in stitches.layers.parameters() if p.requires_grad], lr=schedule.lr, weight_decay=schedule.weight_decay
    )
    lists = accelerator._models, accelerator._optimizers
    lengths = [len(held) for held in lists]
    # The wrapper of several processes must not compare and send frozen weights, which may be distributed.
    frozen = [f"back.{name}" for name in stitches.back.state_dict()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(stitches, frozen)
    try:
        model, optimizer = accelerator.prepare(stitches, optimizer)
        yield model.train(), optimizer
    finally:
        for held, length in zip(lists, lengths, strict=True):
            del held[length:]


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
    total = float(samples) if features else _asked_of_all(batches, parts, accelerator)
    found = torch.zeros((), device=accelerator.device)
    for number, (one, (places, _)) in enumerate(zip(batches, parts, strict=True)):
        with nullcontext() if number == len(parts) - 1 else accelerator.no_sync(model):
            share = len(places) * processes.count / samples
            losses = model(one, total / processes.count, share, features) * float(bool(len(places)))
            found = found + losses.detach().float()
            accelerator.backward(losses.sum() * accelerator.gradient_accumulation_steps)  # which divides by it
    return accelerator.reduce(found, reduction="mean")


def _read(prepared: Prepared, places: Tensor, seed: int, accelerator: Accelerator) -> PreparedBatch:
    """Read the samples at some indices; without indices, one sample that the loss does not count."""
    return prepared.read(places if len(places) else torch.zeros(1, dtype=torch.long), seed).to(accelerator.device)


def _asked_of_all(
    batches: Sequence[PreparedBatch], parts: Sequence[tuple[Tensor, int]], accelerator: Accelerator
) -> float:
    """Number of predictions of a step, over its parts and all processes."""
    if _is_of_samples(batches[0]):
        return float(sum(count for _, count in parts))
    own = [one for one, (places, _) in zip(batches, parts, strict=True) if len(places)]
    tokens = sum(((one.answers["hard"] != IGNORED).sum() for one in own), torch.zeros((), device=accelerator.device))
    return max(accelerator.reduce(tokens, reduction="sum").item(), 1)


@torch.no_grad()
def _validate(
    stitches: Stitches, prepared: Prepared, schedule: TrainingSchedule, accelerator: Accelerator, processes: Processes
) -> tuple[Tensor, Tensor]:
    """Loss and accuracy of each stitch on held-out samples, which are distributed over the processes."""
    sums = torch.zeros(3, len(stitches.names), dtype=torch.float64, device=accelerator.device)
    stitches.eval()
    batches = torch.arange(len(prepared.samples)).split(schedule.batch_size)
    own = batches[processes.rank :: processes.count]
    if prepared.in_step:  # those of other processes run once more where they have no batch of their own
        missing = -(-len(batches) // processes.count) - len(own)
        for places in batches[:missing]:
            batch = _read(prepared, places, 0, accelerator)
            stitches(batch, _asked(batch))
            stitches.right(batch)
    for places in own:
        batch = _read(prepared, places, 0, accelerator)
        asked = _asked(batch)
        sums[0] += asked * stitches(batch, asked).double()
        sums[1] += stitches.right(batch)
        sums[2] += asked
    stitches.train()
    sums = accelerator.reduce(sums, reduction="sum")
    return (sums[0] / sums[2]).float(), (sums[1] / sums[2]).float()


def _asked(batch: PreparedBatch) -> float:
    """Number of predictions: one for each sample, or for language models one for each token with a next token."""
    return batch.count if _is_of_samples(batch) else max((batch.answers["hard"] != IGNORED).sum().item(), 1)


def _is_of_samples(batch: PreparedBatch) -> bool:
    """Whether there is one prediction for each sample, not one for each token."""
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
        of_each = zip(names, values.tolist(), active.tolist(), strict=True)
        figures = {figure if len(names) == 1 else f"{figure}/{name}": value for name, value, on in of_each if on}
        accelerator.log({**figures, **more}, step=step)
