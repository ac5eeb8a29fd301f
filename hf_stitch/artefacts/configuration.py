"""Config of a stitched model: its halves are copied out of two networks, and built again from it without weights."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import fields
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import AutoImageProcessor, PreTrainedConfig

from hf_stitch.adapters.attributes import attributes
from hf_stitch.adapters.base import Adapter
from hf_stitch.adapters.cutting.cut import Cut, CutPlan
from hf_stitch.adapters.cutting.halves import Back, Front
from hf_stitch.adapters.cutting.interface import Interface
from hf_stitch.adapters.libraries.timm_images import TimmImageProcessor
from hf_stitch.adapters.prefixes import PrefixFront
from hf_stitch.adapters.rewriting import network_of
from hf_stitch.artefacts.files import CHECKSUM, MANIFEST, PROCESSOR, TIED
from hf_stitch.artefacts.record import AUTO_MAP, FORMAT, MODEL_TYPE, NEWEST, USAGE, ModelRecord, damaged, read_model
from hf_stitch.plugins import PluginError
from hf_stitch.records import warn_of_unknown
from hf_stitch.reference import weights_hash
from hf_stitch.stitches import StitchingLayer
from hf_stitch.tasks.base import logits_of
from hf_stitch.tasks.heads import task_named

KNOWN = {each.name for each in fields(ModelRecord) if each.name != "others"} | {
    "_commit_hash",
    "_name_or_path",
    "tokenizer_class",
}
"""Keys of a saved config beside those of every config of transformers."""


class StitchConfig(PreTrainedConfig):
    """Config of a :class:`~hf_stitch.artefacts.StitchedModel`.

    :func:`hf_stitch.stitch` creates it. It contains plain JSON values only and no config objects of the two networks,
    because transformers would reset their attention implementation.

    Attributes:
        format_version: Version of the record format.
        task: Task of the head, a name in ``hf_stitch.registries.tasks``; ``None`` for a model without a head.
        source: The front half: ``blueprint`` (how to build the network; ``None`` for user code, with the reason in
            ``why``), ``interface``, ``cut`` and ``reference``.
        target: The back half: the same keys and the ``plan`` to run it without the layers before the cut.
        stitch: The stitching layer, as returned by :meth:`hf_stitch.stitches.StitchingLayer.to_dict`.
        recipe: How the stitching layer was fitted: matcher, pooling, data, split, seed, versions.
        scores: Scores on held-out samples, as returned by :meth:`hf_stitch.analysis.Evaluation.to_dict`.
        hidden_size: Width of the hidden states of the target, as in its own config; ``None`` if it has no config.
        max_position_embeddings: For texts: number of tokens of the longest text that both halves can take; ``None`` if
            there is no limit.
        vocab_size: For texts: vocabulary size of the source, or for language models of the target, whose tokens they
            generate. ``bos_token_id`` and ``eos_token_id`` are of the same network.
        num_hidden_layers: Number of layers that run, and the stitch; for language models number of layers of both
            halves that keep a past (tokens or a state), ``None`` for a model without a cache.
        num_attention_heads: Number of attention heads of the target; ``None`` if its layers have several numbers.
        layer_types: For language models: the type of each of these layers in the terms of transformers, source first.
        sliding_window: For language models: window of the sliding attention of both networks, in tokens.
        requires: Methods of plugins that are needed to load the model, as returned by
            :func:`hf_stitch.provenance.requirements`.
        manifest: File name -> digest of the files saved with the config; set when a config is read from a folder.
        checksum: Checksum of the saved config.
        processor_settings: What decides the outputs of the processor that was saved with the config; ``None`` without
            one, and in configs of version 0.2.0 and earlier.
        tied_weights: Names of weights that share the memory of another one, and the name by which it was saved with the
            config.

    Example:
        >>> StitchConfig().model_type
        'hf_stitch'
    """

    model_type = MODEL_TYPE
    auto_map: ClassVar[dict[str, str]] = {}  # libraries look here for code in the folder; none is ever run

    format_version: int = FORMAT
    task: str | None = None
    source: dict[str, Any] | None = None
    target: dict[str, Any] | None = None
    stitch: dict[str, Any] | None = None
    recipe: dict[str, Any] | None = None
    scores: dict[str, Any] | None = None
    hidden_size: int | None = None
    max_position_embeddings: int | None = None
    vocab_size: int | None = None
    num_hidden_layers: int | None = None
    num_attention_heads: int | None = None
    layer_types: list[str] | None = None
    sliding_window: int | None = None
    requires: list[dict[str, Any]] | None = None
    manifest: dict[str, str] | None = None
    checksum: str | None = None
    processor_settings: dict[str, Any] | None = None
    tied_weights: dict[str, str] | None = None

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Build a config from the values of a file, which may be untrusted.

        Auto classes and pipelines call this method too. The attention implementation is never read from the values,
        because it could name foreign code, nor is a dtype, because the weights are saved in their own.

        Args:
            config_dict: The values.
            **kwargs: Options of the method of transformers. Error messages name ``name_or_path`` as the origin.

        Returns:
            The config; with ``return_unused_kwargs=True``, a tuple of the config and the unused options.
        """
        place = kwargs.get("name_or_path")
        where = f"config.json of {place}" if place else "the config"
        values = {
            key: value
            for key, value in config_dict.items()
            if "attn_implementation" not in key and key not in ("dtype", "torch_dtype", USAGE, AUTO_MAP)
        }
        try:
            values = read_model(values, where)
            warn_of_unknown(values.keys() - {*cls().to_dict()} - KNOWN, where)
            return super().from_dict(values, **kwargs)
        except (ValueError, PluginError):
            raise
        except Exception as error:
            raise damaged(where, error) from error

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Do nothing: saved folders contain no copy of this file, with or without ``trust_remote_code``."""

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values, without what is found again at each save: checksums, what the files contain."""
        values = super().to_dict()
        return {key: value for key, value in values.items() if key not in (MANIFEST, CHECKSUM, PROCESSOR, TIED)}


