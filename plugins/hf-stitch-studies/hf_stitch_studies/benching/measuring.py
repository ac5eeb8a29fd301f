"""Measurements of the bench: probing accuracies, references, and distances from the references."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm.auto import tqdm

from hf_stitch.adapters.checks import layer_names
from hf_stitch.analysis.activations import Activations
from hf_stitch.options import Several, checked
from hf_stitch_studies.benching.correlation import BASELINES, RELIABILITY, Array, BenchGroup, Test
from hf_stitch_studies.benching.distances import DepthDistance, Distance, RankDistance, Represented, RepresentedPair
from hf_stitch_studies.benching.low_rank import LowRankBasis, default_ranks
from hf_stitch_studies.benching.probing import linear_probes
from hf_stitch_studies.benching.result import Bench

Key = tuple[str, int, int]
"""A representation: network, number of the layer, rank."""

Probed = dict[Key, tuple[float, float]]
"""Representation -> probing accuracy on the half that chooses references, and on the second half."""

Measured = tuple[BenchGroup, dict[str, Counter[str]]]
"""A group; and method -> reason of undefined distances -> number of pairs."""

STACK = 2**29
"""Bytes of training rows for probes that are trained side by side."""


@dataclass(frozen=True, eq=False)
class BenchData:
    """Activations of all networks for the same training and test samples, with one vector per sample and layer.

    Attributes:
        train: Network -> its activations of the training samples.
        test: Network -> its activations of the test samples.
        train_labels: Labels of the training samples.
        test_labels: Labels of the test samples.
        selection: Indices of the test samples that choose the references.
        scoring: Indices of the test samples for accuracies and distances.
        classes: Number of classes.

    Raises:
        ValueError: If there are fewer than three networks, they have different numbers of layers, or the two halves
            share a sample.
    """

    train: Mapping[str, Activations]
    test: Mapping[str, Activations]
    train_labels: Sequence[int]
    test_labels: Sequence[int]
    selection: Sequence[int]
    scoring: Sequence[int]
    classes: int

    def __post_init__(self) -> None:
        """Check the networks and the halves."""
        if len(self.train) < 3:
            raise ValueError(
                f"bench requires at least three networks, to leave out one at a time, got {len(self.train)}"
            )
        counts = {name: len(activations.layers) for name, activations in self.train.items()}
        if len(set(counts.values())) > 1:
            raise ValueError(
                "networks must have the same number of layers, because layers correspond by index, got "
                f"{', '.join(f'{name}: {count}' for name, count in counts.items())}; select layers with layers="
            )
        if shared := set(self.selection) & set(self.scoring):
            raise ValueError(f"selection and scoring must not share samples, got test sample {min(shared)} in both")

    @property
    def networks(self) -> tuple[str, ...]:
        """Names of the networks."""
        return tuple(self.train)

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers of the first network, which stand for the layers of all networks."""
        return tuple(self.train[self.networks[0]].layers)

    def rows(self, network: str, depth: int) -> tuple[Tensor, Tensor]:
        """Return the activations of a layer for the training and the test samples, each ``(n, d)``.

        Args:
            network: Name of the network.
            depth: Number of the layer.
        """
        name = self.train[network].layers[depth]
        return self.train[network].values[name], self.test[network].values[name]


