"""Conversion of stitching layers to trainable copies and back."""

from __future__ import annotations

import copy

import torch
from torch.nn.utils import parametrizations, parametrize

from hf_stitch.stitches import IdentityStitch, LinearStitch, Stitch, StitchingLayer


def trainable(layer: StitchingLayer, orthogonal: bool) -> StitchingLayer:
    """Copy a stitching layer such that its maps can be trained; identity maps become affine maps.

    Maps in half precision are trained in float32, because updates smaller than the last bit of a weight would be lost.
    """
    made = copy.deepcopy(layer)
    for part in made.parts:
        stitch: Stitch = getattr(made, part)
        if isinstance(stitch, IdentityStitch):
            stitch = _affine(stitch)
        if not any(parameter.is_floating_point() for parameter in stitch.parameters()):
            raise ValueError(
                f"the {part} map of the stitch, {stitch}, has no parameters to train; start from another map, for "
                "example initial='lstsq'"
            )
        stitch.to(torch.promote_types(_dtype(stitch), torch.float32))
        if orthogonal:
            _make_orthogonal(part, stitch)
        setattr(made, part, stitch.requires_grad_(True))
    return made


def plain(layer: StitchingLayer, first: StitchingLayer) -> StitchingLayer:
    """Copy a trained layer to plain weights, without parametrizations."""
    made = copy.deepcopy(layer)
    for part in made.parts:
        stitch = getattr(made, part)
        if parametrize.is_parametrized(stitch):
            parametrize.remove_parametrizations(stitch, "weight", leave_parametrized=True)
        stitch.to(_dtype(getattr(first, part)))
    return made.eval()


def _dtype(stitch: Stitch) -> torch.dtype:
    """Dtype of the weights; float32 for an identity, which has none."""
    return next((p.dtype for p in stitch.parameters() if p.is_floating_point()), torch.float32)


def _affine(identity: IdentityStitch) -> LinearStitch:
    affine = LinearStitch(identity.in_features, identity.out_features)
    affine.load_state_dict({"weight": identity.matrix(), "bias": torch.zeros(identity.out_features)})
    affine.fitted = dict(identity.fitted)
    return affine


def _make_orthogonal(part: str, stitch: Stitch) -> None:
    if type(stitch) is not LinearStitch:
        raise ValueError(f"only affine maps can be kept orthogonal, but the {part} map is {stitch}")
    with torch.no_grad():
        left, _, right = torch.linalg.svd(stitch.weight.double(), full_matrices=False)
        stitch.weight.copy_(left @ right)
    parametrizations.orthogonal(stitch, "weight", orthogonal_map="matrix_exp")
