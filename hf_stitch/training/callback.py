"""Base class of callbacks that measure a network without affecting training."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from torch import nn
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from hf_stitch.adapters import Adapter, load, unwrap
from hf_stitch.options import Count, Natural, checked
from hf_stitch.running import Processes
from hf_stitch.training.history import History, Measurement
from hf_stitch.training.probe import check_whole, unnoticed

if TYPE_CHECKING:
    import pandas
    from accelerate import Accelerator
    from matplotlib.figure import Figure
    from transformers import Trainer

logger = logging.getLogger(__name__)
Every = Literal["epoch", "eval"] | Count


class ProbingCallback(TrainerCallback, ABC):
    """Base class of callbacks that measure a network during training on a fixed set of samples.

    Measuring does not affect training. In a ``transformers.Trainer`` the callback measures before the first step and
    then at the interval ``every``. ``trainer.log`` passes the values to all loggers and to
    ``trainer.state.log_history``. At evaluation, the values of the same step are added to the metrics with the prefix
    ``eval_``, so that ``metric_for_best_model`` can refer to them. (Add an ``EarlyStoppingCallback`` on such a value
    after attaching this callback.)

    Args:
        name: First part of the name of every value.
        every: When to measure: ``"epoch"``, ``"eval"`` (at every evaluation) or a number of optimizer steps.

    Attributes:
        history: All measurements in order; a resumed run restores them from ``state.log_history``.

    Example:
        >>> import torch, hf_stitch
        >>> from hf_stitch.training import SimilarityCallback
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> adapter = hf_stitch.load(net, example_inputs=torch.randn(2, 4))
        >>> callback = SimilarityCallback("start", probe=torch.randn(50, 4), layers=["0"])
        >>> isinstance(callback, ProbingCallback)
        True
        >>> _ = callback.measure(adapter, step=0)
        >>> callback.to_pandas()["figure"].tolist()
        ['similarity_to_start/linear_cka/0']
    """

    @checked
    def __init__(self, name: str, every: Every) -> None:
        if not name or "/" in name:
            raise ValueError(f"name must be a non-empty string without slashes, got {name!r}")
        self.name, self.every = name, every
        self.history: list[Measurement] = []
        self._trainer: Trainer | None = None
        self._network: nn.Module | None = None
        self._adapter: Adapter | None = None
        self._logged: Any = None  # step and weights (_now) at the last logged measurement

    # -- implemented by subclasses ----------------------------------------------------------------------------------
    @abstractmethod
    def _prepare(self, processes: Processes) -> None:
        """Validate the arguments against the network, and compute the constants of the training run."""

    @abstractmethod
    def _figures(self, step: int, epoch: float | None, processes: Processes) -> dict[str, float]:
        """Measure the network now; return values by name, without the name of the callback."""

    @property
    def _runs(self) -> bool:
        """Whether the callback runs the network (which requires an adapter) or only reads its weights."""
        return True

    def _begin(self) -> None:
        """Reset the state of an earlier training run."""

    def _save(self, folder: Path) -> None:
        """Write the state needed to resume to a checkpoint; called on rank 0 only."""

    def _resume(self, folder: Path, step: int) -> None:
        """Restore the state from the checkpoint of a step."""

    # -- in a custom training loop ----------------------------------------------------------------------------------
    @checked
    def measure(
        self,
        model: nn.Module | Adapter,
        *,
        step: Natural,
        epoch: float | None = None,
        accelerator: Accelerator | None = None,
    ) -> dict[str, float]:
        """Measure the network now; with several processes, every process must call this method.

        Args:
            model: The network in training, wrapped or not, or its adapter (for custom classes, loaded once with
                ``hf_stitch.load(model, example_inputs=…)``). Each call must pass the same network.
            step: Number of optimizer steps taken, at least 0.
            epoch: Number of epochs completed, if it should be recorded.
            accelerator: The accelerator used for training, if there are several processes.
        """
        processes = Processes.of(accelerator)
        module = model.model if isinstance(model, Adapter) else unwrap(model)
        if self._network is None:
            self._watch(model, processes)
        elif self._network is not module:
            raise ValueError(f"{self.name} already measures another network; make a new {type(self).__name__}")
        return self._measure(step, epoch, processes)

    def to_history(self) -> History:
        """Return all measurements so far as a result that can be saved, plotted and rendered as a page.

        Example:
            >>> import torch, hf_stitch
            >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
            >>> adapter = hf_stitch.load(net, example_inputs=torch.randn(2, 4))
            >>> callback = hf_stitch.training.SimilarityCallback("start", torch.randn(50, 4), layers=["0"])
            >>> _ = callback.measure(adapter, step=0)
            >>> list(callback.to_history().curves)
            ['similarity_to_start/linear_cka/0']
        """
        return History(self.name, tuple(self.history))

    def to_pandas(self) -> pandas.DataFrame:
        """Return all measurements as a data frame, as :meth:`History.to_pandas` does."""
        return self.to_history().to_pandas()

    def plot(self, figures: Iterable[str] | None = None) -> Figure:
        """Draw the measured values over the course of training, as :meth:`History.plot` does.

        Args:
            figures: Names of values, as in :meth:`to_pandas`. Default: all.
        """
        return self.to_history().plot(figures)

    # -- in a Trainer -----------------------------------------------------------------------------------------------
    def attach(self, trainer: Trainer, adapter: Adapter | None = None) -> Self:
        """Add this callback to a trainer and keep a reference to the trainer.

        Args:
            trainer: A trainer with a model that also runs without labels.
            adapter: Adapter of the trainer's model. Required for custom classes
                (``hf_stitch.load(model, example_inputs=…)``), and if a processor other than
                ``trainer.processing_class`` converts samples to inputs.
        """
        if self._trainer is not None:
            raise ValueError(f"{self.name} is already attached; make a new {type(self).__name__} for each trainer")
        callback_names = [c.name for c in trainer.callback_handler.callbacks if isinstance(c, ProbingCallback)]
        if self.name in callback_names:
            raise ValueError(f"the trainer already has a callback named {self.name!r}; pass another name=")
        if self.every == "eval" and trainer.args.eval_strategy == "no":
            raise ValueError("every='eval' requires evaluation, but eval_strategy is 'no': set eval_strategy")
        if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
            raise ValueError("callbacks require unsharded weights, but FSDP and DeepSpeed shard them: use DDP")
        if adapter is not None and adapter.model is not unwrap(_network(trainer)):
            raise ValueError("the adapter does not belong to the model of the trainer: load it from trainer.model")
        self._trainer = trainer
        try:
            self._watch(_network(trainer) if adapter is None else adapter, Processes(trainer.accelerator))
        except BaseException:
            self._trainer = None
            raise
        trainer.add_callback(self)
        return self

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Raise an error if passed to the constructor of a trainer, which does not pass on the trainer."""
        raise ValueError(
            f"{type(self).__name__} requires a reference to the trainer: remove it from callbacks=[…] and call "
            "callback.attach(trainer)"
        )

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Measure before the first step, or resume from a checkpoint."""
        trainer = self._attached
        if self._network is not unwrap(_network(trainer)):  # model_init made a new one
            self._watch(_network(trainer), Processes(trainer.accelerator))
        self.history, self._logged = [], None
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
        """Measure if ``every`` is a number of steps that is due."""
        if isinstance(self.every, int) and state.global_step % self.every == 0:
            self._measure_and_log()

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Measure if ``every`` is ``"epoch"``."""
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
        """Measure if ``every`` is ``"eval"``, and add the values of the current weights to the metrics."""
        if self.every == "eval" and self._logged != self._now:
            self._measure_and_log()
        if metrics is not None and self._logged == self._now:
            metrics.update({f"eval_{name}": value for name, value in self.history[-1].figures.items()})

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Add the state needed to resume to the checkpoint."""
        if state.is_world_process_zero:
            self._save(_folder(args, state))

    # -- internals --------------------------------------------------------------------------------------------------
    @property
    def _attached(self) -> Trainer:
        if self._trainer is None:
            raise ValueError(f"{type(self).__name__} is not attached to a trainer: call callback.attach(trainer)")
        return self._trainer

    @property
    def _model(self) -> nn.Module:
        assert self._network is not None, "_watch has not been called"
        return self._network

    @property
    def _loaded(self) -> Adapter:
        assert self._adapter is not None, "_watch has not been called, or the callback does not run the network"
        return self._adapter

    @property
    def _now(self) -> tuple[Any, ...]:
        """Identifier of the current step and weights; it changes if a weight changes or a step is taken."""
        tensors = [*self._model.parameters(), *self._model.buffers()]
        return (self._attached.state.global_step, *((t.data_ptr(), t._version) for t in tensors))

    def _watch(self, model: nn.Module | Adapter, processes: Processes) -> None:  # before the first measurement
        module = model.model if isinstance(model, Adapter) else unwrap(model)
        check_whole(module)
        processor = None if self._trainer is None else self._trainer.processing_class
        previous = self._network, self._adapter
        self._network = module
        try:
            with processes.together(self.name), unnoticed(module, processes):
                if self._runs:
                    self._adapter = model if isinstance(model, Adapter) else load(module, processor=processor)
                self._prepare(processes)
        except BaseException:
            self._network, self._adapter = previous
            raise

    def _measure(self, step: int, epoch: float | None, processes: Processes) -> dict[str, float]:
        with processes.together(self.name), unnoticed(self._model, processes):
            values = self._figures(step, epoch, processes)
        figures = {f"{self.name}/{figure}": value for figure, value in values.items()}
        self.history.append(Measurement(step, epoch, figures))
        return figures

    def _measure_and_log(self) -> None:
        trainer = self._attached
        figures = self._measure(trainer.state.global_step, trainer.state.epoch, Processes(trainer.accelerator))
        self._logged = self._now
        if figures:
            due = trainer.control.should_log
            trainer.log(dict(figures))
            trainer.control.should_log = due  # trainer.log resets it, and the loss of this step would not be logged

    def _undefined(self, quantity: str, error: Exception) -> float:
        """Return NaN for a value that becomes undefined during training; raise an error at the first measurement."""
        if not self.history:
            raise ValueError(f"{quantity}: {error}") from error
        logger.warning("%s: %s is undefined at this step and becomes NaN: %s", self.name, quantity, error)
        return math.nan


def _network(trainer: Trainer) -> nn.Module:
    assert trainer.model is not None
    return trainer.model


def _folder(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(str(args.output_dir), f"checkpoint-{state.global_step}")