class Bases:
    """Basis of every layer, computed from its training rows on first use.

    Args:
        data: The activations.
        ranks: Ranks of the approximations; ``None`` uses :func:`default_ranks`.
        approximated: Numbers of the layers to approximate.

    Raises:
        ValueError: If a rank exceeds the width of a layer, or the training samples are too few.
    """

    def __init__(self, data: BenchData, ranks: Iterable[int] | None, approximated: Iterable[int]) -> None:
        self.data, self.approximated = data, tuple(approximated)
        self._ranks = None if ranks is None else tuple(sorted(set(ranks), reverse=True))
        self._bases: dict[tuple[str, int], LowRankBasis] = {}
        for network in data.networks:
            for depth in self.approximated:
                width, name = self.width(network, depth), data.train[network].layers[depth]
                if wrong := [rank for rank in self._ranks or () if not 1 <= rank <= width]:
                    raise ValueError(
                        f"ranks must be from 1 to {width}, the width of layer {name!r} of {network}, got {wrong[0]}"
                    )

    def width(self, network: str, depth: int) -> int:
        """Return the width of a layer."""
        return self.data.rows(network, depth)[0].shape[1]

    def ranks(self, network: str, depth: int) -> tuple[int, ...]:
        """Return the ranks of a layer, from its width down; only its width without approximation."""
        width = self.width(network, depth)
        if depth not in self.approximated:
            return (width,)
        return default_ranks(width) if self._ranks is None else tuple(dict.fromkeys((width, *self._ranks)))

    def approximate(self, network: str, depth: int, rank: int, rows: Tensor) -> Tensor:
        """Approximate rows of a layer in the basis of the training rows, float64.

        Args:
            network: Name of the network.
            depth: Number of the layer.
            rank: The rank.
            rows: ``(n, d)``.
        """
        if rank == self.width(network, depth):
            return rows.double()
        if (network, depth) not in self._bases:
            self._bases[network, depth] = LowRankBasis.of(self.data.rows(network, depth)[0])
        return self._bases[network, depth].approximate(rows, rank)

    def represented(self, network: str, depth: int, rank: int) -> Represented:
        """Return a representation with its rows of the scoring half."""
        train, test = self.data.rows(network, depth)
        rows = self.approximate(network, depth, rank, test[list(self.data.scoring)])
        return Represented(network, depth, rank, partial(self.approximate, network, depth, rank, train), rows)


def probe(bases: Bases, *, seed: int, batch_size: int, epochs: int, progress: bool) -> Probed:
    """Train the probes of all representations on training rows, and score them on both halves of the test samples.

    Args:
        bases: The representations.
        seed: Seed of the probes.
        batch_size: Samples per step.
        epochs: Passes over the training samples.
        progress: Whether to show a progress bar.
    """
    data = bases.data
    labels = torch.as_tensor(data.test_labels)
    keys = [(n, depth, r) for depth in range(len(data.layers)) for n in data.networks for r in bases.ranks(n, depth)]
    accuracies = Probed()
    with tqdm(total=len(keys), desc="probing", unit="probe", delay=3, disable=None if progress else True) as bar:
        for some in _alike(keys, bases):
            train = [bases.approximate(n, depth, rank, data.rows(n, depth)[0]) for n, depth, rank in some]
            probes = linear_probes(
                train, data.train_labels, classes=data.classes, epochs=epochs, batch_size=batch_size, seed=seed
            )
            for key, trained in zip(some, probes, strict=True):
                network, depth, rank = key
                rows = bases.approximate(network, depth, rank, data.rows(network, depth)[1])
                right = (trained(rows.float()).argmax(1) == labels).double()
                selected, scored = (right[list(half)].mean().item() for half in (data.selection, data.scoring))
                accuracies[key] = selected, scored
            bar.update(len(some))
    return accuracies


def _alike(keys: Iterable[Key], bases: Bases) -> Iterator[list[Key]]:
    """Group representations of the same width, so that their probes train side by side within a memory limit."""
    rows = len(bases.data.train_labels)
    some: list[Key] = []
    for key in keys:
        width = bases.width(*key[:2])
        if some and (width != bases.width(*some[0][:2]) or (len(some) + 1) * rows * width * 4 > STACK):
            yield some
            some = []
        some.append(key)
    if some:
        yield some


