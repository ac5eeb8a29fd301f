"""Checks that samples are other ones than those to which something was fitted."""

from __future__ import annotations

from collections.abc import Collection

from hf_stitch.data import Samples
from hf_stitch.data.overlap import MOST_SHARED, ContentSketch


def check_far(far: Samples | None, others: Collection[Samples], *, detectors: Collection[str]) -> None:
    """Check that far samples are a control of detectors."""
    if far is None:
        return
    if not detectors:
        raise ValueError("far_data= is a control of detectors, but none are named: pass detectors=, or leave it out")
    share = max(ContentSketch.of(samples).share(far) or 0 for samples in others)
    if share > MOST_SHARED:
        raise ValueError(
            f"{share:.1%} of far_data are also in the data, from which detectors must tell them apart: pass samples "
            "unlike the data (noise, other motifs)"
        )
