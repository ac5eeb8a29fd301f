"""Similarity and performance of a stitching layer during training, step by step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch.nn import functional

from hf_stitch.adapters import Adapter
from hf_stitch.adapters.cutting.forwards import evaluating
from hf_stitch.artefacts.modeling import StitchedModel
from hf_stitch.data import Batch, Samples
from hf_stitch.metrics import ActivationMetric, Metric
from hf_stitch.metrics.base import activation_metric
from hf_stitch.options import Count, checked
from hf_stitch.representation import Representation
from hf_stitch.results import Result
from hf_stitch.scoring.halves import scored_target
from hf_stitch.stitches import StitchingLayer
from hf_stitch.stitches.layer import paired_rows
from hf_stitch.tasks.heads import task_named

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure
    from rich.table import Table

BatchOutputs = tuple[Representation, Representation, torch.Tensor, torch.Tensor | None]
"""Per batch: source activations at the source cut, target activations at the target cut, target logits, labels."""


@dataclass(frozen=True)
class Trajectory(Result):
    """Quantities recorded by :class:`TrajectoryRecorder` during the training of a stitching layer.

    Attributes:
        steps: Numbers of completed optimiser steps, ascending.
        figures: Name of a quantity -> one value per step: ``relative_accuracy``, ``cross_entropy`` (between stitched
            and target outputs, in nats), and the metrics between stitched and target activations.
        n: Number of probe samples.

    Example:
        >>> trajectory = Trajectory((0, 10), {"relative_accuracy": (0.2, 0.9)}, n=50)
        >>> trajectory["relative_accuracy"]
        (0.2, 0.9)
    """

    page: ClassVar[str] = "hf_stitch_studies.pages:of_trajectory"

    steps: tuple[int, ...]
    figures: Mapping[str, tuple[float, ...]]
    n: int

    def __getitem__(self, figure: str) -> tuple[float, ...]:
        """Return the values of a quantity, one per step."""
        return self.figures[figure]

    def __rich__(self) -> Table:
        """Return the table that ``rich`` prints, one row per step."""
        from rich.table import Table

        table = Table("step", *self.figures, title=f"during training, {self.n} samples")
        for index, step in enumerate(self.steps):
            table.add_row(str(step), *(f"{values[index]:.3f}" for values in self.figures.values()))
        return table

    def to_pandas(self) -> pandas.DataFrame:
        """Return the quantities as a data frame.

        Returns:
            One row per step, with a column ``step`` and a column for each quantity.
        """
        import pandas

        return pandas.DataFrame({"step": self.steps, **self.figures})

    def plot(self) -> Figure:
        """Plot one curve per quantity.

        Returns:
            The matplotlib figure.
        """
        from hf_stitch.plots import curves

        series = {
            name: {float(step): (value,) * 3 for step, value in zip(self.steps, values, strict=True)}
            for name, values in self.figures.items()
        }
        return curves(series, axis="step", label="", title=f"during training, {self.n} samples")


class TrajectoryRecorder:
    """Callback that records the performance of a stitching layer during training.

    Pass it as ``TaskLoss(…).fit(stitched, data, callback=recorder)``; it does not change the training. It computes the
    activations and logits of both networks on the probe samples once, when it is created.

    Args:
        stitched: The stitched model in training.
        probe: Raw samples for the recorded quantities.
        metrics: Metrics, or names of registered metrics, that compare stitched and target activations at the target
            cut, under the pooling of the stitching layer.
        every: Number of steps between two records; the first record is at step 0.
        target: The whole target network; ``None`` uses the network that the model was built from.
        stitch: Index of the stitching layer to record if several are trained at once.
        batch_size: Samples per forward.

    Raises:
        ValueError: If the task of the model is not classification, ``every`` is below 1, or a metric compares outputs.

    Example:
        >>> import hf_stitch
        >>> from hf_stitch.training import TaskLoss
        >>> from torch.nn import Linear, ReLU, Sequential
        >>> nets = [Sequential(Linear(4, 8), ReLU(), Linear(8, 2)) for _ in range(2)]
        >>> a, b = (hf_stitch.load(net, example_inputs=torch.randn(2, 4)) for net in nets)
        >>> data = torch.randn(200, 4)
        >>> stitched = hf_stitch.stitch(
        ...     a, b, data, source_layer="1", target_layer="1", task="image-classification", progress=False
        ... )
        >>> recorder = TrajectoryRecorder(stitched, data[:50], ["linear_cka"], every=2)
        >>> layer = TaskLoss(max_steps=4).fit(stitched, data, callback=recorder, progress=False)
        >>> recorder.trajectory.steps
        (0, 2, 4)
    """

    @checked
    @torch.no_grad()
    def __init__(
        self,
        stitched: StitchedModel,
        probe: Any,
        metrics: Iterable[str | Metric] = ("linear_cka",),
        *,
        every: Count = 10,
        target: Any = None,
        stitch: int = 0,
        batch_size: int = 256,
    ) -> None:
        if not task_named(stitched.task).classifies:
            raise ValueError(f"TrajectoryRecorder requires a classification head, got the task {stitched.task!r}")
        target_network = scored_target(stitched, target)
        self._model, self._metrics, self._every, self._stitch = stitched, _metrics_by_label(metrics), every, stitch
        cut = stitched.target.cut.layer
        samples = Samples.of(probe)
        with evaluating(stitched):
            self._batches = [self._run_networks(batch, target_network, cut) for batch in samples.batches(batch_size)]
        self._n = len(samples)
        self._steps: list[int] = []
        self._figures: dict[str, list[float]] = {}

    def _run_networks(self, batch: Batch, target_network: Adapter, cut: str) -> BatchOutputs:
        """Run both networks on one batch of the probe."""
        stitched = self._model
        x = stitched.source(**stitched.source_inputs(stitched.preprocess(batch.samples))).replace(context={})
        y = target_network.encode(target_network.preprocess(batch.samples), cut)[cut].replace(context={})
        target_logits = stitched.head(y).logits
        labels = None if batch.labels is None else torch.tensor(batch.labels, device=target_logits.device)
        return x, y, target_logits, labels

    @torch.no_grad()
    def __call__(self, step: int, layers: Sequence[StitchingLayer]) -> None:
        """Record all quantities if ``step`` is a multiple of ``every``.

        Args:
            step: Number of completed optimiser steps.
            layers: The stitching layers in training.
        """
        if step % self._every:
            return
        layer = layers[self._stitch]
        rows: list[tuple[torch.Tensor, torch.Tensor]] = []
        correct = target_correct = loss = 0.0
        for x, y, target_logits, labels in self._batches:
            mapped = layer(x)
            rows.append(paired_rows(mapped, y, layer.pooling)["body"])
            logits = self._model.head(mapped).logits
            loss += functional.cross_entropy(logits, target_logits.softmax(-1), reduction="sum").item()
            expected_classes = target_logits.argmax(-1) if labels is None else labels
            correct += (logits.argmax(-1) == expected_classes).sum().item()
            target_correct += (target_logits.argmax(-1) == expected_classes).sum().item()
        mapped_rows, target_rows = (torch.cat(side) for side in zip(*rows, strict=True))
        quantities = {
            "relative_accuracy": correct / target_correct if target_correct else float("nan"),
            "cross_entropy": loss / self._n,
        }
        for label, metric in self._metrics.items():
            quantities[label] = type(metric).function(mapped_rows, target_rows, **metric.options).item()
        self._steps.append(step)
        for name, value in quantities.items():
            self._figures.setdefault(name, []).append(value)

    @property
    def trajectory(self) -> Trajectory:
        """The quantities recorded so far."""
        figures = {name: tuple(np.asarray(values).tolist()) for name, values in self._figures.items()}
        return Trajectory(tuple(self._steps), figures, self._n)


def _metrics_by_label(metrics: Iterable[str | Metric]) -> dict[str, ActivationMetric]:
    """Return label -> metric. A label is the name with all non-default options."""
    by_label: dict[str, ActivationMetric] = {}
    for metric in map(activation_metric, metrics):
        if metric.statistic == "outputs":
            raise ValueError(f"metric {metric.name} compares outputs, not activations; leave it out")
        by_label[metric.label] = metric
    return by_label
