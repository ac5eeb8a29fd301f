"""What any similarity must pass."""

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
    """Check that a similarity keeps the contract of ``Similarity``.

    It is a frozen config that survives JSON. It maps any leading dimensions, every vector by itself, in its own dtype,
    and leaves vectors and anchors as they are. The invariances that it declares hold to 1e-9, and of those that it does
    not declare none does. Gradients at the vectors agree with finite differences. Vectors and anchors of different
    widths or dtypes are refused.

    Args:
        similarity: A name in the registry of similarities, or a similarity that is in the registry.
        **options: Its options, with a name.

    Raises:
        AssertionError: It breaks the contract; the message says where.

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
    require(torch.equal(x, before[0]) and torch.equal(anchors, before[1]), "vectors and anchors must stay as they are")
    for shaped in (x[0], x[:0], x.reshape(3, 3, -1)):
        shape, expected = similarity(shaped, anchors).shape, (*shaped.shape[:-1], len(anchors))
        require(shape == expected, f"vectors of shape {tuple(shaped.shape)} must give {expected}, gave {tuple(shape)}")
    apart = torch.stack([similarity(row, anchors) for row in x])
    require(_close(values, apart), "a vector must have the same similarities whatever vectors come with it")
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
    require(not unknown, f"invariances must be of {_INVARIANCES}, got {sorted(unknown)} too")
    for invariance in _INVARIANCES:
        for seed in range(2):
            # The same map for vectors and anchors.
            both = moved(torch.cat([x, anchors]), invariance, seed)
            kept = _close(similarity(both[: len(x)], both[len(x) :]), values)
            if invariance in declared:
                require(kept, f"{similarity.name} says that {invariance} changes nothing, and it does")
            else:
                require(not kept, f"{similarity.name} does not declare that {invariance} changes nothing")


def _close(values: Tensor, others: Tensor) -> bool:
    return bool((values - others).abs().max() <= 1e-9 * others.abs().max())
