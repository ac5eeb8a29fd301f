"""Conformance checks for similarities, selections of anchors and detectors."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from hf_stitch.data import Samples
from hf_stitch.detectors import Detector, Scorer
from hf_stitch.registry import registries
from hf_stitch.relative import Selection, select_anchors
from hf_stitch.relative.similarities import Similarity
from hf_stitch.representation import Representation
from hf_stitch_testing.kit import (
    INVARIANCES,
    Configuration,
    random,
    require,
    require_close,
    require_error,
    transform,
    unchanged,
    unknown_invariances,
)
from hf_stitch_testing.parts import conformance

SAMPLES, COUNT, KNOWN = 60, 12, 96
"""Numbers of samples to select from, of anchors, and of samples to fit a detector to."""


@conformance
def check_similarity(similarity: str | Similarity, **options: Any) -> _SimilarityKit:
    """Check that a similarity satisfies the contract of ``Similarity``.

    The parts:

    - ``config``: the similarity is a frozen config that can be rebuilt from JSON.
    - ``pure``: vectors and anchors are not modified.
    - ``shapes``: any leading dimensions are accepted, including zero vectors.
    - ``independent``: each vector is mapped independently.
    - ``dtypes``: float32 and bfloat16 return finite values of the same dtype.
    - ``mismatches``: vectors and anchors of different widths or dtypes raise a ``ValueError``.
    - ``invariances``: declared invariances hold to 1e-9, and all remaining ones do not hold.
    - ``gradient``: gradients with respect to the vectors agree with finite differences.

    Args:
        similarity: Name in the registry of similarities, or a registered similarity.
        **options: Options of the similarity, if passed by name.

    Example:
        >>> check_similarity("lp", p=3)
    """
    return _SimilarityKit(registries.similarities, similarity, options)


class _SimilarityKit(Configuration[Similarity]):
    def _cases(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(0)
        yield random(9, 6, seed=generator) + 1, random(14, 6, seed=generator) + 1

    def pure(self, x: Tensor, anchors: Tensor) -> None:
        with unchanged("vectors and anchors must not be modified", lambda: (x, anchors)):
            self.entry(x, anchors)

    def shapes(self, x: Tensor, anchors: Tensor) -> None:
        for inputs in (x, x[0], x[:0], x.reshape(3, 3, -1)):
            shape, expected = self.entry(inputs, anchors).shape, (*inputs.shape[:-1], len(anchors))
            require(shape == expected, f"output for shape {tuple(inputs.shape)} must be {expected}, got {tuple(shape)}")

    def independent(self, x: Tensor, anchors: Tensor) -> None:
        separate = torch.stack([self.entry(row, anchors) for row in x])
        message = "the similarities of a vector must not depend on the remaining vectors"
        require(_close(self.entry(x, anchors), separate), message)

    def dtypes(self, x: Tensor, anchors: Tensor) -> None:
        for dtype in (torch.float32, torch.bfloat16):
            outputs = self.entry(x.to(dtype), anchors.to(dtype))
            require(outputs.dtype == dtype, f"output for {dtype} must be {dtype}, got {outputs.dtype}")
            require(bool(outputs.isfinite().all()), f"output for {dtype} must be finite")

    def mismatches(self, x: Tensor, anchors: Tensor) -> None:
        require_error(ValueError, lambda: self.entry(x[:, 1:], anchors), "vectors narrower than the anchors")
        require_error(ValueError, lambda: self.entry(x.float(), anchors), "vectors and anchors of different dtypes")

    def invariances(self, x: Tensor, anchors: Tensor) -> None:
        values, declared, name = self.entry(x, anchors), self.entry.invariances, self.entry.name
        unknown_invariances(declared)
        for invariance in INVARIANCES:
            for seed in range(2):
                # The same map transforms vectors and anchors.
                rows = transform(torch.cat([x, anchors]), invariance, seed)
                holds = _close(self.entry(rows[: len(x)], rows[len(x) :]), values)
                if invariance in declared:
                    require(holds, f"{name} declares invariance to {invariance}, but its values change")
                else:
                    require(not holds, f"{name} is invariant to {invariance} but does not declare it")

    def gradient(self, x: Tensor, anchors: Tensor) -> None:
        x.requires_grad_()
        agrees = torch.autograd.gradcheck(lambda rows: self.entry(rows, anchors), (x,), raise_exception=False)
        require(agrees, "the gradient at the vectors must agree with finite differences")


def _close(values: Tensor, expected: Tensor) -> bool:
    return bool((values - expected).abs().max() <= 1e-9 * expected.abs().max())


@conformance
def check_selection(selection: str | Selection, **options: Any) -> _SelectionKit:
    """Check that a selection of anchors satisfies the contract of ``Selection``.

    The parts:

    - ``config``: the selection is a frozen config that can be rebuilt from JSON.
    - ``distinct``: the selection returns the requested number of different samples.
    - ``repeatable``: repeated selections are equal.
    - ``pure``: features and torch's random state are not modified.
    - ``needs``: ``needs`` is valid, and missing inputs raise an error that names them.

    Args:
        selection: Name in the registry of anchors, or a registered selection.
        **options: Options of the selection, if passed by name.

    Example:
        >>> check_selection("stratified", seed=1)
    """
    return _SelectionKit(registries.anchors, selection, options)


class _SelectionKit(Configuration[Selection]):
    def _cases(self) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """Yield numbers of anchors, with features if the selection declares that it requires them."""
        for count in (1, COUNT, SAMPLES):
            yield count, {"features": random(SAMPLES, 5)} if self.entry.needs == "features" else {}

    def _select(self, count: int, features: dict[str, Tensor]) -> tuple[Any, ...]:
        labels = [index % 4 for index in range(SAMPLES)] if self.entry.needs == "labels" else None
        samples = Samples.of(random(SAMPLES, 3, seed=1).float(), label=labels)
        return select_anchors(samples, count, self.entry, **features).ids

    def distinct(self, count: int, features: dict[str, Tensor]) -> None:
        ids = self._select(count, features)
        require(
            len(ids) == len(set(ids)) == count,
            f"the selection must return {count} different samples, got {ids}",
        )

    def repeatable(self, count: int, features: dict[str, Tensor]) -> None:
        require(
            self._select(count, features) == self._select(count, features),
            f"two selections of {count} samples must be equal",
        )

    def pure(self, count: int, features: dict[str, Tensor]) -> None:
        with (
            unchanged("the features must not be modified", features.values),
            unchanged("the selection must not change torch's random state"),
        ):
            self._select(count, features)

    def needs(self) -> None:
        needs = self.entry.needs
        require(needs in ("labels", "features", None), f"needs must be labels, features or None, got {needs!r}")
        if needs is not None:
            plain = Samples.of(random(SAMPLES, 3))
            word = "labels" if needs == "labels" else "representations"
            require_error(ValueError, lambda: select_anchors(plain, COUNT, self.entry), f"missing {needs}", word)


@conformance
def check_detector(detector: Detector) -> _DetectorKit:
    """Check that a detector satisfies the laws of :class:`~hf_stitch.detectors.Detector`; parts are named after laws.

    The parts fit the detector to vectors, grids and padded texts. ``config`` also tests that the detector is a frozen
    config that can be rebuilt from JSON.

    Args:
        detector: The detector.

    Example:
        >>> check_detector(registries.detectors.build("mahalanobis"))
    """
    return _DetectorKit(registries.detectors, detector)


class _DetectorKit(Configuration[Detector]):
    @cached_property
    def known(self) -> list[Representation]:
        g = torch.Generator().manual_seed(0)
        mask = torch.arange(6) < torch.randint(2, 7, (KNOWN, 1), generator=g)
        mean = torch.tensor([3.0, -3, 3, -3, 3])  # away from 0: far samples also differ in direction
        return [
            Representation(torch.randn(KNOWN, 5, generator=g) + mean, "bd"),
            Representation(torch.randn(KNOWN, 5, 3, 2, generator=g) + mean[:, None, None], "bchw"),
            Representation(torch.randn(KNOWN, 6, 5, generator=g) + mean, "bnd", mask),
        ]

    @cached_property
    def scorers(self) -> list[Scorer]:
        return [self.entry.fit([activations], **self._extra_inputs(activations)) for activations in self.known]

    def _cases(self) -> Iterator[tuple[Representation, Scorer, Tensor]]:
        """Yield activations, a scorer fitted to them, and their scores."""
        for activations, scorer in zip(self.known, self.scorers, strict=True):
            yield activations, scorer, scorer.score(activations)

    def _extra_inputs(self, activations: Representation) -> dict[str, Any]:
        """Return the labels and auxiliary activations that the detector requires."""
        extras: dict[str, Any] = {}
        if self.entry.needs_labels:
            extras["labels"] = [index % 3 for index in range(KNOWN)]
        if self.entry.auxiliary != "none":
            extras["auxiliary"] = [_far(activations, activations.values.roll(1, 0))]
        return extras

    def needs(self) -> None:
        for activations in self.known:
            extras = self._extra_inputs(activations)
            for name in extras:
                remaining = {key: value for key, value in extras.items() if key != name}
                word = "class" if name == "labels" else name
                require_error(ValueError, partial(self.entry.fit, [activations], **remaining), f"missing {name}", word)

    def scores(self, activations: Representation, scorer: Scorer, scores: Tensor) -> None:
        require(scores.shape == (KNOWN,), f"scores must have shape ({KNOWN},), got {tuple(scores.shape)}")
        require(scores.dtype == torch.float64, f"scores must be float64, got {scores.dtype}")
        require(bool(scores.isfinite().all()), "scores of finite activations must be finite")

    def independent(self, activations: Representation, scorer: Scorer, scores: Tensor) -> None:
        separate = torch.cat([scorer.score(part) for part in _split(activations)])
        # Detectors may be networks, in float32.
        require_close(scores, separate, "the score of a sample must not depend on the remaining samples", 1e-5, 1e-5)

    def batches(self, activations: Representation, scorer: Scorer, scores: Tensor) -> None:
        extras = self._extra_inputs(activations)
        if "auxiliary" in extras:
            extras["auxiliary"] = _split(extras["auxiliary"][0])
        rescored = self.entry.fit(_split(activations), **extras).score(activations)
        message = f"scores of {activations.layout} must not depend on the batches of the fit"
        require_close(rescored, scores, message, 1e-8, 1e-10)

    def random_state(self) -> None:
        for activations in self.known:
            with unchanged("fitting and scoring must not change torch's random state"):
                self.entry.fit([activations], **self._extra_inputs(activations)).score(activations)

    def far(self, activations: Representation, scorer: Scorer, scores: Tensor) -> None:
        far, near = scorer.score(_far(activations, activations.values)).median(), scores.median()
        require(bool(far > near), f"far samples must score higher than known samples ({near:.3g}), got {far:.3g}")

    def width(self, activations: Representation, scorer: Scorer, scores: Tensor) -> None:
        wider = Representation(random(2, 7, seed=1).float(), "bd")
        require_error(ValueError, lambda: scorer.score(wider), "a wrong width", "5", "7")


def _far(activations: Representation, values: Tensor) -> Representation:
    return activations.replace(values=9 + 3 * values)


def _split(activations: Representation) -> list[Representation]:
    masks = [None] * 3 if activations.mask is None else activations.mask.split(32)
    return [activations.replace(values=v, mask=m) for v, m in zip(activations.values.split(32), masks, strict=True)]
