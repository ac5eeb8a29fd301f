"""Two networks and a stitching layer become one model."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hf_stitch.adapters.base import Adapter
from hf_stitch.adapters.cutting.halves import Back, Front
from hf_stitch.artefacts.configuration import StitchConfig
from hf_stitch.artefacts.heads import class_for
from hf_stitch.reference import weights_hash
from hf_stitch.stitches import StitchingLayer

if TYPE_CHECKING:
    from hf_stitch.artefacts.modeling import StitchedModel


def join(
    source: Adapter,
    source_layer: str,
    layer: StitchingLayer,
    target: Adapter,
    target_layer: str,
    *,
    task: str | None,
    recipe: Mapping[str, Any] | None = None,
) -> StitchedModel:
    """The stitched model of two networks and a stitching layer; weights are copied, the networks left as they are.

    Args:
        source: Gives the front half.
        source_layer: Its cut.
        layer: The stitching layer.
        target: Gives the back half.
        target_layer: Its cut.
        task: Which head; ``None``: the target's own output.
        recipe: How the layer was found.
    """
    kind = class_for(task)
    front, back = source.front(source_layer), target.back(target_layer)
    config = StitchConfig(
        task=task,
        source=_half(source, source_layer, front),
        target=_half(target, target_layer, back),
        stitch=layer.to_dict(),
        recipe=dict(recipe or {}),
    )
    known = getattr(target.model, "config", None)
    labels = getattr(known, "id2label", None)
    if labels and task in ("image-classification", "text-classification"):
        config.id2label, config.label2id = dict(labels), {label: i for i, label in labels.items()}
        config.problem_type = getattr(known, "problem_type", None)
    elif task == "image-classification" and (classes := getattr(target.model, "num_classes", None)):
        config.num_labels = int(classes)
    stitched = kind(config, front, layer, back, processor=source.processor)
    stitched.parents = (source, target)
    return stitched


def with_encoder(
    model: StitchedModel, source: Adapter | StitchedModel, source_layer: str, layer: StitchingLayer
) -> StitchedModel:
    """A stitched model's back half, copied as it is now, behind another network.

    Args:
        model: Left as it is.
        source: Gives the front half; of a stitched model, its own as it is now.
        source_layer: The cut of a network.
        layer: The stitching layer.
    """
    config: Any = copy.deepcopy(model.config)
    config.stitch, config.scores = layer.to_dict(), None
    if isinstance(source, Adapter):
        front = source.front(source_layer)
        config.source = _half(source, source_layer, front)
    else:
        config.source, front = copy.deepcopy(source.config.source), copy.deepcopy(source.source)
    swapped = type(model)(config, front, layer, copy.deepcopy(model.target), processor=source.processor)
    if model.parents is not None and isinstance(source, Adapter):
        swapped.parents = (source, model.parents[1])
    return swapped


def _half(adapter: Adapter, layer: str, half: Front | Back) -> dict[str, Any]:
    """One half as JSON values: how to build the network, where it is cut, how it runs, and which both were."""
    try:
        blueprint: dict[str, Any] = {"blueprint": adapter.blueprint()}
    except ValueError as error:  # user code: such a model runs, and says why when it is to be saved
        blueprint = {"blueprint": None, "why": str(error)}
    cut, plan = adapter.cut(layer)
    return {
        **blueprint,
        "cut": cut.to_dict(),
        "plan": plan.to_dict(),
        "interface": adapter.interface.to_dict(),
        "reference": adapter.pinned.public.to_dict(),
        "half_hash": weights_hash(half),
    }
