"""Conformance check for similarities."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hf_stitch.registry import registries
from hf_stitch.relative.similarities import Similarity
from hf_stitch.testing._moved import moved
from hf_stitch.testing._require import require, require_error
from hf_stitch.testing.conformance import conformance

_WIDTH, _ANCHORS, _ROWS = 6, 14, 9
_INVARIANCES = ("orthogonal", "scaling", "invertible", "permutation", "translation")


@conformance
def check_similarity(similarity: str | Similarity, **options: Any) -> Iterator[tuple[str, Callable[[], None]]]:
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

    Raises:
        AssertionError: The contract is violated; the message names the violation.

    Example:
        >>> check_similarity("lp", p=3)
    """

    @cache
    def built() -> Similarity:
        return registries.similarities.build(similarity, **options)

    def of(check: Callable[[Similarity, Tensor, Tensor], None]) -> Callable[[], None]:
        def run() -> None:
            generator = torch.Generator().manual_seed(0)
            rows = torch.randn(_ROWS, _WIDTH, generator=generator, dtype=torch.float64) + 1
            check(built(), rows, torch.randn(_ANCHORS, _WIDTH, generator=generator, dtype=torch.float64) + 1)

        return run

    yield "config", lambda: _check_config(built())
    yield "pure", of(_check_pure)
    yield "shapes", of(_check_shapes)
    yield "independent", of(_check_independent)
    yield "dtypes", of(_check_dtypes)
    yield "mismatches", of(_check_mismatches)
    yield "invariances", of(_check_invariances)
    yield "gradient", of(_check_gradient)


def _check_config(similarity: Similarity) -> None:
    described = json.loads(json.dumps(similarity.to_dict(), allow_nan=False))
    require(registries.similarities.build(described) == similarity, f"{described} must rebuild {similarity!r}")
    require_error(
        AttributeError, lambda: setattr(similarity, "name", "other"), "setting an attribute of a frozen config"
    )


@torch.no_grad()
def _check_pure(similarity: Similarity, x: Tensor, anchors: Tensor) -> None:
    before = x.clone(), anchors.clone()
    similarity(x, anchors)
    require(torch.equal(x, before[0]) and torch.equal(anchors, before[1]), "vectors and anchors must not be modified")


@torch.no_grad()
def _check_shapes(similarity: Similarity, x: Tensor, anchors: Tensor) -> None:
    for shaped in (x, x[0], x[:0], x.reshape(3, 3, -1)):
        shape, expected = similarity(shaped, anchors).shape, (*shaped.shape[:-1], len(anchors))
        require(shape == expected, f"vectors of shape {tuple(shaped.shape)} must give {expected}, gave {tuple(shape)}")


@torch.no_grad()
def _check_independent(similarity: Similarity, x: Tensor, anchors: Tensor) -> None:
    apart = torch.stack([similarity(row, anchors) for row in x])
    close = _close(similarity(x, anchors), apart)
    require(close, "the similarities of a vector must not depend on the other vectors")


@torch.no_grad()
def _check_dtypes(similarity: Similarity, x: Tensor, anchors: Tensor) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        narrow = similarity(x.to(dtype), anchors.to(dtype))
        require(narrow.dtype == dtype, f"vectors of {dtype} must give {dtype}, gave {narrow.dtype}")
        require(bool(narrow.isfinite().all()), f"vectors of {dtype} must give finite values")


@torch.no_grad()
def _check_mismatches(similarity: Similarity, x: Tensor, anchors: Tensor) -> None:
    require_error(ValueError, lambda: similarity(x[:, 1:], anchors), "vectors narrower than the anchors")
    require_error(ValueError, lambda: similarity(x.float(), anchors), "vectors of another dtype than the anchors")


@torch.no_grad()
def _check_invariances(similarity: Similarity, x: Tensor, anchors: Tensor) -> None:
    values, declared = similarity(x, anchors), similarity.invariances
    unknown = set(declared) - set(_INVARIANCES)
    require(not unknown, f"invariances must be among {_INVARIANCES}, got {sorted(unknown)}")
    for invariance in _INVARIANCES:
        for seed in range(2):
            # Vectors and anchors are transformed by the same map.
            both = moved(torch.cat([x, anchors]), invariance, seed)
            kept = _close(similarity(both[: len(x)], both[len(x) :]), values)
            if invariance in declared:
                require(kept, f"{similarity.name} declares invariance to {invariance}, but its values change")
            else:
                require(not kept, f"{similarity.name} is invariant to {invariance} but does not declare it")


def _check_gradient(similarity: Similarity, x: Tensor, anchors: Tensor) -> None:
    x.requires_grad_()
    agrees = torch.autograd.gradcheck(lambda rows: similarity(rows, anchors), (x,), raise_exception=False)
    require(agrees, "the gradient at the vectors must agree with finite differences")


def _close(values: Tensor, others: Tensor) -> bool:
    return bool((values - others).abs().max() <= 1e-9 * others.abs().max())
