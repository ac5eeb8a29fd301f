"""Growth of the time of a job with its size: measured curves, a model fitted to them, and its predictions.

``python -m benchmarks scaling`` measures and prints the page. ``python -m benchmarks.scaling FOLDER`` writes
``scaling.json``, ``scaling.md`` and ``scaling.png`` there, and ``python -m benchmarks.scaling FOLDER --again`` writes
the page again from the JSON.

Processor time on one thread, minimum of two runs. Networks do not run: activations are random rows in memory, so the
curves show hf-stitch alone.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from scipy.optimize import nnls

import hf_stitch
from benchmarks.timing import machine, seconds
from hf_stitch.matchers.regression import Lstsq
from hf_stitch.relative import nearest
from hf_stitch.statistics import Moments

REPEATS, SHARED = 2, 1024
"""Runs of each size, and number of images that several processes share."""
SECONDS_PER_YEAR = 3.15e7


@dataclass(frozen=True)
class Size:
    """Size of a job.

    Attributes:
        n: Number of rows.
        d: Width of the layers.
        layers: Number of layers of each of two networks; all pairs of layers are compared.
    """

    n: int
    d: int
    layers: int = 1

    def __str__(self) -> str:
        """Return the size as text."""
        return f"n {self.n:,}, d {self.d:,}, {self.layers**2:,} pair{'s' if self.layers > 1 else ''}"


@dataclass(frozen=True)
class Job:
    """A kind of work.

    Attributes:
        title: Description of the work.
        run: Function that creates the inputs of a size and returns the work on them.
        terms: Name -> number of operations (in units of 1e9) as a function of the size. The time is modelled as a
            constant plus a rate times each.
        sizes: Measured sizes.
        beyond: Sizes to predict with the model.
        memory: Bytes that the work needs in addition to its inputs, as a function of the size.
    """

    title: str
    run: Callable[[Size], Callable[[], object]]
    terms: Mapping[str, Callable[[Size], float]]
    sizes: tuple[Size, ...]
    beyond: tuple[Size, ...]
    memory: Callable[[Size], float]


def _activations(size: Size, seed: int) -> hf_stitch.Activations:
    draw = torch.Generator().manual_seed(seed)
    shared = torch.randn(size.n, size.d, generator=draw)
    layers = {f"layer{i}": shared.roll(i, 1) + torch.randn(size.n, size.d, generator=draw) for i in range(size.layers)}
    return hf_stitch.Activations(layers, ids=range(size.n), pooling="mean")


def _comparison(route: str) -> Callable[[Size], Callable[[], object]]:
    def made(size: Size) -> Callable[[], object]:
        a, b = _activations(size, 0), _activations(size, 1)

        def work() -> None:
            atlas = hf_stitch.compare(a, b, progress=False)
            assert set(atlas.routes.values()) == {route}, f"{size} takes the route {atlas.routes}, not {route}"

        return work

    return made


def _fit(size: Size) -> Callable[[], object]:
    x, y = (torch.randn(size.n, size.d, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))

    def work() -> object:
        moments = Moments(size.d, size.d)
        for start in range(0, size.n, 10_000):
            moments.update(x[start : start + 10_000], y[start : start + 10_000])
        return Lstsq().fit(moments)

    return work


def _search(size: Size) -> Callable[[], object]:
    rows = torch.randn(size.n, size.d, generator=torch.Generator().manual_seed(0))
    return lambda: nearest(rows, rows, k=10)


JOBS: dict[str, Job] = {
    "moments": Job(
        "linear CKA of all pairs, by co-moments (layers narrower than there are rows)",
        _comparison("moments"),
        {
            "n·pairs·d²": lambda s: s.n * (s.layers * s.d) ** 2 / 1e9,
            "n·2·layers·d²": lambda s: s.n * 2 * s.layers * s.d**2 / 1e9,
            "n·layers·d": lambda s: s.n * s.layers * s.d / 1e9,
            "pairs": lambda s: s.layers**2 / 1e9,
        },
        (
            *(Size(n, 64, 4) for n in (1_000, 3_000, 10_000, 30_000, 100_000)),
            *(Size(8_000, d) for d in (64, 256, 1024, 2048)),
            Size(20_000, 4096),
            *(Size(2_000, 64, layers) for layers in (1, 2, 4, 8, 16, 32)),
        ),
        (Size(1_000_000, 1024, 12), Size(1_000_000, 4096, 32)),
        lambda s: 8 * (s.layers**2 + 2 * s.layers) * s.d**2,
    ),
    "grams": Job(
        "linear CKA of all pairs, by Gram matrices (layers wider than there are rows)",
        _comparison("grams"),
        {
            "n²·2·layers·d": lambda s: s.n**2 * 2 * s.layers * s.d / 1e9,
            "n²·2·layers": lambda s: s.n**2 * 2 * s.layers / 1e9,
            "n²·pairs": lambda s: s.n**2 * s.layers**2 / 1e9,
        },
        (
            *(Size(n, 4096, 2) for n in (250, 500, 1_000, 2_000)),
            *(Size(500, d, 2) for d in (1024, 2048, 4096)),
            *(Size(250, 1024, layers) for layers in (1, 2, 4, 8, 16, 32)),
        ),
        (Size(10_000, 50_000, 50),),
        lambda s: 8 * s.n**2 * 2 * s.layers,
    ),
    "stitch": Job(
        "closed-form stitch (least squares) from streamed rows",
        _fit,
        {"n·d²": lambda s: s.n * s.d**2 / 1e9, "d³": lambda s: s.d**3 / 1e9},
        (
            *(Size(n, 256) for n in (1_000, 3_000, 10_000, 30_000, 100_000)),
            *(Size(5_000, d) for d in (64, 128, 256, 512, 1024, 2048, 4096)),
        ),
        (Size(1_000_000, 4096), Size(10_000_000, 8192)),
        lambda s: 8 * 3 * s.d**2,
    ),
    "nearest": Job(
        "10 nearest rows of each row among all",
        _search,
        {"n²·d": lambda s: s.n**2 * s.d / 1e9, "n²": lambda s: s.n**2 / 1e9},
        (*(Size(n, 256) for n in (1_000, 3_000, 10_000, 30_000)), *(Size(10_000, d) for d in (64, 512, 1024))),
        (Size(1_000_000, 768),),
        lambda s: 4 * 2048 * 1024,
    ),
}


def fitted(job: Job, sizes: list[Size], taken: list[float]) -> dict[str, float]:
    """Fit the time to the terms of a job, with coefficients that are not negative and relative errors as weights.

    Returns:
        Name of a term -> seconds per 1e9 operations, and ``constant`` -> seconds.
    """
    names = ["constant", *job.terms]
    table = np.array([[1.0, *(term(size) for term in job.terms.values())] for size in sizes])
    scale = table.max(0)
    rates, _ = nnls(table / scale / np.array(taken)[:, None], np.ones(len(sizes)))
    return dict(zip(names, (rates / scale).tolist(), strict=True))


def predicted(job: Job, rates: Mapping[str, float], size: Size) -> float:
    """Return the seconds that the fitted model gives for a size."""
    return rates["constant"] + sum(rates[name] * term(size) for name, term in job.terms.items())


def measured(job: Job) -> list[dict[str, Any]]:
    """Measure a job in all its sizes; return one row per size, with its seconds."""
    return [{**asdict(size), "seconds": min(seconds(job.run(size), REPEATS))} for size in job.sizes]


def modelled(job: Job, rows: Sequence[Mapping[str, Any]]) -> tuple[dict[str, float], list[float]]:
    """Fit the model of a job, and predict each size from all others; return the rates, and these predictions."""
    sizes, taken = [_size(row) for row in rows], [row["seconds"] for row in rows]
    left_out = [
        predicted(job, fitted(job, sizes[:i] + sizes[i + 1 :], taken[:i] + taken[i + 1 :]), size)
        for i, size in enumerate(sizes)
    ]
    return fitted(job, sizes, taken), left_out


def _size(row: Mapping[str, Any]) -> Size:
    return Size(row["n"], row["d"], row["layers"])


def record() -> dict[str, Any]:
    """Measure all jobs, and a comparison on one and on two processes."""
    torch.set_num_threads(1)
    JOBS["moments"].run(Size(100, 8))()  # imports
    jobs = {name: measured(job) for name, job in JOBS.items()}
    return {"machine": machine(), "jobs": jobs, "processes": {str(count): shared(count) for count in (1, 2)}}


def shared(count: int) -> float:
    """Return the seconds of a comparison of two networks, shared by several processes of one thread each."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        torch.multiprocessing.spawn(_share, (count, port, folder), nprocs=count)
        return max(float(path.read_text()) for path in Path(folder).iterdir())


