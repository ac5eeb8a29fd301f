"""Pruning of stitching layers by magnitude, and relative accuracy as a function of sparsity."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from hf_stitch.artefacts.modeling import StitchedModel
from hf_stitch.stitches import MaskedStitch, Stitch, StitchingLayer, as_linear
from hf_stitch_studies.curves import Curves, score_curves

THRESHOLD = 1e-4
"""Default threshold (Csiszárik et al. 2021, figure 8): entries of smaller magnitude are set to zero."""
SHARES = (0.0, 0.2, 0.4, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98)


def zero_share(layer: StitchingLayer) -> float:
    """Compute the share of zero entries in the weights of a stitching layer.

    Args:
        layer: A stitching layer with affine maps. The weights of all its maps are counted together, without biases.

    Returns:
        The share of zero entries, between 0 and 1.

    Raises:
        ValueError: If a map is not affine.

    Example:
        >>> from hf_stitch.representation import RepresentationSpec
        >>> from hf_stitch.stitches import LinearStitch
        >>> spec = RepresentationSpec("bd", 4)
        >>> zero_share(StitchingLayer(spec, spec, "none", LinearStitch.of(weight=torch.eye(4), bias=None)))
        0.75
    """
    weights = [as_linear(getattr(layer, part)).weight for part in layer.parts]
    return sum(int((weight == 0).sum()) for weight in weights) / sum(weight.numel() for weight in weights)


def sparsify(layer: StitchingLayer, threshold: float | None = None, *, sparsity: float | None = None) -> StitchingLayer:
    """Prune the weights of a stitching layer by magnitude.

    Pruned entries stay zero during training (:class:`MaskedStitch`). Biases are not pruned.

    Args:
        layer: A stitching layer with affine maps; it is not modified.
        threshold: Entries of smaller magnitude are set to zero. The default is 1e-4 if ``sparsity`` is not given.
        sparsity: Share of the entries of each map to set to zero, smallest magnitude first, rounded to a number of
            entries. Entries that are already zero count. Cannot be combined with ``threshold``.

    Returns:
        The pruned stitching layer.

    Raises:
        ValueError: If both ``threshold`` and ``sparsity`` are passed, the threshold is negative, the sparsity is not in
            [0, 1], or a map is not affine.

    Example:
        >>> from hf_stitch.representation import RepresentationSpec
        >>> from hf_stitch.stitches import LinearStitch
        >>> layer = StitchingLayer(RepresentationSpec("bd", 8), RepresentationSpec("bd", 8), "none", LinearStitch(8, 8))
        >>> zero_share(sparsify(layer, sparsity=0.75))
        0.75
    """
    if threshold is not None and sparsity is not None:
        raise ValueError(f"pass either threshold or sparsity, got both: {threshold} and {sparsity}")
    if threshold is not None and not threshold >= 0:
        raise ValueError(f"threshold must be >= 0, got {threshold}")
    if sparsity is not None and not 0 <= sparsity <= 1:
        raise ValueError(f"sparsity must be in [0, 1], got {sparsity}")

    def prune(stitch: Stitch) -> MaskedStitch:
        linear = as_linear(stitch)
        magnitude = linear.weight.detach().abs()
        mask = (
            magnitude >= (THRESHOLD if threshold is None else threshold)
            if sparsity is None
            else _largest_mask(magnitude, round((1 - sparsity) * magnitude.numel()))
        )
        return MaskedStitch.of(weight=linear.weight, mask=mask, bias=linear.bias)

    return layer.with_maps(prune(layer.body), None if layer.prefix is None else prune(layer.prefix))


def _largest_mask(magnitude: Tensor, count: int) -> Tensor:
    """Return the mask of the ``count`` largest entries; ties go to earlier entries."""
    order = magnitude.flatten().argsort(descending=True, stable=True)
    mask = torch.zeros(magnitude.numel(), dtype=torch.bool, device=magnitude.device)
    mask[order[:count]] = True
    return mask.view_as(magnitude)


def sparsity_curve(
    stitched: StitchedModel,
    data: Any,
    shares: Iterable[float] = SHARES,
    stitches: Mapping[str, StitchingLayer] | None = None,
    **options: Any,
) -> Curves:
    """Evaluate the relative accuracy of pruned stitching layers as a function of their sparsity.

    Weights are pruned by magnitude without refitting; Csiszárik et al. (2021, section 8) train with an L1 penalty
    instead.

    Args:
        stitched: A stitched model with a classification head.
        data: Held-out raw samples with labels.
        shares: Shares of entries to set to zero, each in [0, 1].
        stitches: Name of a curve -> stitching layer at the cuts of the model; ``None`` uses the stitching layer of the
            model, as the curve ``stitched``.
        **options: Options of :func:`score_curves`.

    Returns:
        One curve per stitching layer, over the axis ``sparsity``.

    Example:
        >>> import hf_stitch
        >>> from torch.nn import Flatten, Linear, ReLU, Sequential
        >>> a, b = (
        ...     hf_stitch.load(
        ...         Sequential(Flatten(), Linear(12, 4), ReLU(), Linear(4, 2)), example_inputs=torch.randn(2, 3, 2, 2)
        ...     )
        ...     for _ in range(2)
        ... )
        >>> images = hf_stitch.Samples.of(torch.randn(60, 3, 2, 2), label=[0, 1] * 30)
        >>> stitched = hf_stitch.stitch(a, b, images, source_layer="1", target_layer="1", progress=False)
        >>> curves = sparsity_curve(stitched, images, [0.0, 0.5], resamples=20, progress=False)
        >>> list(curves["stitched"])
        [0.0, 0.5]
    """
    layers = {"stitched": stitched.stitch} if stitches is None else stitches
    sparsities = list(shares)
    families = {
        name: {sparsity: sparsify(layer, sparsity=sparsity) for sparsity in sparsities}
        for name, layer in layers.items()
    }
    return score_curves(stitched, data, "sparsity", families, **options)
