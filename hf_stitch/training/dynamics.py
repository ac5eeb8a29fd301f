"""Training dynamics: similarity of each layer between all pairs of recorded points in training."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from hf_stitch.analysis.activations import Activations
from hf_stitch.analysis.comparison.asking import ROWS_OF, Asked
from hf_stitch.analysis.comparison.atlas import WHOLE
from hf_stitch.analysis.comparison.comparing import Comparison
from hf_stitch.analysis.comparison.weights import read_weights, same_layers
from hf_stitch.data import Data, check_same_order
from hf_stitch.metrics import Metric, WeightMetric
from hf_stitch.options import Count, checked
from hf_stitch.records import read
from hf_stitch.registry import registries
from hf_stitch.representation import Pooling
from hf_stitch.results import Result
from hf_stitch.running import Processes, Run
from hf_stitch.statistics import Weights, load_weights, save_weights
from hf_stitch.storage.files import decoding, write_whole
from hf_stitch.training.callback import Every, ProbingCallback
from hf_stitch.training.probe import optional_probe

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure
    from rich.table import Table

Array = NDArray[np.float64]
logger = logging.getLogger(__name__)

INDEX = "recordings.json"  # file with the step and epoch of each recording
THRESHOLDS = (0.8, 0.9, 0.95)
"""Thresholds in the table of :class:`Dynamics` that shows when layers settle."""


@dataclass(frozen=True, eq=False)
class Dynamics(Result):
    """Similarity of each layer of a network between all pairs of moments of training.

    A moment is a point in training with recorded activations, or recorded weights for a metric of weights.

    Attributes:
        values: Metric values by layer, each ``(moments, moments)`` float64.
        steps: Number of optimizer steps taken at each moment.
        epochs: Number of epochs completed at each moment, as floats; ``None`` if unknown.
        metric: Name of the metric.
        higher_is_better: Whether a higher value means more similar.
        n: Number of samples; ``None`` for a metric of weights.
        pooling: Pooling of the activations; ``None`` for a metric of weights.
        range: Smallest and largest value that the metric can have; ``None`` if unknown.
        whole: For a metric of weights, ``(moments, moments)`` float64 of the whole network; otherwise ``None``.

    Example:
        >>> values = np.array([[1, 0.5, 0.3], [0.5, 1, 0.95], [0.3, 0.95, 1]])
        >>> dynamics = Dynamics({"conv": values}, (0, 10, 20), (0.0, 1.0, 2.0), "linear_cka", True, 9, "mean")
        >>> dynamics.to_final()["conv"]
        array([0.3 , 0.95, 1.  ])
        >>> dynamics.settled(threshold=0.9)
        {'conv': 1.0}
    """

    page: ClassVar[str] = "hf_stitch.reports.training:dynamics_section"
    values: Mapping[str, Array]
    steps: tuple[int, ...]
    epochs: tuple[float | None, ...]
    metric: str
    higher_is_better: bool
    n: int | None
    pooling: Pooling | None
    range: tuple[float, float] | None = None
    whole: Array | None = None

    def __post_init__(self) -> None:
        """Raise an error if the shapes of the values do not fit the number of moments."""
        n = len(self.steps)
        if len(self.epochs) != n or any(values.shape != (n, n) for values in self.values.values()):
            shapes = ", ".join(str(values.shape) for values in self.values.values())
            raise ValueError(
                f"dynamics of {n} moments require {n} epochs and values of shape ({n}, {n}) for each layer, got "
                f"{len(self.epochs)} epochs and values of shape {shapes}"
            )

    @classmethod
    def of(cls, folder: str | Path, metric: str | Metric = "linear_cka") -> Dynamics:
        """Compare the recordings that a :class:`DynamicsRecorder` has saved in a folder.

        With several processes, every process must call this method.

        Args:
            folder: Folder with the recordings.
            metric: A metric, or its name in ``hf_stitch.registries.metrics``. Recordings of weights require the
                recorder's metric, with any options.

        Example:
            >>> import tempfile, torch, hf_stitch
            >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
            >>> adapter, folder = hf_stitch.load(net, example_inputs=torch.randn(2, 4)), tempfile.mkdtemp()
            >>> recorder = DynamicsRecorder(folder, torch.randn(50, 4), layers=["0"])
            >>> for step in range(3):
            ...     _ = recorder.measure(adapter, step=step)
            >>> Dynamics.of(folder, "procrustes").steps
            (0, 1, 2)
        """
        epochs_by_step = _read_index(Path(folder))
        if not epochs_by_step:
            raise FileNotFoundError(f"{folder} contains no recordings of a DynamicsRecorder")
        if len(epochs_by_step) < 2:
            raise ValueError(f"{folder} contains {len(epochs_by_step)} recordings, but dynamics require at least 2")
        steps, epochs = tuple(sorted(epochs_by_step)), tuple(epochs_by_step[step] for step in sorted(epochs_by_step))
        paths = {str(step): _path(Path(folder), step) for step in steps}
        built = registries.metrics.build(metric)
        if isinstance(built, WeightMetric):
            return cls._of_weights([load_weights(path, built.name) for path in paths.values()], built, steps, epochs)
        recordings = {step: Activations.load(path) for step, path in paths.items()}
        first = recordings[str(steps[0])]
        asked = Asked.of([built], ROWS_OF[first.pooling or "mean"])
        ((label, built),) = asked.activations.items()
        values, run = {}, Run(progress=False, processes=Processes.of(None))
        for layer in first.layers:
            if without := [step for step, recording in recordings.items() if layer not in recording.values]:
                raise ValueError(
                    f"the recording of step {without[0]} in {folder} lacks layer {layer!r} of step {steps[0]}; record "
                    "each training run into a separate folder"
                )
            grids = {step: recording.grids[layer] for step, recording in recordings.items() if layer in recording.grids}
            by_step = {step: recording.values[layer] for step, recording in recordings.items()}
            moments = Activations(by_step, first.ids, first.pooling, first.mask, grids)
            try:
                values[layer] = Comparison([moments], asked, run).run()[label]
            except ValueError as error:
                raise ValueError(f"dynamics of layer {layer!r} (recordings are named by step): {error}") from error
        higher_is_better, n = built.higher_is_better, len(first.ids)
        return cls(values, steps, epochs, label, higher_is_better, n, first.pooling, built.range)

    @classmethod
    def _of_weights(
        cls, readings: Sequence[Mapping[str, Weights]], metric: WeightMetric, steps: tuple[int, ...],
        epochs: tuple[float | None, ...],
    ) -> Dynamics:  # fmt: skip
        values = {layer: np.empty((len(steps), len(steps))) for layer in readings[0]}
        whole = np.empty((len(steps), len(steps)))
        for i, j in np.ndindex(whole.shape):
            layer_values, undefined = same_layers(readings[i], readings[j], metric)
            for layer, reason in undefined.items():
                raise ValueError(f"{metric.label} of {layer!r} between steps {steps[i]} and {steps[j]}: {reason}")
            whole[i, j] = layer_values.pop(WHOLE)
            for layer, value in layer_values.items():
                values[layer][i, j] = value
        higher_is_better = metric.higher_is_better
        return cls(values, steps, epochs, metric.label, higher_is_better, None, None, metric.range, whole)

    # -- derived values ---------------------------------------------------------------------------------------------
    @property
    def unit(self) -> str:
        """Unit of :attr:`times`: ``epoch`` if all epochs are known, otherwise ``step``."""
        return "step" if None in self.epochs else "epoch"

    @property
    def times(self) -> tuple[float, ...]:
        """The moments in the unit :attr:`unit`."""
        return self.steps if self.unit == "step" else tuple(epoch for epoch in self.epochs if epoch is not None)

    @property
    def _shown(self) -> dict[str, Array]:
        """The values by layer, and of the whole network for a metric of weights."""
        return {**self.values, **({} if self.whole is None else {WHOLE: self.whole})}

    def to_final(self) -> dict[str, Array]:
        """Return the values ``(moments,)`` of each layer between each moment and the last moment."""
        return {layer: values[:, -1] for layer, values in self._shown.items()}

    def settled(self, threshold: float = 0.9) -> dict[str, float]:
        """Return the moment at which each layer settles.

        A layer settles at the first moment from which its similarity to the last moment stays at or above the
        threshold: the smallest t with s(t′, last) ≥ threshold for all t′ ≥ t (≤ if the metric is a distance). A layer
        that still changes settles at the last moment, which always fulfils the condition.

        Args:
            threshold: Value of the metric.

        Example:
            >>> values = np.array([[1, 0.5, 0.3], [0.5, 1, 0.95], [0.3, 0.95, 1]])
            >>> dynamics = Dynamics({"conv": values}, (0, 10, 20), (0.0, 1.0, 2.0), "linear_cka", True, 9, "mean")
            >>> dynamics.settled(0.9), dynamics.settled(0.99)
            ({'conv': 1.0}, {'conv': 2.0})
        """
        settled_at = {}
        for layer, curve in self.to_final().items():
            similar = curve >= threshold if self.higher_is_better else curve <= threshold
            unsettled = np.flatnonzero(~similar[:-1])
            settled_at[layer] = self.times[int(unsettled[-1]) + 1 if len(unsettled) else 0]
        return settled_at

    def to_pandas(self) -> pandas.DataFrame:
        """Return all values as a data frame."""
        import pandas

        moments = list(enumerate(zip(self.steps, self.epochs, strict=True)))
        return pandas.DataFrame(
            [
                {
                    "layer": layer, "step_a": step_a, "epoch_a": epoch_a, "step_b": step_b, "epoch_b": epoch_b,
                    self.metric: float(values[i, j]),
                }
                for layer, values in self._shown.items()
                for i, (step_a, epoch_a) in moments
                for j, (step_b, epoch_b) in moments
            ]
        )  # fmt: skip

    def plot(self) -> Figure:
        """Plot the similarity of each layer to the end of training (:meth:`to_final`); the page shows all moments."""
        from hf_stitch.plots import curves

        series = {
            layer: {float(x): (float(v),) * 3 for x, v in zip(self.times, values, strict=True)}
            for layer, values in self.to_final().items()
        }
        title = "from weights, without samples" if self.n is None else f"{self.n} samples, pooling: {self.pooling}"
        return curves(series, axis=self.unit, label=f"{self.metric} with the end of training", title=title)

    def __rich__(self) -> Table:
        """Return the table that ``rich`` prints, with one row for each layer."""
        from rich.table import Table
        from rich.text import Text

        title = (
            f"{self.metric} with the last of {len(self.times)} moments, and the {self.unit} at which each layer settles"
        )
        table = Table("layer", "first", "middle", title=title, title_justify="left")
        thresholds = THRESHOLDS if self.higher_is_better else ()
        for threshold in thresholds:
            table.add_column(f"settles ({threshold})", justify="right")
        for layer, curve in self.to_final().items():
            values = (f"{value:.3f}" for value in (curve[0], curve[len(curve) // 2]))
            table.add_row(Text(layer), *values, *(f"{self.settled(t)[layer]:g}" for t in thresholds))
        return table


class DynamicsRecorder(ProbingCallback):
    """Callback that records activations or weights during training, for an analysis of how the layers develop.

    The callback does not log values. :meth:`result` compares all pairs of recorded moments, layer by layer.

    Recordings are files in a folder, one for each moment (layers × samples × width numbers in the dtype of the
    network). For a metric of weights they contain the statistics of the weights, often kilobytes, and ``probe`` is not
    needed. If training resumes from a checkpoint, later recordings are deleted. A new training run needs an empty
    folder.

    Args:
        folder: Folder for the recordings, a separate one for each training run.
        probe: Raw samples to measure on, in a form that :meth:`hf_stitch.Samples.of` accepts; at least 2. ``None`` if
            the metric compares weights.
        layers: Names of modules of the network in training. Default: its cuts; for a metric of weights, all layers that
            it reads.
        metric: Metric that :meth:`result` uses, as a name in ``hf_stitch.registries.metrics`` or a metric.
        every: When to record in addition to the start: ``"epoch"``, ``"eval"`` (at every evaluation) or a number of
            optimizer steps.
        pooling: Pooling of the activations (:meth:`hf_stitch.Representation.rows`).
        batch_size: Number of samples per forward pass.
        name: Name of the callback in error messages and warnings.

    Example:
        >>> import tempfile, torch, hf_stitch
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> adapter = hf_stitch.load(net, example_inputs=torch.randn(2, 4))
        >>> recorder = DynamicsRecorder(tempfile.mkdtemp(), torch.randn(50, 4), layers=["0"])
        >>> for step in range(3):
        ...     _ = recorder.measure(adapter, step=step)
        >>> recorder.result().values["0"].shape
        (3, 3)
    """

    @checked
    def __init__(
        self,
        folder: str | Path,
        probe: Data | None = None,
        layers: Iterable[str] | None = None,
        metric: str | Metric = "linear_cka",
        *,
        every: Every = "epoch",
        pooling: Pooling = "mean",
        batch_size: Count = 64,
        name: str = "dynamics",
    ) -> None:
        super().__init__(name, every)
        self._metric = registries.metrics.build(metric)
        if self._runs:
            Asked.of([self._metric])  # raises an error for metrics of outputs
        self.probe, self.folder = optional_probe(probe, pooling, batch_size, runs=self._runs), Path(folder)
        self._layers = None if layers is None else tuple(layers)
        self._layer_names: tuple[str, ...] = ()

    def result(self) -> Dynamics:
        """Compare all pairs of recorded moments; with several processes, every process must call this method."""
        return Dynamics.of(self.folder, self._metric)

    @property
    def _runs(self) -> bool:
        return not isinstance(self._metric, WeightMetric)

    def _prepare(self, processes: Processes) -> None:
        if isinstance(self._metric, WeightMetric):
            self._layer_names = tuple(self._read(self._metric))
        else:
            self._layer_names = self._loaded.candidates if self._layers is None else self._layers
        if not self._layer_names:
            raise ValueError("no layers to record: pass at least one name in layers=")
        if self.probe is not None:
            self.probe.check_layers(self._loaded, self._layer_names)
        if self._trainer is None:  # a Trainer may resume from a checkpoint, which is known only when training starts
            self._check_empty()

    def _figures(self, step: int, epoch: float | None, processes: Processes) -> dict[str, float]:
        activations = None if self.probe is None else self.probe.activations(self._loaded, self._layer_names, processes)
        if processes.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = _path(self.folder, step)
            if activations is not None:
                activations.save(path)
            elif isinstance(self._metric, WeightMetric):
                save_weights(self._read(self._metric), path, self._metric.name)
            _write(self.folder, {**_read_index(self.folder), step: epoch})
        return {}

    def _read(self, metric: WeightMetric) -> dict[str, Weights]:
        """Read the current weights of the network for the metric."""
        (weights,) = read_weights(self._model, {metric.label: metric}, self._layers).values()
        return weights

    def _begin(self) -> None:
        if self._attached.state.global_step == 0:
            self._check_empty()

    def _check_empty(self) -> None:
        if Processes.of(None).rank == 0 and (self.folder / INDEX).exists():
            raise ValueError(
                f"{self.folder} contains the recordings of another training run: empty it, or use another folder"
            )

    def _resume(self, folder: Path, step: int) -> None:
        epochs = _read_index(self.folder)
        earlier = {recorded_step: epoch for recorded_step, epoch in epochs.items() if recorded_step <= step}
        if not earlier:
            logger.warning(
                "%s: %s contains no recordings up to step %d; recording starts here", self.name, self.folder, step
            )
            return
        layers, pooling = self._layers_and_pooling(_path(self.folder, max(earlier)))
        expected = None if self.probe is None else self.probe.pooling
        if layers != self._layer_names or pooling != expected:
            raise ValueError(
                f"{self.folder} contains recordings of the layers {', '.join(layers)} with pooling={pooling!r}, but "
                f"the callback records {', '.join(self._layer_names)} with pooling={expected!r}; use the same layers "
                "and pooling to resume"
            )
        if self._attached.is_world_process_zero():
            _write(self.folder, earlier)
            for dropped_step in epochs.keys() - earlier.keys():
                _path(self.folder, dropped_step).unlink(missing_ok=True)

    def _layers_and_pooling(self, path: Path) -> tuple[tuple[str, ...], Pooling | None]:
        """Return the layers and the pooling of a recording."""
        if self.probe is None:
            return tuple(load_weights(path, self._metric.name)), None
        recording = Activations.load(path)
        check_same_order(self.probe.samples.ids, recording.ids)
        return tuple(recording.layers), recording.pooling


def _read_index(folder: Path) -> dict[int, float | None]:
    """Read the index of a folder: step -> epoch of each recording; empty for a folder without an index."""
    path = folder / INDEX
    if not path.is_file():
        return {}
    with decoding(path):
        record = read(Mapping[str, float | None], json.loads(path.read_text(encoding="utf-8")), "the index")
        return {int(step): epoch for step, epoch in record.items()}


def _path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:09d}.safetensors"


def _write(folder: Path, epochs: Mapping[int, float | None]) -> None:
    """Write the index atomically; call it after writing the recordings, so that all listed files exist."""
    text = json.dumps(dict(sorted(epochs.items())), indent=2) + "\n"
    write_whole(folder / INDEX, lambda path: path.write_text(text, encoding="utf-8"))