def _share(rank: int, count: int, port: int, folder: str) -> None:
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    if count > 1:
        os.environ |= {name: str(value) for name, value in places.items()}
    torch.set_num_threads(1)
    torch.manual_seed(0)  # the same weights in each process
    images = torch.randn(SHARED, 3, 64, 64)
    a, b = (hf_stitch.load(timm.create_model("resnet18").eval(), example_inputs=images[:2]) for _ in range(2))
    hf_stitch.compare(a, b, images[:64], progress=False)
    start = time.perf_counter()
    hf_stitch.compare(a, b, images, batch_size=32, progress=False)
    (Path(folder) / str(rank)).write_text(str(time.perf_counter() - start))


def _duration(taken: float) -> str:
    for unit, size in (("years", SECONDS_PER_YEAR), ("days", 86_400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if taken >= 2 * size:
            return f"{taken / size:.0f} {unit}"
    return f"{taken:.2g} s"


def _bytes(size: float) -> str:
    return f"{size / 2**30:.2g} GiB" if size > 2**28 else f"{size / 2**20:.2g} MiB"


def page(record: Mapping[str, Any]) -> str:
    """Return the page of a record: measured curves, the fitted model, and predictions."""
    processor, _, torch_version = record["machine"].split(", ")
    parts = [
        "# Scaling",
        "",
        "This page shows how the time of a job (one call of `compare`, `stitch` or a similar function) grows with its "
        f"size. The times are processor time of one thread ({processor}, {torch_version}). They include the work of "
        "hf-stitch, but not the forward passes of networks, because the measured jobs use random activations in "
        "memory. For times with networks, see [benchmarks](benchmarks.md). `python -m benchmarks.scaling docs` wrote "
        "this page.",
        "",
        "![Measured and modelled seconds](scaling.png)",
        "",
        "For each job, we fitted a model of the time: a constant, and a rate for each term that grows with the size. "
        "In its formula and its first table, n is the number of rows, d the width of the layers, *layers* the number "
        "of layers of each of two networks, and *pairs* the number of pairs of layers. The column *left out* checks "
        "the model: it predicts the time for this size from all other sizes. The second table contains "
        "**predictions** for larger sizes, not measurements.",
        "",
    ]
    for name, job in JOBS.items():
        rows = record["jobs"][name]
        rates, left_out = modelled(job, rows)
        errors = [abs(guess / row["seconds"] - 1) for guess, row in zip(left_out, rows, strict=True)]
        terms = " + ".join(f"{rate:.3g}·{term}" for term, rate in rates.items() if term != "constant" and rate)
        parts += [
            f"## {job.title[0].upper()}{job.title[1:]}",
            "",
            f"`seconds ≈ {rates['constant']:.2g} + ({terms}) / 1e9`",
            "",
            f"Error of *left out*: median {np.median(errors):.0%}, largest {max(errors):.0%}.",
            "",
            "| n | d | pairs | seconds | left out |",
            "|---|---|---|---|---|",
            *(
                f"| {row['n']:,} | {row['d']:,} | {row['layers'] ** 2:,} | {row['seconds']:.3g} | {guess:.3g} |"
                for row, guess in zip(rows, left_out, strict=True)
            ),
            "",
            "| prediction, not measured | one core | 64 cores, if shared evenly | memory of statistics |",
            "|---|---|---|---|",
            *(
                f"| {size} | {_duration(took := predicted(job, rates, size))} | {_duration(took / 64)} | "
                f"{_bytes(job.memory(size))} |"
                for size in job.beyond
            ),
            "",
        ]
    one, two = (record["processes"][count] for count in ("1", "2"))
    parts += [
        "## Several processes, GPUs and nodes",
        "",
        f"Measured: comparing the blocks of two ResNet-18 on {SHARED} images of 64 px takes {one:.1f} s in one process "
        f"and {two:.1f} s in two processes ({one / two:.2f} times as fast), with one thread each.",
        "",
        "Several processes split the forward passes and the statistics of the rows. They do not split the solution of "
        "closed forms (the d³ term) or the computation of the values of all pairs. Each process holds all "
        "statistics, and the processes exchange them once, at the end. Each process then sends about twice the bytes "
        "in the column *memory of statistics*: **predicted**, 2 s for 1.3 GiB at 10 Gbit/s.",
        "",
        "On a GPU, rows are multiplied on the device, in float64 for co-moments and in float32 for Gram matrices. "
        "This page does not contain measurements on a GPU; `python -m benchmarks.gpu` makes them. To **predict** the "
        "speed-up of the terms with d², divide the GPU's rate for matrix products in that precision by the rate "
        "of this machine (on one core about 50 GFLOP/s in float64, and 90 in float32). The other terms depend on "
        "memory bandwidth.",
        "",
    ]
    return "\n".join(parts)


def plot(record: Mapping[str, Any]) -> Any:
    """Plot measured seconds against predicted seconds, one panel per job."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(JOBS), figsize=(4 * len(JOBS), 3.6), layout="constrained")
    for panel, (name, job) in zip(panels, JOBS.items(), strict=True):
        rows = record["jobs"][name]
        taken, guesses = [row["seconds"] for row in rows], modelled(job, rows)[1]
        panel.loglog(guesses, taken, "o", color="#0072b2")
        ends = [min(taken + guesses), max(taken + guesses)]
        panel.loglog(ends, ends, color="grey", linewidth=1)
        panel.set(title=job.title.partition(",")[0].partition(" (")[0], xlabel="predicted seconds, size left out")
    panels[0].set_ylabel("measured seconds")
    return figure


def main() -> None:
    """Run the benchmark and print its page."""
    print(page(record()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--again", action="store_true", help="write the page again without measuring")
    options = parser.parse_args()
    place = options.folder / "scaling.json"
    saved = json.loads(place.read_text()) if options.again else record()
    place.write_text(json.dumps(saved, indent=1) + "\n")
    (options.folder / "scaling.md").write_text(page(saved))
    plot(saved).savefig(options.folder / "scaling.png", dpi=120)
