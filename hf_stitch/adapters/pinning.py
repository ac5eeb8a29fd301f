"""What of a config or a processor decides outputs: the settings that pin a network beside its weights."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import Any

from hf_stitch.reference import Settings

UNREAD_OF_CONFIGS = frozenset(
    (
        *("architectures", "auto_map", "finetuning_task", "processor_class", "tokenizer_class", "transformers_version"),
        *("id2label", "label2id", "label_names", "label_descriptions", "problem_type", "pretrained_cfg"),
        *("dtype", "torch_dtype", "attn_implementation", "use_cache", "return_dict"),
        *("output_hidden_states", "output_attentions", "prefix", "task_specific_params"),
        *("initializer_range", "initializer_factor", "gradient_checkpointing", "drop_path_rate"),
        *("attention_dropout", "hidden_dropout", "activation_dropout", "classifier_dropout", "dropout", "dropout_rate"),
        *("attention_probs_dropout_prob", "hidden_dropout_prob", "attn_pdrop", "embd_pdrop", "resid_pdrop"),
        *("layerdrop", "encoder_layerdrop", "decoder_layerdrop"),
    )
)
"""Keys of a config that no forward in eval mode reads, or whose values do not change what it computes.

Only these dropouts: others have an effect in eval mode too, as the ``token_dropout`` of ESM has.
"""

UNREAD_OF_PROCESSORS = ("auto_map", "image_processor_type", "name_or_path", "processor_class")
"""Keys of the config of a processor that it does not read; its class is recorded as ``class``."""

OF_TOKENIZERS = ("model_input_names", "model_max_length", "padding_side", "split_special_tokens", "truncation_side")
"""Attributes of a tokenizer that change its outputs."""


def settings_of_config(config: Any) -> Settings:
    """Return what a forward in eval mode reads of a config of transformers.

    Args:
        config: The config. Those inside it are compared with the defaults of their own classes.

    Returns:
        The settings.

    Example:
        >>> import transformers
        >>> config = transformers.ViTConfig(hidden_act="relu", hidden_dropout_prob=0.5)
        >>> settings_of_config(config).changes(settings_of_config(transformers.ViTConfig()))
        ["hidden_act 'relu', now 'gelu'"]
    """
    values = {n: v for n, v in config.to_dict().items() if n not in UNREAD_OF_CONFIGS and not n.startswith("_")}
    inner = {name: there for name in values if hasattr(there := vars(config).get(name), "to_diff_dict")}
    found = _apart({name: value for name, value in values.items() if name not in inner}, type(config))
    for name, there in inner.items():
        below = settings_of_config(there)
        found.chosen.update({f"{name}.{key}": value for key, value in below.chosen.items()})
        found.defaults.update({f"{name}.{key}": value for key, value in below.defaults.items()})
    return found


def settings_of_processor(processor: Any) -> Settings | None:
    """Return what decides the outputs of a processor.

    Args:
        processor: Tokenizer or image processor of transformers, a function of user code, or ``None``.

    Returns:
        The settings; ``None`` for user code and without a processor.

    Example:
        >>> settings_of_processor(lambda text: text) is None
        True
    """
    if hasattr(processor, "get_vocab"):
        return _of_tokenizer(processor)
    if not hasattr(processor, "to_dict"):
        return None
    values = processor.to_dict()
    values["class"] = values.get("image_processor_type", type(processor).__name__)
    return _apart(
        {n: v for n, v in values.items() if n not in UNREAD_OF_PROCESSORS and not n.startswith("_")}, type(processor)
    )


def _apart(values: Mapping[str, Any], kind: type) -> Settings:
    """Return settings, with those at the default of their class, an attribute of it, apart."""
    nothing = object()
    defaults = {name: value for name, value in values.items() if getattr(kind, name, nothing) == value}
    return Settings.of({name: value for name, value in values.items() if name not in defaults}, defaults)


def _of_tokenizer(tokenizer: Any) -> Settings:
    """Return the settings of a tokenizer.

    A fast tokenizer is what its backend serialises, apart from the padding and truncation of the last call. Its class
    and its other special tokens have no influence.
    """
    if tokenizer.is_fast:
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        values = {name: value for name, value in backend.items() if name not in ("version", "padding", "truncation")}
        if isinstance(values["model"].get("vocab"), dict):
            values["model"]["vocab"] = sorted(values["model"]["vocab"].items())
    else:
        values = {
            "class": type(tokenizer).__name__,
            "vocab": sorted(tokenizer.get_vocab().items()),
            "merges": sorted(getattr(tokenizer, "bpe_ranks", {}).items()),
            "special_tokens": {n: token for n, token in tokenizer.special_tokens_map.items() if n != "pad_token"},
            "options": _options(tokenizer),
        }
        if (pieces := getattr(tokenizer, "sp_model", None)) is not None:
            values["pieces"] = pieces.serialized_model_proto()
    values |= {name: getattr(tokenizer, name) for name in OF_TOKENIZERS if hasattr(tokenizer, name)}
    # Without a padding token a batch raises an error, so it matters only if both sides have one.
    return Settings.of(values, {"pad_token": tokenizer.pad_token} if tokenizer.pad_token else None)


def _options(tokenizer: Any) -> dict[str, Any]:
    """Return the arguments of a slow tokenizer other than files and tokens, with their defaults filled in."""
    others = ("self", "_file", "_token", "_tokens", "merges", "vocab")
    arguments = inspect.signature(type(tokenizer).__init__).parameters.values()
    wanted = [a for a in arguments if a.kind is a.POSITIONAL_OR_KEYWORD and not a.name.endswith(others)]
    return {a.name: tokenizer.init_kwargs.get(a.name, a.default) for a in wanted}
