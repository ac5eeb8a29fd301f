"""How the layers of a network develop: what it said at every epoch, compared with what it said at every other."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from hf_stitch.adapters import Adapter
from hf_stitch.analysis.activations import Activations
from hf_stitch.analysis.comparison.comparing import Comparison, labelled
from hf_stitch.data import check_same_order
from hf_stitch.metrics import Metric
from hf_stitch.processes import Processes
from hf_stitch.representation import Pooling
from hf_stitch.results import Result
from hf_stitch.training.callback import Every, ProbingCallback
from hf_stitch.training.probe import Probe

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure
    from rich.table import Table

Array = NDArray[np.float64]
logger = logging.getLogger(__name__)

INDEX = "recordings.json"
THRESHOLDS = (0.8, 0.9, 0.95)
"""Where layers that settle are shown."""


@dataclass(frozen=True, eq=False)
class Dynamics(Result):
    """How alike each layer of a network is to itself at every two moments of training.

    Attributes:
        values: By layer ``(moments, moments)``, float64.
        steps: Optimizer steps that had been taken at each moment.
        epochs: Epochs that had passed; ``None`` where not known.
        metric: What the values are.
        higher_is_better: Whether a higher value means more similar.
        n: Number of samples.
        pooling: The pooling.
    """

    values: Mapping[str, Array]
    steps: tuple[int, ...]
    epochs: tuple[float | None, ...]
    metric: str
    higher_is_better: bool
    n: int
    pooling: Pooling | None

    def __post_init__(self) -> None:
        """Refuse values that do not fit the moments."""
        n = len(self.steps)
        if len(self.epochs) != n or any(values.shape != (n, n) for values in self.values.values()):
            raise ValueError(f"dynamics must hold a value for each two of {n} moments, and an epoch for each")

    @classmethod
    def of(cls, folder: str | Path, metric: str | Metric = "linear_cka") -> Dynamics:
        """Compare what a :class:`DynamicsRecorder` has kept in a folder; in several processes, all must call it.

        Args:
            folder: Where the recordings are.
            metric: A name of ``hf_stitch.registries.metrics``, or a metric.

        Raises:
            FileNotFoundError: If there are no recordings.
            ValueError: If there is only one, or a layer's values are undefined (which).
        """
        index = _Index.read(Path(folder))
        if len(index.epochs) < 2:
            raise ValueError(f"{folder} holds {len(index.epochs)} recordings, and dynamics take at least 2")
        ((label, score),) = labelled([metric]).items()
        steps = sorted(index.epochs)
        kept = {str(step): Activations.load(index.path(step)) for step in steps}
        first = kept[str(steps[0])]
        values = {}
        for layer in first.layers:
            grids = {step: said.grids[layer] for step, said in kept.items() if layer in said.grids}
            own = Activations(
                {step: said.values[layer] for step, said in kept.items()}, first.ids, first.pooling, first.mask, grids
            )
            try:
                values[layer] = Comparison([own], [score], pooling=first.pooling or "mean").run()[label]
            except ValueError as error:
                raise ValueError(f"dynamics of layer {layer!r}, its recordings named by step: {error}") from error
        epochs = tuple(index.epochs[step] for step in steps)
        return cls(values, tuple(steps), epochs, label, score.higher_is_better, len(first.ids), first.pooling)

    # -- what follows -----------------------------------------------------------------------------------------------
    @property
    def unit(self) -> str:
        """What moments are counted in: ``epoch`` where all are known, else ``step``."""
        return "step" if None in self.epochs else "epoch"

    @property
    def times(self) -> tuple[float, ...]:
        """The moments in that unit."""
        return self.steps if self.unit == "step" else tuple(epoch for epoch in self.epochs if epoch is not None)

    def to_final(self) -> dict[str, Array]:
        """By layer ``(moments,)``: the value of each moment with the last."""
        return {layer: values[:, -1] for layer, values in self.values.items()}

    def settled(self, threshold: float = 0.9) -> dict[str, float]:
        """When each layer settles.

        It is the first of the recorded moments from which on, up to the last, every moment is at least as alike to the
        last as the threshold says: the least t with s(t′, last) ≥ threshold for all t′ ≥ t (≤ where the metric is a
        distance). The last moment is like itself, so that there is one always; a layer that still moves has the last.

        Args:
            threshold: Of the metric.

        Returns:
            By layer the moment, in :attr:`unit`.

        Example:
            >>> values = np.array([[1, 0.5, 0.3], [0.5, 1, 0.95], [0.3, 0.95, 1]])
            >>> d = Dynamics({"conv": values}, (0, 10, 20), (0.0, 1.0, 2.0), "linear_cka", True, 9, "mean")
            >>> d.settled(0.9), d.settled(0.99)
            ({'conv': 1.0}, {'conv': 2.0})
        """
        found = {}
        for layer, curve in self.to_final().items():
            alike = curve >= threshold if self.higher_is_better else curve <= threshold
            moving = np.flatnonzero(~alike[:-1])
            found[layer] = self.times[int(moving[-1]) + 1 if len(moving) else 0]
        return found

    def to_pandas(self) -> pandas.DataFrame:
        """A row for each layer and two moments: ``layer``, ``step_a``, ``epoch_a``, ``step_b``, ``epoch_b``, value."""
        import pandas

        moments = list(enumerate(zip(self.steps, self.epochs, strict=True)))
        return pandas.DataFrame(
            [
                {
                    "layer": layer, "step_a": step_a, "epoch_a": epoch_a, "step_b": step_b, "epoch_b": epoch_b,
                    self.metric: float(values[i, j]),
                }
                for layer, values in self.values.items()
                for i, (step_a, epoch_a) in moments
                for j, (step_b, epoch_b) in moments
            ]
        )  # fmt: skip

    def plot(self) -> Figure:
        """A heat map of moments by moments for each layer; below, how alike each layer is to its last moment."""
        from hf_stitch.plots import evolution

        return evolution(
            self.values,
            self.times,
            unit=self.unit,
            label=self.metric,
            title=f"{self.n} samples, pooling: {self.pooling}",
        )

    def __rich__(self) -> Table:
        """The table that ``rich`` prints: a row for each layer."""
        from rich.table import Table
        from rich.text import Text

        title = (
            f"{self.metric} with the last of {len(self.times)} moments, and the {self.unit} at which a layer settles"
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
    """Keeps what a network says of some samples at every epoch, to see afterwards how its layers developed.

    It logs nothing. :meth:`result` compares every epoch with every other, layer by layer.

    Recordings are files in a folder, one for each moment (layers × samples × width numbers in the network's dtype).
    When training resumes from a checkpoint, those that came after it are dropped. A training that begins anew must
    have an empty folder.

    Args:
        probe: Raw samples to look at: what :meth:`hf_stitch.Samples.of` takes.
        folder: Where recordings are kept; one for each training.
        layers: Names of modules of the network in training; default: its cuts.
        metric: What :meth:`result` compares by: a name of ``hf_stitch.registries.metrics``, or a metric.
        every: ``"epoch"``, ``"eval"`` (at every evaluation) or a number of steps; and before the first step.
        pooling: The pooling.
        batch_size: Samples per forward.
        name: What errors call it.

    Raises:
        ValueError: If the probe is too small, the metric is unknown or compares outputs, or ``every`` is none of the
            three.

    Example:
        >>> import tempfile, torch, hf_stitch
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> adapter = hf_stitch.load(net, example_inputs=torch.randn(2, 4))
        >>> recorder = DynamicsRecorder(torch.randn(50, 4), tempfile.mkdtemp(), layers=["0"])
        >>> for step in range(3):
        ...     _ = recorder.measure(adapter, step=step)
        >>> recorder.result().values["0"].shape
        (3, 3)
    """

    def __init__(
        self,
        probe: Any,
        folder: str | Path,
        layers: Iterable[str] | None = None,
        metric: str | Metric = "linear_cka",
        *,
        every: Every = "epoch",
        pooling: Pooling = "mean",
        batch_size: int = 64,
        name: str = "dynamics",
    ) -> None:
        super().__init__(name, every)
        if isinstance(layers, str):
            raise TypeError(f"layers must be a list of names, got {layers!r}; write [{layers!r}]")
        self.probe, self.folder = Probe(probe, pooling, batch_size), Path(folder)
        (self._metric,) = labelled([metric]).values()
        self._layers = None if layers is None else tuple(layers)
        self._watched: tuple[str, ...] = ()

    def result(self) -> Dynamics:
        """Compare every recorded moment with every other; in several processes, all must call it.

        Raises:
            ValueError: If there are less than two recordings, or a layer's values are undefined.
        """
        return Dynamics.of(self.folder, self._metric)

    def _prepare(self, adapter: Adapter, processes: Processes) -> None:
        self._watched = adapter.candidates if self._layers is None else self._layers
        if not self._watched:
            raise ValueError("there are no layers to record: name at least one by layers=")
        self.probe.rehearse(adapter, self._watched)
        if self._trainer is None:  # a Trainer may go on from a checkpoint, which is known when it begins
            self._refuse_old()

    def _figures(self, adapter: Adapter, step: int, epoch: float | None, processes: Processes) -> dict[str, float]:
        said = self.probe.activations(adapter, self._watched, processes)
        if processes.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            index = _Index.read_or_new(self.folder)
            said.save(index.path(step))
            index.epochs[step] = epoch
            index.write()
        return {}

    def _begin(self) -> None:
        if self._attached.state.global_step == 0:
            self._refuse_old()

    def _refuse_old(self) -> None:
        if Processes.of(None).rank == 0 and (self.folder / INDEX).exists():
            raise ValueError(f"{self.folder} holds the recordings of another training: empty it, or use another folder")

    def _resume(self, folder: Path, step: int) -> None:
        index = _Index.read_or_new(self.folder)
        kept = [recorded for recorded in index.epochs if recorded <= step]
        if not kept:
            logger.warning("%s: %s holds nothing of the %d steps before; it begins here", self.name, self.folder, step)
            return
        said = Activations.load(index.path(kept[-1]))
        check_same_order(self.probe.samples.ids, said.ids)
        if tuple(said.layers) != self._watched or said.pooling != self.probe.pooling:
            raise ValueError(
                f"{self.folder} holds recordings of the layers {', '.join(said.layers)} with pooling={said.pooling!r}; to go "
                f"on, record the same, not {', '.join(self._watched)} with pooling={self.probe.pooling!r}"
            )
        if self._attached.is_world_process_zero():
            index.drop_after(step)


class _Index:
    """Which recordings a folder holds: the epoch of each step; written last, so that what it names is there.

    Args:
        folder: Where.
        epochs: By step.
    """

    def __init__(self, folder: Path, epochs: dict[int, float | None]) -> None:
        self.folder, self.epochs = folder, epochs

    @classmethod
    def read(cls, folder: Path) -> Self:
        """That of a folder.

        Raises:
            FileNotFoundError: If it has none.
        """
        path = folder / INDEX
        if not path.is_file():
            raise FileNotFoundError(f"there are no recordings in {folder}")
        record = json.loads(path.read_text(encoding="utf-8"))
        return cls(folder, {int(step): epoch for step, epoch in record.items()})

    @classmethod
    def read_or_new(cls, folder: Path) -> Self:
        """That of a folder, or an empty one."""
        return cls.read(folder) if (folder / INDEX).is_file() else cls(folder, {})

    def path(self, step: int) -> Path:
        """The file of a recording."""
        return self.folder / f"step-{step:09d}.safetensors"

    def write(self) -> None:
        """Write it such that it is there whole or not at all."""
        unfinished = self.folder / f"{INDEX}.unfinished"
        unfinished.write_text(json.dumps(dict(sorted(self.epochs.items())), indent=2) + "\n", encoding="utf-8")
        unfinished.replace(self.folder / INDEX)

    def drop_after(self, step: int) -> None:
        """Forget what came after a step."""
        dropped = [recorded for recorded in self.epochs if recorded > step]
        for recorded in dropped:
            del self.epochs[recorded]
        self.write()
        for recorded in dropped:
            self.path(recorded).unlink(missing_ok=True)
