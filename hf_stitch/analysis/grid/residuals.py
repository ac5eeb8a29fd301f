"""What least squares leaves at each layer of the target, as noise with which detectors are calibrated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hf_stitch.analysis.detection.noise import DONORS, donors_among
from hf_stitch.analysis.detection.recording import handed_over, received
from hf_stitch.analysis.grid.measuring import Sides, run_both
from hf_stitch.data import Samples
from hf_stitch.matchers.fitting import PairMoments, fit_layer
from hf_stitch.registry import registries
from hf_stitch.stitches import StitchingLayer


@torch.no_grad()
def residuals(sides: Sides, moments: PairMoments, samples: Samples, seed: int) -> Mapping[str, Sequence[Tensor]]:
    """Compute residuals of the best least-squares map into each layer of the target.

    Args:
        sides: The networks.
        moments: Moments of all pairs of layers.
        samples: The samples of these moments, of which some are drawn by their ids.
        seed: Seed of the draw.

    Returns:
        Layer of the target -> ``(prefix tokens + positions, d)`` for each drawn sample. Layers for which least squares
        is undefined are left out.
    """
    maps = {lb: _best(sides, moments, lb) for lb in sides.layers_b}
    best = {lb: found for lb, found in maps.items() if found is not None}
    donors = samples.select(donors_among(samples.ids, seed))
    kept: dict[str, list[Tensor]] = {lb: [] for lb in best}
    for batch in donors.batches(DONORS // 4):
        ran = run_both(sides, batch, complete=False)
        for lb, (la, layer) in best.items():
            own = received(ran.y[lb], sides.pooling)
            left = own.replace(values=handed_over(layer(ran.x[la]), sides.pooling).values.to(own.values) - own.values)
            counts = torch.bincount(left.row_samples("none", prefix=True), minlength=left.batch).tolist()
            kept[lb] += left.rows("none", prefix=True).double().split(counts)
    return kept


def _best(sides: Sides, moments: PairMoments, lb: str) -> tuple[str, StitchingLayer] | None:
    """Return the layer of the source from which least squares explains most, with its map."""
    found = {}
    for la in sides.layers_a:
        try:
            specs = sides.source.spec(la), sides.target.spec(lb)
            found[la] = fit_layer(registries.matchers.build("lstsq"), moments.of(la, lb), *specs, sides.pooling)
        except (ValueError, torch.linalg.LinAlgError):
            continue
    return max(found.items(), key=lambda pair: pair[1].body.fitted["r2"], default=None)
