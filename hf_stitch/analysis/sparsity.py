"""How many entries does a stitch need?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from hf_stitch.analysis.curves import Curves, score_curves
from hf_stitch.artefacts.modeling import StitchedModel
from hf_stitch.stitches import MaskedStitch, Stitch, StitchingLayer, as_linear

THRESHOLD = 1e-4
"""Csiszárik et al. 2021, figure 8: entries of less magnitude become zero."""
SHARES = (0.0, 0.2, 0.4, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98)


def zero_share(layer: StitchingLayer) -> float:
    """The share of entries of the weights that are zero, over all maps of a stitch together; biases do not count.

    Raises:
        ValueError: If a map is not affine.
    """
    weights = [as_linear(getattr(layer, part)).weight for part in layer.parts]
    return sum(int((weight == 0).sum()) for weight in weights) / sum(weight.numel() for weight in weights)


def sparsify(layer: StitchingLayer, threshold: float | None = None, *, sparsity: float | None = None) -> StitchingLayer:
    """The stitch with its smallest entries at zero, where they stay in training (:class:`MaskedStitch`).

    Of each map the entries of the weight are pruned by magnitude; biases are kept.

    Args:
        layer: Of affine maps; it stays as it is.
        threshold: Entries of less magnitude become zero; default, without a sparsity: 1e-4.
        sparsity: Instead: this share of the entries of each map (rounded to a number of entries) becomes zero, the
            smallest first, entries that are zero already among them.

    Raises:
        ValueError: If both are given, the threshold is negative, the sparsity is not in [0, 1], or a map is not affine.

    Example:
        >>> from hf_stitch.representation import RepresentationSpec
        >>> from hf_stitch.stitches import LinearStitch
        >>> layer = StitchingLayer(RepresentationSpec("bd", 8), RepresentationSpec("bd", 8), "none", LinearStitch(8, 8))
        >>> zero_share(sparsify(layer, sparsity=0.75))
        0.75
    """
    if threshold is not None and sparsity is not None:
        raise ValueError(f"give a threshold or a sparsity, got both, {threshold} and {sparsity}")
    if threshold is not None and not threshold >= 0:
        raise ValueError(f"threshold must be >= 0, got {threshold}")
    if sparsity is not None and not 0 <= sparsity <= 1:
        raise ValueError(f"sparsity must be in [0, 1], got {sparsity}")

    def pruned(stitch: Stitch) -> MaskedStitch:
        linear = as_linear(stitch)
        magnitude = linear.weight.detach().abs()
        kept = (
            magnitude >= (THRESHOLD if threshold is None else threshold)
            if sparsity is None
            else _largest(magnitude, round((1 - sparsity) * magnitude.numel()))
        )
        return MaskedStitch.of(weight=linear.weight, mask=kept, bias=linear.bias)

    return layer.with_maps(pruned(layer.body), None if layer.prefix is None else pruned(layer.prefix))


def _largest(magnitude: Tensor, count: int) -> Tensor:
    """Mask of the largest entries; of equal ones, those that stand first."""
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
    """Relative accuracy against the share of entries at zero, pruned by magnitude without fitting again.

    Csiszárik et al. 2021, section 8, reach sparsity by an L1 penalty in training; this prunes what was found without.

    Args:
        stitched: The model, with a head that classifies.
        data: Held-out raw samples with labels.
        shares: Of entries at zero, each in [0, 1].
        stitches: Name of a curve -> a stitch of the model's place; default: the model's own, as ``stitched``.
        **options: Of :func:`score_curves`.
    """
    named = {"stitched": stitched.stitch} if stitches is None else stitches
    chosen = list(shares)
    families = {
        name: {sparsity: sparsify(layer, sparsity=sparsity) for sparsity in chosen} for name, layer in named.items()
    }
    return score_curves(stitched, data, "sparsity", families, **options)
