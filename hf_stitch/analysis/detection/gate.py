"""What a detector must show at a layer before its figures count there."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MIN_AUROC = 0.8
"""AUROC that a detector must reach on coloured noise of the largest of :data:`DOSES`."""

FAR = 0.9
"""AUROC that it must reach on far samples."""

OWN = 0.05
"""How far the AUROC of the test samples, against those to which it was fitted, may lie from .5."""


def failed(controls: dict[str, NDArray[np.float64]], min_auroc: float) -> str:
    """Return why a detector is no evidence at a layer; empty if it is.

    ``controls`` are AUROCs with their intervals, ``(3,)``, as far as measured: ``noise``, ``far`` and ``train``.
    One that is NaN fails. The last fails only if its whole interval lies outside, so that few samples do not fail by
    chance.
    """
    if not min_auroc:
        return ""
    for name, least, what in (
        ("noise", min_auroc, "noise as large as the activations"), ("far", FAR, "far samples"),
    ):  # fmt: skip
        if name in controls and not (value := controls[name][0]) >= least:
            if np.isnan(value):
                return f"could not be tried on {what}"
            return f"tells {what} apart with an AUROC of {value:.3f} only (at least {least:g} is needed)"
    value, low, high = controls.get("train", (0.5, 0.5, 0.5))
    if np.isnan(value):
        return "could not be tried on the samples to which it was fitted"
    if low > 0.5 + OWN or high < 0.5 - OWN:
        return f"tells test samples from those to which it was fitted (AUROC {value:.2f})"
    return ""
