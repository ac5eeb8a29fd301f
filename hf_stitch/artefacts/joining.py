"""Building a stitched model from two networks and a stitching layer."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from hf_stitch.adapters.base import Adapter
from hf_stitch.artefacts.configuration import Halves, record_of
from hf_stitch.artefacts.modeling import StitchedModel, model_of
from hf_stitch.artefacts.record import SCORED
from hf_stitch.pairs import Cell, Pair
from hf_stitch.stitches import IdentityStitch, StitchingLayer


def join(
    source: Adapter, source_layer: str, layer: StitchingLayer, target: Adapter, target_layer: str, *, task: str | None,
    recipe: Mapping[str, Any] | None = None,
) -> StitchedModel:  # fmt: skip
    """Build the stitched model of two networks and a stitching layer, with copies of the network weights."""
    return model_of(Halves(source, target, task), source_layer, layer, target_layer, recipe)


def joined_to_itself(network: Adapter, layer: str, task: str | None) -> StitchedModel:
    """Build a stitched model of a network with itself and the identity."""
    spec = network.spec(layer)
    identity = IdentityStitch(spec.width, spec.width)
    stitch = StitchingLayer(spec, spec, "none", identity, identity if spec.prefix_tokens else None)
    return join(network, layer, stitch, network, layer, task=task)


def join_all(
    pair: Pair, layers: Mapping[Cell, StitchingLayer], recipe: Mapping[str, Any] | None = None
) -> dict[Cell, StitchedModel]:
    """Build stitched models between several layers of two networks.

    Models cut at the same layer share a half, also across calls with the same pair: each network is copied once.
    """
    halves = pair.kept.setdefault("halves", Halves(pair.source, pair.target, pair.task))
    return {(la, lb): model_of(halves, la, layer, lb, recipe) for (la, lb), layer in layers.items()}


def with_encoder(
    model: StitchedModel, source: Adapter | StitchedModel, source_layer: str, layer: StitchingLayer
) -> StitchedModel:
    """Build a stitched model from copies of the back half of a stitched model and of a new front half."""
    config: Any = copy.deepcopy(model.config)
    config.stitch, config.scores = layer.to_dict(), None
    config.recipe = {key: value for key, value in (config.recipe or {}).items() if key not in (SCORED, "audit")}
    if isinstance(source, Adapter):
        front = source.front(source_layer)
        config.source = record_of(source, source_layer, front)
    else:
        config.source, front = copy.deepcopy(source.config.source), copy.deepcopy(source.source)
    swapped = type(model)(config, front, layer, copy.deepcopy(model.target), processor=source.processor)
    if model.parents is not None and isinstance(source, Adapter):
        swapped.parents = (source, model.parents[1])
    return swapped
