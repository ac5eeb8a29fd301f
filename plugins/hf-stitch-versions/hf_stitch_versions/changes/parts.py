"""Parts of two versions of a network: blocks, embeddings, heads, paired by the names of their weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_stitch import Adapter
from hf_stitch.options import did_you_mean
from hf_stitch_versions.changes.weights import Weights, key_of, plain, tensors_of

MOST_DEEP = 3
"""Maximum number of wrappers around one network that the second network lacks."""

Reshaped = Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
"""Name of a weight in the first network -> its shapes in both."""


@dataclass(frozen=True)
class Part:
    """Block, or modules before, between or after blocks.

    Attributes:
        name: Name in the first network: of a module, or of a parameter of the root module.
        block: Whether it is a block.
        members: Names of its weights, in either network. Weights that are tied in both belong to one part.
        weights: Members that both networks have in the same shape.
        modules: Names in the first network of the largest modules with weights of this part only -> names in the
            second network. Several modules if weights are tied.
        loose: The rest of its weights: parameters of modules that contain weights of several parts.
        whole: Whether the second network has all of its weights, in the same shapes, so that it can be exchanged.
        tied: Names in the first network of modules elsewhere that share a weight with it.
    """

    name: str
    block: bool
    members: tuple[str, ...]
    weights: tuple[str, ...]
    modules: Mapping[str, str]
    loose: tuple[str, ...]
    whole: bool
    tied: tuple[str, ...]


@dataclass(frozen=True)
class Pairing:
    """Common parts of two networks.

    Attributes:
        a: Weights of the first network.
        b: Weights of the second network, by the names of the first; its extra weights by names of the same form.
        parts: Common parts, in the order of their weights.
        missing: Weights of the first network only.
        extra: Weights of the second network only, by their original names.
        reshaped: Weights with different shapes, and both shapes.
        names: Name of a common weight in the first network, of any shape -> its name in the second.
    """

    a: Weights
    b: Weights
    parts: tuple[Part, ...]
    missing: tuple[str, ...]
    extra: tuple[str, ...]
    reshaped: Reshaped
    names: Mapping[str, str]


def pair(
    a: Adapter, b: Adapter, weights_a: Weights, weights_b: Weights, within: Collection[str] = ()
) -> Pairing:  # fmt: skip
    """Pair the weights of two networks by name and shape, also under an extra prefix (``bert.``), and group them.

    Args:
        a: The first network.
        b: The second network.
        weights_a: Weights of the first, from :func:`hf_stitch_versions.changes.weights.effective`.
        weights_b: Weights of the second.
        within: Names of parts to divide into their modules.

    Returns:
        The common parts, and the weights without a partner.

    Raises:
        ValueError: If few weights have a partner, or a name in ``within`` is not a part.
    """
    prefix_a, prefix_b, names, reshaped, renamed = named(weights_a, weights_b)
    (real_a, plain_a), (real_b, plain_b) = map(_places, (a, b))
    parts, blocks = [], blocks_of(a, weights_a)
    divided = _divided(weights_a, renamed, blocks)
    ties = Counter(map(key_of, weights_a.values()))
    if unknown := [name for name in within if name not in divided]:
        hint = did_you_mean(unknown[0], divided) or next(iter(divided))
        raise ValueError(f"within contains {unknown[0]!r}, which is not a part of the network; did you mean {hint!r}?")
    totals = Counter(module for name in weights_a for module in _around_weight(name))
    for name, members in _finer(divided, within):
        if not any(weight in names for weight in members):
            continue
        own_weights = [weight for weight in members if weight in weights_a]
        paired = tuple(weight for weight in own_weights if weight in names and weight not in reshaped)
        counts = Counter(module for weight in own_weights for module in _around_weight(weight))
        # modules without weights of other parts
        complete = {module for module, count in counts.items() if count == totals[module] and module in real_a}
        module_of = {w: next((x for x in _around_weight(w) if x in complete), "") for w in own_weights}
        modules = {real_a[x]: real_b.get(prefix_b + x.removeprefix(prefix_a), "") for x in module_of.values() if x}
        loose = tuple(weight for weight, place in module_of.items() if not place)
        ties_inside = Counter(key_of(weights_a[weight]) for weight in own_weights)
        untied = all(ties_inside[key] == ties[key] for key in (key_of(weights_a[weight]) for weight in loose))
        loose_fit = untied and all(weight in plain_a and names.get(weight) in plain_b for weight in loose)
        whole = len(paired) == len(own_weights) and all(modules.values()) and loose_fit
        tied = dict.fromkeys(
            weight.rpartition(".")[0] or weight
            for weight in own_weights if weight != name and not weight.startswith(f"{name}.")
        )  # fmt: skip
        parts.append(Part(name, name in blocks, tuple(members), paired, modules, loose, whole, tuple(tied)))
    return Pairing(
        weights_a, renamed, tuple(parts), tuple(name for name in weights_a if name not in names),
        tuple(name for name in weights_b if name not in {*names.values()}), reshaped, names,
    )  # fmt: skip


def _places(network: Adapter) -> tuple[dict[str, str], set[str]]:
    """Return the outermost module for each plain name, and the names of the tensors of a network."""
    modules: dict[str, str] = {}
    for name, _ in network.model.named_modules(remove_duplicate=False):
        modules.setdefault(plain(name), name)
    return modules, set(tensors_of(network.model))


def _around_weight(name: str) -> list[str]:
    """Return the modules around a weight, largest first."""
    segments = name.split(".")
    return [".".join(segments[:stop]) for stop in range(1, len(segments))]


def named(
    weights_a: Weights, weights_b: Weights
) -> tuple[str, str, dict[str, str], Reshaped, dict[str, Tensor]]:  # fmt: skip
    """Pair the weights of two networks by name, also under an extra prefix.

    Args:
        weights_a: Weights of the first network.
        weights_b: Weights of the second network.

    Returns:
        The prefixes of both; name of a weight in the first network -> its name in the second; both shapes of weights
        with different shapes; and all weights of the second network, by names in the form of the first.

    Raises:
        ValueError: If fewer than half of the weights have the same name and shape.
    """
    prefix_a, prefix_b = _prefixes(weights_a, weights_b)
    names = {prefix_a + name.removeprefix(prefix_b): name for name in weights_b if name.startswith(prefix_b)}
    names = {mine: theirs for mine, theirs in names.items() if mine in weights_a}
    reshaped = {
        mine: (tuple(weights_a[mine].shape), tuple(weights_b[theirs].shape))
        for mine, theirs in names.items() if weights_a[mine].shape != weights_b[theirs].shape
    }  # fmt: skip
    if 2 * (count := len(names) - len(reshaped)) < min(len(weights_a), len(weights_b)):
        example = next(iter(reshaped.items()), None)
        mismatch = f"; {example[0]} has shape {example[1][0]} against {example[1][1]}" if example else ""
        raise ValueError(
            f"expected versions of one network, but only {count} of {len(weights_a)} and {len(weights_b)} weights have "
            f"the same name and shape{mismatch}. Compare activations with hf_stitch.compare"
        )
    renamed = {mine: weights_b[theirs] for mine, theirs in names.items()}
    paired = {*names.values()}
    for name in (name_b for name_b in weights_b if name_b not in paired):
        like = prefix_a + name.removeprefix(prefix_b) if name.startswith(prefix_b) else name
        renamed[f"{name} (second)" if like in weights_a else like] = weights_b[name]
    return prefix_a, prefix_b, names, reshaped, renamed


def blocks_of(network: Adapter, weights: Weights) -> tuple[str, ...]:
    """Return the names of the blocks of a network: its cuts with weights, else the numbered modules of its stacks.

    Args:
        network: The network.
        weights: Its weights.

    Returns:
        Names without wrappers, in the order of their weights.
    """
    cuts = list[str]()
    with suppress(ValueError):  # a network without cuts
        cuts = [plain(network.module_name(layer)) for layer in network.layers]
    cuts = [cut for cut in cuts if any(name.startswith(f"{cut}.") for name in weights)]
    cuts = [cut for cut in cuts if sum(inner.startswith(f"{cut}.") for inner in cuts) < 2]
    blocks = [cut for cut in cuts if not any(cut.startswith(f"{inner}.") for inner in cuts)]
    numbered: dict[str, set[str]] = {}
    for name in weights:
        if not any(name.startswith(f"{block}.") for block in blocks):
            segments = name.split(".")
            if depth := next((i for i, segment in enumerate(segments[:-1]) if segment.isdigit()), 0):
                numbered.setdefault(".".join(segments[:depth]), set()).add(".".join(segments[: depth + 1]))
    blocks += [
        name for stack, names in numbered.items() if len(names) > 1 for name in names if not _around(stack, cuts)
    ]
    return tuple(sorted(blocks, key=_first(weights).__getitem__))


def _around(stack: str, blocks: Sequence[str]) -> bool:
    """Return whether a stack contains a block."""
    return any(block.startswith(f"{stack}.") for block in blocks)


def _first(weights: Weights) -> dict[str, int]:
    """Return the position of the first weight of each module."""
    positions: dict[str, int] = {}
    for position, name in enumerate(weights):
        while name := name.rpartition(".")[0]:
            positions.setdefault(name, position)
    return positions


def _divided(a: Weights, b: Weights, blocks: Sequence[str]) -> dict[str, list[str]]:
    """Group the weights of two networks into parts: name of a part -> names of its weights.

    Outside of blocks, a part is the largest module without a block inside. Weights that are tied in the first network
    and equal in the second belong to the same part.
    """
    parts: dict[str, list[str]] = {}
    owners: dict[tuple[int, torch.Size], list[tuple[str, str]]] = {}
    for name in dict.fromkeys((*a, *b)):
        part = next((block for block in blocks if name.startswith(f"{block}.")), "") or _outermost(name, blocks)
        if name in a:
            tied = owners.setdefault(key_of(a[name]), [])
            part = next((tied_part for tied_name, tied_part in tied if _equal(b.get(tied_name), b.get(name))), part)
            tied.append((name, part))
        parts.setdefault(part, []).append(name)
    return parts


def _equal(x: Tensor | None, y: Tensor | None) -> bool:
    """Return whether two weights are equal, or both are missing."""
    if x is None or y is None:
        return x is y
    return key_of(x) == key_of(y) or torch.equal(x, y.to(x.device))


def _finer(parts: Mapping[str, list[str]], within: Collection[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield parts and their weights, with the parts in ``within`` divided into their modules."""
    for part, members in parts.items():
        if part not in within:
            yield part, members
            continue
        children: dict[str, list[str]] = {}
        for name in members:
            in_module = name.startswith(f"{part}.")
            child = ".".join(name.split(".")[: part.count(".") + 2]) if in_module else name
            children.setdefault(child, []).append(name)
        yield from children.items()


