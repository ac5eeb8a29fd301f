"""Conformance checks for similarities and selections of anchors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hf_stitch.data import Samples
from hf_stitch.registry import registries
from hf_stitch.relative import Selection, select_anchors
from hf_stitch.relative.similarities import Similarity
from hf_stitch.testing.conformance import conformance
from hf_stitch.testing.kit import (
    INVARIANCES,
    Configuration,
    kept,
    moved,
    random,
    require,
    require_error,
    unknown_invariances,
)


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

    @torch.no_grad()
    def pure(self, x: Tensor, anchors: Tensor) -> None:
        with kept("vectors and anchors must not be modified", lambda: (x, anchors)):
            self.entry(x, anchors)

    @torch.no_grad()
    def shapes(self, x: Tensor, anchors: Tensor) -> None:
        for shaped in (x, x[0], x[:0], x.reshape(3, 3, -1)):
            shape, right = self.entry(shaped, anchors).shape, (*shaped.shape[:-1], len(anchors))
            require(shape == right, f"vectors of shape {tuple(shaped.shape)} must give {right}, gave {tuple(shape)}")

    @torch.no_grad()
    def independent(self, x: Tensor, anchors: Tensor) -> None:
        apart = torch.stack([self.entry(row, anchors) for row in x])
        close = _close(self.entry(x, anchors), apart)
        require(close, "the similarities of a vector must not depend on the other vectors")

    @torch.no_grad()
    def dtypes(self, x: Tensor, anchors: Tensor) -> None:
        for dtype in (torch.float32, torch.bfloat16):
            narrow = self.entry(x.to(dtype), anchors.to(dtype))
            require(narrow.dtype == dtype, f"vectors of {dtype} must give {dtype}, gave {narrow.dtype}")
            require(bool(narrow.isfinite().all()), f"vectors of {dtype} must give finite values")

    @torch.no_grad()
    def mismatches(self, x: Tensor, anchors: Tensor) -> None:
        require_error(ValueError, lambda: self.entry(x[:, 1:], anchors), "vectors narrower than the anchors")
        require_error(ValueError, lambda: self.entry(x.float(), anchors), "vectors of another dtype than the anchors")

    @torch.no_grad()
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


SAMPLES, COUNT = 60, 12


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
        distinct = len(chosen) == len(set(chosen)) == count
        require(distinct, f"{count} different samples were asked for, got {chosen}")

    def repeatable(self, count: int, given: dict[str, Tensor]) -> None:
        same = self._select(count, given) == self._select(count, given)
        require(same, f"two selections of {count} samples differ")

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
