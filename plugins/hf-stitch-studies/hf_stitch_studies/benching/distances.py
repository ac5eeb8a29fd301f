"""Distances scored by the bench: metrics, matchers, precomputed distances, and baselines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from hf_stitch.analysis.comparison.asking import Asked
from hf_stitch.matchers import ClosedFormMatcher, Matcher
from hf_stitch.metrics import Metric, direct_matching
from hf_stitch.options import checked
from hf_stitch.registry import registries
from hf_stitch.statistics import Moments
from hf_stitch_studies.benching.correlation import TESTS, Array, Test


@dataclass(frozen=True)
class BenchRepresentation:
    """One representation of the bench.

    Attributes:
        network: Name of the network.
        depth: Index of the layer.
        rank: Rank of the approximation; the width if not approximated.
        train: Function that returns the rows of the training samples, ``(n, d)`` float64.
        rows: ``(k, d)`` float64, the rows of the test samples used for distances.
    """

    network: str
    depth: int
    rank: int
    train: Callable[[], Tensor]
    rows: Tensor

    @cached_property
    def train_rows(self) -> Tensor:
        """Rows of the training samples, computed once."""
        return self.train()


@dataclass(frozen=True)
class BenchPair:
    """A reference and the representation to compare with it.

    Attributes:
        reference: The reference; never approximated.
        other: The representation.
    """

    reference: BenchRepresentation
    other: BenchRepresentation

    @cached_property
    def moments(self) -> Moments:
        """Moments of the training rows: x is the representation, y is the reference."""
        x, y = self.other.train_rows, self.reference.train_rows
        return Moments(x.shape[1], y.shape[1]).update(x, y)


class Distance(ABC):
    """Distance between two representations.

    Attributes:
        kind: Kind of the distance, shown in the table.
        tests: Tests that define the distance.
    """

    kind: ClassVar[str]
    tests: ClassVar[tuple[Test, ...]] = TESTS

    @abstractmethod
    def __call__(self, pair: BenchPair) -> float:
        """Compute the distance of a pair.

        Raises:
            ValueError: If the distance is undefined for the pair; the message states the reason.
            torch.linalg.LinAlgError: If a decomposition did not converge; the distance is undefined, too.
        """

    def describe(self) -> dict[str, Any]:
        """Return the registry, name and options of the method as JSON values; empty if it is not registered."""
        return {}


@dataclass(frozen=True)
class MetricDistance(Distance):
    """Metric on the test rows, with the reference as first argument; a similarity s becomes 1 − s."""

    metric: Metric
    kind = "metric"

    def __call__(self, pair: BenchPair) -> float:
        """Compute the distance of a pair."""
        score: float = self.metric.function(pair.reference.rows, pair.other.rows, **self.metric.options).item()
        return 1 - score if self.metric.higher_is_better else score

    def describe(self) -> dict[str, Any]:
        """Return the metric."""
        return {"registry": "metrics", "name": self.metric.name, **self.metric.options}


@dataclass(frozen=True)
class StructuralDistance(Distance):
    """Relative squared error of a stitch on test rows, ``‖T b − a‖² / ‖a‖²``.

    The stitch maps the representation b to the reference a; it is fitted on the training rows.
    """

    matcher: ClosedFormMatcher
    kind = "matcher, structural"

    def __call__(self, pair: BenchPair) -> float:
        """Compute the distance of a pair."""
        stitch = self.matcher.fit(pair.moments, dtype=torch.float64)
        return direct_matching(stitch(pair.other.rows), pair.reference.rows).item()

    def describe(self) -> dict[str, Any]:
        """Return the matcher."""
        return {"registry": "matchers", **self.matcher.to_dict()}


@dataclass(frozen=True)
class GivenDistance(Distance):
    """Precomputed distances between the layers of all networks.

    Attributes:
        networks: Names of the networks.
        values: (networks, layers, networks, layers) float64, from reference to representation; NaN where undefined.
    """

    networks: tuple[str, ...]
    values: Array
    kind = "given"
    tests = ("specificity",)

    def __call__(self, pair: BenchPair) -> float:
        """Compute the distance of a pair."""
        a, b = pair.reference, pair.other
        distance = float(self.values[self.networks.index(a.network), a.depth, self.networks.index(b.network), b.depth])
        if np.isnan(distance):
            raise ValueError("the given distance is NaN")
        return distance


class DepthDistance(Distance):
    """Number of layers between two layers; ignores the activations."""

    kind = "baseline"

    def __call__(self, pair: BenchPair) -> float:
        """Compute the distance of a pair."""
        return float(abs(pair.reference.depth - pair.other.depth))


class RankDistance(Distance):
    """Difference in rank, or in width for layers that are not approximated."""

    kind = "baseline"

    def __call__(self, pair: BenchPair) -> float:
        """Compute the distance of a pair."""
        return float(abs(pair.reference.rank - pair.other.rank))


def metric_distances(metrics: Iterable[str | Mapping[str, Any] | Metric]) -> dict[str, Distance]:
    """Return label -> distance for metrics.

    Args:
        metrics: Metrics, or names of registered metrics.

    Raises:
        TypeError: If ``metrics`` is a single metric, or an option is unknown.
        ValueError: If a metric is unknown, requested twice, or compares outputs.
    """
    metric_list = metrics if isinstance(metrics, str | Metric) else list(metrics)
    if not metric_list:
        return {}
    requested = Asked.of(metric_list)
    if requested.weights:
        weights = ", ".join(requested.weights)
        raise ValueError(f"bench requires metrics of activations, but {weights} compares weights; leave it out")
    return {label: MetricDistance(metric) for label, metric in requested.activations.items()}


@checked
def structural_distances(matchers: Iterable[str | Mapping[str, Any] | Matcher]) -> dict[str, Distance]:
    """Return label -> structural distance for matchers.

    Args:
        matchers: Closed-form matchers, or names of registered matchers.

    Raises:
        TypeError: If ``matchers`` is a single matcher, or an option is unknown.
        ValueError: If a matcher is unknown, requested twice, or trained.
    """
    distances: dict[str, Distance] = {}
    for matcher in map(registries.matchers.build, matchers):
        if not isinstance(matcher, ClosedFormMatcher):
            raise ValueError(
                f"structural distances require closed-form matchers, got {matcher.label}, which trains through a "
                "target; pass it in functional="
            )
        label = f"{matcher.label}, structural"
        if label in distances:
            raise ValueError(f"matcher {matcher.label} is requested twice; name it once")
        distances[label] = StructuralDistance(matcher)
    return distances
