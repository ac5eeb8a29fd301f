"""Which distance of representations predicts how much they differ in function: :func:`hf_stitch_studies.bench`."""

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
    Distance,
    GivenDistance,
    Represented,
    RepresentedPair,
    metric_distances,
    structural_distances,
)
from hf_stitch_studies.benching.low_rank import Approximated, default_ranks
from hf_stitch_studies.benching.measuring import BenchData, layer_numbers, measure
from hf_stitch_studies.benching.result import Bench

Pooled = Literal["mean", "cls", "last", "flatten"]
"""Poolings that give one vector per sample."""


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
    """Measure which distances of representations predict how much they differ in function.

    Two representations differ in function by the absolute difference of their probing accuracies
    (:func:`hf_stitch_studies.linear_probe`). A distance is good if it ranks pairs of representations alike (Ding et
    al. 2021; Balogh and Jelasity 2025, section 5): the result has Kendall's τ and Spearman's ρ of both, for

    - *sensitivity*: a layer of all networks, approximated at several ranks. The basis is that of the training rows.
      The score is the mean over layers. Within one network, every distance that grows as the rank falls has the same τ;
      only several networks tell such distances apart.
    - *specificity*: all layers of all networks.

    The representation with the best probing accuracy is the reference, with which all others are compared. It is chosen
    on half of the test samples, among those that are not approximated; accuracies and distances are those of the other
    half. The best representation of each network is a reference too, for the spread over references.

    Intervals are those of a jackknife that leaves out one network at a time. They cover the choice of networks, not of
    samples. Two baselines ignore the activations, "depth only" (number of layers between two layers) and "rank
    only" (difference of ranks, or of widths where nothing is approximated). A method beats a baseline if the lower end
    of the interval of the difference of τ is above 0. A baseline that is constant in a test is undefined there.
    "probing, other half" is the difference of probing accuracy itself, on the half that chose the reference. Its τ is
    the reliability of what is predicted: if it is low, accuracies are mostly noise, and more samples are needed. A
    distance without noise may exceed it a little.

    Args:
        networks: Three or more networks with the same number of layers (each an adapter, a module, or a name for
            :func:`hf_stitch.load`), by name; a list names them ``0``, …. Layer i of one corresponds to layer i of
            another.
        data: Raw training samples with labels, for probes, bases and matchers, in any form that
            :meth:`hf_stitch.Samples.of` accepts.
        test_data: Separate held-out samples, instead of a split of ``data``.
        layers: Layers of all networks, or name -> layers. Default: all candidates of each.
        metrics: Metrics: names in ``hf_stitch.registries.metrics``, or objects. The reference is the first argument of
            the metric; a similarity s becomes the distance 1 − s.
        matchers: Closed-form matchers, *structural*: the relative squared error on test rows of the stitch from a
            representation to the reference, fitted to the training rows. Rows are pooled.
        functional: Matchers, *functional*: 1 minus the relative accuracy of the stitched model from a layer to the
            reference (:func:`hf_stitch.stitch_grid`, where all positions are mapped). In the sensitivity test the
            stitch is fitted to approximated positions, in the basis of the samples to which it is fitted; only matchers
            take part that are closed-form and linear.
        distances: Name -> (networks, layers, networks, layers) distances that were computed elsewhere, from the
            reference to the other layer, for the specificity test. NaN where undefined.
        sensitivity_layers: Layers that are approximated, by the names of the first network. Default: all; an empty
            list leaves out the test.
        ranks: Ranks of the approximations beside the full one. Default: as in the paper, by width (multiples of about
            an eighth of the width, then halves down to 1).
        references: Number of references, at least 2.
        own_network: Whether representations of the reference's own network are compared with it, too.
        pooling: How a representation becomes one vector per sample: ``mean``, ``cls``, ``last`` or ``flatten``.
        test_size: Held-out samples: a share (float) or a number (int).
        functional_samples: Training samples to which ``functional`` fits. Default: all; the paper takes 100.
        task: Task of the stitched models of ``functional``. ``"auto"`` takes the task of the target.
        probe_batch_size: Samples per step of a probe.
        probe_epochs: Passes of a probe over the training samples.
        batch_size: Number of samples per forward pass. Each network runs once, for all layers.
        seed: Seed of the splits and of the probes.
        progress: Whether to show progress bars.

    Returns:
        The correlations of all methods with their intervals, beside both baselines and the reliability.

    Raises:
        NotACutError: If a layer does not exist or does not run; with ``functional`` also if a network cannot be cut at
            one of the layers.
        TypeError: If a network is :class:`hf_stitch.Activations`, or a list of methods or layers is a single one.
        ValueError: If there are fewer than three networks or two references, networks have different numbers of
            layers, samples have no labels, more than 5% of ``test_data`` are also in ``data``, a method or a layer is
            unknown or named twice, a trained matcher is structural, a network has no task for ``functional``, given
            distances have the wrong shape, a rank exceeds a width, or a method is undefined for all pairs of a test. A
            distance that is undefined for some pairs is no error: they are left out and counted.

    Example:
        >>> import torch, hf_stitch
        >>> from torch.nn import Linear, ReLU, Sequential
        >>> nets = [Sequential(Linear(4, 6), ReLU(), Linear(6, 6), ReLU(), Linear(6, 2)) for _ in range(4)]
        >>> loaded = [hf_stitch.load(net, example_inputs=torch.randn(2, 4)) for net in nets]
        >>> points = torch.randn(300, 4)
        >>> samples = hf_stitch.Samples.of(points, label=(points[:, 0] > 0).long().tolist())
        >>> found = bench(loaded, samples, layers=["1", "3"], matchers=["lstsq"], probe_epochs=2, progress=False)
        >>> list(found.scores["sensitivity"])[2:]
        ['lstsq, structural', 'depth only', 'rank only', 'probing, other half']
    """
    named = named_networks(networks)
    given = named_layers(named, layers)
    methods = {**metric_distances(metrics), **structural_distances(matchers)}
    stitched = list(registries.matchers.build_all(functional, "functional").values())
    adapters = {name: load(each) for name, each in named.items()}
    chosen = _layers(adapters, given, cut=bool(stitched))
    layer_numbers(next(iter(chosen.values()), ()), sensitivity_layers)
    if stitched:
        for adapter in adapters.values():
            scored_task(adapter, task)
    train, test = _apart(data, test_data, test_size, seed)
    selection, scoring = (_places(test, half) for half in test.split(0.5, seed))
    if stitched:
        fitted = train if functional_samples is None else train.split(functional_samples, seed)[1]
        ranks = None if ranks is None else tuple(ranks)
        grids = _Grids(adapters, chosen, stitched, fitted, test.select(scoring), task, batch_size, ranks)
        methods |= {f"{each.label}, functional": FunctionalDistance(each, grids) for each in stitched}
    methods |= _given(distances or {}, chosen, methods)
    labels = _labels(train, "data"), _labels(test, "test_data")
    recorded, tested = (
        {name: extract_activations(each, part, layers=chosen[name], pooling=pooling, batch_size=batch_size,
                                   progress=progress) for name, each in adapters.items()}
        for part in (train, test)
    )  # fmt: skip
    classes = max(train.num_classes or 0, test.num_classes or 0)
    described = {label: method.describe() for label, method in methods.items()}
    recipe = {
        "networks": {name: adapter.pinned.public.to_dict() for name, adapter in adapters.items()}, "layers": chosen,
        "data": train.fingerprint, "samples": len(train), "test_data": test.fingerprint, "batch_size": batch_size,
        "test_size": test_size if test_data is None else None, "functional_samples": functional_samples, "task": task,
        "methods": described,
        "versions": versions((each["registry"], each["name"]) for each in described.values() if each),
    }  # fmt: skip
    return measure(
        BenchData(recorded, tested, *labels, selection, scoring, classes), methods,
        sensitivity_layers=sensitivity_layers, ranks=ranks, references=references, own_network=own_network,
        probe_batch_size=probe_batch_size, probe_epochs=probe_epochs, seed=seed, recipe=recipe, progress=progress,
    )  # fmt: skip


