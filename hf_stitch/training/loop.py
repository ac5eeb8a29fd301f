"""The loop: any number of stitches into one frozen half, on accelerate, interruptible."""

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
from torch.nn import functional

from hf_stitch.adapters.cutting.halves import Back
from hf_stitch.artefacts.modeling import logits_of
from hf_stitch.processes import Processes
from hf_stitch.representation import Representation
from hf_stitch.stitches import StitchingLayer
from hf_stitch.stitches.layer import paired_rows
from hf_stitch.storage.checkpoint import Checkpoint
from hf_stitch.training.objective import IGNORED, Objective
from hf_stitch.training.prepared import Prepared, Seen

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
        patience: Evaluations without improvement before a stitch is done.
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

    def forward(self, seen: Seen, total: float, share: float = 1.0, features: bool = False) -> Tensor:
        """The loss of each stitch ``(stitches,)``.

        Args:
            seen: Samples.
            total: What a sum over samples is divided by: how many samples (of language models, tokens) there are.
            share: Weight of the penalties, which are no sums over samples: the share of a step that these samples are.
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
            if self._objective.penalties and share:
                loss = loss + share * self._objective.penalty(layer, self._rows(layer, one, seen))
            losses.append(loss)
        return torch.stack(losses)

    @torch.no_grad()
    def check(self, seen: Seen) -> int:
        """Refuse what cannot be minimised, by a batch.

        Returns:
            Number of classes that the target predicts (of language models, tokens).

        Raises:
            ValueError: If a parent answers with other classes, a penalty takes more rows than a batch has, or final
                features have another shape through the stitch.
        """
        mapped = [layer(seen.sources[name]) for name, layer in zip(self.names, self.layers, strict=True)]
        for layer, one, logits in zip(self.trained, mapped, self._logits(mapped), strict=True):
            for kind, answers in seen.answers.items():
                if kind != "hard" and answers.shape != logits.shape:
                    raise ValueError(
                        f"labels={kind!r}: the {kind} answers a batch with {tuple(answers.shape)} and the target with "
                        f"{tuple(logits.shape)}; soft labels need the same classes"
                    )
            if (rows := self._rows(layer, one, seen)) is not None:
                for name, least in self._objective.missing_rows(*rows).items():
                    raise ValueError(
                        f"the penalty {name!r} takes at least {least} rows, and a process has {len(rows[0])} of a "
                        "batch; raise batch_size"
                    )
        if (wanted := seen.features) is not None:
            for said in self._features(mapped):
                if said.shape != wanted.values.shape:
                    raise ValueError(
                        f"final features are {tuple(said.shape)} through the stitch and {tuple(wanted.values.shape)} "
                        "in the target: they can be matched with rows='positions' or 'flatten' only; set "
                        "feature_steps=0"
                    )
        return logits.shape[-1]

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
    checkpoint: Checkpoint | None,
    save_every: int,
    validation: Prepared | None,
    observe: Observe | None,
    progress: bool,
) -> tuple[Tensor, Tensor]:
    """Train the stitches; they end as they were best, if there is a validation, and else as they were last.

    Returns:
        The loss of each, an exponential mean over about its last ten steps; and the number of its steps.

    Raises:
        DivergedError: If a loss is NaN or infinite; the message names the step and the stitch.
    """
    from tqdm.auto import tqdm

    every, samples = accelerator.gradient_accumulation_steps, len(prepared.samples)
    last, per_epoch = course.feature_steps + course.steps, math.ceil(samples / (course.batch_size * every))
    hide = None if progress and accelerator.is_main_process else True
    with _prepared(accelerator, stitches, course) as (model, optimizer):
        run = _Run(stitches, optimizer, accelerator.scaler, course.patience)
        step = 0
        if checkpoint is not None and (saved := checkpoint.load(accelerator.device)) is not None:
            step = run.load(*saved)
        accelerator.wait_for_everyone()  # before the first saves anew what the others read
        if observe is not None and step == 0:
            observe(0, stitches.trained)
        with tqdm(total=last, initial=step, desc="training", unit="step", delay=3, disable=hide) as bar:
            for parts in course.batches(samples, step, every, processes):
                if step >= last or not bool(run.active.any()):
                    break
                features = step < course.feature_steps
                for group in optimizer.param_groups:
                    group["lr"] = course.rate(step)
                seen = [_read(prepared, places, course.seed + step, accelerator) for places, _ in parts]
                found = _gradients(model, seen, parts, features, accelerator, processes)
                if not bool(found.isfinite().all()):
                    raise DivergedError(_diverged(stitches.names, found, step, checkpoint, course.lr, "loss"))
                if course.clip is not None:
                    accelerator.unscale_gradients(optimizer)
                    for layer in stitches.layers:
                        nn.utils.clip_grad_norm_(layer.parameters(), course.clip)
                for layer, active in zip(stitches.layers, run.active.tolist(), strict=True):
                    if not active:
                        layer.zero_grad()  # Adam leaves alone what has no gradient
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                run.note(found, step, first=step in (1, course.feature_steps + 1))
                bar.update()
                bar.set_postfix(loss=f"{run.loss[run.active].mean().item():.3f}", refresh=False)
                _log(accelerator, stitches.names, found, step, "loss", run.active, lr=course.rate(step - 1))
                if validation is not None and not features and (step % per_epoch == 0 or step == last):
                    loss, right = _validate(stitches, validation, course, accelerator, processes)
                    if not bool(loss.isfinite().all()):
                        why = _diverged(stitches.names, loss, step, checkpoint, course.lr, "validation loss")
                        raise DivergedError(why)
                    _log(accelerator, stitches.names, loss, step, "validation loss", run.active)
                    _log(accelerator, stitches.names, right, step, "validation accuracy", run.active)
                    run.judge(loss)
                if observe is not None:
                    observe(step, stitches.trained)
                if checkpoint is not None and accelerator.is_main_process and (step == last or step % save_every == 0):
                    checkpoint.save(step, run.state())
    run.restore_best()
    return run.loss, run.steps


@contextmanager
def _prepared(accelerator: Accelerator, stitches: Stitches, course: Course) -> Iterator[tuple[Any, Any]]:
    """Model and optimizer as the accelerator makes them; it would keep them for as long as it lives."""
    optimizer = torch.optim.Adam(
        [p for p in stitches.layers.parameters() if p.requires_grad], lr=course.lr, weight_decay=course.weight_decay
    )
    lists = accelerator._models, accelerator._optimizers
    lengths = [len(held) for held in lists]
    try:
        model, optimizer = accelerator.prepare(stitches, optimizer)
        yield model.train(), optimizer
    finally:
        for held, length in zip(lists, lengths, strict=True):
            del held[length:]


def _gradients(
    model: Any,
    seen: Sequence[Seen],
    parts: Sequence[tuple[Tensor, int]],
    features: bool,
    accelerator: Accelerator,
    processes: Processes,
) -> Tensor:
    """Add up the gradients of a step over its parts and all processes; gives back the loss of each stitch."""
    samples = sum(count for _, count in parts)
    total = float(samples) if features else _asked_of_all(seen, parts, accelerator)
    found = torch.zeros((), device=accelerator.device)
    for number, (one, (places, _)) in enumerate(zip(seen, parts, strict=True)):
        with nullcontext() if number == len(parts) - 1 else accelerator.no_sync(model):
            share = len(places) * processes.count / samples
            losses = model(one, total / processes.count, share, features) * float(bool(len(places)))
            found = found + losses.detach().float()
            accelerator.backward(losses.sum() * accelerator.gradient_accumulation_steps)  # which divides by it
    return accelerator.reduce(found, reduction="mean")


def _read(prepared: Prepared, places: Tensor, seed: int, accelerator: Accelerator) -> Seen:
    """What is known of some samples; of one that does not count, where there are none."""
    return prepared.read(places if len(places) else torch.zeros(1, dtype=torch.long), seed).to(accelerator.device)


def _asked_of_all(seen: Sequence[Seen], parts: Sequence[tuple[Tensor, int]], accelerator: Accelerator) -> float:
    """How many predictions a step asks for, over its parts and all processes."""
    if _is_of_samples(seen[0]):
        return float(sum(count for _, count in parts))
    own = [one for one, (places, _) in zip(seen, parts, strict=True) if len(places)]
    tokens = sum(((one.answers["hard"] != IGNORED).sum() for one in own), torch.zeros((), device=accelerator.device))
    return max(accelerator.reduce(tokens, reduction="sum").item(), 1)


class _Run:
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


@torch.no_grad()
def _validate(
    stitches: Stitches, prepared: Prepared, course: Course, accelerator: Accelerator, processes: Processes
) -> tuple[Tensor, Tensor]:
    """Loss and share of right answers of each stitch on held-out samples, which the processes share."""
    sums = torch.zeros(3, len(stitches.names), dtype=torch.float64, device=accelerator.device)
    stitches.eval()
    batches = torch.arange(len(prepared.samples)).split(course.batch_size)
    for places in batches[processes.rank :: processes.count]:
        seen = _read(prepared, places, 0, accelerator)
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


def _diverged(
    names: Sequence[str], losses: Tensor, step: int, checkpoint: Checkpoint | None, lr: float, figure: str
) -> str:
    name = names[int((~losses.isfinite()).nonzero()[0])]
    kept = "nothing was saved" if checkpoint is None else f"the last state saved is in {checkpoint.folder}"
    return (
        f"the {figure} of stitch {name!r} is {losses[names.index(name)].item()} at step {step}; {kept}. Lower lr (now "
        f"{lr}), set clip, or look for inputs that are not finite"
    )


def _log(
    accelerator: Accelerator,
    names: Sequence[str],
    values: Tensor,
    step: int,
    figure: str,
    active: Tensor,
    **more: float,
) -> None:
    """Tell the trackers a figure of each stitch that is still trained."""
    if accelerator.trackers:
        of_each = zip(names, values.tolist(), active.tolist(), strict=True)
        figures = {figure if len(names) == 1 else f"{figure}/{name}": value for name, value, on in of_each if on}
        accelerator.log({**figures, **more}, step=step)


def _joined(representations: Sequence[Representation]) -> Representation:
    """Several batches as one."""
    masks = [one.mask for one in representations]
    mask = torch.cat([m for m in masks if m is not None]) if masks[0] is not None else None
    return representations[0].replace(values=torch.cat([one.values for one in representations]), mask=mask)


def _distance(values: Tensor, features: Representation, total: float) -> Tensor:
    """The squared distance for each number, its mean over each sample's real positions, summed over the samples."""
    wide = _at_least_float32(values.dtype)
    each = functional.mse_loss(values.to(wide), features.values.to(wide), reduction="none")
    if features.mask is None:
        return each.flatten(1).mean(1).sum() / total
    of_positions = each.mean(-1) * features.mask
    return (of_positions.sum(1) / features.mask.sum(1).clamp(min=1)).sum() / total


def _first(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
