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
    kept,
    moved,
    random,
    require,
    require_close,
    require_error,
    unknown_invariances,
)
from hf_stitch_testing.parts import conformance

SAMPLES, COUNT, KNOWN = 60, 12, 96


@conformance
def check_similarity(similarity: str | Similarity, **options: Any) -> _SimilarityKit:
    """Check that a similarity satisfies the contract of ``Similarity``.

    The parts:

    - ``config``: it is a frozen config that can be rebuilt from JSON.
    - ``pure``: it does not modify vectors or anchors.
    - ``shapes``: it accepts any leading dimensions, and no vectors at all.
    - ``independent``: it maps each vector independently.
    - ``dtypes``: float32 and bfloat16 give finite values of the same dtype.
    - ``mismatches``: vectors and anchors of different widths or dtypes raise a ``ValueError``.
    - ``invariances``: those that it declares hold to 1e-9, and others do not hold.
    - ``gradient``: gradients with respect to the vectors agree with finite differences.

    Args:
        similarity: Name in the registry of similarities, or a registered similarity.
        **options: Options of the similarity, if given by name.

    Example:
        >>> check_similarity("lp", p=3)
    """
    return _SimilarityKit(registries.similarities, similarity, options)


class _SimilarityKit(Configuration[Similarity]):
    def _cases(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(0)
        yield random(9, 6, seed=generator) + 1, random(14, 6, seed=generator) + 1

    def pure(self, x: Tensor, anchors: Tensor) -> None:
        with kept("vectors and anchors must not be modified", lambda: (x, anchors)):
            self.entry(x, anchors)

    def shapes(self, x: Tensor, anchors: Tensor) -> None:
        for shaped in (x, x[0], x[:0], x.reshape(3, 3, -1)):
            shape, right = self.entry(shaped, anchors).shape, (*shaped.shape[:-1], len(anchors))
            require(shape == right, f"vectors of shape {tuple(shaped.shape)} must give {right}, gave {tuple(shape)}")

    def independent(self, x: Tensor, anchors: Tensor) -> None:
        apart = torch.stack([self.entry(row, anchors) for row in x])
        message = "the similarities of a vector must not depend on the other vectors"
        require(_close(self.entry(x, anchors), apart), message)

    def dtypes(self, x: Tensor, anchors: Tensor) -> None:
        for dtype in (torch.float32, torch.bfloat16):
            narrow = self.entry(x.to(dtype), anchors.to(dtype))
            require(narrow.dtype == dtype, f"vectors of {dtype} must give {dtype}, gave {narrow.dtype}")
            require(bool(narrow.isfinite().all()), f"vectors of {dtype} must give finite values")

    def mismatches(self, x: Tensor, anchors: Tensor) -> None:
        require_error(ValueError, lambda: self.entry(x[:, 1:], anchors), "vectors narrower than the anchors")
        require_error(ValueError, lambda: self.entry(x.float(), anchors), "vectors of another dtype than the anchors")

    def invariances(self, x: Tensor, anchors: Tensor) -> None:
        values, declared, name = self.entry(x, anchors), self.entry.invariances, self.entry.name
        unknown_invariances(declared)
        for invariance in INVARIANCES:
            for seed in range(2):
                # Vectors and anchors are transformed by the same map.
                both = moved(torch.cat([x, anchors]), invariance, seed)
                holds = _close(self.entry(both[: len(x)], both[len(x) :]), values)
                if invariance in declared:
                    require(holds, f"{name} declares invariance to {invariance}, but its values change")
                else:
                    require(not holds, f"{name} is invariant to {invariance} but does not declare it")

    def gradient(self, x: Tensor, anchors: Tensor) -> None:
        x.requires_grad_()
        agrees = torch.autograd.gradcheck(lambda rows: self.entry(rows, anchors), (x,), raise_exception=False)
        require(agrees, "the gradient at the vectors must agree with finite differences")


def _close(values: Tensor, others: Tensor) -> bool:
    return bool((values - others).abs().max() <= 1e-9 * others.abs().max())


@conformance
def check_selection(selection: str | Selection, **options: Any) -> _SelectionKit:
    """Check that a selection of anchors satisfies the contract of ``Selection``.

    The parts:

    - ``config``: it is a frozen config that can be rebuilt from JSON.
    - ``distinct``: it returns as many different samples as it should.
    - ``repeatable``: it returns the same ones each time.
    - ``pure``: it modifies neither the features nor torch's random state.
    - ``needs``: it names what it needs and does not get, and declares nothing else.

    Args:
        selection: Name in the registry of anchors, or a registered selection.
        **options: Options of the selection, if given by name.

    Example:
        >>> check_selection("stratified", seed=1)
    """
    return _SelectionKit(registries.anchors, selection, options)


class _SelectionKit(Configuration[Selection]):
    def _cases(self) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """Yield numbers of anchors, and features, if the selection declares that it needs them."""
        for count in (1, COUNT, SAMPLES):
            yield count, {"features": random(SAMPLES, 5)} if self.entry.needs == "features" else {}

    def _select(self, count: int, given: dict[str, Tensor]) -> tuple[Any, ...]:
        labels = [place % 4 for place in range(SAMPLES)] if self.entry.needs == "labels" else None
        samples = Samples.of(random(SAMPLES, 3, seed=1).float(), label=labels)
        return select_anchors(samples, count, self.entry, **given).ids

    def distinct(self, count: int, given: dict[str, Tensor]) -> None:
        chosen = self._select(count, given)
        require(len(chosen) == len(set(chosen)) == count, f"{count} different samples were asked for, got {chosen}")

    def repeatable(self, count: int, given: dict[str, Tensor]) -> None:
        require(self._select(count, given) == self._select(count, given), f"two selections of {count} samples differ")

    def pure(self, count: int, given: dict[str, Tensor]) -> None:
        with (
            kept("the features must not be modified", given.values),
            kept("selecting must not change torch's random state"),
        ):
            self._select(count, given)

    def needs(self) -> None:
        needs = self.entry.needs
        require(needs in ("labels", "features", None), f"needs must be labels, features or None, got {needs!r}")
        if needs is not None:
            plain = Samples.of(random(SAMPLES, 3))
            word = "labels" if needs == "labels" else "representations"
            require_error(ValueError, lambda: select_anchors(plain, COUNT, self.entry), f"missing {needs}", word)


@conformance
def check_detector(detector: Detector) -> _DetectorKit:
    """Check that a detector satisfies the laws of :class:`~hf_stitch.detectors.Detector`, each in a part of its name.

    It is fitted to vectors, grids and texts with padding. ``config`` also tests that it is a frozen config that can be
    rebuilt from JSON.

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
        mean = torch.tensor([3.0, -3, 3, -3, 3])  # away from 0: far samples have another direction, too
        return [
            Representation(torch.randn(KNOWN, 5, generator=g) + mean, "bd"),
            Representation(torch.randn(KNOWN, 5, 3, 2, generator=g) + mean[:, None, None], "bchw"),
            Representation(torch.randn(KNOWN, 6, 5, generator=g) + mean, "bnd", mask),
        ]

    @cached_property
    def scorers(self) -> list[Scorer]:
        return [self.entry.fit([known], **self._needed(known)) for known in self.known]

    def _cases(self) -> Iterator[tuple[Representation, Scorer, Tensor]]:
        """Yield activations, a scorer that was fitted to them, and their scores."""
        for known, scorer in zip(self.known, self.scorers, strict=True):
            yield known, scorer, scorer.score(known)

    def _needed(self, known: Representation) -> dict[str, Any]:
        """Return labels and auxiliary activations, as far as the detector declares that it needs them."""
        needs: dict[str, Any] = {}
        if self.entry.needs_labels:
            needs["labels"] = [place % 3 for place in range(KNOWN)]
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

    def scores(self, known: Representation, scorer: Scorer, scores: Tensor) -> None:
        require(scores.shape == (KNOWN,), f"{KNOWN} samples must have {KNOWN} scores, got {tuple(scores.shape)}")
        require(scores.dtype == torch.float64, f"scores must be float64, got {scores.dtype}")
        require(bool(scores.isfinite().all()), "scores of finite activations must be finite")

    def independent(self, known: Representation, scorer: Scorer, scores: Tensor) -> None:
        apart = torch.cat([scorer.score(part) for part in _split(known)])  # detectors may be networks, in float32
        require_close(scores, apart, "the score of a sample must not depend on the other samples", 1e-5, 1e-5)

    def batches(self, known: Representation, scorer: Scorer, scores: Tensor) -> None:
        needed = self._needed(known)
        if "auxiliary" in needed:
            needed["auxiliary"] = _split(needed["auxiliary"][0])
        other = self.entry.fit(_split(known), **needed).score(known)
        message = f"fitted to the same activations in other batches, it scores {known.layout} differently"
        require_close(other, scores, message, 1e-8, 1e-10)

    def random_state(self) -> None:
        for known in self.known:
            with kept("fitting and scoring must not change torch's random state"):
                self.entry.fit([known], **self._needed(known)).score(known)

    def far(self, known: Representation, scorer: Scorer, scores: Tensor) -> None:
        far, near = scorer.score(_far(known, known.values)).median(), scores.median()
        require(bool(far > near), f"far samples must score higher than known ones ({near:.3g}), got {far:.3g}")

    def width(self, known: Representation, scorer: Scorer, scores: Tensor) -> None:
        wrong = Representation(random(2, 7, seed=1).float(), "bd")
        require_error(ValueError, lambda: scorer.score(wrong), "another width", "5", "7")


def _far(known: Representation, values: Tensor) -> Representation:
    return known.replace(values=9 + 3 * values)


def _split(known: Representation) -> list[Representation]:
    masks = [None] * 3 if known.mask is None else known.mask.split(32)
    return [known.replace(values=v, mask=m) for v, m in zip(known.values.split(32), masks, strict=True)]
