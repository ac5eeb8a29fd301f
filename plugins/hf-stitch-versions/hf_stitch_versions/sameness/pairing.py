"""Pair the modules of two networks."""

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
"""Number of randomly sampled values of an output that are compared."""

FAR = 0.5
"""Minimum relative difference of outputs that are not similar."""


@dataclass(frozen=True)
class Trace:
    """Summary of a call, used to pair it with a call of the second network."""

    key: Key
    kind: str
    size: int  # number of values in its first output; 0 without outputs
    sizes: frozenset[int]  # number of values in each of its outputs, padding included
    sketch: NDArray[np.float64]  # sampled values of its first output
    weights: tuple[float, ...]  # norms of its own weights, sorted


@dataclass(frozen=True)
class Pairing:
    """Calls of the first network -> calls of the second."""

    calls: Mapping[Key, Key]
    by_names: bool
    missing: tuple[str, ...] = ()  # modules of the first network without a partner
    extra: tuple[str, ...] = ()  # modules of the second network without a partner


def trace(event: Event, module: nn.Module | None, mask: Tensor | None) -> Trace:
    """Summarize a call: the size and a sketch of its first output, and the norms of its weights."""
    values = rows_of(next(iter(event.outputs.values())), mask) if event.outputs else torch.zeros(0)
    flat = values.flatten().cpu().nan_to_num()
    weights = (
        () if module is None else (float(dequantized(value).double().norm()) for value in module.parameters(False))
    )
    sizes = frozenset(value.numel() for value in event.outputs.values())
    return Trace(event.key, event.kind, flat.numel(), sizes, _sketch(flat), tuple(sorted(weights)))


def pair(one: Sequence[Trace], two: Sequence[Trace], *, sized: bool = False) -> Pairing:
    """Pair the calls of two networks by names, up to a prefix, if most agree; else in order, by values and weights.

    A pair by values requires outputs of equal size with similar values, or equal weights. With ``sized``, if the
    outputs of a module are uncertain, a pair by names requires an output of equal size as well.
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
        sizes_a = {trace.key: trace.sizes for trace in one}
        named = {mine: theirs for mine, theirs in named.items() if not mine[0] or sizes_a[mine] & sizes[theirs]}
    calls = named if by_names else _aligned(one, two)
    ends = one[-1], two[-1]  # the whole networks, also if wrappers change their names
    if all(end.key[0] == "" for end in ends) and ends[0].size == ends[1].size:
        calls = {a: b for a, b in calls.items() if b != ends[1].key} | {ends[0].key: ends[1].key}
    paired_names = {key[0] for key in calls}, {key[0] for key in calls.values()}
    missing, extra = (
        tuple(dict.fromkeys(call.key[0] for call in side if call.key[0] not in paired))
        for side, paired in zip((one, two), paired_names, strict=True)
    )
    return Pairing(calls, by_names, missing, extra)


def _without(name: str, prefix: str) -> str:
    """Return a name without a prefix; a wrapper outside of the prefix becomes ``(whole)``."""
    if name == prefix.rstrip("."):
        return ""
    return name.removeprefix(prefix) or "(whole)"


def _prefixes(one: set[str], two: set[str]) -> tuple[str, str]:
    """Return the prefix of each network that must be removed to match the names of the second network."""
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
    """Return values at random positions, which depend on the size only."""
    if values.numel() > PLACES:
        values = values[torch.from_numpy(np.random.default_rng(values.numel()).integers(0, values.numel(), PLACES))]
    return values.numpy()


def _aligned(one: Sequence[Trace], two: Sequence[Trace]) -> dict[Key, Key]:
    """Pair calls in order, with the largest sum of similarities."""
    likeness = np.array([[_likeness(a, b) for b in two] for a in one])
    best = np.zeros((len(one) + 1, len(two) + 1))
    for i in range(len(one)):
        with_pair = best[i, :-1] + likeness[i]
        best[i + 1, 1:] = np.maximum(with_pair, best[i, 1:])
        best[i + 1] = np.maximum.accumulate(best[i + 1])
    pairs, i, j = {}, len(one), len(two)
    while i and j:
        if best[i, j] == best[i - 1, j]:
            i -= 1
        elif best[i, j] == best[i, j - 1]:
            j -= 1
        else:
            i, j = i - 1, j - 1
            pairs[one[i].key] = two[j].key
    return pairs


def _likeness(a: Trace, b: Trace) -> float:
    """Return the similarity of two calls; 0 if they cannot be a pair."""
    if a.size != b.size or not a.size:
        return 0.0
    scale = float(np.linalg.norm(a.sketch))
    gap = float(np.linalg.norm(a.sketch - b.sketch)) / scale if scale else float(bool(b.sketch.any()))
    equal = bool(a.weights) and len(a.weights) == len(b.weights) and np.allclose(a.weights, b.weights, 1e-3)
    return (1 - gap if gap < FAR else 0.0) + float(equal)
