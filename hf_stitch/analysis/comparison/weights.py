"""Comparison of the layers of networks by their weights alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import chain, product
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from hf_stitch.adapters.checks import layer_names
from hf_stitch.analysis.comparison.atlas import WHOLE, SimilarityAtlas, pair_name
from hf_stitch.analysis.comparison.sides import WeightSide
from hf_stitch.metrics.base import NotComparable, WeightMetric
from hf_stitch.options import did_you_mean
from hf_stitch.provenance import versions
from hf_stitch.reference import shareable
from hf_stitch.statistics import Weights

Array = NDArray[np.float64]
Readings = Mapping[str, Mapping[str, Weights]]
"""Weights of a network for comparison: label of the metric -> layer -> weights."""
Pair = tuple[str, str]
"""One layer from each of two networks."""


def read_weights(
    model: nn.Module, metrics: Mapping[str, WeightMetric], layers: Iterable[str] | None, argument: str = "layers"
) -> dict[str, dict[str, Weights]]:
    """Read the weights that each metric compares from modules of a network and their submodules."""
    names = None if layers is None else layer_names(argument, layers)
    modules = dict(model.named_modules())
    if unknown := [name for name in names or () if name not in modules]:
        hint = did_you_mean(unknown[0], modules)
        raise ValueError(
            f"{argument} must name modules of the network, got {unknown[0]!r}"
            + (f"; did you mean {hint!r}?" if hint else "")
        )
    readings = {}
    for label, metric in metrics.items():
        readable = metric.read(model)
        selected = {
            layer: weights
            for layer, weights in readable.items()
            if names is None or any(layer == name or layer.startswith(f"{name}.") for name in names)
        }
        if not selected:
            raise ValueError(
                f"{argument} must contain layers that {label} reads, got {names}; use {_join_names(readable)}"
            )
        readings[label] = selected
    return readings


def compare_weights(
    sides: Mapping[str, WeightSide], metrics: Mapping[str, WeightMetric], layers: Mapping[str, Iterable[str] | None]
) -> SimilarityAtlas:
    """Compare the layers of two networks, ``a`` and ``b``, by metrics of weights."""
    a, b = (read_weights(side.model, metrics, layers[name], f"layers_{name}") for name, side in sides.items())
    atlas, values = _compare_pairs(a, b, metrics)
    whole: dict[str, float] = {}
    undefined = dict(atlas.undefined)
    for label, metric in metrics.items():
        value, reason = _whole(metric, a[label], b[label], values[label])
        if reason is None:
            whole[label] = value
        else:
            undefined[pair_name(label, WHOLE, WHOLE)] = reason
    recipe = _recipe(metrics) | {"layers_a": atlas.layers_a, "layers_b": atlas.layers_b}
    recipe |= {name: dict(side.description) for name, side in sides.items()}
    return replace(atlas, recipe=shareable(recipe), whole=whole, undefined=undefined)


def compare_all_weights(
    sides: Mapping[str, WeightSide], metrics: Mapping[str, WeightMetric], layers: Mapping[str, Iterable[str]]
) -> tuple[SimilarityAtlas, dict[str, tuple[str, ...]], dict[str, Array]]:
    """Compare the layers of several networks by metrics of weights.

    Returns the atlas of all layers, named ``network/layer``; the layers of each network; and by metric the values of
    whole networks, ``(networks, networks)``, NaN where two networks are not comparable in all layers.
    """
    readings = {name: read_weights(side.model, metrics, layers.get(name)) for name, side in sides.items()}
    prefixed: dict[str, dict[str, Weights]] = {label: {} for label in metrics}
    for name, label in product(readings, metrics):
        prefixed[label] |= {f"{name}/{layer}": weights for layer, weights in readings[name][label].items()}
    atlas, values = _compare_pairs(prefixed, prefixed, metrics)
    whole = {label: np.full((len(readings), len(readings)), np.nan) for label in metrics}
    undefined = dict(atlas.undefined)
    for label, metric in metrics.items():
        for (i, a), (j, b) in product(enumerate(readings), repeat=2):
            sides_read = readings[a][label], readings[b][label]
            whole[label][i, j], reason = _whole(metric, *sides_read, values[label], f"{a}/", f"{b}/")
            if reason is not None:
                undefined[pair_name(label, f"{a}/{WHOLE}", f"{b}/{WHOLE}")] = reason
    description = {"networks": {name: dict(side.description) for name, side in sides.items()}}
    recipe = _recipe(metrics) | {"a": description, "b": description}
    names = {name: tuple(dict.fromkeys(chain(*by_metric.values()))) for name, by_metric in readings.items()}
    return replace(atlas, recipe=shareable(recipe), undefined=undefined), names, whole


def same_layers(
    a: Mapping[str, Weights], b: Mapping[str, Weights], metric: WeightMetric
) -> tuple[dict[str, float], dict[str, str]]:
    """Compare the layers of the same name of two networks, and the whole networks."""
    if different := sorted(a.keys() ^ b.keys()):
        raise ValueError(f"only one of the networks has layer {different[0]!r}; compare networks of one architecture")
    pairs, reasons = _values(metric, a, b, [(layer, layer) for layer in a])
    whole, cause = _whole(metric, a, b, pairs)
    values = {**{layer: value for (layer, _), value in pairs.items()}, WHOLE: whole}
    return values, {layer: reason for (layer, _), reason in reasons.items()} | ({WHOLE: cause} if cause else {})


def _compare_pairs(
    a: Readings, b: Readings, metrics: Mapping[str, WeightMetric]
) -> tuple[SimilarityAtlas, dict[str, dict[Pair, float]]]:
    """Compare all pairs of layers of two networks from the weights that were read."""
    names_a, names_b = (tuple(dict.fromkeys(chain(*side.values()))) for side in (a, b))
    pair_values: dict[str, dict[Pair, float]] = {}
    undefined: dict[str, str] = {}
    for label, metric in metrics.items():
        pair_values[label], reasons = _values(metric, a[label], b[label], product(names_a, names_b))
        undefined |= {pair_name(label, *pair): reason for pair, reason in reasons.items()}
        if len(reasons) == len(pair_values[label]):
            first = next((layer for layer in a[label] if layer in b[label]), next(iter(a[label])))
            second = first if first in b[label] else next(iter(b[label]))
            reason = reasons[first, second]
            raise ValueError(f"{label} is undefined for all pairs; {first!r} of a and {second!r} of b: {reason}")
    shape = (len(names_a), len(names_b))
    atlas = SimilarityAtlas(
        {label: np.array([*values.values()]).reshape(shape) for label, values in pair_values.items()}, names_a, names_b,
        None, None, dict.fromkeys(metrics, "weights"),
        tuple(label for label, metric in metrics.items() if not metric.higher_is_better),
        ranges={label: metric.range for label, metric in metrics.items()}, undefined=undefined,
    )  # fmt: skip
    return atlas, pair_values


def _values(
    metric: WeightMetric, a: Mapping[str, Weights], b: Mapping[str, Weights], pairs: Iterable[Pair]
) -> tuple[dict[Pair, float], dict[Pair, str]]:
    """Compare pairs of layers; return values, and reasons for the undefined pairs (NaN)."""
    values: dict[Pair, float] = {}
    undefined: dict[Pair, str] = {}
    for pair in pairs:
        layer_a, layer_b = pair
        twin = (layer_b, layer_a)
        if a is b and metric.symmetric and twin in values:
            values[pair] = values[twin]
            undefined |= {pair: undefined[twin]} if twin in undefined else {}
            continue
        values[pair] = np.nan
        if layer_a not in a or layer_b not in b:
            undefined[pair] = f"{metric.label} does not use this layer"
            continue
        try:
            values[pair] = metric.value(a[layer_a], b[layer_b])
        except NotComparable as error:
            undefined[pair] = str(error)
    return values, undefined


def _whole(
    metric: WeightMetric, a: Mapping[str, Any], b: Mapping[str, Any], pair_values: Mapping[Pair, float],
    prefix_a: str = "", prefix_b: str = "",
) -> tuple[float, str | None]:  # fmt: skip
    """Combine the values of the layers of both networks, or return NaN and the reason."""
    if different := a.keys() ^ b.keys():
        return np.nan, f"only one network has layer {min(different)!r}"
    by_layer = {layer: pair_values.get((prefix_a + layer, prefix_b + layer), np.nan) for layer in a}
    if undefined := [layer for layer, value in by_layer.items() if np.isnan(value)]:
        return np.nan, f"layer {undefined[0]!r} is undefined"
    return float(metric.combine(by_layer)), None


def _recipe(metrics: Mapping[str, WeightMetric]) -> dict[str, Any]:
    return {
        "metrics": {label: {"name": metric.name, "options": metric.options} for label, metric in metrics.items()},
        "versions": versions(("metrics", metric.name) for metric in metrics.values()),
    }


def _join_names(weights: Mapping[str, Weights], limit: int = 5) -> str:
    names = list(weights)
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "") or "nothing"
