"""What least squares leaves at each layer of the target, as noise with which detectors are calibrated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hf_stitch.analysis.detection.noise import DONORS, donors_among
from hf_stitch.analysis.detection.recording import handed_over, received
from hf_stitch.pairs import CollectedPair
from hf_stitch.registry import registries


@torch.no_grad()
def residuals(collected: CollectedPair) -> Mapping[str, Sequence[Tensor]]:
    """Return residuals of the best least-squares map into each layer of the target, of samples drawn by their ids.

    Those of a sample are ``(prefix tokens + positions, d)``. Layers for which least squares is undefined are left out.
    """
    pair, samples = collected.pair, collected.samples.a
    layers = registries.matchers.build("lstsq").match(collected).layers
    best = {
        lb: max(into, key=lambda cell: layers[cell].body.fitted["r2"])
        for lb in pair.layers_b
        if (into := [cell for cell in layers if cell[1] == lb])
    }
    donors = samples.select(donors_among(samples.ids, collected.run.seed))
    kept: dict[str, list[Tensor]] = {lb: [] for lb in best}
    for batch in donors.batches(DONORS // 4):
        ran = pair.run(batch)
        for lb, (la, _) in best.items():
            own, mapped = received(ran.y[lb], pair.pooling), layers[la, lb](ran.x[la])
            left = own.replace(values=handed_over(mapped, pair.pooling).values.to(own.values) - own.values)
            counts = torch.bincount(left.row_samples("none", prefix=True), minlength=left.batch).tolist()
            kept[lb] += left.rows("none", prefix=True).double().split(counts)
    return kept
