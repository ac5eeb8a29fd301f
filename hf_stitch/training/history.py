"""Measurements of a callback during training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from hf_stitch.results import Result

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure
    from rich.table import Table


@dataclass(frozen=True)
class Measurement:
    """Values that a callback measured at one step.

    Attributes:
        step: Number of optimizer steps taken before the measurement.
        epoch: Number of epochs completed, as a float; ``None`` if unknown.
        figures: Values by name, as passed to loggers.

    Example:
        >>> Measurement(step=100, epoch=1.0, figures={"similarity_to_start/linear_cka/conv1": 0.93}).epoch
        1.0
    """

    step: int
    epoch: float | None
    figures: Mapping[str, float]


@dataclass(frozen=True)
class History(Result):
    """All measurements of a callback, returned by :meth:`ProbingCallback.to_history`.

    Attributes:
        name: Name of the callback.
        measurements: The measurements, in order.

    Example:
        >>> measured = tuple(Measurement(step, None, {"cka/conv1": 1 - step / 100}) for step in (0, 10))
        >>> History("cka", measured).curves
        {'cka/conv1': {0.0: 1.0, 10.0: 0.9}}
    """

    page: ClassVar[str] = "hf_stitch.reports.training:history_section"

    name: str
    measurements: tuple[Measurement, ...]

    @property
    def unit(self) -> str:
        """``epoch`` if all epochs are known, otherwise ``step``."""
        return "step" if any(measurement.epoch is None for measurement in self.measurements) else "epoch"

    @property
    def curves(self) -> dict[str, dict[float, float]]:
        """Name of a value -> step or epoch (:attr:`unit`) -> value."""
        by_name: dict[str, dict[float, float]] = {}
        for measurement in self.measurements:
            for figure, value in measurement.figures.items():
                by_name.setdefault(figure, {})[float(getattr(measurement, self.unit))] = value
        return by_name

    def __rich__(self) -> Table:
        """Return the table that ``rich`` prints, one row for each value: the first, the last, and how many."""
        from rich.table import Table
        from rich.text import Text

        table = Table("value", "first", "last", "measurements", title=self.name)
        for figure, points in self.curves.items():
            values = list(points.values())
            table.add_row(Text(figure), f"{values[0]:.3f}", f"{values[-1]:.3f}", str(len(values)))
        return table

    def to_pandas(self) -> pandas.DataFrame:
        """Return all measurements as a data frame."""
        import pandas

        return pandas.DataFrame(
            [
                {"step": measurement.step, "epoch": measurement.epoch, "figure": figure, "value": value}
                for measurement in self.measurements
                for figure, value in measurement.figures.items()
            ],
            columns=["step", "epoch", "figure", "value"],
        )

    def plot(self, figures: Iterable[str] | None = None) -> Figure:
        """Draw the measured values over the course of training, one curve for each.

        Curves of the same layer share a colour, and curves of the same kind (metric, baseline) share a line style, for
        up to 4 kinds.

        Args:
            figures: Names of values, as in :meth:`to_pandas`. Default: all.
        """
        from hf_stitch.plots import curves
        from hf_stitch.plots.charts import MOST_KINDS

        curves_of = self.curves
        available = list(curves_of)
        names = available if figures is None else list(figures)
        if not names or (unknown := [name for name in names if name not in available]):
            raise ValueError(f"{self.name} lacks {', '.join(unknown) if names else 'values'}; it has {available}")
        series = {name: {x: (value,) * 3 for x, value in curves_of[name].items()} for name in names}
        split = {
            name: (name.rpartition("/")[2], name.removeprefix(f"{self.name}/").rpartition("/")[0]) for name in names
        }
        can_split = len({kind for _, kind in split.values()}) <= MOST_KINDS
        return curves(series, axis=self.unit, label="value", title=self.name, split=split if can_split else None)
