"""Comparison of the layers of networks by their weights alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from hf_stitch.adapters.naming import layer_names
from hf_stitch.analysis.comparison.atlas import WHOLE, SimilarityAtlas, pair_name
from hf_stitch.metrics.base import ActivationMetric, Metric, NotComparable, WeightMetric
from hf_stitch.options import did_you_mean
from hf_stitch.provenance import versions
from hf_stitch.reference import shareable
from hf_stitch.registry import registries
from hf_stitch.statistics import Weights

Array = NDArray[np.float64]


def sorted_metrics(
    metrics: Iterable[str | Mapping[str, Any] | Metric],
) -> tuple[list[ActivationMetric], dict[str, WeightMetric]]:
    """Build metrics, and sort them into those of activations and those of weights."""
    activations: list[ActivationMetric] = []
    weights: dict[str, WeightMetric] = {}
    for metric in map(registries.metrics.build, metrics):
        if isinstance(metric, WeightMetric):
            if metric.label in weights:
                raise ValueError(f"metric {metric.label} is requested twice; name it once")
            weights[metric.label] = metric
        elif isinstance(metric, ActivationMetric):
            activations.append(metric)
        else:
            raise TypeError(f"{metric!r} is neither an ActivationMetric nor a WeightMetric; derive it from one of them")
    return activations, weights


@dataclass(frozen=True)
class WeightSide:
    """A network whose weights are compared."""

    model: nn.Module  # the network
    description: Mapping[str, Any]  # what identifies it, as JSON values


def compare_weights(
    sides: Sequence[WeightSide],
    metrics: Mapping[str, WeightMetric],
    layers_a: Iterable[str] | None = None,
    layers_b: Iterable[str] | None = None,
) -> SimilarityAtlas:
    """Compare the layers of two networks by metrics of weights."""
    read_a, read_b = (
        read_of(side.model, metrics, layers, argument)
        for side, layers, argument in zip(sides, (layers_a, layers_b), ("layers_a", "layers_b"), strict=True)
    )
    atlas = compare_readings(read_a, read_b, metrics)
    recipe = _recipe(metrics) | {"layers_a": atlas.layers_a, "layers_b": atlas.layers_b}
    recipe |= {name: dict(side.description) for name, side in zip("ab", sides, strict=True)}
    return replace(atlas, recipe=shareable(recipe))


def read_of(
    model: nn.Module, metrics: Mapping[str, WeightMetric], layers: Iterable[str] | None, argument: str = "layers"
) -> dict[str, dict[str, Weights]]:
    """Read what metrics of weights compare of some modules of a network, and of the modules in them."""
    names = None if layers is None else layer_names(argument, layers)
    modules = dict(model.named_modules())
    if unknown := [name for name in names or () if name not in modules]:
        hint = did_you_mean(unknown[0], modules)
        raise ValueError(
            f"{argument} contains {unknown[0]!r}, which the network does not have"
            + (f"; did you mean {hint!r}?" if hint else "")
        )
    found = {}
    for label, metric in metrics.items():
        read = metric.read(model)
        own = {
            layer: each
            for layer, each in read.items()
            if names is None or any(layer == name or layer.startswith(f"{name}.") for name in names)
        }
        if not own:
            raise ValueError(f"{label} reads nothing of {argument}={names}; it reads {_listed(read)}")
        found[label] = own
    return found


def compare_readings(
    a: Mapping[str, Mapping[str, Weights]], b: Mapping[str, Mapping[str, Weights]], metrics: Mapping[str, WeightMetric]
) -> SimilarityAtlas:
    """Compare what metrics of weights have read of two networks."""
    names_a, names_b = (tuple(dict.fromkeys(layer for read in side.values() for layer in read)) for side in (a, b))
    values = {label: np.full((len(names_a), len(names_b)), np.nan) for label in metrics}
    whole: dict[str, float] = {}
    undefined: dict[str, str] = {}
    for label, metric in metrics.items():
        found = values[label]
        for (i, layer_a), (j, layer_b) in product(enumerate(names_a), enumerate(names_b)):
            if a is b and metric.symmetric and j < i:
                found[i, j] = found[j, i]
                why = undefined.get(pair_name(label, layer_b, layer_a))
            else:
                found[i, j], why = _value(metric, a[label].get(layer_a), b[label].get(layer_b))
            if why is not None:
                undefined[pair_name(label, layer_a, layer_b)] = why
        if np.isnan(found).all():
            first = next((layer for layer in a[label] if layer in b[label]), next(iter(a[label])))
            other = first if first in b[label] else next(iter(b[label]))
            why = undefined[pair_name(label, first, other)]
            raise ValueError(f"{label} is undefined for all pairs of layers; {first!r} of a and {other!r} of b: {why}")
        both = {layer: found[names_a.index(layer), names_b.index(layer)] for layer in a[label] if layer in b[label]}
        value, why = _whole(metric, both, a[label].keys() ^ b[label].keys())
        if why is None:
            whole[label] = value
        else:
            undefined[pair_name(label, WHOLE, WHOLE)] = why
    distances = tuple(label for label, metric in metrics.items() if not metric.higher_is_better)
    return SimilarityAtlas(
        values, names_a, names_b, None, None, dict.fromkeys(metrics, "weights"), distances,
        ranges={label: metric.range for label, metric in metrics.items()}, undefined=undefined, whole=whole,
    )  # fmt: skip


def compare_all_weights(
    sides: Mapping[str, WeightSide], metrics: Mapping[str, WeightMetric], layers: Mapping[str, Iterable[str]]
) -> tuple[SimilarityAtlas, dict[str, tuple[str, ...]], dict[str, Array]]:
    """Compare the layers of several networks by metrics of weights.

    Returns the atlas of all layers, named ``network/layer``; the layers of each network; and by metric the values of
    whole networks, ``(networks, networks)``, NaN where two networks are not comparable in all layers.
    """
    read = {name: read_of(side.model, metrics, layers.get(name)) for name, side in sides.items()}
    named = {name: tuple(dict.fromkeys(x for found in own.values() for x in found)) for name, own in read.items()}
    flat: dict[str, dict[str, Weights]] = {label: {} for label in metrics}
    for name in named:
        for label in metrics:
            flat[label] |= {f"{name}/{layer}": each for layer, each in read[name][label].items()}
    atlas = compare_readings(flat, flat, metrics)
    whole = {label: np.full((len(named), len(named)), np.nan) for label in metrics}
    undefined = {key: why for key, why in atlas.undefined.items() if WHOLE not in key}
    places = {layer: place for place, layer in enumerate(atlas.layers_a)}
    for label, metric in metrics.items():
        for (i, a), (j, b) in product(enumerate(named), repeat=2):
            own, other = read[a][label], read[b][label]
            both = {x: atlas.values[label][places[f"{a}/{x}"], places[f"{b}/{x}"]] for x in own if x in other}
            whole[label][i, j], why = _whole(metric, both, own.keys() ^ other.keys())
            if why is not None:
                undefined[pair_name(label, f"{a}/{WHOLE}", f"{b}/{WHOLE}")] = why
    described = {"networks": {name: dict(side.description) for name, side in sides.items()}}
    recipe = _recipe(metrics) | {"a": described, "b": described}
    return replace(atlas, recipe=shareable(recipe), whole={}, undefined=undefined), named, whole


def same_layers(
    a: Mapping[str, Weights], b: Mapping[str, Weights], metric: WeightMetric
) -> tuple[dict[str, float], dict[str, str]]:
    """Compare the layers of two networks with those of the same names, and the whole networks."""
    if different := sorted(a.keys() ^ b.keys()):
        raise ValueError(f"only one of the networks has layer {different[0]!r}; compare networks of one architecture")
    values: dict[str, float] = {}
    undefined: dict[str, str] = {}
    for layer in a:
        values[layer], why = _value(metric, a[layer], b[layer])
        if why is not None:
            undefined[layer] = why
    values[WHOLE], why = _whole(metric, values)
    if why is not None:
        undefined[WHOLE] = why
    return values, undefined


def _value(metric: WeightMetric, a: Weights | None, b: Weights | None) -> tuple[float, str | None]:
    """Compare two layers; where there is no value, return NaN and the reason."""
    if a is None or b is None:
        return np.nan, f"{metric.label} does not read this layer"
    try:
        return metric.value(a, b), None
    except NotComparable as error:
        return np.nan, str(error)


def _whole(
    metric: WeightMetric, by_layer: Mapping[str, float], different: AbstractSet[str] = frozenset()
) -> tuple[float, str | None]:
    """Combine the values of the layers that both networks have, or return NaN and the reason."""
    if different:
        return np.nan, f"only one network has layer {min(different)!r}"
    if undefined := [layer for layer, value in by_layer.items() if np.isnan(value)]:
        return np.nan, f"layer {undefined[0]!r} has no value"
    return float(metric.combine(by_layer)), None


def _recipe(metrics: Mapping[str, WeightMetric]) -> dict[str, Any]:
    return {
        "metrics": {label: {"name": each.name, "options": each.options} for label, each in metrics.items()},
        "versions": versions(("metrics", each.name) for each in metrics.values()),
    }


def _listed(read: Mapping[str, Weights], shown: int = 5) -> str:
    names = list(read)
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "") or "nothing"
