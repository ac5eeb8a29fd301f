"""Affine maps between two networks, from a stitch and its inverse."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, Self, TypeAlias

import torch
from torch import Tensor

from hf_stitch.artefacts import StitchedModel, Stitcher
from hf_stitch.options import Within, checked
from hf_stitch.stitches import Stitch, StitchingLayer
from hf_stitch.stitches.linear import as_linear

Stitching: TypeAlias = Stitch | StitchingLayer | Stitcher | StitchedModel
"""Types that contain an affine map between two layers."""

Side = Literal["source", "target"]
Rcond = Annotated[float, Within(0, 1, above=True, below=True)]


@dataclass(frozen=True)
class Affine:
    """Affine map of vectors in float64."""

    weight: Tensor  # (out, in)
    bias: Tensor  # (out,)

    @classmethod
    def of(cls, stitch: Stitching) -> Self:
        """Return the map of a stitch; for a stitching layer, the map of positions or pooled vectors."""
        layer = stitch.stitch if isinstance(stitch, (Stitcher, StitchedModel)) else stitch
        body = layer.body if isinstance(layer, StitchingLayer) else layer
        if not isinstance(body, Stitch):
            raise TypeError(
                f"the stitch must be a Stitcher, a StitchedModel, a StitchingLayer or a Stitch, got "
                f"{type(stitch).__name__}"
            )
        linear = as_linear(body)
        weight = linear.weight.detach().double().cpu()
        bias = torch.zeros(len(weight)).double() if linear.bias is None else linear.bias.detach().double().cpu()
        if not bool(weight.isfinite().all() and bias.isfinite().all()):
            raise ValueError(f"the {body.title} of this stitch must not contain NaN or infinite values")
        return cls(weight, bias)

    def inverse(self, rcond: float) -> Self:
        """Return the pseudo-inverse: the minimum-norm vector with the nearest image."""
        back = torch.linalg.pinv(self.weight, rtol=rcond)
        return type(self)(back, -back @ self.bias)


@checked
def maps_of(
    stitch: Stitching, to: Side, reverse: Stitching | None, rcond: Rcond | None, *, inverts: bool
) -> tuple[Affine | None, Affine | None]:
    """Return the map to the destination of a transfer and the map back; the map target -> source only if ``inverts``.

    The map from the target of the stitch to its source is ``reverse``, or the inverse with ``rcond``.
    """
    option_names = [name for name, option in (("reverse", reverse), ("rcond", rcond)) if option is not None]
    if len(option_names) > 1:
        raise ValueError("`reverse` and `rcond` both define the map from the target to the source: pass only one")
    if option_names and not inverts:
        raise ValueError(f"`{option_names[0]}` is not used for a transfer to the {to}: remove it")
    forward = Affine.of(stitch)
    backward = _backward(forward, reverse, rcond) if inverts else None
    return (forward, backward) if to == "target" else (backward, forward)


def _backward(forward: Affine, reverse: Stitching | None, rcond: float | None) -> Affine:
    if reverse is None:
        if rcond is None:
            raise ValueError(
                "the transfer requires a map from the target to the source: pass rcond to invert the stitch "
                "(rcond=1e-3: singular values below that share of the largest count as zero), or a stitch fitted in "
                "that direction as reverse"
            )
        return forward.inverse(rcond)
    backward, (to, of) = Affine.of(reverse), forward.weight.shape
    if backward.weight.shape != (of, to):
        raise ValueError(
            f"reverse of a stitch {of} -> {to} must map {to} -> {of}, got {backward.weight.shape[1]} -> "
            f"{backward.weight.shape[0]}"
        )
    return backward
