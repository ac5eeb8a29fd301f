"""Stitching layers made ready to be trained, and plain again."""

from __future__ import annotations

import copy

import torch
from torch.nn.utils import parametrizations, parametrize

from hf_stitch.stitches import IdentityStitch, LinearStitch, Stitch, StitchingLayer


def trainable(layer: StitchingLayer, orthogonal: bool) -> StitchingLayer:
    """A copy of a layer whose maps can be trained; an identity becomes the affine map that is one.

    Maps of half precision are trained in float32: steps smaller than the last bit of a weight would be lost.

    Args:
        layer: The layer.
        orthogonal: Keep the weight of affine maps orthogonal; to begin with, the nearest one that is (polar factor).

    Raises:
        ValueError: If a map has no parameters, or is to be orthogonal and is no affine map.
    """
    made = copy.deepcopy(layer)
    for part in made.parts:
        stitch: Stitch = getattr(made, part)
        if isinstance(stitch, IdentityStitch):
            stitch = _affine(stitch)
        if not any(parameter.is_floating_point() for parameter in stitch.parameters()):
            raise ValueError(
                f"the {part} of the stitch, {stitch}, has no parameters to train; start from another map, for example "
                "initial='lstsq'"
            )
        stitch.to(torch.promote_types(_dtype(stitch), torch.float32))
        if orthogonal:
            _make_orthogonal(part, stitch)
        setattr(made, part, stitch.requires_grad_(True))
    return made


def plain(layer: StitchingLayer, first: StitchingLayer) -> StitchingLayer:
    """A copy with plain weights, in the precision that the first one had."""
    made = copy.deepcopy(layer)
    for part in made.parts:
        stitch = getattr(made, part)
        if parametrize.is_parametrized(stitch):
            parametrize.remove_parametrizations(stitch, "weight", leave_parametrized=True)
        stitch.to(_dtype(getattr(first, part)))
    return made.eval()


def _dtype(stitch: Stitch) -> torch.dtype:
    """Of the weights; an identity has none and is float32."""
    return next((p.dtype for p in stitch.parameters() if p.is_floating_point()), torch.float32)


def _affine(identity: IdentityStitch) -> LinearStitch:
    affine = LinearStitch(identity.in_features, identity.out_features)
    affine.load_state_dict({"weight": identity.matrix(), "bias": torch.zeros(identity.out_features)})
    affine.fitted = dict(identity.fitted)
    return affine


def _make_orthogonal(part: str, stitch: Stitch) -> None:
    if type(stitch) is not LinearStitch:
        raise ValueError(f"only affine maps can be kept orthogonal, and the {part} is {stitch}; start from another map")
    with torch.no_grad():
        left, _, right = torch.linalg.svd(stitch.weight.double(), full_matrices=False)
        stitch.weight.copy_(left @ right)
    parametrizations.orthogonal(stitch, "weight", orthogonal_map="matrix_exp")