def best_of_networks(
    networks: Sequence[str], eligible: NDArray[np.bool_], accuracy: Array, count: int
) -> tuple[int, ...]:
    """Choose references: the most accurate representation of each network, and the best of these, best first.

    Args:
        networks: Network of each of the m representations.
        eligible: (m,) bool, the candidates.
        accuracy: (m,) float64. The first of equal accuracies wins.
        count: Maximum number of references.

    Returns:
        The indices of the references.

    Example:
        >>> best_of_networks("aabb", np.ones(4, bool), np.array([0.5, 0.7, 0.9, 0.8]), 2)
        (2, 1)
    """
    ordered = [place for place in np.argsort(-accuracy, kind="stable") if eligible[place]]
    first: dict[str, int] = {}
    for place in ordered:
        first.setdefault(networks[place], int(place))
    return tuple(first.values())[:count]


def measure_group(
    bases: Bases,
    probed: Probed,
    test: Test,
    depths: Sequence[int],
    distances: Mapping[str, Distance],
    *,
    references: int,
    progress: bool,
) -> Measured:
    """Compute the distances between the references of one group and its representations.

    Args:
        bases: The representations.
        probed: Their probing accuracies.
        test: The test.
        depths: Numbers of the layers: one for sensitivity, all for specificity.
        distances: Method -> distance.
        references: Maximum number of references.
        progress: Whether to show a progress bar.

    Returns:
        The group; and method -> reason of undefined distances -> number of pairs.
    """
    data = bases.data
    keys = [(n, depth, r) for n in data.networks for depth in depths for r in _ranks(bases, test, n, depth)]
    chosen, accuracy = np.array([probed[key] for key in keys]).T
    networks = [network for network, _, _ in keys]
    full = np.array([rank == bases.width(network, depth) for network, depth, rank in keys])
    places = best_of_networks(networks, full, chosen, references)
    ends = [bases.represented(*keys[place]) for place in places]
    methods = {label: method for label, method in distances.items() if test in method.tests}
    matrices = {label: np.full((len(places), len(keys)), np.nan) for label in methods}
    undefined: dict[str, Counter[str]] = {label: Counter() for label in methods}
    name = data.layers[depths[0]] if test == "sensitivity" else ""
    for column, key in enumerate(
        tqdm(keys, f"{test} {name}".strip(), unit="representation", delay=3, disable=None if progress else True)
    ):
        compared = bases.represented(*key)
        for row, reference in enumerate(ends):
            if places[row] == column:
                continue  # the pair of a representation and itself is left out
            pair = RepresentedPair(reference, compared)
            for label, method in methods.items():
                try:
                    matrices[label][row, column] = method(pair)
                except (ValueError, torch.linalg.LinAlgError) as error:
                    undefined[label][str(error)] += 1
    matrices[RELIABILITY] = np.abs(chosen[list(places)][:, None] - chosen).round(12)
    return BenchGroup(
        test, name, tuple(networks), tuple(data.layers[depth] for _, depth, _ in keys),
        tuple(rank for _, _, rank in keys), chosen, accuracy, places, matrices,
    ), undefined  # fmt: skip


