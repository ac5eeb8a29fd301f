"""The loop: any number of stitches into one frozen half, on accelerate, interruptible."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..adapters.cut import Back
from ..checkpoint import Checkpoint
from ..models.modeling import logits_of
from ..processes import Processes
from ..representation import Representation
from ..stitches import StitchingLayer
from ..stitches.layer import paired_rows
from .objective import IGNORED, Objective
from .prepared import Prepared, Seen

if TYPE_CHECKING:
    from accelerate import Accelerator

Schedule = Literal["step", "constant", "linear", "cosine"]
Observe = Callable[[int, Sequence[StitchingLayer]], None]
"""Is told the number of steps done and the layers, which go on being trained: it copies what it keeps."""


@dataclass(frozen=True)
class Course:
    """How long and how fast.

    Attributes:
        steps: Optimizer steps.
        feature_steps: Those before them that match final features.
        batch_size: Samples of a step over all processes; with gradient accumulation, of each of its parts.
        lr: Learning rate of Adam.
        weight_decay: Its L2 penalty.
        schedule: What becomes of the learning rate.
        clip: Norm that the gradient of a stitch is cut to, if any.
        seed: Of the order of the samples and of augmentation.
        shuffle: Whether the order changes from epoch to epoch.
        patience: Evaluations without improvement before an end.
    """

    steps: int
    feature_steps: int
    batch_size: int
    lr: float
    weight_decay: float
    schedule: Schedule
    clip: float | None
    seed: int
    shuffle: bool
    patience: int | None

    def rate(self, step: int) -> float:
        """The learning rate of a step."""
        done = max(step - self.feature_steps, 0) / self.steps
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


class Stitches(nn.Module):
    """Stitches of one target cut, and the frozen half behind it, through which all of them go in one batch.

    Args:
        layers: By name.
        back: The target from the cut on.
        objective: What is minimised.
        last: The target's last cut.
    """

    def __init__(self, layers: Mapping[str, StitchingLayer], back: Back, objective: Objective, last: str) -> None:
        super().__init__()
        self.names = tuple(layers)
        self.layers = nn.ModuleList(layers.values())
        self.back = back
        self._objective, self._last = objective, last

    @property
    def trained(self) -> list[StitchingLayer]:
        """The layers, in the order of the names."""
        return [layer for layer in self.layers if isinstance(layer, StitchingLayer)]

    def train(self, mode: bool = True) -> Stitches:
        """The frozen half stays in eval mode."""
        super().train(mode)
        self.back.eval()
        return self

    def forward(self, seen: Seen, total: int, features: bool = False) -> Tensor:
        """The loss of each stitch ``(stitches,)``.

        Args:
            seen: Samples.
            total: What a sum over samples is divided by: how many samples (of language models, tokens) there are.
            features: The squared distance of final features instead of the objective.
        """
        mapped = [layer(seen.sources[name]) for name, layer in zip(self.names, self.layers, strict=True)]
        if features:
            assert seen.features is not None
            said = self._features(mapped)
            return torch.stack([_distance(one, seen.features, total) for one in said])
        losses = []
        for layer, one, logits in zip(self.trained, mapped, self._logits(mapped), strict=True):
            loss = self._objective.loss(logits.to(_at_least_float32(logits.dtype)), seen.answers) / total
            if self._objective.penalties:
                loss = loss + self._objective.penalty(layer, self._rows(layer, one, seen))
            losses.append(loss)
        return torch.stack(losses)

    @torch.no_grad()
    def right(self, seen: Seen) -> Tensor:
        """How many samples (tokens) each stitch predicts as the first kind of labels would have it ``(stitches,)``."""
        mapped = [layer(seen.sources[name]) for name, layer in zip(self.names, self.layers, strict=True)]
        answers = next(iter(seen.answers[name] for name in ("hard", *seen.answers) if name in seen.answers))
        wanted = answers if not answers.is_floating_point() else answers.argmax(-1)
        return torch.stack([(logits.argmax(-1) == wanted).sum() for logits in self._logits(mapped)])

    def _logits(self, mapped: Sequence[Representation]) -> Sequence[Tensor]:
        if len(mapped) > 1 and len({one.values.shape for one in mapped}) == 1:
            return logits_of(self._run(_joined(mapped))).chunk(len(mapped))
        return [logits_of(self._run(one)) for one in mapped]

    def _run(self, representation: Representation) -> Any:
        parameter = next((p for p in self.back.parameters() if p.is_floating_point()), representation.values)
        return self.back(representation.replace(values=representation.values.to(parameter.dtype)))

    def _features(self, mapped: Sequence[Representation]) -> list[Tensor]:
        """What the target says at its last cut, of each."""
        if self._last == self.back.cut.layer:
            return [one.values for one in mapped]
        found: list[Tensor] = []
        module = self.back.model.get_submodule(self._last)
        handle = module.register_forward_hook(lambda module, args, output: found.append(_first(output)))
        try:
            for one in mapped:
                self._run(one)
        finally:
            handle.remove()
        return found

    def _rows(self, layer: StitchingLayer, mapped: Representation, seen: Seen) -> tuple[Tensor, Tensor] | None:
        return None if seen.there is None else paired_rows(mapped, seen.there, layer.rows)["body"]


class DivergedError(FloatingPointError):
    """A loss is no finite number: training has stopped."""


def train(
    stitches: Stitches,
    prepared: Prepared,
    course: Course,
    *,
    accelerator: Accelerator,
    processes: Processes,
    checkpoint: Checkpoint,
    save_every: int,
    validation: Prepared | None,
    observe: Observe | None,
    progress: bool,
) -> tuple[Tensor, int]:
    """Train the stitches; they end as they were best, if there is a validation, and else as they were last.

    Returns:
        The loss of each, an exponential mean over about the last ten steps; and the number of steps done.

    Raises:
        DivergedError: If a loss is NaN or infinite; the message names the step and the stitch.
    """
    from tqdm.auto import tqdm

    optimizer = torch.optim.Adam(
        [p for p in stitches.layers.parameters() if p.requires_grad], lr=course.lr, weight_decay=course.weight_decay
    )
    model, optimizer = accelerator.prepare(stitches, optimizer)
    model.train()
    run = _Run(stitches, optimizer)
    step = 0
    if (saved := checkpoint.load(accelerator.device)) is not None:
        step = run.load(*saved)
    accelerator.wait_for_everyone()  # before the first saves anew what the others read
    every, samples = accelerator.gradient_accumulation_steps, len(prepared.samples)
    last, per_epoch = course.feature_steps + course.steps, math.ceil(samples / (course.batch_size * every))
    if observe is not None and step == 0:
        observe(0, stitches.trained)
    hide = None if progress and accelerator.is_main_process else True
    with tqdm(total=last, initial=step, desc="training", unit="step", delay=3, disable=hide) as bar:
        for parts in course.batches(samples, step, every, processes):
            if step >= last or run.patience_lost(course.patience):
                break
            features = step < course.feature_steps
            for group in optimizer.param_groups:
                group["lr"] = course.rate(step)
            seen = [_read(prepared, places, course.seed + step, accelerator) for places, _ in parts]
            total = _asked_of_all(seen, [count for _, count in parts], accelerator)
            found = torch.zeros(len(stitches.names), device=accelerator.device)
            for number, (one, (places, _)) in enumerate(zip(seen, parts, strict=True)):
                with nullcontext() if number == len(parts) - 1 else accelerator.no_sync(model):
                    losses = model(one, total / processes.count, features) * float(bool(len(places)))
                    found = found + losses.detach().float()
                    accelerator.backward(losses.sum() * every)  # which divides by it
            found = accelerator.reduce(found, reduction="mean")
            if not bool(found.isfinite().all()):
                raise DivergedError(_diverged(stitches.names, found, step, checkpoint, course.lr, "loss"))
            if course.clip is not None:
                accelerator.unscale_gradients(optimizer)
                for layer in stitches.layers:
                    nn.utils.clip_grad_norm_(layer.parameters(), course.clip)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            run.note(found, first=step in (1, course.feature_steps + 1))
            bar.update()
            bar.set_postfix(loss=f"{found.mean().item():.3f}", refresh=False)
            _log(accelerator, stitches.names, found, optimizer.param_groups[0]["lr"], step)
            if validation is not None and not features and (step % per_epoch == 0 or step == last):
                loss, right = _validate(stitches, validation, course, accelerator, processes)
                if not bool(loss.isfinite().all()):
                    raise DivergedError(_diverged(stitches.names, loss, step, checkpoint, course.lr, "validation loss"))
                run.judge(loss)
                _log(accelerator, stitches.names, loss, None, step, "validation loss")
                _log(accelerator, stitches.names, right, None, step, "validation accuracy")
            if observe is not None:
                observe(step, stitches.trained)
            if accelerator.is_main_process and (step == last or step % save_every == 0) and checkpoint.lasting:
                checkpoint.save(step, run.state())
    run.restore_best()
    return run.loss, step


def _read(prepared: Prepared, places: Tensor, seed: int, accelerator: Accelerator) -> Seen:
    """What is known of some samples; of one that does not count, where there are none."""
    return prepared.read(places if len(places) else torch.zeros(1, dtype=torch.long), seed).to(accelerator.device)


def _asked_of_all(seen: Sequence[Seen], counts: Sequence[int], accelerator: Accelerator) -> float:
    """How many predictions a step asks for, over its parts and all processes."""
    if _is_of_samples(seen[0]):
        return float(sum(counts))
    tokens = torch.stack([(one.answers["hard"] != IGNORED).sum() for one in seen]).sum()
    return max(accelerator.reduce(tokens, reduction="sum").item(), 1)


class _Run:
    """What training has reached: layers, optimizer, the best layers so far, and the loss."""

    def __init__(self, stitches: Stitches, optimizer: Any) -> None:
        self._stitches, self._optimizer = stitches, optimizer
        self._best: Tensor | None = None
        self._since = 0
        self._states: list[dict[str, Tensor]] = []
        self.loss = torch.full((len(stitches.names),), math.nan)

    def note(self, losses: Tensor, first: bool) -> None:
        """Take a step's losses into the running mean, which the first of their kind begins."""
        losses = losses.float().cpu()
        self.loss = losses if first else torch.lerp(self.loss, losses, 0.1)

    def judge(self, losses: Tensor) -> None:
        """Keep the layers that are better than ever."""
        states = [copy.deepcopy(layer.state_dict()) for layer in self._stitches.layers]
        if self._best is None:
            self._best, self._states = losses.cpu(), states
            return
        better = losses.cpu() < self._best
        self._best = torch.where(better, losses.cpu(), self._best)
        self._states = [new if b else old for b, new, old in zip(better, states, self._states, strict=True)]
        self._since = 0 if bool(better.any()) else self._since + 1

    def patience_lost(self, patience: int | None) -> bool:
        """Whether there has been no improvement for long."""
        return patience is not None and self._since >= patience

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
        tensors |= {} if self._best is None else {"judged": self._best}
        return tensors | {"loss": self.loss, "since": torch.tensor(self._since)}

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
        self._best = tensors["judged"].cpu() if "judged" in tensors else None
        self.loss, self._since = tensors["loss"].cpu(), int(tensors["since"])
        return step


