"""What stitches will cost, measured on one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hf_stitch.analysis.planning import NETWORKS, SOLVING, Plan, bytes_of_weights, speed
from hf_stitch.matchers import Matcher
from hf_stitch.pairs import Pair, Split
from hf_stitch.pairs.moments import PairMoments, check_moments_fit
from hf_stitch.representation import Pooling, RepresentationSpec
from hf_stitch.resources import seconds_of
from hf_stitch.running import Run
from hf_stitch.stitches import LinearStitch, StitchingLayer
from hf_stitch.stitches.layer import paired_rows, part_widths

BACKWARD = 2
"""Backward passes take about twice the time of forward passes."""


@torch.no_grad()
def planned(
    job: str, pair: Pair, data: Split, run: Run, matchers: Sequence[Matcher], *, scored: int = 1, left_out: str = ""
) -> Any:
    """Measure one batch of each stage, and extrapolate; ``Any``, as a job is typed by its result.

    ``scored`` predictors per stitch run through the target (1, or more with baselines).
    """
    train, test = data.train, data.test
    read = [count for matcher in matchers if (count := matcher.samples_trained(len(train)))]
    by_rows = any(matcher.collects == "rows" for matcher in matchers)
    if not by_rows:
        check_moments_fit(pair)
    batch, twin = (next(each.batches(min(run.batch_size, len(train)))) for each in (train.a, train.b))
    count, device = len(batch.samples), pair.target.device
    found = pair.run(batch, twin, complete=True)
    forwards = seconds_of(lambda: pair.run(batch, twin, complete=True), device) / count
    moments = PairMoments([] if by_rows else pair.cells, pair.pooling)
    collecting = seconds_of(lambda: moments.update(found.x, found.y), device) / count
    maps, cubes, rows = 0, 0.0, 0
    layers = {cell: unfitted(*pair.specs(cell), pair.pooling, pair.source.device) for cell in pair.cells}
    for (la, lb), layer in layers.items():
        maps += sum(value.nbytes for value in layer.state_dict().values())
        cubes += layer.body.in_features**3
        rows += sum(x.nbytes + y.nbytes for x, y in paired_rows(found.x[la], found.y[lb], pair.pooling).values())

    def finish() -> None:
        for (la, lb), layer in layers.items():
            pair.finish(layer(found.x[la]), lb, found.y[lb])

    stitched = seconds_of(finish, device) / count
    share = 1 / run.processes.count
    stages = {"fitting": len(train) * (forwards + collecting) * share}
    if closed := len(matchers) - len(read):
        stages["solving"] = closed * SOLVING * cubes / speed()
    if read:
        again = len(read) * len(train) * forwards
        stages["training"] = (sum(read) * stitched * (1 + BACKWARD) + again) * share
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
    kept = len(train) * sum(one.values.nbytes for one in found.x.values()) // count if read else 0
    disk = {"activations of the source": kept} if kept else {}
    held = {part: size for part, size in memory.items() if size}
    return Plan.of(job, stages, held, disk, device, run, left_out)


def unfitted(
    source: RepresentationSpec, target: RepresentationSpec, pooling: Pooling, device: torch.device
) -> StitchingLayer:
    """Return a stitching layer of the size of a fitted one: a single batch may be too few samples for a fit."""
    maps, means = dict[str, LinearStitch](), dict[str, torch.Tensor]()
    for part, (dx, dy) in part_widths(source, target, pooling).items():
        means[part] = torch.zeros(dy, device=device)
        maps[part] = LinearStitch.of(weight=means[part].new_zeros(dy, dx), bias=means[part])
    return StitchingLayer(source, target, pooling, maps["body"], maps.get("prefix"), means).eval()
