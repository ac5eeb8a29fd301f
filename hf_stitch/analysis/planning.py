"""Predicted cost of a job."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import nn

from hf_stitch.data import Batch, PairedSamples, Samples
from hf_stitch.matchers import Matcher
from hf_stitch.pairs import Pair, Split
from hf_stitch.pairs.moments import PairMoments, check_moments_fit
from hf_stitch.representation import Pooling, RepresentationSpec
from hf_stitch.resources import free_disk, free_memory, seconds_of, sized
from hf_stitch.results import Result
from hf_stitch.running import Run
from hf_stitch.scoring.passing import Scoring
from hf_stitch.stitches import LinearStitch, StitchingLayer
from hf_stitch.stitches.layer import paired_rows, part_widths

if TYPE_CHECKING:
    import pandas
    from rich.console import RenderableType

SOLVING = 30
"""Operations of a closed form in units of width³: one eigendecomposition, and several products."""

MIN_WIDTH = 60
"""Width of the table in characters, to leave room for its title and caption."""
NETWORKS, LARGEST = "networks", "largest output"
"""Parts of the memory: the networks, in use before a job begins, and the largest output, needed on every device."""
BACKWARD = 2
"""Backward passes take about twice the time of forward passes."""


@dataclass(frozen=True)
class Plan(Result):
    """Predicted cost of a job, from :func:`hf_stitch.plan`.

    Attributes:
        job: Description of the job.
        stages: Stage -> predicted seconds, measured on one batch and extrapolated.
        memory: Part -> bytes that the job holds at the same time, in addition to one batch: weights of the networks,
            statistics, rows, maps.
        disk: Part -> bytes of temporary files.
        free_memory: Free bytes of memory.
        free_disk: Free bytes of disk for temporary files.
        processes: Number of processes that share the samples. Memory and disk are per process.
        left_out: Parts that are not included, in words; may be empty.
        computed: Whether the figures are computed from the operations of the networks, without data and weights.
        speed: Floating-point operations per second that computed figures assume; infinite for measured figures.
        devices: Number of devices that share memory, possibly of another machine (:meth:`on`).

    Example:
        >>> plan = Plan("stitch", {"fitting": 1.0, "scoring": 3.0}, {"moments": 10**6}, {}, 10**9, 10**9)
        >>> plan.seconds, plan.fits
        (4.0, True)
    """

    derived: ClassVar[tuple[str, ...]] = ("seconds", "fits")

    job: str
    stages: Mapping[str, float]
    memory: Mapping[str, int]
    disk: Mapping[str, int]
    free_memory: int
    free_disk: int
    processes: int = 1
    left_out: str = ""
    computed: bool = False
    speed: float = math.inf
    devices: int = 1

    @classmethod
    def of(
        cls, job: str, stages: Mapping[str, float], memory: Mapping[str, int], disk: Mapping[str, int],
        device: torch.device, run: Run, left_out: str = "", **more: Any,
    ) -> Self:  # fmt: skip
        """Build the plan of a job on a device, with the free memory and disk of this machine."""
        free = free_memory(device), free_disk(Path(tempfile.gettempdir()))
        return cls(job, stages, memory, disk, *free, run.processes.count, left_out, **more)

    def on(self, device: str, memory: float, speed: float) -> Self:
        """Return a computed plan for other devices, each with this memory in bytes and operations per second.

        It uses the smallest number of devices that hold weights and statistics together; each also holds the largest
        output. Blocks run in sequence, so more devices add memory but not speed.
        """
        room = memory - (largest := self.memory.get(LARGEST, 0))
        if not self.computed or room <= 0:
            raise ValueError("on() requires a plan without data and a largest output that fits on one device")
        count = max(1, math.ceil((sum(self.memory.values()) - largest) / room))
        job = f"{self.job} on {count} × {device} ({sized(memory)}, {speed:.2g} operations a second, not measured)"
        stages = {stage: seconds * self.speed / speed for stage, seconds in self.stages.items()}
        free = int(count * room + largest)
        return replace(self, job=job, stages=stages, free_memory=free, speed=speed, devices=count)

    @property
    def seconds(self) -> float:
        """Predicted duration of the whole job in seconds."""
        return sum(self.stages.values())

    @property
    def fits(self) -> bool:
        """Whether memory and disk suffice. Only a computed plan counts the networks, which are in memory otherwise."""
        required = sum(size for part, size in self.memory.items() if self.computed or part != NETWORKS)
        return required <= self.free_memory and sum(self.disk.values()) <= self.free_disk

    def to_pandas(self) -> pandas.DataFrame:
        """Return all figures as a data frame, one row per stage or part."""
        import pandas

        rows = [(kind, part, value) for kind, parts in self._kinds().items() for part, value in parts.items()]
        return pandas.DataFrame(rows, columns=["kind", "part", "value"])

    def _kinds(self) -> dict[str, Mapping[str, float]]:
        return {"seconds": self.stages, "memory": self.memory, "disk": self.disk}

    def __rich__(self) -> RenderableType:
        """Return the table that ``rich`` prints, one row per stage and part."""
        from rich.table import Table
        from rich.text import Text

        shared = f" (in each of {self.processes} processes)" if self.processes > 1 else ""
        title = f"{'computed ' * self.computed}plan of {self.job}{shared}"
        table = Table("", "part", "predicted", title=title, title_justify="left", min_width=MIN_WIDTH)
        totals: dict[str, Callable[[Any], str]] = {
            "seconds": lambda count: f"{count:.2g} s" if count < 7200 else f"{count / 3600:.3g} h"
        }
        for kind, parts in self._kinds().items():
            format_figure = totals.get(kind, sized)
            for number, (part, value) in enumerate(parts.items()):
                table.add_row("" if number else kind, Text(part), format_figure(value), end_section=False)
            if len(parts) > 1:
                table.add_row("", "total", format_figure(sum(parts.values())), style="bold", end_section=True)
        free = f"{sized(self.free_memory)} of memory and {sized(self.free_disk)} of disk are free"
        verdict = free if self.fits else f"DOES NOT FIT: {free}"
        table.caption = "; ".join(filter(None, (verdict, self.left_out)))
        return table


def bytes_of_weights(*networks: nn.Module, meta: bool = False) -> int:
    """Return the bytes of parameters and buffers in memory, each counted once; with ``meta``, also of meta tensors."""
    tensors = {id(t): t for network in networks for t in (*network.parameters(), *network.buffers())}
    return sum(tensor.nbytes for tensor in tensors.values() if meta or not tensor.is_meta)


def planned_scoring(
    job: str, scoring: Scoring, samples: PairedSamples, run: Run, *, stages: Mapping[str, float] | None = None,
    left_out: str,
) -> Any:  # fmt: skip
    """Return the plan of a job that scores samples after other stages (``Any``: a job is typed by its result)."""
    seconds, measured = scoring.cost(samples, run)
    memory = {NETWORKS: bytes_of_weights(*scoring.networks)}
    vectors = (m["vector"].nbytes for rows in measured.answers.values() for m in rows.values() if "vector" in m)
    if size := sum(vectors):
        memory["vectors"] = len(samples) * size // min(run.batch_size, len(samples))
    return Plan.of(job, {**(stages or {}), "scoring": seconds}, memory, {}, scoring.device, run, left_out)


@torch.no_grad()
def seconds_per_sample(read: Callable[[Batch], object], samples: Samples, run: Run, device: torch.device) -> float:
    """Measure one batch; return the seconds per sample of a job that all processes share."""
    batch = next(samples.batches(min(run.batch_size, len(samples))))
    return seconds_of(lambda: read(batch), device) / len(batch.samples) / run.processes.count


def speed(dtype: torch.dtype = torch.float64) -> float:
    """Measure the floating-point operations per second of a matrix product on the CPU."""
    size, times = 384, 4
    x = torch.ones(size, size, dtype=dtype) @ torch.ones(size, size, dtype=dtype)
    start = time.perf_counter()
    for _ in range(times):
        x = x @ x / size**3
    return 2 * size**3 * times / (time.perf_counter() - start)


@torch.no_grad()
def planned(
    job: str, pair: Pair, data: Split, run: Run, matchers: Sequence[Matcher], *, scored: int = 1, left_out: str = ""
) -> Any:
    """Measure one batch of each stage and extrapolate (``Any``: a job is typed by its result).

    ``scored`` predictors per stitch run through the target (1, or more with baselines).
    """
    train, test = data.train, data.test
    trained = [count for matcher in matchers if (count := matcher.samples_trained(len(train)))]
    by_rows = any(matcher.collects == "rows" for matcher in matchers)
    if not by_rows:
        check_moments_fit(pair)
    batch, twin = (next(side.batches(min(run.batch_size, len(train)))) for side in (train.a, train.b))
    count, device = len(batch.samples), pair.target.device
    ran = pair.run(batch, twin, complete=True)
    forwards = seconds_of(lambda: pair.run(batch, twin, complete=True), device) / count
    moments = PairMoments([] if by_rows else pair.cells, pair.pooling)
    collecting = seconds_of(lambda: moments.update(ran.x, ran.y), device) / count
    maps, cubes, rows = 0, 0.0, 0
    layers = {cell: unfitted(*pair.specs(cell), pair.pooling, pair.source.device) for cell in pair.cells}
    for (la, lb), layer in layers.items():
        maps += sum(value.nbytes for value in layer.state_dict().values())
        cubes += layer.body.in_features**3
        rows += sum(x.nbytes + y.nbytes for x, y in paired_rows(ran.x[la], ran.y[lb], pair.pooling).values())

    def finish() -> None:
        for (la, lb), layer in layers.items():
            pair.finish(layer(ran.x[la]), lb, ran.y[lb])

    stitched = seconds_of(finish, device) / count
    share = 1 / run.processes.count
    stages = {"fitting": len(train) * (forwards + collecting) * share}
    if closed_forms := len(matchers) - len(trained):
        stages["solving"] = closed_forms * SOLVING * cubes / speed()
    if trained:
        rerun = len(trained) * len(train) * forwards
        stages["training"] = (sum(trained) * stitched * (1 + BACKWARD) + rerun) * share
    stages["scoring"] = len(test) * (forwards + len(matchers) * scored * stitched) * share
    memory = {
        NETWORKS: bytes_of_weights(pair.source.model, pair.target.model),
        "moments": sum(value.nbytes for key, value in moments.state_dict().items() if not key.endswith("pending")),
        "maps": len(matchers) * maps,
    }
    if by_rows:
        memory["rows"] = len(train) * rows // count
    if data.unpaired is not None:
        one_side = sum(map(len, data.unpaired)) / 2  # each sample runs through one of the networks
        stages["reading samples without partners"] = one_side * forwards * share
        memory["rows without partners"] = int(one_side * rows / count)
    size_of_source = (
        len(train) * sum(activations.values.nbytes for activations in ran.x.values()) // count if trained else 0
    )
    disk = {"activations of the source": size_of_source} if size_of_source else {}
    nonzero = {part: size for part, size in memory.items() if size}
    return Plan.of(job, stages, nonzero, disk, device, run, left_out)


def unfitted(
    source: RepresentationSpec, target: RepresentationSpec, pooling: Pooling, device: torch.device
) -> StitchingLayer:
    """Return a stitching layer with the size of a fitted one, as a single batch may be too small for a fit."""
    maps, means = dict[str, LinearStitch](), dict[str, torch.Tensor]()
    for part, (dx, dy) in part_widths(source, target, pooling).items():
        means[part] = torch.zeros(dy, device=device)
        maps[part] = LinearStitch.of(weight=means[part].new_zeros(dy, dx), bias=means[part])
    return StitchingLayer(source, target, pooling, maps["body"], maps.get("prefix"), means).eval()