def _numbered(tensors: Mapping[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    """``number/key`` taken apart."""
    found: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        number, _, key = name.partition("/")
        found.setdefault(int(number), {})[key] = value
    return dict(sorted(found.items()))


@torch.no_grad()
def _validate(
    stitches: Stitches, prepared: Prepared, course: Course, accelerator: Accelerator, processes: Processes
) -> tuple[Tensor, Tensor]:
    """Loss and share of right answers of each stitch on held-out samples, which the processes share."""
    sums = torch.zeros(3, len(stitches.names), dtype=torch.float64, device=accelerator.device)
    stitches.eval()
    for number, (_, read) in enumerate(prepared.batches(course.batch_size)):
        if number % processes.count == processes.rank:
            seen = read.to(accelerator.device)
            asked = _asked(seen)
            sums[0] += asked * stitches(seen, asked).double()
            sums[1] += stitches.right(seen)
            sums[2] += asked
    stitches.train()
    sums = accelerator.reduce(sums, reduction="sum")
    return (sums[0] / sums[2]).float(), (sums[1] / sums[2]).float()


def _asked(seen: Seen) -> float:
    """How many predictions are asked for: one for each sample, or of texts the tokens that are followed by another."""
    return seen.count if _is_of_samples(seen) else max((seen.answers["hard"] != IGNORED).sum().item(), 1)


def _is_of_samples(seen: Seen) -> bool:
    """Whether a prediction is made for each sample, not for each token."""
    return "hard" not in seen.answers or seen.answers["hard"].dim() == 1


def _diverged(names: Sequence[str], losses: Tensor, step: int, checkpoint: Checkpoint, lr: float, figure: str) -> str:
    name = names[int((~losses.isfinite()).nonzero()[0])]
    kept = f"the last state saved is in {checkpoint.folder}" if checkpoint.lasting else "nothing was saved"
    return (
        f"the {figure} of stitch {name!r} is {losses[names.index(name)].item()} at step {step}; {kept}. Lower lr (now "
        f"{lr}), set clip, or look for inputs that are not finite"
    )


def _log(
    accelerator: Accelerator, names: Sequence[str], values: Tensor, lr: float | None, step: int, figure: str = "loss"
) -> None:
    if accelerator.trackers:
        figures = {figure if len(names) == 1 else f"{figure}/{name}": v for name, v in zip(names, values.tolist())}  # noqa: B905
        accelerator.log(figures if lr is None else {**figures, "lr": lr}, step=step)


def _joined(representations: Sequence[Representation]) -> Representation:
    """Several batches as one."""
    masks = [one.mask for one in representations]
    mask = torch.cat([m for m in masks if m is not None]) if masks[0] is not None else None
    return representations[0].replace(values=torch.cat([one.values for one in representations]), mask=mask)


def _distance(values: Tensor, features: Representation, total: float) -> Tensor:
    """The squared distance for each sample and number, real positions alone."""
    if values.shape != features.values.shape:
        raise ValueError(
            f"final features are {tuple(values.shape)} through the stitch and {tuple(features.values.shape)} in the "
            "target: they can be matched with rows='positions' or 'flatten' only; set feature_steps=0"
        )
    wide = _at_least_float32(values.dtype)
    each = functional.mse_loss(values.to(wide), features.values.to(wide), reduction="none")
    each = each.flatten(features.values.dim() - 1).mean(-1)
    if features.mask is not None:
        return (each * features.mask).sum() / features.mask.sum()
    return each.flatten(1).mean(1).sum() / total if each.dim() > 1 else each.sum() / total


def _first(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
