"""Stratified random splits."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Sequence

from hf_stitch.data.tables import Id


def chance(seed: int, id_: Id) -> bytes:
    """A pseudorandom sort key from a seed and an id."""
    return hashlib.blake2b(repr((operator.index(seed), id_)).encode(), digest_size=8).digest()


def apportion(count: int, sizes: Sequence[int]) -> list[int]:
    """Divide ``count`` in proportion to ``sizes``, by the largest-remainder method."""
    total = sum(sizes)
    quotas = [count * size // total for size in sizes]
    by_remainder = sorted(range(len(sizes)), key=lambda i: -(count * sizes[i] % total))
    for i in by_remainder[: count - sum(quotas)]:
        quotas[i] += 1
    return quotas
