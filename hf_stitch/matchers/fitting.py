"""Fit a stitching layer between two networks on samples, with a closed-form matcher."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hf_stitch.adapters import Adapter
from hf_stitch.data import Batch, Samples, paired_batches
from hf_stitch.matchers import Matcher
from hf_stitch.representation import Pooling, Representation, RepresentationSpec
from hf_stitch.statistics import Moments
from hf_stitch.stitches import Stitch, StitchingLayer
from hf_stitch.stitches.layer import paired_rows, part_widths

Statistics = dict[str, Moments]
"""Moments by part of a stitching layer: ``body``, and ``prefix`` where the target has prefix tokens."""


@torch.no_grad()
def collect(
    source: Adapter,
    target: Adapter,
    pairs: Iterable[tuple[str, str]],
    samples: Samples,
    pooling: Pooling = "none",
    *,
    target_samples: Samples | None = None,
    batch_size: int = 64,
    progress: bool = True,
) -> dict[tuple[str, str], Statistics]:
    """Collect the moments of any number of pairs of layers in one pass over the data.

    Each network runs once per batch.

    Args:
        source: The first network.
        target: The second network.
        pairs: Pairs of layers (of the source, of the target).
        samples: Raw samples, the same for both networks.
        pooling: The pooling.
        target_samples: Samples for the second network, in the same order, if they differ.
        batch_size: Samples per forward pass.
        progress: Whether to show a progress bar.

    Returns:
        The moments of each pair, by part of the stitching layer.

    Raises:
        ValueError: Activations are NaN or infinite (the message names layer and sample), or rows do not correspond.
    """
    pairs = list(dict.fromkeys(pairs))
    layers_a, layers_b = list(dict.fromkeys(a for a, _ in pairs)), list(dict.fromkeys(b for _, b in pairs))
    found: dict[tuple[str, str], Statistics] = {pair: {} for pair in pairs}
    others = samples if target_samples is None else target_samples
    for batch, other in paired_batches(samples, others, batch_size, progress="fitting" if progress else None):
        x = source.encode(source.preprocess(batch.samples), layers_a)
        y = target.encode(target.preprocess(other.samples), layers_b)
        for side, representations in (("source", x), ("target", y)):
            for name, representation in representations.items():
                check_finite(representation, f"layer {name!r} of the {side}", batch)
        for pair in pairs:
            for part, (rows_x, rows_y) in paired_rows(x[pair[0]], y[pair[1]], pooling).items():
                if part not in found[pair]:
                    found[pair][part] = Moments(rows_x.shape[1], rows_y.shape[1], device=rows_y.device)
                found[pair][part].update(rows_x, rows_y)
    return found


def fit_layer(
    matcher: Matcher,
    statistics: Statistics,
    source: RepresentationSpec,
    target: RepresentationSpec,
    pooling: Pooling = "none",
) -> StitchingLayer:
    """Fit the stitching layer of a closed-form matcher from the moments of its parts.

    Args:
        matcher: A closed-form matcher.
        statistics: Moments by part of the stitching layer.
        source: Spec of the source representation.
        target: Spec of the target representation.
        pooling: The pooling.

    Returns:
        The stitching layer, in eval mode.

    Raises:
        ValueError: The matcher could not fit a part; the message names the part.
    """
    maps: dict[str, Stitch] = {}
    for part in part_widths(source, target, pooling):
        try:
            maps[part] = matcher.fit(statistics[part])  # type: ignore[attr-defined]
        except ValueError as error:
            what = "the map of positions" if part == "body" else "the map of prefix tokens (CLS, distillation)"
            raise ValueError(f"{what} from {source} to {target}: {error}") from error
    means = {part: moments.mean_y for part, moments in statistics.items()}
    return StitchingLayer(source, target, pooling, maps["body"], maps.get("prefix"), means).eval()


def check_finite(representation: Representation, what: str, batch: Batch) -> None:
    """Check the activations of a batch, except at padding.

    Args:
        representation: The activations.
        what: Their name in the message.
        batch: The samples.

    Raises:
        ValueError: Activations are NaN or infinite; the message names the first sample.
    """
    values = representation.values
    if bool(torch.isfinite(values).all()):
        return
    real = values if representation.mask is None else torch.where(representation.mask[..., None], values, 0)
    bad = ~torch.isfinite(real).flatten(1).all(1)
    if bool(bad.any()):
        sample = batch.ids[int(bad.nonzero()[0])]
        raise ValueError(
            f"{what} is NaN or infinite for {int(bad.sum())} samples of a batch of {len(batch.ids)}; the first is "
            f"{sample!r}"
        )
