"""Low-rank stitching layers, and relative accuracy as a function of rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from hf_stitch.adapters.cutting.forwards import evaluating
from hf_stitch.artefacts.modeling import StitchedModel
from hf_stitch.data import Samples
from hf_stitch.pairs import CollectedParts
from hf_stitch.registry import registries
from hf_stitch.scoring.halves import whole_target
from hf_stitch.statistics import Moments
from hf_stitch.statistics.spectrum import Spectrum
from hf_stitch.stitches import StitchingLayer
from hf_stitch.stitches.layer import paired_rows
from hf_stitch_studies.curves import Curves, score_curves


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
    """Fit least-squares stitching layers of several ranks in one pass over the data.

    Uses the matcher ``low_rank`` (Csiszárik et al. 2021, section 4.2) at the cuts of a stitched model. The maps of
    prefix tokens and of the remaining tokens have the same rank.

    Args:
        stitched: A stitched model that defines the cuts; only its source is used.
        train_data: Raw samples to fit on.
        ranks: Ranks from 1 to the maximum: the smaller width, or less if features of the source are linearly
            dependent. ``None`` uses the powers of 2 below the maximum, and the maximum.
        target: The whole target network; default as in :func:`hf_stitch.evaluate`.
        batch_size: Samples per forward.
        progress: Show a progress bar.

    Returns:
        Rank -> stitching layer.

    Raises:
        ValueError: If a rank is out of range, or the data have too few rows.

    Example:
        >>> import torch, hf_stitch
        >>> from torch.nn import Linear, ReLU, Sequential
        >>> _ = torch.manual_seed(0)
        >>> a, b = (
        ...     hf_stitch.load(Sequential(Linear(6, 4), ReLU(), Linear(4, 2)), example_inputs=torch.randn(2, 6))
        ...     for _ in range(2)
        ... )
        >>> data = torch.randn(60, 6)
        >>> stitched = hf_stitch.stitch(a, b, data, source_layer="0", target_layer="0", task=None, progress=False)
        >>> list(reduced_ranks(stitched, data, progress=False))
        [1, 2, 4]
    """
    stitch = stitched.stitch
    max_rank = min(stitch.widths)
    rank_list = None if ranks is None else list(ranks)
    if invalid_ranks := [rank for rank in rank_list or () if not 1 <= rank <= max_rank]:
        raise ValueError(f"ranks must be from 1 to {max_rank}, the smaller width of the stitch, got {invalid_ranks[0]}")
    moments_by_part: dict[str, Moments] = {}
    target_network, layer = whole_target(stitched, target), (stitched.config.target or {})["cut"]["layer"]
    for batch in Samples.of(train_data).batches(batch_size, "fitting" if progress else None):
        with evaluating(stitched):
            x = stitched.source(**stitched.source_inputs(stitched.preprocess(batch.samples)))
        y = target_network.encode(target_network.preprocess(batch.samples), layer)[layer]
        for part, (rows_x, rows_y) in paired_rows(x, y, stitch.pooling).items():
            if part not in moments_by_part:
                moments_by_part[part] = Moments(rows_x.shape[1], rows_y.shape[1], device=rows_y.device)
            moments_by_part[part].update(rows_x, rows_y)
    if rank_list is None:
        moments = moments_by_part.values()
        max_rank = min(min(Spectrum.of(part, sxy=part.sxy).rank, part.dy) for part in moments)
        rank_list = [2**i for i in range(max_rank.bit_length()) if 2**i < max_rank] + [max_rank]
    collected_parts = CollectedParts(stitch.source, stitch.target, stitch.pooling, moments_by_part)
    return {rank: registries.matchers.build("low_rank", rank=rank).match(collected_parts).only for rank in rank_list}


def rank_curve(
    stitched: StitchedModel, data: Any, stitches: Mapping[str, Mapping[Any, StitchingLayer]], **options: Any
) -> Curves:
    """Evaluate the relative accuracy of stitching layers as a function of their rank.

    Follows Csiszárik et al. (2021, section 7).

    Args:
        stitched: A stitched model at the same cuts with a classification head; only its source and target are used.
        data: Held-out raw samples with labels.
        stitches: Name of a curve -> rank -> stitching layer, e.g. from :func:`reduced_ranks` or trained bottlenecks.
        **options: Options of :func:`score_curves`.

    Returns:
        One curve per name, over the axis ``rank``.

    Example:
        >>> import torch, hf_stitch
        >>> from torch.nn import Flatten, Linear, ReLU, Sequential
        >>> a, b = (
        ...     hf_stitch.load(
        ...         Sequential(Flatten(), Linear(12, 4), ReLU(), Linear(4, 2)), example_inputs=torch.randn(2, 3, 2, 2)
        ...     )
        ...     for _ in range(2)
        ... )
        >>> images = hf_stitch.Samples.of(torch.randn(200, 3, 2, 2), label=[0, 1] * 100)
        >>> train_data, test = images.split(0.5)
        >>> stitched = hf_stitch.stitch(a, b, train_data, source_layer="1", target_layer="1", progress=False)
        >>> list(rank_curve(stitched, test, {"direct": reduced_ranks(stitched, train_data)})["direct"])
        [1, 2, 4]
    """
    return score_curves(stitched, data, "rank", stitches, **options)
