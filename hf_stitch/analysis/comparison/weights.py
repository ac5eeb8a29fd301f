"""Comparison of the layers of networks by their weights alone."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from hf_stitch.analysis.comparison.atlas import SimilarityAtlas, pair_name
from hf_stitch.analysis.layers import layer_names
from hf_stitch.metrics.base import ActivationMetric, Metric, NotComparable, WeightMetric
from hf_stitch.provenance import versions
from hf_stitch.registry import registries
from hf_stitch.statistics import Weights

Array = NDArray[np.float64]

WHOLE = "whole network"
"""Stands for all layers of both networks in ``SimilarityAtlas.undefined``."""


def sorted_metrics(metrics: Iterable[str | Metric]) -> tuple[list[ActivationMetric], dict[str, WeightMetric]]:
    """Build metrics, and sort them into those of activations and those of weights.

    Args:
        metrics: Metrics, or names of registered metrics.

    Returns:
        The metrics of activations, and the metrics of weights by label.

    Raises:
        TypeError: If ``metrics`` is a single metric, or an option is unknown.
        ValueError: If a metric is unknown, or a metric of weights is requested twice.
    """
    if isinstance(metrics, str | Metric):
        raise TypeError(f"metrics must be a list of names or metrics, got {metrics!r}; write [{metrics!r}]")
    activations: list[ActivationMetric] = []
    weights: dict[str, WeightMetric] = {}
    for metric in map(registries.metrics.build, metrics):
        if isinstance(metric, WeightMetric):
            if metric.label in weights:
                raise ValueError(f"metric {metric.label} is requested twice; name it once")
            weights[metric.label] = metric
        elif isinstance(metric, ActivationMetric):
            activations.append(metric)
    return activations, weights


@dataclass(frozen=True)
class WeightSide:
    """A network whose weights are compared.

    Attributes:
        model: The network.
        description: What identifies it, as JSON values.
    """

    model: nn.Module
    description: Mapping[str, Any]


def compare_weights(
    sides: Sequence[WeightSide],
    metrics: Mapping[str, WeightMetric],
    layers_a: Iterable[str] | None = None,
    layers_b: Iterable[str] | None = None,
) -> SimilarityAtlas:
    """Compare the layers of two networks by metrics of weights.

    Args:
        sides: The networks a and b.
        metrics: Label -> metric.
        layers_a: Modules of a: themselves, and what is in them. ``None`` takes all layers that a metric reads.
        layers_b: Modules of b.

    Returns:
        The values of all pairs of layers, and of the whole networks.

    Raises:
        ValueError: If a network has nothing that a metric reads, or a metric has no value for any pair of layers.
    """
    read_a, read_b = (
        {label: selected(metric.read(side.model), layers, argument) for label, metric in metrics.items()}
        for side, layers, argument in zip(sides, (layers_a, layers_b), ("layers_a", "layers_b"), strict=True)
    )
    atlas = compare_readings(read_a, read_b, metrics)
    recipe = _recipe(metrics) | {"layers_a": atlas.layers_a, "layers_b": atlas.layers_b}
    recipe |= {name: dict(side.description) for name, side in zip("ab", sides, strict=True)}
    return replace(atlas, recipe=json.loads(json.dumps(recipe)))


def compare_readings(
    a: Mapping[str, Mapping[str, Weights]], b: Mapping[str, Mapping[str, Weights]], metrics: Mapping[str, WeightMetric]
) -> SimilarityAtlas:
    """Compare what metrics of weights have read of two networks.

    Args:
        a: Label of the metric -> layer -> what was read of it.
        b: The same of the other network.
        metrics: Label -> metric.

    Returns:
        The values, without a recipe.

    Raises:
        ValueError: If a metric has no value for any pair of layers.
    """
    names_a, names_b = (tuple(dict.fromkeys(layer for read in side.values() for layer in read)) for side in (a, b))
    values = {label: np.full((len(names_a), len(names_b)), np.nan) for label in metrics}
    whole: dict[str, float] = {}
    undefined: dict[str, str] = {}
    for label, metric in metrics.items():
        same: dict[str, float] = {}
        for i, layer_a in enumerate(names_a):
            for j, layer_b in enumerate(names_b):
                try:
                    value = metric.value(_of(a[label], layer_a, label), _of(b[label], layer_b, label))
                except NotComparable as error:
                    undefined[pair_name(label, layer_a, layer_b)] = str(error)
                    continue
                values[label][i, j] = value
                if layer_a == layer_b:
                    same[layer_a] = value
        if np.isnan(values[label]).all():
            first = next((layer for layer in a[label] if layer in b[label]), next(iter(a[label])))
            other = first if first in b[label] else next(iter(b[label]))
            why = undefined[pair_name(label, first, other)]
            raise ValueError(f"{label} is undefined for all pairs of layers; {first!r} of a and {other!r} of b: {why}")
        if missing := [layer for layer in {**a[label], **b[label]} if layer not in same]:
            why = undefined.get(pair_name(label, missing[0], missing[0]), "only one network has it")
            undefined[pair_name(label, WHOLE, WHOLE)] = f"{missing[0]!r} has no value: {why}"
        else:
            whole[label] = metric.combine(same)
    distances = tuple(label for label, metric in metrics.items() if not metric.higher_is_better)
    return SimilarityAtlas(
        values, names_a, names_b, None, None, dict.fromkeys(metrics, "weights"), distances,
        ranges={label: metric.range for label, metric in metrics.items()}, undefined=undefined, whole=whole,
    )  # fmt: skip


def compare_all_weights(
    sides: Mapping[str, WeightSide], metrics: Mapping[str, WeightMetric], layers: Mapping[str, Iterable[str]]
) -> tuple[SimilarityAtlas, dict[str, tuple[str, ...]], dict[str, Array]]:
    """Compare the layers of several networks by metrics of weights.

    Args:
        sides: Name -> network.
        metrics: Label -> metric.
        layers: Name -> modules of the network. Networks that are left out take part with all their layers.

    Returns:
        The atlas of all layers, named ``network/layer``; the layers of each network; and by metric the values of whole
        networks, ``(networks, networks)``, NaN where two networks are not comparable in all layers.

    Raises:
        ValueError: If a network has nothing that a metric reads, or a metric has no value for any pair of layers.
    """
    read = {
        name: {label: selected(metric.read(side.model), layers.get(name)) for label, metric in metrics.items()}
        for name, side in sides.items()
    }
    named = {name: tuple(dict.fromkeys(x for found in own.values() for x in found)) for name, own in read.items()}
    flat: dict[str, dict[str, Weights]] = {label: {} for label in metrics}
    for name in named:
        for label in metrics:
            flat[label] |= {f"{name}/{layer}": each for layer, each in read[name][label].items()}
    atlas = compare_readings(flat, flat, metrics)
    whole = {label: np.full((len(named), len(named)), np.nan) for label in metrics}
    places = {layer: place for place, layer in enumerate(atlas.layers_a)}
    for label, metric in metrics.items():
        for i, a in enumerate(named):
            for j, b in enumerate(named):
                if read[a][label].keys() != read[b][label].keys():
                    continue
                same = {x: atlas.values[label][places[f"{a}/{x}"], places[f"{b}/{x}"]] for x in read[a][label]}
                if not np.isnan(list(same.values())).any():
                    whole[label][i, j] = metric.combine(same)
    described = {"networks": {name: dict(side.description) for name, side in sides.items()}}
    recipe = _recipe(metrics) | {"a": described, "b": described}
    return replace(atlas, recipe=json.loads(json.dumps(recipe)), whole={}), named, whole


def selected(read: Mapping[str, Weights], layers: Iterable[str] | None, argument: str = "layers") -> dict[str, Weights]:
    """Return what was read of some modules and of the modules in them.

    Args:
        read: Layer -> what was read of it.
        layers: Names of modules; ``None`` for all.
        argument: Name of the argument, for error messages.

    Raises:
        ValueError: If nothing was read of one of the modules.
    """
    if layers is None:
        return dict(read)
    found: set[str] = set()
    for name in layer_names(argument, layers):
        inside = {layer for layer in read if layer == name or layer.startswith(f"{name}.")}
        if not inside:
            raise ValueError(f"{argument} contains {name!r}, but the metric reads no weights of it: {_listed(read)}")
        found |= inside
    return {layer: each for layer, each in read.items() if layer in found}


def same_layers(a: Mapping[str, Weights], b: Mapping[str, Weights], metric: WeightMetric) -> dict[str, float]:
    """Compare the layers of two networks with those of the same names.

    Args:
        a: Layer -> what the metric has read of it.
        b: The same of the other network.
        metric: The metric.

    Returns:
        Layer -> value.

    Raises:
        ValueError: If the networks have other layers, or a layer has no value.
    """
    if different := sorted(a.keys() ^ b.keys()):
        raise ValueError(f"only one of the networks has layer {different[0]!r}; compare networks of one architecture")
    return {layer: metric.value(each, b[layer]) for layer, each in a.items()}


def _of(read: Mapping[str, Weights], layer: str, label: str) -> Weights:
    if layer not in read:
        raise NotComparable(layer, f"{label} does not read it")
    return read[layer]


def _recipe(metrics: Mapping[str, WeightMetric]) -> dict[str, Any]:
    return {
        "metrics": {label: {"name": each.name, "options": each.options} for label, each in metrics.items()},
        "versions": versions(("metrics", each.name) for each in metrics.values()),
    }


def _listed(read: Mapping[str, Weights], shown: int = 5) -> str:
    names = list(read)
    return "it reads " + ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")
