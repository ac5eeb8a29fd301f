"""The checks that every fit from moments needs."""

from __future__ import annotations

from typing import Annotated

from hf_stitch.errors import see
from hf_stitch.options import Within
from hf_stitch.statistics import Moments
from hf_stitch.statistics.spectrum import EPS

Rcond = Annotated[float, Within(0, 1, below=True)] | None
"""Threshold on relative singular values; ``None`` for the default."""


def require(moments: Moments, rows: int, remedy: str = "give more rows") -> None:
    """Check that moments determine a fit: at least ``rows`` rows, and variation on both sides."""
    if moments.n < rows:
        raise ValueError(
            f"fitting {moments.dx} to {moments.dy} features needs at least {rows} rows, got {moments.n}; {remedy}"
            + see("too-few-samples")
        )
    for side, scatter, mean in (("x", moments.sxx, moments.mean_x), ("y", moments.syy, moments.mean_y)):
        # Equal rows may have a small variance, because their mean is rounded.
        if scatter.trace() <= moments.n * (8 * EPS * mean.norm()) ** 2:
            raise ValueError(f"all {moments.n} rows of {side} are equal: there is nothing to match; is the layer dead?")
