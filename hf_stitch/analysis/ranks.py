"""How much rank does a stitch need?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from hf_stitch.adapters.cutting.modes import evaluating
from hf_stitch.analysis.curves import Curves, score_curves
from hf_stitch.analysis.scoring import whole_target
from hf_stitch.artefacts.modeling import StitchedModel
from hf_stitch.data import Samples
from hf_stitch.matchers.fitting import Statistics, fit_layer
from hf_stitch.matchers.low_rank import greatest_rank
from hf_stitch.registry import registries
from hf_stitch.statistics import Moments
from hf_stitch.stitches import StitchingLayer
from hf_stitch.stitches.layer import paired_rows


@torch.no_grad()
def reduced_ranks(
    stitched: StitchedModel,
    train_data: Any,
    ranks: Iterable[int] | None = None,
    *,
    target: Any = None,
    batch_size: int = 64,
    progress: bool = True,
) -> dict[int, StitchingLayer]:
    """The least-squares stitches of several ranks at the place of a stitched model, from one pass over the data.

    The matcher ``low_rank`` (Csiszárik et al. 2021, section 4.2); a map of prefix tokens has the same rank.

    Args:
        stitched: A stitched model of the place; only its source half is used.
        train_data: Raw samples to fit on.
        ranks: From 1 to the greatest, which is the smaller width, or less where features of the source depend on each
            other; default: the powers of 2 below the greatest, and it.
        target: The whole target; default: as in :func:`hf_stitch.evaluate`.
        batch_size: Samples per forward.
        progress: Show a progress bar.

    Returns:
        Rank -> stitching layer.

    Raises:
        ValueError: If a rank is out of range, or there are too few rows.
    """
    place = stitched.stitch
    most = min(place.widths)
    chosen = None if ranks is None else list(ranks)
    if wrong := [rank for rank in chosen or () if not 1 <= rank <= most]:
        raise ValueError(f"ranks must be from 1 to {most}, the smaller width of the stitch, got {wrong[0]}")
    statistics: Statistics = {}
    whole, layer = whole_target(stitched, target), (stitched.config.target or {})["cut"]["layer"]
    for batch in Samples.of(train_data).batches(batch_size, "fitting" if progress else None):
        with evaluating(stitched):
            x = stitched.source(**stitched.source_inputs(stitched.preprocess(batch.samples)))
        y = whole.encode(whole.preprocess(batch.samples), layer)[layer]
        for part, (of_x, of_y) in paired_rows(x, y, place.pooling).items():
            if part not in statistics:
                statistics[part] = Moments(of_x.shape[1], of_y.shape[1], device=of_y.device)
            statistics[part].update(of_x, of_y)
    if chosen is None:
        most = min(greatest_rank(moments) for moments in statistics.values())
        chosen = [2**i for i in range(most.bit_length()) if 2**i < most] + [most]
    return {
        rank: fit_layer(
            registries.matchers.build("low_rank", rank=rank), statistics, place.source, place.target, place.pooling
        )
        for rank in chosen
    }


def rank_curve(
    stitched: StitchedModel, data: Any, stitches: Mapping[str, Mapping[Any, StitchingLayer]], **options: Any
) -> Curves:
    """Relative accuracy against rank (Csiszárik et al. 2021, section 7).

    Args:
        stitched: A stitched model of the place, with a head that classifies; only its halves are used.
        data: Held-out raw samples with labels.
        stitches: Name of a curve -> rank -> stitching layer: those of :func:`reduced_ranks`, trained bottlenecks, ….
        **options: Of :func:`score_curves`.

    Example:
        >>> import torch, hf_stitch
        >>> from torch.nn import Flatten, Linear, ReLU, Sequential
        >>> a, b = (hf_stitch.load(Sequential(Flatten(), Linear(12, 4), ReLU(), Linear(4, 2)),
        ...                        example_inputs=torch.randn(2, 3, 2, 2)) for _ in range(2))
        >>> images = hf_stitch.Samples.of(torch.randn(200, 3, 2, 2), label=[0, 1] * 100)
        >>> train_data, test = images.split(0.5)
        >>> stitched = hf_stitch.stitch(a, b, train_data, source_layer="1", target_layer="1")
        >>> list(rank_curve(stitched, test, {"direct": reduced_ranks(stitched, train_data)})["direct"])
        [1, 2, 4]
    """
    return score_curves(stitched, data, "rank", stitches, **options)
