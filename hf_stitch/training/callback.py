"""What every callback here does alike: when it looks, how it leaves everything as it was, where figures go."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from torch import nn
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from hf_stitch.adapters import Adapter, load, unwrap
from hf_stitch.processes import Processes
from hf_stitch.training.probe import check_whole, unnoticed

if TYPE_CHECKING:
    import pandas
    from accelerate import Accelerator
    from transformers import Trainer

logger = logging.getLogger(__name__)

Every = Literal["epoch", "eval"] | int


@dataclass(frozen=True)
class Measurement:
    """What a callback saw once.

    Attributes:
        step: Optimizer steps that had been taken.
        epoch: Epochs that had passed, where known.
        figures: By name, as loggers are given them.
    """

    step: int
    epoch: float | None
    figures: Mapping[str, float]


class ProbingCallback(TrainerCallback, ABC):
    """Looks at a network while it learns, always at the same samples of its own, and leaves it as it was.

    In a ``transformers.Trainer`` it looks before the first step and then as often as ``every`` says. Figures go to
    every logger by ``trainer.log`` and stay in ``trainer.state.log_history``; at evaluation those of that step are
    added to the metrics with ``eval_`` before the name, so that ``metric_for_best_model`` may name them. (An
    ``EarlyStoppingCallback`` on one of them must be added after this one is attached.)

    Attributes:
        name: The first part of every figure's name.
        every: ``"epoch"``, ``"eval"`` (at every evaluation) or a number of steps.
        history: What it saw, in order; a run that resumes takes it up from ``state.log_history``.

    Raises:
        ValueError: If the name is empty or holds a slash, or ``every`` is none of the three.
    """

    def __init__(self, name: str, every: Every) -> None:
        if not name or "/" in name:
            raise ValueError(f"name must be a text without slashes, got {name!r}")
        steps = isinstance(every, int) and not isinstance(every, bool) and every >= 1
        if not steps and every not in ("epoch", "eval"):
            raise ValueError(f"every must be 'epoch', 'eval' or a number of steps, at least 1, got {every!r}")
        self.name, self.every = name, every
        self.history: list[Measurement] = []
        self._trainer: Trainer | None = None
        self._adapter: Adapter | None = None
        self._seen: Any = None

    # -- what a kind of callback provides ---------------------------------------------------------------------------
    @abstractmethod
    def _prepare(self, adapter: Adapter, processes: Processes) -> None:
        """Check everything, and compute what stays the same during training."""

    @abstractmethod
    def _figures(self, adapter: Adapter, step: int, epoch: float | None, processes: Processes) -> dict[str, float]:
        """Look at the network as it is now; figures by name, without the name of the callback."""

    def _begin(self) -> None:
        """Forget what belongs to an earlier training."""

    def _save(self, folder: Path) -> None:
        """Write into a checkpoint what is needed to go on from there; of several processes, the first one does."""

    def _resume(self, folder: Path, step: int) -> None:
        """Go on from the checkpoint of a step."""

    # -- in a loop of one's own -------------------------------------------------------------------------------------
    def measure(
        self,
        model: nn.Module | Adapter,
        *,
        step: int,
        epoch: float | None = None,
        accelerator: Accelerator | None = None,
    ) -> dict[str, float]:
        """Look at the network as it is now; every process must call it.

        Args:
            model: The network in training, wrapped or not, or its adapter (for classes of user code, made once by
                ``hf_stitch.load(model, example_inputs=…)``); the same one each time.
            step: Optimizer steps that have been taken.
            epoch: Epochs that have passed, if that is of interest.
            accelerator: The one that trains, where there are several processes.

        Returns:
            The figures by name, ready for ``accelerator.log``.

        Raises:
            ValueError: If the network is another than before, its weights are sharded, or, the first time, what cannot
                be measured. Later on, a figure that is undefined (a dead layer) is NaN and a warning says why.
        """
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ValueError(f"step must be a number of optimizer steps, at least 0, got {step!r}")
        processes = Processes.of(accelerator)
        module = model.model if isinstance(model, Adapter) else unwrap(model)
        if self._adapter is None:
            self._watch(model, processes)
        elif self._adapter.model is not module:
            raise ValueError(f"{self.name} has been watching another network: use another {type(self).__name__}")
        return self._measure(step, epoch, processes)

    def to_pandas(self) -> pandas.DataFrame:
        """A row for each measurement and figure: ``step``, ``epoch``, ``figure``, ``value``."""
        import pandas

        return pandas.DataFrame(
            [
                {"step": seen.step, "epoch": seen.epoch, "figure": figure, "value": value}
                for seen in self.history
                for figure, value in seen.figures.items()
            ],
            columns=["step", "epoch", "figure", "value"],
        )

    # -- in a Trainer -----------------------------------------------------------------------------------------------
    def attach(self, trainer: Trainer, adapter: Adapter | None = None) -> Self:
        """Add this callback to a trainer, and give it what callbacks are not given: the trainer.

        Args:
            trainer: Of any model that also runs without labels.
            adapter: Of the trainer's model, for classes of user code (``hf_stitch.load(model, example_inputs=…)``) or
                where another processor than ``trainer.processing_class`` turns samples into inputs.

        Returns:
            This callback.

        Raises:
            ValueError: If it is attached already, or another of the same name is; if the trainer never evaluates and
                ``every="eval"``; if weights are sharded, the adapter is of another model, or the probe, the layers or
                the reference do not go with the model.
        """
        if self._trainer is not None:
            raise ValueError(f"{self.name} is attached already; a trainer of its own takes a callback of its own")
        taken = [c.name for c in trainer.callback_handler.callbacks if isinstance(c, ProbingCallback)]
        if self.name in taken:
            raise ValueError(f"the trainer has a callback named {self.name!r}; give this one another name=")
        if self.every == "eval" and trainer.args.eval_strategy == "no":
            raise ValueError("every='eval', and this trainer never evaluates: its eval_strategy is 'no'")
        if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
            raise ValueError("FSDP and DeepSpeed shard the weights, and to be watched a network must be whole: use DDP")
        if adapter is not None and adapter.model is not unwrap(_network(trainer)):
            raise ValueError("the adapter is of another model than the trainer's: make it of trainer.model")
        self._trainer = trainer
        try:
            self._watch(_network(trainer) if adapter is None else adapter, Processes(trainer.accelerator))
        except BaseException:
            self._trainer = self._adapter = None
            raise
        trainer.add_callback(self)
        return self

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Refuse to be passed to the constructor, where no trainer comes along."""
        raise ValueError(
            f"{type(self).__name__} needs the trainer, which callbacks are not given: leave it out of callbacks=[…] "
            "and call callback.attach(trainer)"
        )

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Look before the first step, or go on from a checkpoint."""
        trainer = self._attached
        assert self._adapter is not None
        if self._adapter.model is not unwrap(_network(trainer)):  # model_init made a new one
            self._watch(_network(trainer), Processes(trainer.accelerator))
        self.history, self._seen = [], None
        self._begin()
        if state.global_step == 0:
            self._measure_and_log()
            return
        self._resume(Path(args.resume_from_checkpoint or _folder(args, state)), state.global_step)
        for entry in state.log_history:
            figures = {key: value for key, value in entry.items() if key.startswith(f"{self.name}/")}
            if figures:
                self.history.append(Measurement(int(entry["step"]), entry.get("epoch"), figures))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Look, where steps are counted."""
        if isinstance(self.every, int) and state.global_step % self.every == 0:
            self._measure_and_log()

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Look, where epochs are counted."""
        if self.every == "epoch":
            self._measure_and_log()

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Look, where evaluations are counted; add the figures of this very network to the metrics."""
        if self.every == "eval" and self._seen != self._now:
            self._measure_and_log()
        if metrics is not None and self._seen == self._now:
            metrics.update({f"eval_{name}": value for name, value in self.history[-1].figures.items()})

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Add to the checkpoint what is needed to go on from it."""
        if state.is_world_process_zero:
            self._save(_folder(args, state))

    # -- inside -----------------------------------------------------------------------------------------------------
    @property
    def _attached(self) -> Trainer:
        if self._trainer is None:
            raise ValueError(f"{type(self).__name__} needs the trainer: call callback.attach(trainer)")
        return self._trainer

    @property
    def _now(self) -> tuple[Any, ...]:
        """What changes whenever a weight does, or a step is taken."""
        assert self._adapter is not None
        tensors = [*self._adapter.model.parameters(), *self._adapter.model.buffers()]
        return (self._attached.state.global_step, *((t.data_ptr(), t._version) for t in tensors))

    def _watch(self, model: nn.Module | Adapter, processes: Processes) -> None:
        """Make ready to look at a network, which is looked at for the first time."""
        module = model.model if isinstance(model, Adapter) else unwrap(model)
        check_whole(module)
        processor = None if self._trainer is None else self._trainer.processing_class
        with unnoticed(module, processes):
            adapter = model if isinstance(model, Adapter) else load(module, processor=processor)
            self._prepare(adapter, processes)
        self._adapter = adapter

    def _measure(self, step: int, epoch: float | None, processes: Processes) -> dict[str, float]:
        assert self._adapter is not None
        with unnoticed(self._adapter.model, processes):
            found = self._figures(self._adapter, step, epoch, processes)
        figures = {f"{self.name}/{figure}": value for figure, value in found.items()}
        self.history.append(Measurement(step, epoch, figures))
        return figures

    def _measure_and_log(self) -> None:
        trainer = self._attached
        figures = self._measure(trainer.state.global_step, trainer.state.epoch, Processes(trainer.accelerator))
        self._seen = self._now
        if figures:
            due = trainer.control.should_log
            trainer.log(dict(figures))
            trainer.control.should_log = due  # logging takes it back, and the loss of this step would go unlogged

    def _undefined(self, what: str, error: Exception) -> float:
        """NaN for a figure that cannot be computed now, if it could be before.

        Raises:
            ValueError: The first time: nothing is lost yet.
        """
        if not self.history:
            raise ValueError(f"{what}: {error}") from error
        logger.warning("%s: %s is undefined at this step and becomes NaN: %s", self.name, what, error)
        return math.nan


def _network(trainer: Trainer) -> nn.Module:
    assert trainer.model is not None
    return trainer.model


def _folder(args: TrainingArguments, state: TrainerState) -> Path:
    """The checkpoint of this step."""
    return Path(str(args.output_dir), f"checkpoint-{state.global_step}")