@dataclass
class _Grids:
    """Relative accuracies of stitches into references, computed once for each reference and source network."""

    adapters: Mapping[str, Adapter]
    layers: Mapping[str, tuple[str, ...]]
    matchers: Sequence[Matcher]
    train: Samples
    test: Samples
    task: str
    batch_size: int
    ranks: Sequence[int] | None
    _found: dict[tuple[str, int, str, bool], dict[str, StitchGrid | str]] = field(default_factory=dict)

    def into(self, reference: Represented, other: Represented, matcher: Matcher) -> tuple[StitchGrid, str]:
        """Return the grid of all layers of a network, or of approximations of one, into a reference; and the label.

        Raises:
            ValueError: If the matcher is undefined for all of them.
        """
        source, depth, width = other.network, other.depth, other.rows.shape[1]
        approximated = other.rank < width
        key = reference.network, reference.depth, source, approximated
        layers, matchers, used = self.layers[source], self.matchers, matcher
        if approximated:
            layers, used = (layers[depth],), Approximated(matcher, other.rank)
            linear = [each for each in self.matchers if isinstance(each, ClosedFormMatcher)]
            ranks = [rank for rank in self.ranks or default_ranks(width) if rank < width]
            matchers = [Approximated(each, rank) for each in linear for rank in ranks]
        if key not in self._found:
            into = self.layers[reference.network][reference.depth]
            self._found[key] = self._grids(source, layers, reference.network, into, matchers)
        grid = self._found[key][used.label]
        if isinstance(grid, str):
            raise ValueError(grid)
        return grid, used.label

    def _grids(
        self, source: str, layers: Sequence[str], network: str, into: str, matchers: Sequence[Matcher]
    ) -> dict[str, StitchGrid | str]:
        """Return by matcher a grid, one for all matchers if each is defined, or why there is none."""
        try:
            grid = stitch_grid(
                self.adapters[source], self.adapters[network], self.train, test_data=self.test, layers_a=layers,
                layers_b=[into], matchers=matchers, task=self.task, batch_size=self.batch_size, resamples=2,
                progress=False,
            )  # fmt: skip
        except (ValueError, DivergedError) as error:
            if len(matchers) == 1:
                return {matchers[0].label: str(error)}
            alone = [self._grids(source, layers, network, into, [matcher]) for matcher in matchers]
            return {label: found for of_matcher in alone for label, found in of_matcher.items()}
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
        """Approximations are stitched by closed-form matchers alone."""
        return TESTS if isinstance(self.matcher, ClosedFormMatcher) else ("specificity",)

    def __call__(self, pair: RepresentedPair) -> float:
        """Compute the distance of a pair."""
        grid, label = self.grids.into(pair.reference, pair.other, self.matcher)
        layers = self.grids.layers[pair.other.network][pair.other.depth], grid.layers_b[0]
        value = grid.score(*layers, "relative_accuracy", label).value
        if np.isnan(value):
            why = grid.undefined.get(cell_name(label, *layers))
            raise ValueError(why or "the target predicts no test sample correctly")
        return 1 - value

    def describe(self) -> dict[str, Any]:
        """Return the matcher."""
        return {"registry": "matchers", **self.matcher.to_dict()}


