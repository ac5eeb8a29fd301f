"""Anchors that are nearly the same sample, of which one adds nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL.Image import Image, Resampling
from torch import Tensor

from hf_stitch.data import Samples
from hf_stitch.printing import warn

SIDE = 32
"""Width and height to which images are reduced for the comparison."""

FEWEST = 64
"""Minimum number of values of a sample: with fewer, different samples are often near each other."""

NEAR = 0.1
"""Samples are nearly the same if their distance is below this share of the median distance. On CIFAR-10 and
Fashion-MNIST, different images are further apart, and images that differ in one pixel are nearer."""

_ROWS = 512


def warn_of_near_duplicates(samples: Samples) -> None:
    """Warn if two anchors are nearly the same image or tensor.

    Images are compared as grey images of 32 x 32 pixels. Texts are not compared: equal ones have equal representations,
    which is an error later.
    """
    rows = _rows(samples)
    if rows is None or len(rows) < 3:
        return
    distances = [torch.cdist(part, rows) for part in rows.split(_ROWS)]
    median = distances[0].flatten()[:: max(1, distances[0].numel() // 100_000)].median()
    nearest = torch.cat([part.topk(2, dim=1, largest=False).values[:, 1] for part in distances])
    first = int(nearest.argmin())
    if not nearest[first] < NEAR * median:
        return
    others = torch.cdist(rows[first : first + 1], rows)[0]
    others[first] = torch.inf
    warn(
        f"anchors {samples.ids[first]!r} and {samples.ids[int(others.argmin())]!r} are nearly the same sample (their "
        f"distance is {float(nearest[first] / median):.1%} of the median): one of them adds hardly anything, choose "
        "another"
    )


def _rows(samples: Samples) -> Tensor | None:
    """Return one vector per sample; ``None`` if samples are texts, small, or differ in shape."""
    if samples.modality == "text":
        return None
    rows = [_values(sample) for batch in samples.batches(_ROWS) for sample in batch.samples]
    if len({row.shape for row in rows}) > 1 or rows[0].size < FEWEST:
        return None
    found = torch.from_numpy(np.stack(rows))
    return found if bool(found.isfinite().all()) else None


def _values(sample: Any) -> np.ndarray[Any, Any]:
    if isinstance(sample, Image):
        return np.asarray(sample.convert("RGB").convert("L").resize((SIDE, SIDE), Resampling.BOX), np.float32).ravel()
    values = np.asarray(sample.detach().cpu().float() if isinstance(sample, Tensor) else sample, np.float32).ravel()
    return values[:: max(1, values.size // SIDE**2)]
