"""What stitches will cost, measured on one batch."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hf_stitch.analysis.grid.measuring import Sides, run_both
from hf_stitch.analysis.planning import NETWORKS, SOLVING, Plan, bytes_of_weights, seconds_of, speed
from hf_stitch.data import Samples
from hf_stitch.matchers import Matcher, RowsMatcher, TrainedMatcher
from hf_stitch.matchers.fitting import PairMoments, check_moments_fit
from hf_stitch.resources import free_disk, free_memory
from hf_stitch.running import Run
from hf_stitch.stitches import LinearStitch, StitchingLayer
from hf_stitch.stitches.layer import paired_rows, part_widths

BACKWARD = 2
"""Backward passes take about twice the time of forward passes."""


@torch.no_grad()
def planned(
    job: str, sides: Sides, matchers: Sequence[Matcher], train: Samples, test: Samples, run: Run, *,
    twins: Samples | None = None, unpaired: tuple[Samples, Samples] | None = None,
    scored: int = 1, left_out: str = "",
) -> Any:  # fmt: skip
    """Measure one batch of each stage, and extrapolate; ``Any``, as a job is typed by its result.

    Args:
        job: What runs, in words.
        sides: The networks.
        matchers: The matchers.
        train: Samples to which stitches are fitted.
        test: Samples of the scores.
        run: How the job runs.
        twins: Training samples of the target, if it takes other ones.
        unpaired: Samples of the source and of the target without partners.
        scored: Number of predictors per stitch that run through the target (1, or more with baselines).
        left_out: What is not included, in words.

    Raises:
        ValueError: If the moments do not fit into memory, so that a batch of them cannot be measured.
    """
    trained = [matcher for matcher in matchers if isinstance(matcher, TrainedMatcher)]
    by_rows = any(isinstance(matcher.fitted_first, RowsMatcher) for matcher in matchers)
    if not by_rows:
        check_moments_fit(sides.source, sides.target, sides.pairs, sides.pooling)
    batch, twin = (next(each.batches(min(run.batch_size, len(train)))) for each in (train, twins or train))
    count, device = len(batch.samples), sides.target.device
    found = run_both(sides, batch, twin, complete=True)
    forwards = seconds_of(lambda: run_both(sides, batch, twin, complete=True), device) / count
    moments = PairMoments([] if by_rows else sides.pairs, sides.pooling)
    collecting = seconds_of(lambda: moments.update(found.x, found.y), device) / count
    maps, cubes, rows = 0, 0.0, 0
    layers = []
    for la, lb in sides.pairs:
        layers.append((la, lb, layer := _unfitted(sides, la, lb)))
        maps += sum(value.nbytes for value in layer.state_dict().values())
        cubes += layer.body.in_features**3
        rows += sum(x.nbytes + y.nbytes for x, y in paired_rows(found.x[la], found.y[lb], sides.pooling).values())

    def decode() -> None:
        for la, lb, layer in layers:
            mapped = layer(found.x[la])
            sides.target.decode(mapped.replace(values=mapped.values.to(found.y[lb].values.dtype)), lb)

    stitched = seconds_of(decode, device) / count
    share = 1 / run.processes.count
    stages = {"fitting": len(train) * (forwards + collecting) * share}
    if closed := len(matchers) - len(trained):
        stages["solving"] = closed * SOLVING * cubes / speed()
    if trained:
        read = sum(matcher.samples_read(len(train)) for matcher in trained)
        again = len(trained) * len(train) * forwards
        stages["training"] = (read * stitched * (1 + BACKWARD) + again) * share
    stages["scoring"] = len(test) * (forwards + len(matchers) * scored * stitched) * share
    memory = {
        NETWORKS: bytes_of_weights(sides.source.model, sides.target.model),
        "moments": sum(value.nbytes for key, value in moments.state_dict().items() if not key.endswith("pending")),
        "maps": len(matchers) * maps,
    }
    if by_rows:
        memory["rows"] = len(train) * rows // count
    if unpaired is not None:
        one_side = sum(map(len, unpaired)) / 2  # each sample runs through one of the networks
        stages["reading samples without partners"] = one_side * forwards * share
        memory["rows without partners"] = int(one_side * rows / count)
    kept = len(train) * sum(one.values.nbytes for one in found.x.values()) // count if trained else 0
    disk = {"activations of the source": kept} if kept else {}
    free = free_memory(device), free_disk(Path(tempfile.gettempdir()))
    held = {part: size for part, size in memory.items() if size}
    return Plan(job, stages, held, disk, *free, run.processes.count, left_out)


def _unfitted(sides: Sides, source_layer: str, target_layer: str) -> StitchingLayer:
    """Return a stitching layer of the size of a fitted one: a single batch may be too few samples for a fit."""
    specs = sides.source.spec(source_layer), sides.target.spec(target_layer)
    maps, means = dict[str, LinearStitch](), dict[str, torch.Tensor]()
    for part, (dx, dy) in part_widths(*specs, sides.pooling).items():
        means[part] = torch.zeros(dy, device=sides.source.device)
        maps[part] = LinearStitch.of(weight=means[part].new_zeros(dy, dx), bias=means[part])
    return StitchingLayer(*specs, sides.pooling, maps["body"], maps.get("prefix"), means).eval()
