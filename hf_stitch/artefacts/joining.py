"""Building a stitched model from two networks and a stitching layer."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from hf_stitch.adapters.base import Adapter
from hf_stitch.adapters.cutting.halves import Back, Front
from hf_stitch.adapters.prefixes import PrefixFront
from hf_stitch.artefacts.configuration import StitchConfig
from hf_stitch.artefacts.halves import record_of
from hf_stitch.artefacts.parents import SCORED
from hf_stitch.artefacts.record import FORMAT, NEWEST
from hf_stitch.pairs import Cell, Pair
from hf_stitch.stitches import IdentityStitch, StitchingLayer
from hf_stitch.tasks.base import logits_of
from hf_stitch.tasks.heads import task_named

if TYPE_CHECKING:
    from hf_stitch.artefacts.modeling import StitchedModel


def join(
    source: Adapter, source_layer: str, layer: StitchingLayer, target: Adapter, target_layer: str, *, task: str | None,
    recipe: Mapping[str, Any] | None = None,
) -> StitchedModel:  # fmt: skip
    """Build the stitched model of two networks and a stitching layer. The weights of the networks are copied."""
    return _Halves(source, target, task).join(source_layer, layer, target_layer, recipe)


def joined_to_itself(network: Adapter, layer: str, task: str | None) -> StitchedModel:
    """Build the network that is stitched to itself by the identity."""
    spec = network.spec(layer)
    same = IdentityStitch(spec.width, spec.width)
    identity = StitchingLayer(spec, spec, "none", same, same if spec.prefix_tokens else None)
    return join(network, layer, identity, network, layer, task=task)


def join_all(
    pair: Pair, layers: Mapping[Cell, StitchingLayer], recipe: Mapping[str, Any] | None = None
) -> dict[Cell, StitchedModel]:
    """Build stitched models between several layers of two networks.

    Models that are cut at the same layer share a half, also those of several calls with one pair: a network is copied
    once.
    """
    halves = pair.kept.setdefault("halves", _Halves(pair.source, pair.target, pair.task))
    return {(la, lb): halves.join(la, layer, lb, recipe) for (la, lb), layer in layers.items()}


def with_encoder(
    model: StitchedModel, source: Adapter | StitchedModel, source_layer: str, layer: StitchingLayer
) -> StitchedModel:
    """Build a stitched model from the back half of another one and a new front half. Both halves are copied."""
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


class _Halves:
    """Halves of two networks with their records, each copied once."""

    def __init__(self, source: Adapter, target: Adapter, task: str | None) -> None:
        self._source, self._target, self._task = source, target, task
        self._fronts: dict[str, tuple[Front, dict[str, Any]]] = {}
        self._backs: dict[str, tuple[Back, dict[str, Any]]] = {}

    def join(self, la: str, layer: StitchingLayer, lb: str, recipe: Mapping[str, Any] | None) -> StitchedModel:
        source, target, task = self._source, self._target, self._task
        if la not in self._fronts:
            front = source.front(la)
            self._fronts[la] = front, record_of(source, la, front)
        if lb not in self._backs:
            back = target.back(lb)
            self._backs[lb] = back, record_of(target, lb, back)
        (front, of_front), (back, of_back) = self._fronts[la], self._backs[lb]
        config = StitchConfig(
            task=task, source=copy.deepcopy(of_front), target=copy.deepcopy(of_back), stitch=layer.to_dict(),
            recipe=dict(recipe or {}), format_version=NEWEST if isinstance(front, PrefixFront) else FORMAT,
        )  # fmt: skip
        known = getattr(target.model, "config", None)
        labels = getattr(known, "id2label", None)
        kind = task_named(task)
        if labels and kind.describes_outputs:
            config.id2label, config.label2id = dict(labels), {label: i for i, label in labels.items()}
        elif kind.describes_outputs:
            config.num_labels = self._outputs
        config.problem_type = kind.problem_type
        stitched = config.model_class(config, front, layer, back, processor=source.processor)
        stitched.parents = (source, target)
        return stitched

    @cached_property
    def _outputs(self) -> int:
        with torch.no_grad():
            return logits_of(self._target.forward(self._target.example)).shape[-1]