def record_of(adapter: Adapter, layer: str, half: Front | Back) -> dict[str, Any]:
    """Return the record of one half: blueprint of the network, cut, plan, interface, reference and weights hash."""
    try:
        blueprint: dict[str, Any] = {"blueprint": adapter.blueprint()}
    except ValueError as error:  # user code: the model runs, and saving it raises this error
        blueprint = {"blueprint": None, "why": str(error)}
    cut, plan = adapter.cut(layer)
    half.made = attributes(half)
    return {
        **blueprint,
        "cut": cut.to_dict(),
        "plan": plan.to_dict(),
        "interface": half.interface.to_dict(),
        "reference": adapter.pinned.public.to_dict(),
        "half_hash": weights_hash(half),
        **({"reading": half.record()} if isinstance(half, PrefixFront) else {}),
    }


def front_of(config: StitchConfig) -> Front:
    """Build the front half of a config, without loading weights."""
    half: Any = config.source
    reading = half.get("reading")
    if not reading:
        return Front(*_parts(half))
    takes = Interface.from_dict((config.target or {})["interface"])
    own = nn.Embedding(*reading["own"]) if reading["own"] else None
    return PrefixFront(*_parts(half), takes, reading["start"], own)


def back_of(config: StitchConfig) -> Back:
    """Build the back half of a config, without loading weights, with as many outputs as the config has labels."""
    half = copy.deepcopy(config.target or {})
    made = (half.get("blueprint") or {}).get("config", {})
    if len(made.get("id2label", ())) not in (0, config.num_labels) and task_named(config.task).describes_outputs:
        made |= {name: config.to_dict()[name] for name in ("id2label", "label2id")}
    return Back(*_parts(half))


def _parts(half: Mapping[str, Any]) -> tuple[nn.Module, Cut, CutPlan, Interface]:
    plan, interface = CutPlan.from_dict(half["plan"]), Interface.from_dict(half["interface"])
    return network_of(half["blueprint"]), Cut.from_dict(half["cut"]), plan, interface


class Halves:
    """Halves of two networks with their records, each copied once."""

    def __init__(self, source: Adapter, target: Adapter, task: str | None) -> None:
        self.source, self.target, self._task = source, target, task
        self._fronts: dict[str, tuple[Front, dict[str, Any]]] = {}
        self._backs: dict[str, tuple[Back, dict[str, Any]]] = {}

    def cut(
        self, la: str, layer: StitchingLayer, lb: str, recipe: Mapping[str, Any] | None
    ) -> tuple[StitchConfig, Front, Back]:
        """Return the halves at two layers, and the config of the model of both with a stitching layer."""
        source, target, task = self.source, self.target, self._task
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
        return config, front, back

    @cached_property
    def _outputs(self) -> int:
        with torch.no_grad():
            return logits_of(self.target.forward(self.target.example)).shape[-1]


# AutoImageProcessor then loads the processor saved with a stitched model without a warning.
if "image_processor_classes" in inspect.signature(AutoImageProcessor.register).parameters:
    _both: dict[str, Any] = {"image_processor_classes": dict.fromkeys(("pil", "torchvision"), TimmImageProcessor)}
else:  # transformers before 5.12
    _both = {"slow_image_processor_class": TimmImageProcessor}
AutoImageProcessor.register(StitchConfig, **_both, exist_ok=True)
