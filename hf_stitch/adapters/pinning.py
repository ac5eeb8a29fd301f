"""What of a config or a processor decides outputs: the settings that pin a network beside its weights."""

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
"""Keys of a config that no forward in eval mode reads, or whose values do not change what it computes.

Only these dropouts: others have an effect in eval mode too, as the ``token_dropout`` of ESM has.
"""

UNREAD_OF_PROCESSORS = ("auto_map", "image_processor_type", "name_or_path", "processor_class")
"""Keys of the config of a processor that it does not read; its class is recorded as ``class``."""

OF_TOKENIZERS = ("model_input_names", "padding_side", "split_special_tokens", "truncation_side")
"""Attributes of a tokenizer that change its outputs."""

USER_CODE = "user code"
"""Class of the settings of functions of user code, which have no others."""


def settings_of_config(config: Any) -> Settings:
    """Return what a forward in eval mode reads of a config of transformers."""
    every = config.to_dict()
    values = {name: value for name, value in every.items() if is_read(name)}
    inner = {name: there for name in values if hasattr(there := vars(config).get(name), "to_diff_dict")}
    own = {name: value for name, value in values.items() if name not in inner}
    followed = _followed(_Config(type(config), repr(every), every))
    found = _apart(own, followed & own.keys())
    for name, there in inner.items():
        below = settings_of_config(there)
        found.chosen.update({f"{name}.{key}": value for key, value in below.chosen.items()})
        found.defaults.update({f"{name}.{key}": value for key, value in below.defaults.items()})
    return found


def is_read(key: str) -> bool:
    """Return whether a forward in eval mode may compute with the value of a key of a config."""
    return key not in UNREAD_OF_CONFIGS and not key.startswith("_")


@dataclass(frozen=True)
class _Config:
    """The values of a config, compared by how Python writes them."""

    kind: Any
    written: str
    values: dict[str, Any] = field(compare=False)


@lru_cache(maxsize=64)  # a job pins its networks several times, and configs are slow to build
def _followed(config: _Config) -> frozenset[str]:
    """Return the keys whose values a config has of itself: the default of its class, or derived from other values."""
    return frozenset(name for name in config.values if is_read(name) and _follows(config, name))


def _follows(config: _Config, name: str) -> bool:
    value = config.values[name]
    if _is_default(config.kind, name, value):
        return True
    try:
        with _unlogged():
            others = {key: there for key, there in config.values.items() if key != name}
            again = config.kind.from_dict(deepcopy(others)).to_dict()
    except Exception:  # the class demands the value
        return False
    return name in again and bool(again[name] == value)


def settings_of_processor(processor: Any, max_tokens: int | None = None) -> Settings | None:
    """Return what decides the outputs of a processor.

    Returns the settings. User code differs from every other processor, but not from other user code. ``None`` without a
    processor.
    """
    if processor is None:
        return None
    if hasattr(processor, "get_vocab"):
        return _of_tokenizer(processor, max_tokens)
    if not hasattr(processor, "to_dict"):
        return Settings({"class": USER_CODE})
    values = processor.to_dict()
    values["class"] = values.get("image_processor_type", type(processor).__name__)
    kept = {n: v for n, v in values.items() if n not in UNREAD_OF_PROCESSORS and not n.startswith("_")}
    return _apart(kept, {name for name, value in kept.items() if _is_default(type(processor), name, value)})


@contextmanager
def _unlogged() -> Iterator[None]:
    """Silence the log of transformers, which would tell what is wrong with a config that nobody wrote."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(level)


def _is_default(kind: type, name: str, value: Any) -> bool:
    nothing = object()
    return bool(getattr(kind, name, nothing) == value)


def _apart(values: Mapping[str, Any], defaults: Collection[str]) -> Settings:
    chosen = {name: value for name, value in values.items() if name not in defaults}
    return Settings.of(chosen, {name: values[name] for name in values if name in defaults})


def _of_tokenizer(tokenizer: Any, max_tokens: int | None) -> Settings:
    """Return the settings of a tokenizer.

    A fast tokenizer is what its backend serialises, apart from the padding and truncation of the last call. Its class
    and its other special tokens have no influence.
    """
    # Without a padding token a batch raises an error, so it matters only if both sides have one.
    defaults = {"pad_token": tokenizer.pad_token} if tokenizer.pad_token else {}
    if tokenizer.is_fast:
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        # Every token has contents; other keys may be those of a version.
        keys = {"content", *(key for token in backend["added_tokens"] for key in token)}
        defaults |= {f"added_tokens.{key}": [t.get(key) for t in backend["added_tokens"]] for key in sorted(keys)}
        values: dict[str, Any] = {"class": "fast tokenizer"}
        for part, there in backend.items():
            if part not in ("version", "padding", "truncation", "added_tokens"):
                types, others = _types_of(there, part)
                values, defaults = values | types, defaults | others
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
    """Return the types of a part of a fast tokenizer and of the parts inside it, and apart from these all else.

    Another version of the library may write further keys, so only the types must be on both sides.
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
    others: dict[str, Any] = {}
    for name, value in inner.items():
        below, rest = _types_of(value, name)
        types, others = types | below, others | rest
    return types, others


def _options(tokenizer: Any) -> dict[str, Any]:
    """Return the arguments of a slow tokenizer other than files and tokens, with their defaults filled in."""
    others = ("self", "_file", "_token", "_tokens", "merges", "vocab")
    arguments = inspect.signature(type(tokenizer).__init__).parameters.values()
    wanted = [a for a in arguments if a.kind is a.POSITIONAL_OR_KEYWORD and not a.name.endswith(others)]
    return {a.name: tokenizer.init_kwargs.get(a.name, a.default) for a in wanted}
