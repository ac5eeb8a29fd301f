"""The config of a stitched model: how to build both halves and the stitch without any weights."""

from __future__ import annotations

import inspect
from typing import Any

from transformers import AutoConfig, AutoImageProcessor, PreTrainedConfig

from hf_stitch.adapters.libraries.timm_images import TimmImageProcessor
from hf_stitch.artefacts.manifest import CHECKSUM, MANIFEST
from hf_stitch.artefacts.migrations import migrated
from hf_stitch.artefacts.record import FORMAT, check_counts, damaged, known, known_half, known_stitch

BESIDES = (
    "_name_or_path",
    "num_labels",
    "use_cache",
    "bos_token_id",
    "decoder_start_token_id",
    "eos_token_id",
    "pad_token_id",
    "sep_token_id",
)
"""Keys that a saved config has beside its own: those that transformers and its users set on it."""


class StitchConfig(PreTrainedConfig):
    """Config of a :class:`~hf_stitch.artefacts.StitchedModel`.

    It is made by :func:`hf_stitch.stitch` and holds plain JSON values only: no live config of a parent, whose attention
    would be reset.

    Attributes:
        format_version: Of the record.
        task: Which head the model has, a name of ``hf_stitch.registries.heads``; ``None``: none.
        source: The front half: ``blueprint`` (how to build the network; ``None`` for user code, with ``why``),
            ``interface``, ``cut`` and ``reference``.
        target: The back half: the same, and the ``plan`` by which it runs without what precedes it.
        stitch: The stitching layer, as :meth:`hf_stitch.stitches.StitchingLayer.to_dict` gives it.
        recipe: How the stitch was found: matcher, rows, data, split, seed, versions.
        scores: What was measured on held-out samples, as :meth:`hf_stitch.analysis.Evaluation.to_dict` gives it.
        vocab_size: Of language models: number of tokens that the target knows.
        num_hidden_layers: Of language models: attention layers that run, those of the source first.
        layer_types: Of language models: the kind of each of these layers, in transformers' terms.
        sliding_window: Of language models: the window of both networks' sliding attention.
        requires: Methods of plugins that are needed to load the model, as
            :func:`hf_stitch.provenance.requirements` gives them.
        manifest: Of files that were saved with the config, where it was read from beside them: name -> digest.
        checksum: Of the config as it was saved.

    Example:
        >>> StitchConfig().model_type
        'hf_stitch'
    """

    model_type = "hf_stitch"

    format_version: int = FORMAT
    task: str | None = None
    source: dict[str, Any] | None = None
    target: dict[str, Any] | None = None
    stitch: dict[str, Any] | None = None
    recipe: dict[str, Any] | None = None
    scores: dict[str, Any] | None = None
    vocab_size: int | None = None
    num_hidden_layers: int | None = None
    layer_types: list[str] | None = None
    sliding_window: int | None = None
    requires: list[dict[str, Any]] | None = None
    manifest: dict[str, str] | None = None
    checksum: str | None = None

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """From the values in a file, which may come from anyone: the one way in, for Auto classes and pipelines too.

        How attention is computed is up to who loads: a file could name foreign code.

        Args:
            config_dict: The values.
            **kwargs: As of transformers' own; ``name_or_path`` says in messages where the values come from.

        Raises:
            ValueError: If they make no sense, or ask for an absurdly deep network or absurdly many classes.
        """
        place = kwargs.get("name_or_path")
        where = f"config.json of {place}" if place else "the config"
        values = {key: value for key, value in config_dict.items() if "attn_implementation" not in key}
        check_counts(values, where)
        try:
            values = migrated(values, where)
            known(values, {*cls().to_dict(), MANIFEST, CHECKSUM, *BESIDES}, where)
            for side in ("source", "target"):
                if values.get(side):
                    values[side] = known_half(values[side], f"{side} of {where}")
            if values.get("stitch"):
                values["stitch"] = known_stitch(values["stitch"], f"stitch of {where}")
            return super().from_dict(values, **kwargs)
        except ValueError:
            raise
        except Exception as error:
            raise damaged(where, error) from error

    def to_dict(self) -> dict[str, Any]:
        """As JSON values; what vouches for files on disk is left out, as it is written anew with these."""
        values = super().to_dict()
        return {key: value for key, value in values.items() if key not in (MANIFEST, CHECKSUM)}


# So that AutoTokenizer and AutoImageProcessor find what is saved beside a stitched model without a word of warning.
AutoConfig.register(StitchConfig.model_type, StitchConfig, exist_ok=True)
if "image_processor_classes" in inspect.signature(AutoImageProcessor.register).parameters:
    _both = {"image_processor_classes": dict.fromkeys(("pil", "torchvision"), TimmImageProcessor)}
else:  # transformers 5.0
    _both = {"slow_image_processor_class": TimmImageProcessor}
AutoImageProcessor.register(StitchConfig, **_both, exist_ok=True)
