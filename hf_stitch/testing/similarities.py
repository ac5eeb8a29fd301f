"""Conformance check for similarities."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from hf_stitch.registry import registries
from hf_stitch.relative.similarities import Similarity
from hf_stitch.testing._moved import moved
from hf_stitch.testing._require import require, require_error

_WIDTH, _ANCHORS, _ROWS = 6, 14, 9
_INVARIANCES = ("orthogonal", "scaling", "invertible", "permutation", "translation")


def check_similarity(similarity: str | Similarity, **options: Any) -> None:
    """Check that a similarity satisfies the contract of ``Similarity``.

    The similarity is a frozen config that can be rebuilt from JSON. It accepts any leading dimensions, maps each vector
    independently, in its own dtype, and does not modify vectors or anchors. Declared invariances hold to 1e-9, and
    undeclared ones do not hold. Gradients with respect to the vectors agree with finite differences. Vectors and
    anchors of different widths or dtypes raise an error.

    Args:
        similarity: Name in the registry of similarities, or a registered similarity.
        **options: Options of the similarity, if given by name.

    Raises:
        AssertionError: The contract is violated; the message names the violation.

    Example:
        >>> check_similarity("lp", p=3)
    """
    built = registries.similarities.build(similarity, **options)
    described = json.loads(json.dumps(built.to_dict(), allow_nan=False))
    require(registries.similarities.build(described) == built, f"{described} must rebuild {built!r}")
    require_error(AttributeError, lambda: setattr(built, "name", "other"), "setting an attribute of a frozen config")
    generator = torch.Generator().manual_seed(0)
    x, anchors = (torch.randn(n, _WIDTH, generator=generator, dtype=torch.float64) + 1 for n in (_ROWS, _ANCHORS))
    _check_values(built, x, anchors)
    _check_invariances(built, x, anchors)
    agrees = torch.autograd.gradcheck(lambda rows: built(rows, anchors), (x.requires_grad_(),), raise_exception=False)
    require(agrees, "the gradient at the vectors must agree with finite differences")


@torch.no_grad()
def _check_values(similarity: Similarity, x: Tensor, anchors: Tensor) -> None:
    before = x.clone(), anchors.clone()
    values = similarity(x, anchors)
    require(torch.equal(x, before[0]) and torch.equal(anchors, before[1]), "vectors and anchors must not be modified")
    for shaped in (x[0], x[:0], x.reshape(3, 3, -1)):
        shape, expected = similarity(shaped, anchors).shape, (*shaped.shape[:-1], len(anchors))
        require(shape == expected, f"vectors of shape {tuple(shaped.shape)} must give {expected}, gave {tuple(shape)}")
    apart = torch.stack([similarity(row, anchors) for row in x])
    require(_close(values, apart), "the similarities of a vector must not depend on the other vectors")
    for dtype in (torch.float32, torch.bfloat16):
        narrow = similarity(x.to(dtype), anchors.to(dtype))
        require(narrow.dtype == dtype, f"vectors of {dtype} must give {dtype}, gave {narrow.dtype}")
        require(bool(narrow.isfinite().all()), f"vectors of {dtype} must give finite values")
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


def _close(values: Tensor, others: Tensor) -> bool:
    return bool((values - others).abs().max() <= 1e-9 * others.abs().max())
