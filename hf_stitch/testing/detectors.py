"""Conformance of detectors."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_stitch.detectors import Detector, Scorer
from hf_stitch.registry import registries
from hf_stitch.representation import Representation
from hf_stitch.testing._require import require, require_error

SAMPLES = 96


def check_detector(detector: Detector) -> None:
    """Check that a detector does what its class promises.

    - It can be built again from its own record.
    - It says what is missing if it needs labels or auxiliary activations, and needs nothing that it does not declare.
    - It scores each sample by itself, in float64, for vectors, grids and texts with padding.
    - Two fits to the same activations are equal, whatever the batches, and leave the global random state as it was.
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
    mask = torch.arange(6) < torch.randint(2, 7, (SAMPLES, 1), generator=g)
    mean = torch.tensor([3.0, -3, 3, -3, 3])  # away from 0: far samples have another direction, too
    for known in (
        Representation(torch.randn(SAMPLES, 5, generator=g) + mean, "bd"),
        Representation(torch.randn(SAMPLES, 5, 3, 2, generator=g) + mean[:, None, None], "bchw"),
        Representation(torch.randn(SAMPLES, 6, 5, generator=g) + mean, "bnd", mask),
    ):
        needs = _needs(detector, known)
        _check_needs(detector, known, needs)
        before = torch.get_rng_state()
        scorer, parts = detector.fit([known], **needs), _split(known)
        _check_scores(scorer, known)
        if "auxiliary" in needs:
            needs["auxiliary"] = _split(needs["auxiliary"][0])
        other = detector.fit(parts, **needs).score(known)
        close = torch.allclose(other, scorer.score(known), rtol=1e-8, atol=1e-10)
        require(close, f"fitted to the same activations in other batches, it scores {known.layout} differently")
        require(torch.equal(before, torch.get_rng_state()), "fitting and scoring must not change torch's random state")
        far = scorer.score(_far(known, known.values)).median()
        near = scorer.score(known).median()
        require(bool(far > near), f"far samples must score higher than known ones ({near:.3g}), got {far:.3g}")
        wrong = Representation(torch.randn(2, 7, generator=g), "bd")
        message = require_error(ValueError, partial(scorer.score, wrong), "another width")
        require("5" in message and "7" in message, f"the error on a wrong width must name 5 and 7: {message}")


def _needs(detector: Detector, known: Representation) -> dict[str, Any]:
    """Return labels and auxiliary activations, as far as the detector declares that it needs them."""
    needs: dict[str, Any] = {}
    if detector.needs_labels:
        needs["labels"] = [place % 3 for place in range(SAMPLES)]
    if detector.auxiliary != "none":
        needs["auxiliary"] = [_far(known, known.values.roll(1, 0))]
    return needs


def _check_needs(detector: Detector, known: Representation, needs: dict[str, Any]) -> None:
    for name in needs:
        rest = {other: value for other, value in needs.items() if other != name}
        message = require_error(ValueError, partial(detector.fit, [known], **rest), f"missing {name}")
        word = "class" if name == "labels" else name
        require(word in message, f"the error on missing {name} must name them: {message}")


def _far(known: Representation, values: Tensor) -> Representation:
    return known.replace(values=9 + 3 * values)


def _check_scores(scorer: Scorer, known: Representation) -> None:
    scores = scorer.score(known)
    require(scores.shape == (SAMPLES,), f"{SAMPLES} samples must have {SAMPLES} scores, got {tuple(scores.shape)}")
    require(scores.dtype == torch.float64, f"scores must be float64, got {scores.dtype}")
    require(bool(scores.isfinite().all()), "scores of finite activations must be finite")
    apart = torch.cat([scorer.score(part) for part in _split(known)])
    close = torch.allclose(scores, apart, rtol=1e-5, atol=1e-5)  # detectors may be networks, which run in float32
    require(close, "the score of a sample must not depend on the other samples")


def _split(known: Representation) -> list[Representation]:
    masks = [None] * 3 if known.mask is None else known.mask.split(32)
    return [known.replace(values=v, mask=m) for v, m in zip(known.values.split(32), masks, strict=True)]
