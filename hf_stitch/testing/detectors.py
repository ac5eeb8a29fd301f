"""Conformance check for detectors."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_stitch.detectors import Detector, Scorer
from hf_stitch.registry import registries
from hf_stitch.representation import Representation
from hf_stitch.testing.conformance import conformance
from hf_stitch.testing.kit import Configuration, random, require, require_error

SAMPLES = 96


@conformance
def check_detector(detector: Detector) -> _DetectorKit:
    """Check that a detector does what its class promises, for vectors, grids and texts with padding.

    The parts:

    - ``config``: it is a frozen config that can be rebuilt from JSON.
    - ``needs``: it says what is missing if it needs labels or auxiliary activations.
    - ``scores``: it gives one finite score in float64 per sample.
    - ``independent``: it scores each sample by itself.
    - ``batches``: two fits to the same activations are equal, whatever the batches.
    - ``random_state``: fitting and scoring leave the global random state as it was.
    - ``far``: samples that are far from the activations that it was fitted to score higher than these.
    - ``width``: activations of another width raise a ``ValueError`` with both widths.

    Args:
        detector: The detector.

    Example:
        >>> check_detector(registries.detectors.build("mahalanobis"))
    """
    return _DetectorKit(registries.detectors, detector)


class _Fit(NamedTuple):
    """A scorer, the activations that it was fitted to with their scores, and whether torch's random state stayed."""

    known: Representation
    scorer: Scorer
    scores: Tensor
    kept_random_state: bool


class _DetectorKit(Configuration[Detector]):
    @cached_property
    def known(self) -> list[Representation]:
        g = torch.Generator().manual_seed(0)
        mask = torch.arange(6) < torch.randint(2, 7, (SAMPLES, 1), generator=g)
        mean = torch.tensor([3.0, -3, 3, -3, 3])  # away from 0: far samples have another direction, too
        return [
            Representation(torch.randn(SAMPLES, 5, generator=g) + mean, "bd"),
            Representation(torch.randn(SAMPLES, 5, 3, 2, generator=g) + mean[:, None, None], "bchw"),
            Representation(torch.randn(SAMPLES, 6, 5, generator=g) + mean, "bnd", mask),
        ]

    @cached_property
    def fits(self) -> list[_Fit]:
        return list(map(self._fit, self.known))

    def _cases(self) -> Iterator[tuple[_Fit]]:
        for fit in self.fits:
            yield (fit,)

    def _fit(self, known: Representation) -> _Fit:
        before = torch.get_rng_state()
        scorer = self.entry.fit([known], **self._needed(known))
        scores = scorer.score(known)
        return _Fit(known, scorer, scores, torch.equal(before, torch.get_rng_state()))

    def _needed(self, known: Representation) -> dict[str, Any]:
        """Return labels and auxiliary activations, as far as the detector declares that it needs them."""
        needs: dict[str, Any] = {}
        if self.entry.needs_labels:
            needs["labels"] = [place % 3 for place in range(SAMPLES)]
        if self.entry.auxiliary != "none":
            needs["auxiliary"] = [_far(known, known.values.roll(1, 0))]
        return needs

    def needs(self) -> None:
        for known in self.known:
            needed = self._needed(known)
            for name in needed:
                rest = {other: value for other, value in needed.items() if other != name}
                word = "class" if name == "labels" else name
                require_error(ValueError, partial(self.entry.fit, [known], **rest), f"missing {name}", word)

    def scores(self, fit: _Fit) -> None:
        scores = fit.scores
        require(scores.shape == (SAMPLES,), f"{SAMPLES} samples must have {SAMPLES} scores, got {tuple(scores.shape)}")
        require(scores.dtype == torch.float64, f"scores must be float64, got {scores.dtype}")
        require(bool(scores.isfinite().all()), "scores of finite activations must be finite")

    def independent(self, fit: _Fit) -> None:
        apart = torch.cat([fit.scorer.score(part) for part in _split(fit.known)])
        close = torch.allclose(fit.scores, apart, rtol=1e-5, atol=1e-5)  # detectors may be networks, in float32
        require(close, "the score of a sample must not depend on the other samples")

    def batches(self, fit: _Fit) -> None:
        needed = self._needed(fit.known)
        if "auxiliary" in needed:
            needed["auxiliary"] = _split(needed["auxiliary"][0])
        other = self.entry.fit(_split(fit.known), **needed).score(fit.known)
        close = torch.allclose(other, fit.scores, rtol=1e-8, atol=1e-10)
        require(close, f"fitted to the same activations in other batches, it scores {fit.known.layout} differently")

    def random_state(self, fit: _Fit) -> None:
        require(fit.kept_random_state, "fitting and scoring must not change torch's random state")

    def far(self, fit: _Fit) -> None:
        far, near = fit.scorer.score(_far(fit.known, fit.known.values)).median(), fit.scores.median()
        require(bool(far > near), f"far samples must score higher than known ones ({near:.3g}), got {far:.3g}")

    def width(self, fit: _Fit) -> None:
        wrong = Representation(random(2, 7, seed=1).float(), "bd")
        require_error(ValueError, partial(fit.scorer.score, wrong), "another width", "5", "7")


def _far(known: Representation, values: Tensor) -> Representation:
    return known.replace(values=9 + 3 * values)


def _split(known: Representation) -> list[Representation]:
    masks = [None] * 3 if known.mask is None else known.mask.split(32)
    return [known.replace(values=v, mask=m) for v, m in zip(known.values.split(32), masks, strict=True)]
