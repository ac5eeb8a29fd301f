"""Settings of configs and processors that determine outputs; together with the weights they pin a network."""

from __future__ import annotations

import inspect
import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import lru_cache
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
        *("layerdrop", "encoder_layerdrop", "decoder_layerdrop", "anchors_fingerprint"),
    )
)
"""Keys of a config that no forward in eval mode reads, or that do not change its outputs.

Further dropouts are excluded because they may have an effect in eval mode, like the ``token_dropout`` of ESM.
"""

UNREAD_OF_PROCESSORS = ("auto_map", "image_processor_type", "name_or_path", "processor_class")
"""Keys of the config of a processor that the processor does not read; its class is recorded as ``class``."""

OF_TOKENIZERS = ("model_input_names", "padding_side", "split_special_tokens", "truncation_side")
"""Attributes of a tokenizer that change its outputs."""

USER_CODE = "user code"
"""Value of ``class`` for functions of user code, without further settings."""


def settings_of_config(config: Any) -> Settings:
    """Return the values of a config of transformers that a forward in eval mode reads."""
    config_values = config.to_dict()
    values = {name: value for name, value in config_values.items() if is_read(name)}
    inner = {name: nested for name in values if hasattr(nested := vars(config).get(name), "to_diff_dict")}
    plain = {name: value for name, value in values.items() if name not in inner}
    derived = _derived_keys(_HashableConfig(type(config), repr(config_values), config_values))
    settings = _split(plain, derived & plain.keys())
    for name, nested in inner.items():
        nested_settings = settings_of_config(nested)
        settings.chosen.update({f"{name}.{key}": value for key, value in nested_settings.chosen.items()})
        settings.defaults.update({f"{name}.{key}": value for key, value in nested_settings.defaults.items()})
    return settings


def is_read(key: str) -> bool:
    """Return whether a forward in eval mode may read a key of a config."""
    return key not in UNREAD_OF_CONFIGS and not key.startswith("_")


@dataclass(frozen=True)
class _HashableConfig:
    """The values of a config, compared by their ``repr``."""

    kind: Any
    written: str
    values: dict[str, Any] = field(compare=False)


@lru_cache(maxsize=64)  # a job pins its networks several times, and configs are slow to build
def _derived_keys(config: _HashableConfig) -> frozenset[str]:
    """Return the keys with default values, or with values that the config derives from other values."""
    return frozenset(name for name in config.values if is_read(name) and _is_derived(config, name))


def _is_derived(config: _HashableConfig, name: str) -> bool:
    value = config.values[name]
    if _is_default(config.kind, name, value):
        return True
    try:
        with _unlogged():
            others = {key: current for key, current in config.values.items() if key != name}
            rebuilt = config.kind.from_dict(deepcopy(others)).to_dict()
    except Exception:  # the class requires the value
        return False
    return name in rebuilt and bool(rebuilt[name] == value)


def settings_of_processor(processor: Any, max_tokens: int | None = None) -> Settings | None:
    """Return the settings that determine the outputs of a processor; ``None`` without a processor.

    All user code has the same settings, which differ from the settings of every other processor.
    """
    if processor is None:
        return None
    if hasattr(processor, "get_vocab"):
        return _of_tokenizer(processor, max_tokens)
    if not hasattr(processor, "to_dict"):
        return Settings({"class": USER_CODE})
    values = processor.to_dict()
    values["class"] = values.get("image_processor_type", type(processor).__name__)
    used = {n: v for n, v in values.items() if n not in UNREAD_OF_PROCESSORS and not n.startswith("_")}
    return _split(used, {name for name, value in used.items() if _is_default(type(processor), name, value)})


@contextmanager
def _unlogged() -> Iterator[None]:
    """Silence the log of transformers, which would report errors in an artificial config."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(level)


def _is_default(kind: type, name: str, value: Any) -> bool:
    missing = object()
    return bool(getattr(kind, name, missing) == value)


def _split(values: Mapping[str, Any], defaults: Collection[str]) -> Settings:
    chosen = {name: value for name, value in values.items() if name not in defaults}
    return Settings.of(chosen, {name: values[name] for name in values if name in defaults})


def _of_tokenizer(tokenizer: Any, max_tokens: int | None) -> Settings:
    """Return the settings of a tokenizer.

    The settings of a fast tokenizer are its serialised backend without the padding and truncation of the last call. Its
    class and its further special tokens do not affect the outputs.
    """
    # Without a padding token, a batch raises an error: compare it only if both tokenizers have one.
    defaults = {"pad_token": tokenizer.pad_token} if tokenizer.pad_token else {}
    if tokenizer.is_fast:
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        # Every token has contents; further keys depend on the version.
        keys = {"content", *(key for token in backend["added_tokens"] for key in token)}
        defaults |= {f"added_tokens.{key}": [t.get(key) for t in backend["added_tokens"]] for key in sorted(keys)}
        values: dict[str, Any] = {"class": "fast tokenizer"}
        for part, contents in backend.items():
            if part not in ("version", "padding", "truncation", "added_tokens"):
                types, rest = _types_of(contents, part)
                values, defaults = values | types, defaults | rest
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
    values |= {name: getattr(tokenizer, name) for name in OF_TOKENIZERS}
    return Settings.of({**values, "max_tokens": max_tokens}, defaults)


def _types_of(part: Any, within: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the types of a part of a fast tokenizer and of its inner parts, and separately all remaining values.

    Another version of the library may write further keys, so only the types must be present on both sides.
    """
    inner: dict[str, Any] = {}
    types: dict[str, Any] = {}
    if isinstance(part, dict) and isinstance(part.get("type"), str):  # a number is the id of the word "type"
        inner = {f"{within}.{key}": value for key, value in part.items() if key != "type"}
        types[f"{within}.type"] = part["type"]
    elif (
        isinstance(part, list)
        and part
        and all(isinstance(item, dict) and isinstance(item.get("type"), str) for item in part)
    ):
        inner = {f"{within}.{index}": item for index, item in enumerate(part)}
    else:
        return {}, {within: sorted(part.items()) if isinstance(part, dict) else part}
    remaining: dict[str, Any] = {}
    for name, value in inner.items():
        inner_types, rest = _types_of(value, name)
        types, remaining = types | inner_types, remaining | rest
    return types, remaining


def _options(tokenizer: Any) -> dict[str, Any]:
    """Return the arguments of a slow tokenizer except files and tokens, with default values."""
    suffixes = ("self", "_file", "_token", "_tokens", "merges", "vocab")
    arguments = inspect.signature(type(tokenizer).__init__).parameters.values()
    options = [a for a in arguments if a.kind is a.POSITIONAL_OR_KEYWORD and not a.name.endswith(suffixes)]
    return {a.name: tokenizer.init_kwargs.get(a.name, a.default) for a in options}
