"""Measurements of the bench: train probes, choose references, and compute distances from the references."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
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
from hf_stitch_studies.benching.distances import BenchPair, BenchRepresentation, DepthDistance, Distance, RankDistance
from hf_stitch_studies.benching.low_rank import LowRankBasis, default_ranks
from hf_stitch_studies.benching.probing import linear_probes
from hf_stitch_studies.benching.result import Bench

Key = tuple[str, int, int]
"""A representation: network, index of the layer, rank."""

ProbeAccuracies = dict[Key, tuple[float, float]]
"""Representation -> probing accuracy on the selection half and on the scoring half of the test samples."""

GroupResult = tuple[BenchGroup, dict[str, Counter[str]]]
"""A group, and method -> reason for undefined distances -> number of pairs."""

STACK = 2**29
"""Maximum size of the training rows of probes that are trained in parallel, in bytes."""


@dataclass(frozen=True, eq=False)
class BenchData:
    """Activations of all networks for the same training and test samples, with one vector per sample and layer.

    Attributes:
        train: Network -> activations of the training samples.
        test: Network -> activations of the test samples.
        train_labels: Labels of the training samples.
        test_labels: Labels of the test samples.
        selection: Indices of the test samples used to choose references.
        scoring: Indices of the test samples used for accuracies and distances.
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
        """Layer names of the first network, also used for the corresponding layers of the rest."""
        return tuple(self.train[self.networks[0]].layers)

    def rows(self, network: str, depth: int) -> tuple[Tensor, Tensor]:
        """Return the activations of a layer for the training and the test samples, each ``(n, d)``.

        Args:
            network: Name of the network.
            depth: Index of the layer.
        """
        name = self.train[network].layers[depth]
        return self.train[network].values[name], self.test[network].values[name]


class Bases:
    """Bases of all layers, each computed from the training rows on first use.

    Args:
        data: The activations.
        ranks: Ranks of the approximations; ``None`` uses :func:`default_ranks`.
        approximated: Indices (depths) of the layers to approximate.

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
        """Return the ranks of a layer, from its width down; only the width if the layer is not approximated."""
        width = self.width(network, depth)
        if depth not in self.approximated:
            return (width,)
        return default_ranks(width) if self._ranks is None else tuple(dict.fromkeys((width, *self._ranks)))

    def approximate(self, network: str, depth: int, rank: int, rows: Tensor) -> Tensor:
        """Return the approximation of rows of a layer in the basis of its training rows, float64.

        Args:
            network: Name of the network.
            depth: Index of the layer.
            rank: The rank.
            rows: ``(n, d)``.
        """
        if rank == self.width(network, depth):
            return rows.double()
        if (network, depth) not in self._bases:
            self._bases[network, depth] = LowRankBasis.of(self.data.rows(network, depth)[0])
        return self._bases[network, depth].approximate(rows, rank)

    def representation(self, network: str, depth: int, rank: int) -> BenchRepresentation:
        """Return a representation with its rows on the scoring half."""
        train, test = self.data.rows(network, depth)
        rows = self.approximate(network, depth, rank, test[list(self.data.scoring)])
        return BenchRepresentation(network, depth, rank, partial(self.approximate, network, depth, rank, train), rows)


def probe(bases: Bases, *, seed: int, batch_size: int, epochs: int, progress: bool) -> ProbeAccuracies:
    """Train probes of all representations on training rows, and score them on both halves of the test samples.

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
    accuracies = ProbeAccuracies()
    with tqdm(total=len(keys), desc="probing", unit="probe", delay=3, disable=None if progress else True) as bar:
        for group in _group_by_width(keys, bases):
            train = [bases.approximate(name, depth, rank, data.rows(name, depth)[0]) for name, depth, rank in group]
            probes = linear_probes(
                train, data.train_labels, classes=data.classes, epochs=epochs, batch_size=batch_size, seed=seed
            )
            for key, classifier in zip(group, probes, strict=True):
                network, depth, rank = key
                rows = bases.approximate(network, depth, rank, data.rows(network, depth)[1])
                is_correct = (classifier(rows.float()).argmax(1) == labels).double()
                selection, scoring = (is_correct[list(half)].mean().item() for half in (data.selection, data.scoring))
                accuracies[key] = selection, scoring
            bar.update(len(group))
    return accuracies


def _group_by_width(keys: Iterable[Key], bases: Bases) -> Iterator[list[Key]]:
    """Yield groups of representations with the same width, to train their probes in parallel within ``STACK`` bytes."""
    rows = len(bases.data.train_labels)
    group: list[Key] = []
    for key in keys:
        width = bases.width(*key[:2])
        if group and (width != bases.width(*group[0][:2]) or (len(group) + 1) * rows * width * 4 > STACK):
            yield group
            group = []
        group.append(key)
    if group:
        yield group


def best_of_networks(
    networks: Sequence[str], eligible: NDArray[np.bool_], accuracy: Array, count: int
) -> tuple[int, ...]:
    """Choose references among the most accurate representations of each network, best first.

    Args:
        networks: Network of each of the m representations.
        eligible: (m,) bool, mask of the representations to choose from.
        accuracy: (m,) float64. Ties go to the first.
        count: Maximum number of references.

    Returns:
        The indices of the references.

    Example:
        >>> best_of_networks("aabb", np.ones(4, bool), np.array([0.5, 0.7, 0.9, 0.8]), 2)
        (2, 1)
    """
    ordered = [index for index in np.argsort(-accuracy, kind="stable") if eligible[index]]
    best: dict[str, int] = {}
    for index in ordered:
        best.setdefault(networks[index], int(index))
    return tuple(best.values())[:count]


