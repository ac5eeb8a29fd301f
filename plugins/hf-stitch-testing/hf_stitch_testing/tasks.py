"""Conformance check for tasks."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import cached_property
from typing import Any
from unittest import SkipTest

import numpy as np
import torch

from hf_stitch.adapters import Adapter, load
from hf_stitch.artefacts import StitchedModel
from hf_stitch.artefacts.joining import joined_to_itself
from hf_stitch.data import PairedSamples, Samples
from hf_stitch.registry import registries
from hf_stitch.running import Run
from hf_stitch.tasks.base import IGNORED, Answers, Array, Task, logits_of
from hf_stitch.tasks.heads import task_of
from hf_stitch.tasks.vectors import tensor_of
from hf_stitch_testing.kit import Kit, require, require_registered, skip_unless
from hf_stitch_testing.parts import conformance

SAMPLES = 12


@conformance
def check_task(task: Task, network: Any, data: Any) -> _TaskKit:
    """Check that a task satisfies the laws of :class:`~hf_stitch.tasks.base.Task`; parts are named after laws.

    The parts run on a network with a head of this task. Further parts:

    - ``declared``: the task is registered, and its figures, measures and classes of stitched models are complete.
    - ``head``: the task accepts the output of the network, and its stitched model has the declared class.

    Args:
        task: The task.
        network: The network, in a form that :func:`hf_stitch.load` accepts.
        data: At least 12 raw samples for the network, with labels if the task uses them.

    Example:
        >>> from torch.nn import Flatten, Linear, ReLU, Sequential
        >>> net = Sequential(Flatten(), Linear(12, 8), ReLU(), Linear(8, 3))
        >>> images = torch.randn(20, 3, 2, 2)
        >>> network = load(net, example_inputs=images[:2])
        >>> data = Samples.of(images, label=[place % 3 for place in range(20)])
        >>> check_task(registries.tasks.build("image-classification"), network, data)
    """
    return _TaskKit(task, network, data)


class _TaskKit(Kit):
    """Measures of a task on a network stitched to itself, and on a network with different outputs."""

    def __init__(self, task: Task, network: Any, data: Any) -> None:
        self._general_task, self._network, self._data = task, network, data

    @cached_property
    def network(self) -> Adapter:
        return load(self._network)

    @cached_property
    def task(self) -> Task:
        return self._general_task.about(self.network)

    @cached_property
    def samples(self) -> Samples:
        data = Samples.of(self._data)
        return self.task.numbered(data.take(min(SAMPLES, len(data))), getattr(self.network.model, "config", None))

    @cached_property
    def model(self) -> StitchedModel:
        name = None if self.task.name == "feature-extraction" else self.task.name
        return joined_to_itself(self.network, self.network.layers[0], name)

    @cached_property
    def answers(self) -> dict[str, Answers]:
        return self._measure(len(self.samples))

    @torch.no_grad()
    def _measure(self, batch_size: int) -> dict[str, Answers]:
        """Measure the target and a stitched network with changed outputs."""
        answers_by_network: dict[str, list[Answers]] = {}
        for _, batch, _ in PairedSamples.of(self.samples).batches(Run(batch_size, progress=False), "checking"):
            inputs, sizes = self.task.sized_inputs(self.network, batch)
            output = self.network.forward(inputs)
            outputs = {"target": output, "stitched": _perturb(output)}
            for network_name, answers in self.task.measure(outputs, (batch, inputs), (batch, inputs)).items():
                answers_by_network.setdefault(network_name, []).append({**answers, **sizes})
        return self.task.joined(answers_by_network, self.samples)

    def _logits(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the outputs of all samples and the labels for training."""
        skip_unless(self.model.task is not None, "a model without a head is not trained on a task")
        (batch,) = self.samples.batches(len(self.samples))
        labels = self.task.labels(batch)
        skip_unless(labels is not None or bool(self.task.unused), "the samples do not have labels")
        with torch.no_grad():
            logits = logits_of(self.network.forward(self.task.inputs(self.network, batch.samples))).float()
        return logits, self.task.asked(self.model, batch.samples, labels)

    def _resampled_figures(self, **answers: Answers) -> dict[str, dict[str, Array]]:
        return self.task.drawn(answers, resamples=3, seed=0)

    def _sides(self) -> list[Answers]:
        """Return the measures of the stitched network and the target, if they determine the figures."""
        skip_unless("agreement" in self.task.figures, "the figures are not functions of weighted measures")
        return [self.answers[network_name] for network_name in ("stitched", "target")]

    def declared(self) -> None:
        task = self._general_task
        require_registered(registries.tasks, task)
        missing = [name for name in task.compared if name not in task.figures]
        require(not missing, f"compared must be a subset of figures, got {', '.join(missing)} in addition")
        require("" in task.models, "models must have a class for all modalities ('')")
        for modality in task.models:
            kind = task.model_for(modality)
            require(issubclass(kind, StitchedModel), f"the model of {modality!r} must be a StitchedModel, got {kind}")

    def head(self) -> None:
        name = self.task.name if self.model.task else None
        detected, kind = task_of(self.network, name), type(self.model)
        require(detected == name, f"the network must have the task {name}, got {detected}")
        expected = self.task.model_for(self.network.interface.modality)
        require(kind is expected, f"the stitched model must be a {expected.__name__}, got {kind}")

    def itself(self) -> None:
        task, target = self.task, self.answers["target"]
        chance_row = task.chance({"target": target, "stitched": target}, 0)
        figures = self._resampled_figures(target=target, stitched=target, chance=chance_row)
        names = ", ".join(figures["stitched"])
        require({*figures["stitched"]} <= {*task.figures}, f"figures must be declared, got {names}")
        for figure, values in figures.get("target", {}).items():
            equal = np.array_equal(values, figures["stitched"][figure], equal_nan=True)
            require(equal, f"{figure} of equal networks must be equal")
        headline = next(iter(figures["stitched"]))
        score, chance = (figures[network_name][headline][0] for network_name in ("stitched", "chance"))
        is_better = score >= chance if task.figures[headline] else score <= chance
        message = f"{headline} of the target must not be worse than chance ({chance}), got {score}"
        require(bool(is_better or np.isnan(score - chance)), message)

    def batches(self) -> None:
        for network_name, row in self._measure(1).items():
            for name, values in row.items():
                label = f"{name} of {network_name} for a single sample and in a batch"
                _require_close(np.asarray(values), np.asarray(self.answers[network_name][name]), label, 1e-4, 1e-4)

    def resamples(self) -> None:
        rows, count = self._sides(), len(self.samples)
        weights = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count)).astype(float)
        repeated = np.repeat(np.arange(count), weights.astype(int))
        stitched, target = ({name: np.asarray(values)[:, None] for name, values in row.items()} for row in rows)
        weighted = self.task.figures_of(stitched, target, weights[None])
        stitched, target = ({name: values[repeated] for name, values in row.items()} for row in (stitched, target))
        for figure, values in self.task.figures_of(stitched, target, np.ones((1, count))).items():
            _require_close(weighted[figure], values, f"{figure} of weighted and of repeated samples")

    def several(self) -> None:
        rows = self._sides()
        stacked = {name: np.stack([row[name] for row in rows], 1) for name in rows[0] if name in rows[1]}
        together = self._resampled_figures(target=rows[1], both=stacked)["both"]
        for index, row in enumerate(rows):
            for figure, values in self._resampled_figures(target=rows[1], one=row)["one"].items():
                _require_close(
                    together[figure][:, index], values, f"{figure} of a predictor, alone and with a second one,"
                )

    def loss(self) -> None:
        logits, labels = self._logits()
        logits.requires_grad_()
        loss = self.task.loss(logits, labels)
        require(loss.dim() == 0 and bool(loss.isfinite()), f"the loss must be a finite scalar, got {loss}")
        loss.backward()
        require(logits.grad is not None and bool(logits.grad.any()), "the loss must have a gradient")
        repeated_loss = self.task.loss(torch.cat([logits, logits]), torch.cat([labels, labels]))
        equal = torch.allclose(repeated_loss, loss, rtol=1e-4)
        require(equal, f"the loss of repeated samples must be {loss}, got {repeated_loss}")
        count = (labels != IGNORED).sum() if self.task.per_token else len(labels)
        mean = self.task.summed_loss(logits, labels) / count
        require(torch.allclose(mean, loss, rtol=1e-4), f"summed_loss divided by {count} must be {loss}, got {mean}")

    def imitation(self) -> None:
        target, _ = self._logits()
        logits = target.clone().requires_grad_()
        loss = self.task.imitation_loss(logits, target, 1.0)
        axes: Sequence[int] = logits.shape[: 2 if self.task.per_token else 1]
        require(loss.shape == torch.Size(axes), f"the loss must have the shape {tuple(axes)}, got {tuple(loss.shape)}")
        loss.sum().backward()
        stationary = logits.grad is not None and float(logits.grad.abs().max()) < 1e-5
        require(stationary, "imitation_loss of equal outputs must have a zero gradient")

    def saved(self) -> None:
        (batch,) = self.samples.batches(len(self.samples))
        inputs = self.model.preprocess(batch.samples)
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            try:
                self.model.save_pretrained(folder)
            except ValueError as error:  # user code: its stitcher is saved
                raise SkipTest(str(error)) from error
            loaded = StitchedModel.from_pretrained(folder)
            require(loaded.task == self.model.task, f"the loaded model must have the task {self.model.task}")
            outputs, loaded_outputs = (tensor_of(model(**inputs), len(self.samples)) for model in (self.model, loaded))
            is_equal = outputs is not None and loaded_outputs is not None and torch.equal(outputs, loaded_outputs)
            require(is_equal, "the loaded model must have equal outputs")


def _require_close(values: Array, expected: Array, label: str, rtol: float = 1e-9, atol: float = 1e-12) -> None:
    close = bool(np.allclose(values, expected, rtol=rtol, atol=atol, equal_nan=True))
    require(close, f"{label} must be equal, got {values} and {expected}")


def _perturb(output: Any) -> Any:
    """Return an output with different numbers, computed for each sample separately."""
    if isinstance(output, torch.Tensor):
        return (9 * output).sin() if output.is_floating_point() else output
    return {name: _perturb(value) for name, value in output.items()}
