"""What becomes of a stitch while it is trained: similarity and performance, step by step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

from hf_stitch.adapters import Adapter
from hf_stitch.adapters.cutting.modes import evaluating
from hf_stitch.analysis.scoring import whole_target
from hf_stitch.artefacts.modeling import StitchedModel
from hf_stitch.data import Batch, Samples
from hf_stitch.metrics import Metric
from hf_stitch.registry import registries
from hf_stitch.representation import Representation
from hf_stitch.results import Result
from hf_stitch.stitches import StitchingLayer
from hf_stitch.stitches.layer import paired_rows

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure
    from rich.table import Table

BatchOutputs = tuple[Representation, Representation, torch.Tensor, torch.Tensor | None]
"""Of some samples: the source at its cut, the target at its own, the target's answers, and labels."""


@dataclass(frozen=True)
class Trajectory(Result):
    """Figures along training, made by :class:`TrajectoryRecorder`.

    Attributes:
        max_steps: Optimizer steps done, ascending.
        figures: Name -> a value for each step: ``relative_accuracy``, ``cross_entropy`` (with the target's answers, in
            nats), and the metrics of the transformed rows with the target's.
        n: Number of samples of the probe.
    """

    steps: tuple[int, ...]
    figures: Mapping[str, tuple[float, ...]]
    n: int

    def __getitem__(self, figure: str) -> tuple[float, ...]:
        """The values of a figure."""
        return self.figures[figure]

    def __rich__(self) -> Table:
        """The table that ``rich`` prints: a row for each step."""
        from rich.table import Table

        table = Table("step", *self.figures, title=f"along training, {self.n} samples")
        for place, step in enumerate(self.steps):
            table.add_row(str(step), *(f"{values[place]:.3f}" for values in self.figures.values()))
        return table

    def to_pandas(self) -> pandas.DataFrame:
        """A row for each step, a column for each figure."""
        import pandas

        return pandas.DataFrame({"step": self.steps, **self.figures})

    def plot(self) -> Figure:
        """A curve for each figure."""
        from hf_stitch.plots import curves

        series = {
            name: {float(step): (value,) * 3 for step, value in zip(self.steps, values, strict=True)}
            for name, values in self.figures.items()
        }
        return curves(series, axis="step", label="", title=f"along training, {self.n} samples")


class TrajectoryRecorder:
    """Watches a stitch in training: ``TaskLoss(…).fit(stitched, data, callback=recorder)``.

    What both networks say of the probe is computed once. Nothing of the training changes.

    Args:
        stitched: The model whose stitch is trained.
        probe: Raw samples.
        metrics: Names or metrics, of the transformed rows with the target's: both sides at the target's cut, by the
            pooling of the stitch.
        every: Steps between two looks; the first is at step 0.
        target: The whole target; default: the live one that the model was made of.
        stitch: Which one, where several are trained at once.
        batch_size: Samples per forward.

    Raises:
        ValueError: If the model has no head that classifies, or ``every`` is below 1.

    Example:
        >>> import hf_stitch
        >>> from hf_stitch.training import TaskLoss
        >>> from torch.nn import Linear, ReLU, Sequential
        >>> nets = [Sequential(Linear(4, 8), ReLU(), Linear(8, 2)) for _ in range(2)]
        >>> a, b = (hf_stitch.load(net, example_inputs=torch.randn(2, 4)) for net in nets)
        >>> data = torch.randn(200, 4)
        >>> stitched = hf_stitch.stitch(a, b, data, source_layer="1", target_layer="1", task="image-classification", progress=False)
        >>> recorder = TrajectoryRecorder(stitched, data[:50], ["linear_cka"], every=2)
        >>> layer = TaskLoss(max_steps=4).fit(stitched, data, callback=recorder, progress=False)
        >>> recorder.trajectory.steps
        (0, 2, 4)
    """

    @torch.no_grad()
    def __init__(
        self,
        stitched: StitchedModel,
        probe: Any,
        metrics: Iterable[str | Metric] = ("linear_cka",),
        *,
        every: int = 10,
        target: Any = None,
        stitch: int = 0,
        batch_size: int = 256,
    ) -> None:
        if stitched.task not in ("image-classification", "text-classification"):
            raise ValueError(f"a trajectory needs a head that classifies, and this model's task is {stitched.task!r}")
        if every < 1:
            raise ValueError(f"every must be at least 1, got {every}")
        whole = whole_target(stitched, target)
        self._model, self._metrics, self._every, self._stitch = stitched, _by_label(metrics), every, stitch
        cut = stitched.target.cut.layer
        samples = Samples.of(probe)
        with evaluating(stitched):
            self._batches = [self._look(batch, whole, cut) for batch in samples.batches(batch_size)]
        self._n = len(samples)
        self._steps: list[int] = []
        self._figures: dict[str, list[float]] = {}

    def _look(self, batch: Batch, whole: Adapter, cut: str) -> BatchOutputs:
        """What both networks say of some samples."""
        stitched = self._model
        x = stitched.source(**stitched.source_inputs(stitched.preprocess(batch.samples))).replace(context={})
        y = whole.encode(whole.preprocess(batch.samples), cut)[cut].replace(context={})
        answers = stitched.head(y).logits
        labels = None if batch.labels is None else torch.tensor(batch.labels, device=answers.device)
        return x, y, answers, labels

    @torch.no_grad()
    def __call__(self, step: int, layers: Sequence[StitchingLayer]) -> None:
        """Look, if it is time."""
        if step % self._every:
            return
        layer = layers[self._stitch]
        rows: list[tuple[torch.Tensor, torch.Tensor]] = []
        right = reference = loss = 0.0
        for x, y, answers, labels in self._batches:
            mapped = layer(x)
            rows.append(paired_rows(mapped, y, layer.pooling)["body"])
            logits = self._model.head(mapped).logits
            loss += functional.cross_entropy(logits, answers.softmax(-1), reduction="sum").item()
            wanted = answers.argmax(-1) if labels is None else labels
            right += (logits.argmax(-1) == wanted).sum().item()
            reference += (answers.argmax(-1) == wanted).sum().item()
        mapped_rows, there = (torch.cat(side) for side in zip(*rows, strict=True))
        found = {"relative_accuracy": right / reference if reference else float("nan"), "cross_entropy": loss / self._n}
        for label, metric in self._metrics.items():
            found[label] = type(metric).function(mapped_rows, there, **metric.options).item()
        self._steps.append(step)
        for name, value in found.items():
            self._figures.setdefault(name, []).append(value)

    @property
    def trajectory(self) -> Trajectory:
        """What was seen until now."""
        figures = {name: tuple(np.asarray(values).tolist()) for name, values in self._figures.items()}
        return Trajectory(tuple(self._steps), figures, self._n)


def _by_label(metrics: Iterable[str | Metric]) -> dict[str, Metric]:
    """The metrics by name, with the options that are not the default."""
    found: dict[str, Metric] = {}
    for metric in map(registries.metrics.build, metrics):
        if metric.statistic == "outputs":
            raise ValueError(f"metric {metric.name} compares what networks answer, not rows; leave it out")
        found[metric.label] = metric
    return found
