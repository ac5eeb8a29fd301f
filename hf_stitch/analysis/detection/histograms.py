"""Histograms of the scores of a detector, of stitched activations beside the target's own."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
BINS = 30
"""Bins of a histogram. The first and the last are open: they count everything beyond."""


def binned(strange: Array, own: Array) -> dict[str, Array]:
    """Count scores in bins of equal width between the 1st and the 99th percentile of all.

    Returns ``edges``, ``(BINS + 1,)``, of which the first and the last are infinite; ``stitched`` and ``own``,
    ``(BINS,)`` counts, which add up to n and m.
    """
    low, high = np.percentile(np.concatenate([strange, own]), [1, 99])
    if low == high:  # nearly all scores are equal
        low, high = low - 0.5, high + 0.5
    edges = np.array([-np.inf, *np.linspace(low, high, BINS - 1), np.inf])
    counts = {
        name: np.histogram(values, edges)[0].astype(float) for name, values in (("stitched", strange), ("own", own))
    }
    return {"edges": edges, **counts}