def _layers(
    adapters: Mapping[str, Adapter], layers: Mapping[str, tuple[str, ...]], *, cut: bool
) -> dict[str, tuple[str, ...]]:
    """Return the layers of each network, all candidates by default, at which it can be cut if stitches need it.

    Raises:
        NotACutError: If a layer does not exist, or the network cannot be cut there.
    """
    found = {name: layers.get(name, adapter.candidates) for name, adapter in adapters.items()}
    for name, adapter in adapters.items():
        for layer in found[name]:
            adapter.cut(layer) if cut else adapter.spec(layer)
    return found


def _apart(data: Any, test_data: Any, test_size: float | int, seed: int) -> tuple[Samples, Samples]:
    """Return training and test samples."""
    samples = Samples.of(data)
    if test_data is None:
        return samples.split(test_size, seed)
    test = Samples.of(test_data)
    check_held_out(samples, test)
    return samples, test


def _places(samples: Samples, part: Samples) -> list[int]:
    """Return the places of the samples of a part."""
    place = {id_: number for number, id_ in enumerate(samples.ids)}
    return [place[id_] for id_ in part.ids]


def _labels(samples: Samples, name: str) -> list[int]:
    if samples.labels is None:
        raise ValueError(f"{name} has no labels, which probes are trained on; pass hf_stitch.Samples.of(data, label=…)")
    return samples.labels


def _given(
    distances: Mapping[str, ArrayLike], layers: Mapping[str, Sequence[str]], taken: Iterable[str]
) -> dict[str, Distance]:
    """Return given distances as methods."""
    if twice := sorted(distances.keys() & {*taken, *BASELINES}):
        raise ValueError(f"distances has the name of another method, {twice[0]!r}; choose another name")
    names = tuple(layers)
    shape = (len(names), len(layers[names[0]])) * 2
    found: dict[str, Distance] = {}
    for name, given in distances.items():
        values = np.asarray(given, np.float64)
        if values.shape != shape:
            raise ValueError(
                f"distances {name!r} must have the shape (networks, layers, networks, layers) = {shape}, got "
                f"{values.shape}"
            )
        found[name] = GivenDistance(names, values)
    return found
