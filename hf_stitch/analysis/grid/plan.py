"""What a grid of stitches will cost, measured on one batch."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from tqdm.auto import tqdm

from hf_stitch.analysis.grid.measuring import Sides, run
from hf_stitch.data import Samples
from hf_stitch.matchers import Matcher, TrainedMatcher
from hf_stitch.matchers.fitting import PairMoments, fit_layer
from hf_stitch.registry import registries
from hf_stitch.results import Result

if TYPE_CHECKING:
    import pandas
    from rich.table import Table

BACKWARD = 2
"""Backward passes take about twice the time of forward passes."""


@dataclass(frozen=True)
class GridPlan(Result):
    """Predicted cost of a grid of stitches without detectors, returned by ``stitch_grid(…, plan=True)``.

    Attributes:
        fitting: Predicted duration in seconds of the pass that collects moments.
        training: Predicted duration in seconds of the training of task-loss stitches.
        scoring: Predicted duration in seconds of the pass that scores all stitches.
        stitches: Number of stitches.
        memory: Bytes of moments and of the maps of all stitches, beside both networks and a batch.
        disk: Bytes of the source's activations, which training reads from files.

    Example:
        >>> plan = GridPlan(fitting=1.0, training=0.0, scoring=3.0, stitches=64, memory=10**6, disk=0)
        >>> plan.seconds
        4.0
    """

    derived: ClassVar[tuple[str, ...]] = ("seconds",)

    fitting: float
    training: float
    scoring: float
    stitches: int
    memory: int
    disk: int

    @property
    def seconds(self) -> float:
        """Predicted duration of the whole grid in seconds, without detectors."""
        return self.fitting + self.training + self.scoring

    def to_pandas(self) -> pandas.DataFrame:
        """Return the durations as a data frame with the columns ``stage`` and ``seconds``."""
        import pandas

        return pandas.DataFrame(self._stages(), columns=["stage", "seconds"])

    def __rich__(self) -> Table:
        """Return the table that ``rich`` prints, one row per stage."""
        from rich.table import Table

        table = Table("stage", "seconds", title=f"{self.stitches} stitches", title_justify="left")
        for stage, seconds in self._stages():
            table.add_row(stage, f"{seconds:.2g}")
        memory, disk = (tqdm.format_sizeof(size, "B") for size in (self.memory, self.disk))
        files = f", {disk} of temporary files" if self.disk else ""
        table.caption = f"{memory} of memory beside both networks{files}; detectors are not included"
        return table

    def _stages(self) -> list[tuple[str, float]]:
        stages = {"fitting": self.fitting, "training": self.training, "scoring": self.scoring, "total": self.seconds}
        return list(stages.items())


@torch.no_grad()
def planned(sides: Sides, matchers: Iterable[Matcher], train: Samples, test: Samples, batch_size: int) -> GridPlan:
    """Measure one batch of each stage, and extrapolate.

    Args:
        sides: The networks.
        matchers: The matchers.
        train: Samples to which stitches are fitted.
        test: Samples of the scores.
        batch_size: Number of samples per forward pass.
    """
    chosen = list(matchers)
    trained = [matcher for matcher in chosen if isinstance(matcher, TrainedMatcher)]
    batch = next(iter(train.take(min(batch_size, len(train))).batches(batch_size)))
    count, clock = len(batch.samples), time.perf_counter
    run(sides, batch, complete=True)  # the first forward is slower than others
    start = clock()
    found = run(sides, batch, complete=True)
    forwards = (clock() - start) / count
    moments = PairMoments(sides.pairs, sides.pooling)
    start = clock()
    moments.update(found.x, found.y)
    collecting = (clock() - start) / count
    any_map = registries.matchers.build("random")
    start = clock()
    parameters = 0
    for la, lb in sides.pairs:
        layer = fit_layer(any_map, moments.of(la, lb), sides.source.spec(la), sides.target.spec(lb), sides.pooling)
        parameters += sum(value.nbytes for value in layer.state_dict().values())
        mapped = layer(found.x[la])
        sides.target.decode(mapped.replace(values=mapped.values.to(found.y[lb].values.dtype)), lb)
    stitched = (clock() - start) / count
    read = sum(matcher.samples_read(len(train)) for matcher in trained)
    return GridPlan(
        fitting=len(train) * (forwards + collecting),
        training=read * stitched * (1 + BACKWARD) + len(trained) * len(train) * forwards,
        scoring=len(test) * (forwards + len(chosen) * stitched),
        stitches=len(chosen) * len(sides.pairs),
        memory=sum(value.nbytes for value in moments.state_dict().values()) + len(chosen) * parameters,
        disk=len(train) * sum(one.values.nbytes for one in found.x.values()) // count if trained else 0,
    )
