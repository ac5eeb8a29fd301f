"""Conformance of tasks."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any
from unittest import SkipTest

import numpy as np
import torch

from hf_stitch.adapters import Adapter, load
from hf_stitch.artefacts import StitchedModel
from hf_stitch.artefacts.joining import join
from hf_stitch.data import PairedSamples, Samples
from hf_stitch.registry import registries
from hf_stitch.running import Run
from hf_stitch.stitches import IdentityStitch, StitchingLayer
from hf_stitch.tasks.base import IGNORED, Answers, Array, Task
from hf_stitch.tasks.heads import logits_of, task_of
from hf_stitch.tasks.vectors import tensor_of
from hf_stitch.testing._require import require
from hf_stitch.testing.conformance import conformance

SAMPLES = 12


@conformance
def check_task(task: Task, network: Any, data: Any) -> Iterator[tuple[str, Callable[[], None]]]:
    """Check that a task does what its class promises, on a network with a head of this task.

    The parts:

    - ``declared``: it is registered, and its figures, measures and classes of stitched models are complete.
    - ``head``: it takes the output of the network, and its stitched model has the class that it names.
    - ``itself``: the outputs of the target have the figures of the target, and the headline is better than that of
      chance, or undefined.
    - ``batches``: the measures of a sample do not depend on the other samples of its batch.
    - ``resamples``: figures with weights are those of samples that are repeated so often.
    - ``several``: figures of several predictors at once are those of each alone.
    - ``loss``: the loss is a number with a gradient, and a mean: twice the same samples leave it as it is.
    - ``imitation``: the loss with its own outputs as labels has no gradient.
    - ``saved``: a stitched model that is saved and loaded has the task, and the outputs, bit for bit.

    Args:
        task: The task.
        network: The network, in a form that :func:`hf_stitch.load` accepts.
        data: Raw samples that it takes, with labels if the task reads some; at least 12.

    Raises:
        AssertionError: It does not conform; the message contains what was expected and what came.

    Example:
        >>> from torch.nn import Flatten, Linear, ReLU, Sequential
        >>> net = Sequential(Flatten(), Linear(12, 8), ReLU(), Linear(8, 3))
        >>> images = torch.randn(20, 3, 2, 2)
        >>> network = load(net, example_inputs=images[:2])
        >>> data = Samples.of(images, label=[place % 3 for place in range(20)])
        >>> check_task(registries.tasks.build("image-classification"), network, data)
    """

    @cache
    def case() -> _Case:
        return _Case(task, load(network), Samples.of(data))

    yield "declared", lambda: _check_declared(task)
    yield "head", lambda: _check_head(case())
    yield "itself", lambda: _check_itself(case())
    yield "batches", lambda: _check_batches(case())
    yield "resamples", lambda: _check_resamples(case())
    yield "several", lambda: _check_several(case())
    yield "loss", lambda: _check_loss(case())
    yield "imitation", lambda: _check_imitation(case())
    yield "saved", lambda: _check_saved(case())


class _Case:
    """A network stitched to itself, and what the task measures of it and of a network with other outputs."""

    def __init__(self, task: Task, network: Adapter, data: Samples) -> None:
        self.task, self.network = task.about(network), network
        samples = data.take(min(SAMPLES, len(data)))
        self.samples = task.numbered(samples, getattr(network.model, "config", None))
        layer, name = network.layers[0], None if task.name == "feature-extraction" else task.name
        spec = network.spec(layer)
        identity = StitchingLayer(spec, spec, "none", IdentityStitch(spec.width, spec.width))
        self.model = join(network, layer, identity, network, layer, task=name)
        self.measured = self.measures(len(self.samples))

    @torch.no_grad()
    def measures(self, batch_size: int) -> dict[str, Answers]:
        """Measure the target and a stitched network whose outputs are those of other samples."""
        parts: dict[str, list[Answers]] = {}
        for _, batch, _ in PairedSamples.of(self.samples).batches(Run(batch_size, progress=False), "checking"):
            inputs, sizes = self.task.sized_inputs(self.network, batch)
            output = self.network.forward(inputs)
            found = self.task.measure({"target": output, "stitched": _other(output)}, (batch, inputs), (batch, inputs))
            for who, row in found.items():
                parts.setdefault(who, []).append({**row, **sizes})
        return self.task.joined(parts, self.samples)

    def logits(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the outputs of all samples and the labels that training asks for, if the task has some."""
        if self.model.task is None:
            raise SkipTest("a model without a head is not trained on its task")
        (batch,) = self.samples.batches(len(self.samples))
        labels = self.task.labels(batch)
        if labels is None and not self.task.unused:
            raise SkipTest("the samples have no labels")
        with torch.no_grad():
            logits = logits_of(self.network.forward(self.task.inputs(self.network, batch.samples))).float()
        return logits, self.task.asked(self.model, batch.samples, labels)


def _other(output: Any) -> Any:
    """Return an output with other numbers, of each sample by itself."""
    if isinstance(output, torch.Tensor):
        return (9 * output).sin() if output.is_floating_point() else output
    return {name: _other(value) for name, value in output.items()}


def _check_declared(task: Task) -> None:
    require(registries.tasks.get(task.name) is type(task), f"the registry has another class for {task.name!r}")
    missing = [name for name in task.compared if name not in task.figures]
    require(not missing, f"compared figures must be among figures, but {', '.join(missing)} are not")
    require("" in task.models, "models must name a class for all modalities ('')")
    for modality in task.models:
        kind = task.model_for(modality)
        require(issubclass(kind, StitchedModel), f"the model of {modality!r} must be a StitchedModel, got {kind}")