def _outermost(name: str, blocks: Sequence[str]) -> str:
    """Return the largest module around a weight that does not contain a block; else the name of the weight."""
    segments = name.split(".")
    for stop in range(1, len(segments)):
        module = ".".join(segments[:stop])
        if not _around(module, blocks):
            return module
    return name


def _prefixes(a: Weights, b: Weights) -> tuple[str, str]:
    """Return the prefixes of both sides that give the most common names and shapes."""
    shapes = {name: value.shape for name, value in b.items()}

    def common(prefix_a: str, prefix_b: str) -> int:
        pairs = ((name, prefix_b + name.removeprefix(prefix_a)) for name in a if name.startswith(prefix_a))
        return sum(shapes.get(theirs) == a[name].shape for name, theirs in pairs)

    return max(
        ((prefix_a, prefix_b) for prefix_a in _leading(a) for prefix_b in _leading(b)),
        key=lambda prefixes: common(*prefixes),
    )


def _leading(weights: Weights) -> list[str]:
    """Return the prefixes of most names, the empty prefix first."""
    counts = Counter(
        ".".join(name.split(".")[:depth]) + "." for name in weights for depth in range(1, MOST_DEEP + 1)
        if name.count(".") >= depth
    )  # fmt: skip
    return ["", *(prefix for prefix, count in counts.items() if 2 * count > len(weights))]
