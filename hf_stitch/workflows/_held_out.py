"""Checks that samples are other ones than those to which something was fitted."""

from __future__ import annotations

from collections.abc import Collection

from hf_stitch.data import Samples
from hf_stitch.data.overlap import ContentSketch

MOST_SHARED = 0.05
"""Maximum share of samples that are also among others, to which something was fitted; data sets have duplicates."""


def check_held_out(train: Samples, test: Samples) -> None:
    """Check that test samples are not training samples. Samples are recognised by their content."""
    share = ContentSketch.of(train).share(test) or 0
    if share > MOST_SHARED:
        raise ValueError(
            f"{share:.1%} of test_data are also in data, to which stitches and probes are fitted, so that scores are "
            "too good: pass other samples, or leave test_data out for a split"
        )


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