def _check_head(case: _Case) -> None:
    name = case.task.name if case.model.task else None
    found = task_of(case.network, name)
    require(found == name, f"the network must have the task {name}, got {found}")
    expected = case.task.model_for(case.network.interface.modality)
    require(type(case.model) is expected, f"the stitched model must be a {expected.__name__}, got {type(case.model)}")


def _drawn(task: Task, measured: Mapping[str, Answers]) -> dict[str, dict[str, Array]]:
    return task.drawn(measured, resamples=3, seed=0)


def _check_itself(case: _Case) -> None:
    task, target = case.task, case.measured["target"]
    rows = {"target": target, "stitched": target}
    found = _drawn(task, {**rows, "chance": task.chance(rows, 0)})
    require({*found["stitched"]} <= {*task.figures}, f"figures must be declared, got {', '.join(found['stitched'])}")
    for figure, values in found.get("target", {}).items():
        require(np.array_equal(values, found["stitched"][figure], equal_nan=True), f"{figure} of the target differs")
    headline = next(iter(found["stitched"]))
    own, chance = (found[who][headline][0] for who in ("stitched", "chance"))
    better = own >= chance if task.figures[headline] else own <= chance
    require(bool(better or np.isnan(own - chance)), f"{headline} of the target is {own}, and of chance {chance}")


def _check_batches(case: _Case) -> None:
    for who, row in case.measures(1).items():
        for name, values in row.items():
            expected = np.asarray(case.measured[who][name])
            close = np.allclose(np.asarray(values), expected, rtol=1e-4, atol=1e-4, equal_nan=True)
            require(close, f"{name} of {who} depends on the other samples of a batch")


def _check_resamples(case: _Case) -> None:
    task = case.task
    if "agreement" not in task.figures:
        raise SkipTest("the figures are no functions of weighted measures")
    count = len(case.samples)
    weights = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count)).astype(float)
    again = np.repeat(np.arange(count), weights.astype(int))
    rows = (case.measured[who] for who in ("stitched", "target"))
    own, target = ({name: np.asarray(values)[:, None] for name, values in row.items()} for row in rows)
    found = task.figures_of(own, target, weights[None])
    own, target = ({name: values[again] for name, values in row.items()} for row in (own, target))
    for figure, values in task.figures_of(own, target, np.ones((1, count))).items():
        close = np.allclose(found[figure], values, rtol=1e-9, atol=1e-12, equal_nan=True)
        require(close, f"{figure} with weights is {found[figure]}, and of the repeated samples {values}")


def _check_several(case: _Case) -> None:
    task = case.task
    if "agreement" not in task.figures:
        raise SkipTest("the figures are no functions of weighted measures")
    rows = [case.measured[who] for who in ("stitched", "target")]
    both = {name: np.stack([row[name] for row in rows], 1) for name in rows[0] if name in rows[1]}
    together = _drawn(task, {"target": rows[1], "both": both})["both"]
    for place, row in enumerate(rows):
        for figure, values in _drawn(task, {"target": rows[1], "one": row})["one"].items():
            close = np.allclose(together[figure][:, place], values, rtol=1e-9, atol=1e-12, equal_nan=True)
            require(close, f"{figure} of several predictors differs from that of one")


def _check_loss(case: _Case) -> None:
    logits, labels = case.logits()
    logits.requires_grad_()
    loss = case.task.loss(logits, labels)
    require(loss.dim() == 0 and bool(loss.isfinite()), f"the loss must be one finite number, got {loss}")
    loss.backward()
    require(logits.grad is not None and bool(logits.grad.any()), "the loss has no gradient")
    twice = case.task.loss(torch.cat([logits, logits]), torch.cat([labels, labels]))
    require(torch.allclose(twice, loss, rtol=1e-4), f"the loss of twice the same samples is {twice}, not {loss}")
    count = (labels != IGNORED).sum() if case.task.per_token else len(labels)
    mean = case.task.summed_loss(logits, labels) / count
    require(torch.allclose(mean, loss, rtol=1e-4), f"the summed loss, divided by {count}, is {mean}, not {loss}")


def _check_imitation(case: _Case) -> None:
    wanted, _ = case.logits()
    logits = wanted.clone().requires_grad_()
    loss = case.task.imitation_loss(logits, wanted, 1.0)
    axes: Sequence[int] = logits.shape[: 2 if case.task.per_token else 1]
    require(loss.shape == torch.Size(axes), f"the loss must have the shape {tuple(axes)}, got {tuple(loss.shape)}")
    loss.sum().backward()
    require(logits.grad is not None and float(logits.grad.abs().max()) < 1e-5, "its own outputs have a gradient")


def _check_saved(case: _Case) -> None:
    (batch,) = case.samples.batches(len(case.samples))
    inputs = case.model.preprocess(batch.samples)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        try:
            case.model.save_pretrained(folder)
        except ValueError as error:  # user code: its stitcher is saved
            raise SkipTest(str(error)) from error
        again = StitchedModel.from_pretrained(folder)
        require(again.task == case.model.task, f"the loaded model has the task {again.task}")
        before, after = (tensor_of(model(**inputs), len(case.samples)) for model in (case.model, again))
        require(before is not None and after is not None and torch.equal(before, after), "it has other outputs")