@checked
def measure(
    data: BenchData,
    methods: Mapping[str, Distance],
    *,
    sensitivity_layers: Sequence[str] | None = None,
    ranks: Iterable[int] | None = None,
    references: Several = 10,
    own_network: bool = False,
    probe_batch_size: int = 64,
    probe_epochs: int = 10,
    seed: int = 0,
    recipe: Mapping[str, Any] | None = None,
    progress: bool = False,
) -> Bench:
    """Run the bench on activations, as :func:`hf_stitch_studies.bench` does on networks.

    Args:
        data: The activations.
        methods: Method -> distance; both baselines and the reliability are added.
        sensitivity_layers: As in :func:`hf_stitch_studies.bench`.
        ranks: As in :func:`hf_stitch_studies.bench`.
        references: As in :func:`hf_stitch_studies.bench`.
        own_network: As in :func:`hf_stitch_studies.bench`.
        probe_batch_size: As in :func:`hf_stitch_studies.bench`.
        probe_epochs: As in :func:`hf_stitch_studies.bench`.
        seed: Seed of the probes.
        recipe: Record of the origin of the activations.
        progress: Whether to show progress bars.

    Returns:
        The result.

    Raises:
        ValueError: If ``methods`` is empty, ``references`` is below two, a layer or a rank does not exist, or a method
            is undefined for all pairs of a test.
    """
    if not methods:
        raise ValueError("bench requires at least one metric, matcher or distance, got none")
    distances = {**methods, **dict(zip(BASELINES, (DepthDistance(), RankDistance()), strict=True))}
    kinds = {**{label: distance.kind for label, distance in distances.items()}, RELIABILITY: "reliability"}
    approximated = layer_numbers(data.layers, sensitivity_layers)
    ranks = None if ranks is None else tuple(ranks)
    bases = Bases(data, ranks, approximated)
    probed = probe(bases, seed=seed, batch_size=probe_batch_size, epochs=probe_epochs, progress=progress)
    depths: list[tuple[Test, Sequence[int]]] = [("sensitivity", (depth,)) for depth in approximated]
    depths.append(("specificity", range(len(data.layers))))
    groups, undefined = [], {label: Counter[str]() for label in distances}
    for test, of_test in itertools.groupby(depths, key=lambda of: of[0]):
        measured = [
            measure_group(bases, probed, test, of_group, distances, references=references, progress=progress)
            for _, of_group in of_test
        ]
        groups += [group for group, _ in measured]
        for label, counts in _undefined(test, measured).items():
            undefined[label] += counts
    first = data.train[data.networks[0]]
    options = {
        "sensitivity_layers": [data.layers[depth] for depth in approximated], "ranks": ranks, "references": references,
        "probe": {"batch_size": probe_batch_size, "epochs": probe_epochs}, "seed": seed,
    }  # fmt: skip
    return Bench(
        tuple(groups), kinds, data.networks, data.layers,
        first.pooling or "mean", len(data.scoring), own_network,
        {label: dict(counts) for label, counts in undefined.items() if counts},
        {**(recipe or {}), **options},
    )  # fmt: skip


def _undefined(
    test: Test, measured: Iterable[tuple[BenchGroup, Mapping[str, Counter[str]]]]
) -> dict[str, Counter[str]]:
    """Count the reasons of undefined distances in a test, by method.

    Raises:
        ValueError: If a method is undefined for all pairs.
    """
    by_method: dict[str, Counter[str]] = {}
    pairs = 0
    for group, counts in measured:
        pairs += len(group.references) * (len(group.networks) - 1)
        for label, reasons in counts.items():
            by_method.setdefault(label, Counter()).update(reasons)
    for label, reasons in by_method.items():
        if reasons.total() == pairs:
            reason = reasons.most_common(1)[0][0]
            raise ValueError(f"{label} is undefined for all {pairs} pairs of the {test} test: {reason}")
    return by_method


def layer_numbers(layers: Sequence[str], names: Iterable[str] | None) -> tuple[int, ...]:
    """Return the numbers of the layers to approximate.

    Args:
        layers: Layers of the first network.
        names: Names of the layers to approximate; ``None`` selects all.

    Raises:
        TypeError: If ``names`` is a single name.
        ValueError: If a name is not among the layers, or occurs twice.
    """
    if names is None:
        return tuple(range(len(layers)))
    if not isinstance(names, str) and not (names := tuple(names)):
        return ()  # the test is left out
    chosen = layer_names("sensitivity_layers", names)
    if unknown := [name for name in chosen if name not in layers]:
        raise ValueError(f"sensitivity_layers must be among {', '.join(layers)}, got {unknown[0]!r}")
    return tuple(layers.index(name) for name in chosen)


def _ranks(bases: Bases, test: Test, network: str, depth: int) -> tuple[int, ...]:
    return bases.ranks(network, depth) if test == "sensitivity" else (bases.width(network, depth),)
