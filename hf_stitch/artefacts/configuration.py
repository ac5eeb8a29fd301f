"""Config of stitched models: cuts halves out of two networks, and rebuilds them without weights."""

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

KNOWN = {key.name for key in fields(ModelRecord) if key.name != "others"} | {
    "_commit_hash",
    "_name_or_path",
    "tokenizer_class",
}
"""Keys of a saved config in addition to the keys of every transformers config."""


class StitchConfig(PreTrainedConfig):
    """Config of a :class:`~hf_stitch.artefacts.StitchedModel`.

    :func:`hf_stitch.stitch` creates it. It contains only plain JSON values, not the config objects of the two networks,
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
        hidden_size: Width of the hidden states of the target, as in its config; ``None`` without a config.
        max_position_embeddings: For texts: maximum number of tokens that both halves accept; ``None`` without a limit.
        vocab_size: For texts: vocabulary size of the source; for language models, of the target, which generates the
            tokens. ``bos_token_id`` and ``eos_token_id`` are from the same network.
        num_hidden_layers: Number of layers that run, plus the stitch; for language models, number of cached layers of
            both halves, ``None`` for a model without a cache.
        num_attention_heads: Number of attention heads of the target; ``None`` if it differs between layers.
        layer_types: For language models: the transformers type of each cached layer, source first.
        sliding_window: For language models: window of the sliding attention of both networks, in tokens.
        requires: Methods of plugins required to load the model, as returned by
            :func:`hf_stitch.provenance.requirements`.
        manifest: File name -> digest of the files saved with the config; set when a config is read from a folder.
        checksum: Checksum of the saved config.
        processor_settings: Settings of the saved processor that affect its outputs; ``None`` without a processor, and
            in configs of version 0.2.0 and earlier.
        tied_weights: Name of a weight that shares memory -> name of the saved weight with this memory.

    Example:
        >>> StitchConfig().model_type
        'hf_stitch'
    """

    model_type = MODEL_TYPE
    auto_map: ClassVar[dict[str, str]] = {}  # libraries look here for code in the folder; it is never run

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
        """Build a config from the values of a possibly untrusted file.

        Auto classes and pipelines call this method, too. It never reads the attention implementation from the values,
        because it could name foreign code, nor a dtype, because the weights are saved in their dtypes.

        Args:
            config_dict: The values.
            **kwargs: Options of the method of transformers. Error messages show ``name_or_path`` as the origin.

        Returns:
            The config; with ``return_unused_kwargs=True``, a tuple of the config and the unused options.
        """
        origin = kwargs.get("name_or_path")
        where = f"config.json of {origin}" if origin else "the config"
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
        """Do nothing: saved folders do not contain a copy of this file, with or without ``trust_remote_code``."""

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values, without the fields that each save computes: checksums, processor settings and ties."""
        values = super().to_dict()
        return {key: value for key, value in values.items() if key not in (MANIFEST, CHECKSUM, PROCESSOR, TIED)}


def record_of(adapter: Adapter, layer: str, half: Front | Back) -> dict[str, Any]:
    """Return the record of a half: blueprint of the network, cut, plan, interface, reference and weights hash."""
    try:
        blueprint: dict[str, Any] = {"blueprint": adapter.blueprint()}
    except ValueError as error:  # user code: the model runs, and saving it raises this error
        blueprint = {"blueprint": None, "why": str(error)}
    cut, plan = adapter.cut(layer)
    half.made = attributes(half)  # compared when the model is saved, to find changes by hand
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
    half_record: Any = config.source
    prefix = half_record.get("reading")
    if not prefix:
        return Front(*_parts(half_record))
    target_interface = Interface.from_dict((config.target or {})["interface"])
    embedding = nn.Embedding(*prefix["own"]) if prefix["own"] else None
    return PrefixFront(*_parts(half_record), target_interface, prefix["start"], embedding)


def back_of(config: StitchConfig) -> Back:
    """Build the back half of a config, without loading weights, with one output per label of the config."""
    half_record = copy.deepcopy(config.target or {})
    network = (half_record.get("blueprint") or {}).get("config", {})
    if len(network.get("id2label", ())) not in (0, config.num_labels) and task_named(config.task).describes_outputs:
        network |= {name: config.to_dict()[name] for name in ("id2label", "label2id")}
    return Back(*_parts(half_record))


def _parts(half_record: Mapping[str, Any]) -> tuple[nn.Module, Cut, CutPlan, Interface]:
    plan, interface = CutPlan.from_dict(half_record["plan"]), Interface.from_dict(half_record["interface"])
    return network_of(half_record["blueprint"]), Cut.from_dict(half_record["cut"]), plan, interface


class Halves:
    """Halves of two networks with their records; each half is copied once."""

    def __init__(self, source: Adapter, target: Adapter, task: str | None) -> None:
        self.source, self.target, self._task = source, target, task
        self._fronts: dict[str, tuple[Front, dict[str, Any]]] = {}
        self._backs: dict[str, tuple[Back, dict[str, Any]]] = {}

    def cut(
        self, la: str, layer: StitchingLayer, lb: str, recipe: Mapping[str, Any] | None
    ) -> tuple[StitchConfig, Front, Back]:
        """Return the halves at two layers, and the config of their stitched model."""
        source, target, task = self.source, self.target, self._task
        if la not in self._fronts:
            front = source.front(la)
            self._fronts[la] = front, record_of(source, la, front)
        if lb not in self._backs:
            back = target.back(lb)
            self._backs[lb] = back, record_of(target, lb, back)
        (front, front_record), (back, back_record) = self._fronts[la], self._backs[lb]
        config = StitchConfig(
            task=task, source=copy.deepcopy(front_record), target=copy.deepcopy(back_record), stitch=layer.to_dict(),
            recipe=dict(recipe or {}), format_version=NEWEST if isinstance(front, PrefixFront) else FORMAT,
        )  # fmt: skip
        labels = getattr(getattr(target.model, "config", None), "id2label", None)
        task_class = task_named(task)
        if labels and task_class.describes_outputs:
            config.id2label, config.label2id = dict(labels), {label: i for i, label in labels.items()}
        elif task_class.describes_outputs:
            config.num_labels = self._outputs
        config.problem_type = task_class.problem_type
        return config, front, back

    @cached_property
    def _outputs(self) -> int:
        with torch.no_grad():
            return logits_of(self.target.forward(self.target.example)).shape[-1]


# Registered, so that AutoImageProcessor loads the processor of a stitched model without a warning.
if "image_processor_classes" in inspect.signature(AutoImageProcessor.register).parameters:
    _classes: dict[str, Any] = {"image_processor_classes": dict.fromkeys(("pil", "torchvision"), TimmImageProcessor)}
else:  # transformers before 5.12
    _classes = {"slow_image_processor_class": TimmImageProcessor}
AutoImageProcessor.register(StitchConfig, **_classes, exist_ok=True)