def measure_group(
    bases: Bases,
    probe_accuracies: ProbeAccuracies,
    test: Test,
    depths: Sequence[int],
    distances: Mapping[str, Distance],
    *,
    references: int,
    progress: bool,
) -> GroupResult:
    """Compute the distances between the references of one group and its representations.

    Args:
        bases: The representations.
        probe_accuracies: Their probing accuracies.
        test: The test.
        depths: Indices of the layers: one for sensitivity, all for specificity.
        distances: Method -> distance.
        references: Maximum number of references.
        progress: Whether to show a progress bar.

    Returns:
        The group, and method -> reason for undefined distances -> number of pairs.
    """
    data = bases.data
    keys = [(name, depth, r) for name in data.networks for depth in depths for r in _ranks(bases, test, name, depth)]
    selection_accuracy, accuracy = np.array([probe_accuracies[key] for key in keys]).T
    networks = [network for network, _, _ in keys]
    is_whole = np.array([rank == bases.width(network, depth) for network, depth, rank in keys])
    indices = best_of_networks(networks, is_whole, selection_accuracy, references)
    reference_representations = [bases.representation(*keys[index]) for index in indices]
    methods = {label: method for label, method in distances.items() if test in method.tests}
    distances_by_method = {label: np.full((len(indices), len(keys)), np.nan) for label in methods}
    undefined: dict[str, Counter[str]] = {label: Counter() for label in methods}
    layer = data.layers[depths[0]] if test == "sensitivity" else ""
    for column, key in enumerate(
        tqdm(keys, f"{test} {layer}".strip(), unit="representation", delay=3, disable=None if progress else True)
    ):
        representation = bases.representation(*key)
        for row, reference in enumerate(reference_representations):
            if indices[row] == column:
                continue  # a representation is not compared with itself
            pair = BenchPair(reference, representation)
            for label, method in methods.items():
                try:
                    distances_by_method[label][row, column] = method(pair)
                except (ValueError, torch.linalg.LinAlgError) as error:
                    undefined[label][str(error)] += 1
    distances_by_method[RELIABILITY] = np.abs(selection_accuracy[list(indices)][:, None] - selection_accuracy).round(12)
    return BenchGroup(
        test, layer, tuple(networks), tuple(data.layers[depth] for _, depth, _ in keys),
        tuple(rank for _, _, rank in keys), selection_accuracy, accuracy, indices, distances_by_method,
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
    """Run the bench on activations; :func:`hf_stitch_studies.bench` runs it on networks.

    Args:
        data: The activations.
        methods: Method -> distance, in addition to both baselines and the reliability.
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
    accuracies = probe(bases, seed=seed, batch_size=probe_batch_size, epochs=probe_epochs, progress=progress)
    depths: list[tuple[Test, Sequence[int]]] = [("sensitivity", (depth,)) for depth in approximated]
    depths.append(("specificity", range(len(data.layers))))
    groups, undefined = [], {label: Counter[str]() for label in distances}
    for test, test_depths in itertools.groupby(depths, key=itemgetter(0)):
        group_results = [
            measure_group(bases, accuracies, test, group_depths, distances, references=references, progress=progress)
            for _, group_depths in test_depths
        ]
        groups += [group for group, _ in group_results]
        for label, counts in _count_undefined(test, group_results).items():
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


def _count_undefined(
    test: Test, group_results: Iterable[tuple[BenchGroup, Mapping[str, Counter[str]]]]
) -> dict[str, Counter[str]]:
    """Return method -> reason -> number of undefined pairs of a test.

    Raises:
        ValueError: If a method is undefined for all pairs.
    """
    totals: dict[str, Counter[str]] = {}
    pairs = 0
    for group, counts in group_results:
        pairs += len(group.references) * (len(group.networks) - 1)
        for label, reasons in counts.items():
            totals.setdefault(label, Counter()).update(reasons)
    for label, reasons in totals.items():
        if reasons.total() == pairs:
            reason = reasons.most_common(1)[0][0]
            raise ValueError(f"{label} is undefined for all {pairs} pairs of the {test} test: {reason}")
    return totals


def layer_numbers(layers: Sequence[str], names: Iterable[str] | None) -> tuple[int, ...]:
    """Return the indices of the layers to approximate.

    Args:
        layers: Layers of the first network.
        names: Layers to approximate; ``None`` uses all.

    Raises:
        TypeError: If ``names`` is a single name.
        ValueError: If a name is not among the layers, or occurs twice.
    """
    if names is None:
        return tuple(range(len(layers)))
    if not isinstance(names, str) and not (names := tuple(names)):
        return ()  # without a sensitivity test
    selected_layers = layer_names("sensitivity_layers", names)
    if unknown := [name for name in selected_layers if name not in layers]:
        raise ValueError(f"sensitivity_layers must be among {', '.join(layers)}, got {unknown[0]!r}")
    return tuple(layers.index(name) for name in selected_layers)


def _ranks(bases: Bases, test: Test, network: str, depth: int) -> tuple[int, ...]:
    return bases.ranks(network, depth) if test == "sensitivity" else (bases.width(network, depth),)
