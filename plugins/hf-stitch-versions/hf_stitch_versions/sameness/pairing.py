"""Which module of one network is which of the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hf_stitch_versions.changes.weights import dequantized
from hf_stitch_versions.recording import Event, Key
from hf_stitch_versions.sameness.distances import rows_of

PLACES = 1024
"""Number of random places of values that are compared, to see which values are alike."""

FAR = 0.5
"""Relative difference from which on values are not alike."""


@dataclass(frozen=True)
class Trace:
    """A call, without its values: what pairs it with one of another network."""

    key: Key
    kind: str
    size: int  # numbers in its first output; 0 if it has none
    sizes: frozenset[int]  # numbers in each of its outputs, also those of padding
    sketch: NDArray[np.float64]  # some numbers of its first output
    weights: tuple[float, ...]  # norms of its own weights, sorted


@dataclass(frozen=True)
class Pairing:
    """Calls of the first network -> calls of the second."""

    calls: Mapping[Key, Key]
    by_names: bool
    missing: tuple[str, ...] = ()  # modules of the first network without a partner
    extra: tuple[str, ...] = ()  # modules of the second network without a partner


def trace(event: Event, module: nn.Module | None, mask: Tensor | None) -> Trace:
    """Return what pairs a call: the size of its first output, a sketch of it, and the norms of its weights."""
    values = rows_of(next(iter(event.outputs.values())), mask) if event.outputs else torch.zeros(0)
    flat = values.flatten().cpu().nan_to_num()
    weights = (
        () if module is None else (float(dequantized(value).double().norm()) for value in module.parameters(False))
    )
    sizes = frozenset(value.numel() for value in event.outputs.values())
    return Trace(event.key, event.kind, flat.numel(), sizes, _sketch(flat), tuple(sorted(weights)))


def pair(one: Sequence[Trace], two: Sequence[Trace], *, sized: bool = False) -> Pairing:
    """Pair the calls of two networks: by names, up to a prefix, where most agree; else in order, by values and weights.

    A pair by values needs outputs of as many numbers that are alike, or the same weights; one by names needs an output
    of as many numbers if it is not certain which values are those of a module (``sized``).
    """
    names = {trace.key[0] for trace in one if trace.key[0]}, {trace.key[0] for trace in two if trace.key[0]}
    strip_one, strip_two = _prefixes(*names)
    places = {(_without(trace.key[0], strip_two), trace.key[1]): trace.key for trace in reversed(two)}
    named = {
        trace.key: place for trace in one
        if (place := places.get((_without(trace.key[0], strip_one), trace.key[1]))) is not None
    }  # fmt: skip
    by_names = 2 * len(named) > min(len(one), len(two))
    if sized:
        sizes = {trace.key: trace.sizes for trace in two}
        own = {trace.key: trace.sizes for trace in one}
        named = {mine: theirs for mine, theirs in named.items() if not mine[0] or own[mine] & sizes[theirs]}
    calls = named if by_names else _aligned(one, two)
    ends = one[-1], two[-1]  # the networks as wholes, also if they have other names inside of wrappers
    if all(end.key[0] == "" for end in ends) and ends[0].size == ends[1].size:
        calls = {a: b for a, b in calls.items() if b != ends[1].key} | {ends[0].key: ends[1].key}
    found = {key[0] for key in calls}, {key[0] for key in calls.values()}
    missing, extra = (
        tuple(dict.fromkeys(each.key[0] for each in side if each.key[0] not in paired))
        for side, paired in zip((one, two), found, strict=True)
    )
    return Pairing(calls, by_names, missing, extra)


def _without(name: str, prefix: str) -> str:
    """Return a name without a prefix. The whole network inside of which the prefix leads keeps a name of its own."""
    if name == prefix.rstrip("."):
        return ""
    return name.removeprefix(prefix) or "(whole)"


def _prefixes(one: set[str], two: set[str]) -> tuple[str, str]:
    """Return the prefix of the names of each network that the names of the other do not have."""
    most, best = len(one & two), ("", "")
    for swap, (short, long) in enumerate(((one, two), (two, one))):
        ends = {name.rpartition(".")[2] for name in short}
        counts = Counter(
            ".".join(parts[:cut]) + "." for name in long for parts in [name.split(".")] for cut in range(1, len(parts))
            if ".".join(parts[cut:]) in short and parts[-1] in ends
        )  # fmt: skip
        for prefix, count in counts.most_common(1):
            if count > most:
                most, best = count, (prefix, "") if swap else ("", prefix)
    return best


def _sketch(values: Tensor) -> NDArray[np.float64]:
    """Return values at random places, which are the same for all values of this size."""
    if values.numel() > PLACES:
        values = values[torch.from_numpy(np.random.default_rng(values.numel()).integers(0, values.numel(), PLACES))]
    return values.numpy()


def _aligned(one: Sequence[Trace], two: Sequence[Trace]) -> dict[Key, Key]:
    """Pair calls in their order, so that the sum of likenesses is the greatest."""
    likeness = np.array([[_likeness(a, b) for b in two] for a in one])
    best = np.zeros((len(one) + 1, len(two) + 1))
    for i in range(len(one)):
        with_pair = best[i, :-1] + likeness[i]
        best[i + 1, 1:] = np.maximum(with_pair, best[i, 1:])
        best[i + 1] = np.maximum.accumulate(best[i + 1])
    found, i, j = {}, len(one), len(two)
    while i and j:
        if best[i, j] == best[i - 1, j]:
            i -= 1
        elif best[i, j] == best[i, j - 1]:
            j -= 1
        else:
            i, j = i - 1, j - 1
            found[one[i].key] = two[j].key
    return found


def _likeness(a: Trace, b: Trace) -> float:
    """Return 0 for calls that cannot be a pair, and more the more they are alike."""
    if a.size != b.size or not a.size:
        return 0.0
    scale = float(np.linalg.norm(a.sketch))
    gap = float(np.linalg.norm(a.sketch - b.sketch)) / scale if scale else float(bool(b.sketch.any()))
    equal = bool(a.weights) and len(a.weights) == len(b.weights) and np.allclose(a.weights, b.weights, 1e-3)
    return (1 - gap if gap < FAR else 0.0) + float(equal)
