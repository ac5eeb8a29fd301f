"""Conformance of detectors."""

from __future__ import annotations

from functools import partial

import torch

from hf_stitch.detectors import Detector, Scorer
from hf_stitch.registry import registries
from hf_stitch.representation import Representation
from hf_stitch.testing._require import require, require_error


def check_detector(detector: Detector) -> None:
    """Check that a detector does what its class promises.

    - It can be built again from its own record.
    - It scores each sample by itself, in float64, for vectors, grids and texts with padding.
    - Two fits to the same activations are equal, whatever the batches.
    - Samples that are far from the activations that it was fitted to score higher than these.
    - Activations of another width raise a ``ValueError`` with both widths.

    Args:
        detector: The detector.

    Raises:
        AssertionError: It does not conform; the message contains what was expected and what came.

    Example:
        >>> check_detector(registries.detectors.build("mahalanobis"))
    """
    again = registries.detectors.build(detector.to_dict())
    require(again == detector, f"built from its own record, it is {again}, not {detector}")
    g = torch.Generator().manual_seed(0)
    mask = torch.arange(6) < torch.randint(2, 7, (96, 1), generator=g)
    for known in (
        Representation(torch.randn(96, 5, generator=g), "bd"),
        Representation(torch.randn(96, 5, 3, 2, generator=g), "bchw"),
        Representation(torch.randn(96, 6, 5, generator=g), "bnd", mask),
    ):
        scorer, parts = detector.fit([known]), _split(known)
        _check_scores(scorer, known)
        other = detector.fit(parts).score(known)
        close = torch.allclose(other, scorer.score(known), rtol=1e-8, atol=1e-10)
        require(close, f"fitted to the same activations in other batches, it scores {known.layout} differently")
        far = scorer.score(known.replace(values=9 + 3 * known.values)).median()
        near = scorer.score(known).median()
        require(bool(far > near), f"far samples must score higher than known ones ({near:.3g}), got {far:.3g}")
        wrong = Representation(torch.randn(2, 7), "bd")
        message = require_error(ValueError, partial(scorer.score, wrong), "another width")
        require("5" in message and "7" in message, f"the error on a wrong width must name 5 and 7: {message}")


def _check_scores(scorer: Scorer, known: Representation) -> None:
    scores = scorer.score(known)
    require(scores.shape == (96,), f"96 samples must have 96 scores, got shape {tuple(scores.shape)}")
    require(scores.dtype == torch.float64, f"scores must be float64, got {scores.dtype}")
    require(bool(scores.isfinite().all()), "scores of finite activations must be finite")
    apart = torch.cat([scorer.score(part) for part in _split(known)])
    require(torch.allclose(scores, apart, rtol=1e-8), "the score of a sample must not depend on the other samples")


def _split(known: Representation) -> list[Representation]:
    masks = [None] * 3 if known.mask is None else known.mask.split(32)
    return [known.replace(values=v, mask=m) for v, m in zip(known.values.split(32), masks, strict=True)]
