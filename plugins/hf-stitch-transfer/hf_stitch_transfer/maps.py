"""The affine maps between two networks, from a stitch and from its inverse."""

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
"""What contains an affine map between two layers."""

Side = Literal["source", "target"]
Rcond = Annotated[float, Within(0, 1, above=True, below=True)]


@dataclass(frozen=True)
class Affine:
    """An affine map of vectors, in float64."""

    weight: Tensor  # (out, in)
    bias: Tensor  # (out,)

    @classmethod
    def of(cls, stitch: Stitching) -> Self:
        """Read the map of a stitch: of a stitching layer, that of positions or pooled vectors."""
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
            raise ValueError(f"the {body.title} of this stitch has values that are NaN or infinite")
        return cls(weight, bias)

    def inverse(self, rcond: float) -> Self:
        """Return the pseudo-inverse: the least vector whose image is nearest."""
        back = torch.linalg.pinv(self.weight, rtol=rcond)
        return type(self)(back, -back @ self.bias)


@checked
def maps_of(
    stitch: Stitching, to: Side, reverse: Stitching | None, rcond: Rcond | None, *, inverts: bool
) -> tuple[Affine | None, Affine | None]:
    """Return the map to the network that something is carried to, and the map back; one of them only if it is needed.

    The map from the target of the stitch to its source is ``reverse``, or the inverse with ``rcond``.
    """
    given = [name for name, value in (("reverse", reverse), ("rcond", rcond)) if value is not None]
    if len(given) > 1:
        raise ValueError("reverse is a map from the target to the source, and rcond makes one: give one of them")
    if given and not inverts:
        raise ValueError(f"{given[0]} has no effect: to the {to}, this needs the stitch alone")
    forward = Affine.of(stitch)
    backward = _backward(forward, reverse, rcond) if inverts else None
    return (forward, backward) if to == "target" else (backward, forward)


def _backward(forward: Affine, reverse: Stitching | None, rcond: float | None) -> Affine:
    if reverse is None:
        if rcond is None:
            raise ValueError(
                "this needs the map from the target to the source: pass rcond, with which the stitch is inverted "
                "(rcond=1e-3: singular values below that share of the largest count as zero), or a stitch fitted "
                "in that direction, reverse=…"
            )
        return forward.inverse(rcond)
    found, (to, of) = Affine.of(reverse), forward.weight.shape
    if found.weight.shape != (of, to):
        raise ValueError(
            f"the stitch maps {of} -> {to}, so that its reverse must map {to} -> {of}, got {found.weight.shape[1]} -> "
            f"{found.weight.shape[0]}"
        )
    return found
