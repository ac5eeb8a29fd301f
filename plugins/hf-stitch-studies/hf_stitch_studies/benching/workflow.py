"""The function :func:`hf_stitch_studies.bench`: score how well distances predict functional differences of networks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from hf_stitch.adapters import Adapter, load
from hf_stitch.analysis.extraction import extract_activations
from hf_stitch.analysis.grid import StitchGrid, cell_name
from hf_stitch.data import Data, Samples
from hf_stitch.matchers import ClosedFormMatcher, Matcher
from hf_stitch.metrics import Metric
from hf_stitch.options import Count, Natural, Several, checked
from hf_stitch.pairs.pair import scored_task
from hf_stitch.provenance import versions
from hf_stitch.registry import registries
from hf_stitch.training.loop import DivergedError
from hf_stitch.workflows._checks import Named, Runs, check_held_out, named_layers, named_networks
from hf_stitch.workflows._grid import stitch_grid
from hf_stitch_studies.benching.correlation import BASELINES, TESTS, Test
from hf_stitch_studies.benching.distances import (
    BenchPair,
    BenchRepresentation,
    Distance,
    GivenDistance,
    metric_distances,
    structural_distances,
)
from hf_stitch_studies.benching.low_rank import Approximated, default_ranks
from hf_stitch_studies.benching.measuring import BenchData, layer_numbers, measure
from hf_stitch_studies.benching.result import Bench

Pooled = Literal["mean", "cls", "last", "flatten"]
"""Poolings that return one vector per sample."""


@checked
def bench(
    networks: Mapping[str, Runs] | Iterable[Runs],
    data: Data,
    *,
    test_data: Data | None = None,
    layers: Mapping[str, Iterable[str]] | Iterable[str] | None = None,
    metrics: Iterable[Named | Metric] = ("linear_cka:debiased=True", "procrustes"),
    matchers: Iterable[Named | Matcher] = (),
    functional: Iterable[Named | Matcher] = (),
    distances: Mapping[str, ArrayLike] | None = None,
    sensitivity_layers: Sequence[str] | None = None,
    ranks: Iterable[Count] | None = None,
    references: Several = 10,
    own_network: bool = False,
    pooling: Pooled = "mean",
    test_size: float | int = 0.2,
    functional_samples: Count | None = None,
    task: str = "auto",
    probe_batch_size: Count = 64,
    probe_epochs: Count = 10,
    batch_size: Count = 64,
    seed: Natural = 0,
    progress: bool = True,
) -> Bench:
    """Measure how well distances between representations predict their functional differences.

    The functional difference of two representations is the absolute difference of their probing accuracies
    (:func:`hf_stitch_studies.linear_probe`). A good distance ranks pairs of representations like the functional
    difference (Ding et al. 2021; Balogh and Jelasity 2025, section 5). The result contains Kendall's τ and Spearman's ρ
    between the distance and the functional difference in two tests:

    - *sensitivity*: one layer of all networks, approximated at several ranks in the PCA basis of the training rows. The
      score is the mean over layers. Within one network, all distances that grow as the rank falls have the same τ; only
      several networks distinguish them.
    - *specificity*: all layers of all networks.

    All representations are compared with a reference: the representation with the best probing accuracy on half of the
    test samples, among the unapproximated ones. Accuracies and distances use the second half. The spread over
    references uses the best representation of each network as the reference.

    Confidence intervals come from a jackknife over networks. They cover the choice of networks, not of samples. Two
    baselines ignore the activations: "depth only" (number of layers between two layers) and "rank only" (difference in
    rank, or in width where nothing is approximated). A method beats a baseline if the interval of the difference in τ
    lies above 0. A baseline that is constant in a test is undefined there. "probing, other half" is the difference in
    probing accuracy on the half that chose the reference. Its τ measures the reliability of the functional differences:
    if it is low, accuracies are mostly noise, and the bench needs more samples. A distance without noise may exceed it
    a little.

    Args:
        networks: Three or more networks with the same number of layers (each an adapter, a module, or a name for
            :func:`hf_stitch.load`), by name; a list names them ``0``, …. Layers with the same index correspond.
        data: Raw training samples with labels, for probes, bases and matchers, in any form that
            :meth:`hf_stitch.Samples.of` accepts.
        test_data: Separate held-out samples, instead of a split of ``data``.
        layers: Layers of all networks, or name -> layers. Default: all candidates of each network.
        metrics: Metrics: names in ``hf_stitch.registries.metrics``, or objects. The reference is the first argument of
            the metric; a similarity s becomes the distance 1 − s.
        matchers: Closed-form matchers, *structural*: the relative squared error on test rows of the stitch from a
            representation to the reference, fitted on the training rows. Rows are pooled.
        functional: Matchers, *functional*: 1 minus the relative accuracy of the stitched model from a layer to the
            reference (:func:`hf_stitch.stitch_grid`, with a map of all positions). The sensitivity test uses only
            closed-form linear matchers, fitted to approximated positions in the basis of their training samples.
        distances: Name -> (networks, layers, networks, layers) precomputed distances for the specificity test, from
            the reference to the compared layer. NaN where undefined.
        sensitivity_layers: Layers to approximate, by the names of the first network. Default: all; an empty list
            omits the test.
        ranks: Ranks of the approximations, in addition to the full rank. Default: as in the paper, by width (multiples
            of about an eighth of the width, then halves down to 1).
        references: Number of references, at least 2.
        own_network: Whether references are also compared with representations of the same network.
        pooling: Pooling of a representation to one vector per sample: ``mean``, ``cls``, ``last`` or ``flatten``.
        test_size: Held-out samples: a share (float) or a number (int).
        functional_samples: Number of training samples for ``functional``. Default: all; the paper uses 100.
        task: Task of the stitched models of ``functional``. ``"auto"`` uses the task of the target.
        probe_batch_size: Samples per step of a probe.
        probe_epochs: Passes of a probe over the training samples.
        batch_size: Number of samples per forward pass. Each network runs once, for all layers.
        seed: Seed of the splits and of the probes.
        progress: Whether to show progress bars.

    Returns:
        The correlations of all methods, both baselines and the reliability, with their intervals.

    Raises:
        NotACutError: If a layer does not exist or does not run; with ``functional`` also if a network cannot be cut at
            one of the layers.
        TypeError: If a network is :class:`hf_stitch.Activations`, or a list of methods or layers is a single name.
        ValueError: If there are fewer than three networks or two references, networks have different numbers of
            layers, samples do not have labels, more than 5% of ``test_data`` are also in ``data``, a method or a layer
            is unknown or named twice, a trained matcher is structural, a network does not have a task for
            ``functional``, an array in ``distances`` has the wrong shape, a rank exceeds a width, or a method is
            undefined for all pairs of a test. Pairs with an undefined distance are otherwise left out and counted.

    Example:
        >>> import torch, hf_stitch
        >>> from torch.nn import Linear, ReLU, Sequential
        >>> nets = [Sequential(Linear(4, 6), ReLU(), Linear(6, 6), ReLU(), Linear(6, 2)) for _ in range(4)]
        >>> loaded = [hf_stitch.load(net, example_inputs=torch.randn(2, 4)) for net in nets]
        >>> points = torch.randn(300, 4)
        >>> samples = hf_stitch.Samples.of(points, label=(points[:, 0] > 0).long().tolist())
        >>> scored = bench(loaded, samples, layers=["1", "3"], matchers=["lstsq"], probe_epochs=2, progress=False)
        >>> list(scored.scores["sensitivity"])[2:]
        ['lstsq, structural', 'depth only', 'rank only', 'probing, other half']
    """
    networks_by_name = named_networks(networks)
    layers_of_networks = named_layers(networks_by_name, layers)
    methods = {**metric_distances(metrics), **structural_distances(matchers)}
    functional_matchers = list(registries.matchers.build_all(functional, "functional").values())
    adapters = {name: load(network) for name, network in networks_by_name.items()}
    cut_layers = _check_layers(adapters, layers_of_networks, cut=bool(functional_matchers))
    layer_numbers(next(iter(cut_layers.values()), ()), sensitivity_layers)  # raises for unknown layers
    if functional_matchers:
        for adapter in adapters.values():
            scored_task(adapter, task)  # raises without a task that can be scored
    train, test = _train_and_test(data, test_data, test_size, seed)
    selection, scoring = (_indices(test, half) for half in test.split(0.5, seed))
    if functional_matchers:
        # The second part of a split has exactly the requested number of samples, stratified by class.
        fit_samples = train if functional_samples is None else train.split(functional_samples, seed)[1]
        ranks = None if ranks is None else tuple(ranks)
        held_out = test.select(scoring)
        grids = _Grids(adapters, cut_layers, functional_matchers, fit_samples, held_out, task, batch_size, ranks)
        methods |= {f"{m.label}, functional": FunctionalDistance(m, grids) for m in functional_matchers}
    methods |= _given_distances(distances or {}, cut_layers, methods)
    labels = _require_labels(train, "data"), _require_labels(test, "test_data")
    train_activations, test_activations = (
        {name: extract_activations(adapter, part, layers=cut_layers[name], pooling=pooling, batch_size=batch_size,
                                   progress=progress) for name, adapter in adapters.items()}
        for part in (train, test)
    )  # fmt: skip
    classes = max(train.num_classes or 0, test.num_classes or 0)
    method_records = {label: method.describe() for label, method in methods.items()}
    recipe = {
        "networks": {name: adapter.pinned.public.to_dict() for name, adapter in adapters.items()}, "layers": cut_layers,
        "data": train.fingerprint, "samples": len(train), "test_data": test.fingerprint, "batch_size": batch_size,
        "test_size": test_size if test_data is None else None, "functional_samples": functional_samples, "task": task,
        "methods": method_records,
        "versions": versions((fields["registry"], fields["name"]) for fields in method_records.values() if fields),
    }  # fmt: skip
    return measure(
        BenchData(train_activations, test_activations, *labels, selection, scoring, classes), methods,
        sensitivity_layers=sensitivity_layers, ranks=ranks, references=references, own_network=own_network,
        probe_batch_size=probe_batch_size, probe_epochs=probe_epochs, seed=seed, recipe=recipe, progress=progress,
    )  # fmt: skip


@dataclass
class _Grids:
    """Grids of stitches to references, computed once for each reference and source network."""

    adapters: Mapping[str, Adapter]
    layers: Mapping[str, tuple[str, ...]]
    matchers: Sequence[Matcher]
    train: Samples
    test: Samples
    task: str
    batch_size: int
    ranks: Sequence[int] | None
    # (reference network, its depth, source network, approximated) -> matcher label -> grid, or why it is undefined
    _cache: dict[tuple[str, int, str, bool], dict[str, StitchGrid | str]] = field(default_factory=dict)

    def grid(
        self, reference: BenchRepresentation, representation: BenchRepresentation, matcher: Matcher
    ) -> tuple[StitchGrid, str]:
        """Return the grid from a representation to a reference, and the label of the applied matcher in it.

        The grid contains all layers of the network, or all approximations of the layer.

        Raises:
            ValueError: If the matcher is undefined for the whole grid.
        """
        source, depth, width = representation.network, representation.depth, representation.rows.shape[1]
        approximated = representation.rank < width
        key = reference.network, reference.depth, source, approximated
        layers, matchers, applied = self.layers[source], self.matchers, matcher
        if approximated:
            layers, applied = (layers[depth],), Approximated(matcher, representation.rank)
            closed_form = [candidate for candidate in self.matchers if isinstance(candidate, ClosedFormMatcher)]
            ranks = [rank for rank in self.ranks or default_ranks(width) if rank < width]
            matchers = [Approximated(candidate, rank) for candidate in closed_form for rank in ranks]
        if key not in self._cache:
            target_layer = self.layers[reference.network][reference.depth]
            self._cache[key] = self._compute_grids(source, layers, reference.network, target_layer, matchers)
        grid = self._cache[key][applied.label]
        if isinstance(grid, str):
            raise ValueError(grid)
        return grid, applied.label

    def _compute_grids(
        self, source: str, layers: Sequence[str], target: str, target_layer: str, matchers: Sequence[Matcher]
    ) -> dict[str, StitchGrid | str]:
        """Return matcher label -> grid, or the reason why the matcher is undefined. If none is, all share one grid."""
        try:  # intervals are not used: the minimum of 2 resamples is enough
            grid = stitch_grid(
                self.adapters[source], self.adapters[target], self.train, test_data=self.test, layers_a=layers,
                layers_b=[target_layer], matchers=matchers, task=self.task, batch_size=self.batch_size, resamples=2,
                progress=False,
            )  # fmt: skip
        except (ValueError, DivergedError) as error:
            if len(matchers) == 1:
                return {matchers[0].label: str(error)}
            single = (self._compute_grids(source, layers, target, target_layer, [matcher]) for matcher in matchers)
            return {label: outcome for outcomes in single for label, outcome in outcomes.items()}
        return dict.fromkeys((matcher.label for matcher in matchers), grid)


@dataclass(frozen=True)
class FunctionalDistance(Distance):
    """One minus the relative accuracy of the stitched model from a layer to the reference.

    Attributes:
        matcher: The matcher.
        grids: The grids of stitches.
    """

    matcher: Matcher
    grids: _Grids
    kind = "matcher, functional"

    @property
    def tests(self) -> tuple[Test, ...]:  # type: ignore[override]
        """Both tests for closed-form matchers; only specificity for trained matchers."""
        return TESTS if isinstance(self.matcher, ClosedFormMatcher) else ("specificity",)

    def __call__(self, pair: BenchPair) -> float:
        """Compute the distance of a pair."""
        grid, label = self.grids.grid(pair.reference, pair.other, self.matcher)
        layers = self.grids.layers[pair.other.network][pair.other.depth], grid.layers_b[0]
        accuracy = grid.score(*layers, "relative_accuracy", label).value
        if np.isnan(accuracy):
            reason = grid.undefined.get(cell_name(label, *layers))
            raise ValueError(reason or "the target predicts no test sample correctly")
        return 1 - accuracy

    def describe(self) -> dict[str, Any]:
        """Return the matcher."""
        return {"registry": "matchers", **self.matcher.to_dict()}


def _check_layers(
    adapters: Mapping[str, Adapter], layers: Mapping[str, tuple[str, ...]], *, cut: bool
) -> dict[str, tuple[str, ...]]:
    """Return the layers of each network, by default all candidates.

    Raises:
        NotACutError: If a layer does not exist, or with ``cut`` if the network cannot be cut there.
    """
    layers_of_networks = {name: layers.get(name, adapter.candidates) for name, adapter in adapters.items()}
    for name, adapter in adapters.items():
        for layer in layers_of_networks[name]:
            adapter.cut(layer) if cut else adapter.spec(layer)  # raises NotACutError
    return layers_of_networks


def _train_and_test(data: Any, test_data: Any, test_size: float | int, seed: int) -> tuple[Samples, Samples]:
    samples = Samples.of(data)
    if test_data is None:
        return samples.split(test_size, seed)
    test = Samples.of(test_data)
    check_held_out(samples, test)
    return samples, test


def _indices(samples: Samples, part: Samples) -> list[int]:
    """Return the indices of the samples of a part."""
    indices = {id_: index for index, id_ in enumerate(samples.ids)}
    return [indices[id_] for id_ in part.ids]


def _require_labels(samples: Samples, name: str) -> list[int]:
    if samples.labels is None:
        raise ValueError(f"probes require labels; pass {name} as hf_stitch.Samples.of({name}, label=…)")
    return samples.labels


def _given_distances(
    distances: Mapping[str, ArrayLike], layers: Mapping[str, Sequence[str]], taken: Iterable[str]
) -> dict[str, Distance]:
    """Return the precomputed distances as methods."""
    if twice := sorted(distances.keys() & {*taken, *BASELINES}):
        raise ValueError(f"names in distances must differ from all methods, got {twice[0]!r}; rename it")
    names = tuple(layers)
    shape = (len(names), len(layers[names[0]])) * 2
    methods: dict[str, Distance] = {}
    for name, array in distances.items():
        values = np.asarray(array, np.float64)
        if values.shape != shape:
            raise ValueError(
                f"distances {name!r} must have the shape (networks, layers, networks, layers) = {shape}, got "
                f"{values.shape}"
            )
        methods[name] = GivenDistance(names, values)
    return methods
