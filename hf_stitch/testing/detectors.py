"""Conformance of detectors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from hf_stitch.detectors import Detector, Scorer
from hf_stitch.registry import registries
from hf_stitch.representation import Representation
from hf_stitch.testing._require import require, require_error
from hf_stitch.testing.conformance import conformance

SAMPLES = 96


@conformance
def check_detector(detector: Detector) -> Iterator[tuple[str, Callable[[], None]]]:
    """Check that a detector does what its class promises, for vectors, grids and texts with padding.

    The parts:

    - ``config``: it can be built again from its own record.
    - ``needs``: it says what is missing if it needs labels or auxiliary activations.
    - ``scores``: it gives one finite score in float64 per sample.
    - ``independent``: it scores each sample by itself.
    - ``batches``: two fits to the same activations are equal, whatever the batches.
    - ``random_state``: fitting and scoring leave the global random state as it was.
    - ``far``: samples that are far from the activations that it was fitted to score higher than these.
    - ``width``: activations of another width raise a ``ValueError`` with both widths.

    Args:
        detector: The detector.

    Raises:
        AssertionError: It does not conform; the message contains what was expected and what came.

    Example:
        >>> check_detector(registries.detectors.build("mahalanobis"))
    """

    @cache
    def fits() -> list[_Fit]:
        return [_fit(detector, known) for known in _activations()]

    def of_fits(check: Callable[[_Fit], None]) -> Callable[[], None]:
        def run() -> None:
            for fit in fits():
                check(fit)

        return run

    yield "config", lambda: _check_config(detector)
    yield "needs", lambda: _check_needs(detector)
    yield "scores", of_fits(_check_scores)
    yield "independent", of_fits(_check_independent)
    yield "batches", of_fits(lambda fit: _check_batches(detector, fit))
    yield "random_state", of_fits(_check_random_state)
    yield "far", of_fits(_check_far)
    yield "width", of_fits(_check_width)


@dataclass(frozen=True)
class _Fit:
    """A scorer, the activations that it was fitted to with their scores, and whether torch's random state stayed."""

    known: Representation
    scorer: Scorer
    scores: Tensor
    kept_random_state: bool


def _activations() -> list[Representation]:
    g = torch.Generator().manual_seed(0)
    mask = torch.arange(6) < torch.randint(2, 7, (SAMPLES, 1), generator=g)
    mean = torch.tensor([3.0, -3, 3, -3, 3])  # away from 0: far samples have another direction, too
    return [
        Representation(torch.randn(SAMPLES, 5, generator=g) + mean, "bd"),
        Representation(torch.randn(SAMPLES, 5, 3, 2, generator=g) + mean[:, None, None], "bchw"),
        Representation(torch.randn(SAMPLES, 6, 5, generator=g) + mean, "bnd", mask),
    ]


def _fit(detector: Detector, known: Representation) -> _Fit:
    before = torch.get_rng_state()
    scorer = detector.fit([known], **_needs(detector, known))
    scores = scorer.score(known)
    return _Fit(known, scorer, scores, torch.equal(before, torch.get_rng_state()))


def _check_config(detector: Detector) -> None:
    again = registries.detectors.build(detector.to_dict())
    require(again == detector, f"built from its own record, it is {again}, not {detector}")


def _needs(detector: Detector, known: Representation) -> dict[str, Any]:
    """Return labels and auxiliary activations, as far as the detector declares that it needs them."""
    needs: dict[str, Any] = {}
    if detector.needs_labels:
        needs["labels"] = [place % 3 for place in range(SAMPLES)]
    if detector.auxiliary != "none":
        needs["auxiliary"] = [_far(known, known.values.roll(1, 0))]
    return needs


def _check_needs(detector: Detector) -> None:
    for known in _activations():
        needs = _needs(detector, known)
        for name in needs:
            rest = {other: value for other, value in needs.items() if other != name}
            message = require_error(ValueError, partial(detector.fit, [known], **rest), f"missing {name}")
            word = "class" if name == "labels" else name
            require(word in message, f"the error on missing {name} must name them: {message}")


def _check_scores(fit: _Fit) -> None:
    scores = fit.scores
    require(scores.shape == (SAMPLES,), f"{SAMPLES} samples must have {SAMPLES} scores, got {tuple(scores.shape)}")
    require(scores.dtype == torch.float64, f"scores must be float64, got {scores.dtype}")
    require(bool(scores.isfinite().all()), "scores of finite activations must be finite")


def _check_independent(fit: _Fit) -> None:
    apart = torch.cat([fit.scorer.score(part) for part in _split(fit.known)])
    close = torch.allclose(fit.scores, apart, rtol=1e-5, atol=1e-5)  # detectors may be networks, which run in float32
    require(close, "the score of a sample must not depend on the other samples")


def _check_batches(detector: Detector, fit: _Fit) -> None:
    known, needs = fit.known, _needs(detector, fit.known)
    if "auxiliary" in needs:
        needs["auxiliary"] = _split(needs["auxiliary"][0])
    other = detector.fit(_split(known), **needs).score(known)
    close = torch.allclose(other, fit.scores, rtol=1e-8, atol=1e-10)
    require(close, f"fitted to the same activations in other batches, it scores {known.layout} differently")


def _check_random_state(fit: _Fit) -> None:
    require(fit.kept_random_state, "fitting and scoring must not change torch's random state")


def _check_far(fit: _Fit) -> None:
    far = fit.scorer.score(_far(fit.known, fit.known.values)).median()
    near = fit.scores.median()
    require(bool(far > near), f"far samples must score higher than known ones ({near:.3g}), got {far:.3g}")


def _check_width(fit: _Fit) -> None:
    wrong = Representation(torch.randn(2, 7, generator=torch.Generator().manual_seed(1)), "bd")
    message = require_error(ValueError, partial(fit.scorer.score, wrong), "another width")
    require("5" in message and "7" in message, f"the error on a wrong width must name 5 and 7: {message}")


def _far(known: Representation, values: Tensor) -> Representation:
    return known.replace(values=9 + 3 * values)


def _split(known: Representation) -> list[Representation]:
    masks = [None] * 3 if known.mask is None else known.mask.split(32)
    return [known.replace(values=v, mask=m) for v, m in zip(known.values.split(32), masks, strict=True)]
