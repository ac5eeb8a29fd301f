"""Which head a transformers network has, and how it pads batches, from its class and config.

Decoders that classify texts use the last token that is not padding. Without a padding id in their config, which is the
default of many types, they accept only batches of one text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from hf_stitch.printing import warn
from hf_stitch.registry import registries

GENERATES = ("", "conditional generation")
"""Results of :func:`unscored_head` that a generation task accepts: no other head, or conditional generation."""


def task_of_head(class_name: str, config: Any) -> str | None:
    """Return the task of a head; ``None`` for a class without a head, or if no task scores it."""
    return next((str(task.name) for task in registries.tasks.usable() if task.takes(class_name, config)), None)


def unscored_head(class_name: str, config: Any) -> str:
    """Return a short description of a head that no task scores; empty for other classes."""
    head = None if task_of_head(class_name, config) else re.search(r"(?<=For)[A-Z]\w*|DoubleHeads", class_name)
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z][a-z\d]*", head.group()) if head else []
    return " ".join(word if word.isupper() else word.lower() for word in words)


NO_TOKEN = -1
"""Invalid token id."""


def text_config(config: Any) -> Any:
    """Return the config of the text network, which may be nested in the config of a network."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def pad_id(config: Any) -> int | None:
    """Return the padding id; ``None`` if the config does not define it."""
    padding: int | None = getattr(text_config(config), "pad_token_id", None)
    return padding


def positions_from_padding(model: Any) -> Any:
    """Return the position embeddings of a network that counts positions from the padding id + 1, like RoBERTa."""
    config = getattr(model, "config", None)
    positions = getattr(text_config(config), "max_position_embeddings", None)
    for table in model.modules():
        padding, weight = getattr(table, "padding_idx", None), getattr(table, "weight", None)
        if padding is not None and isinstance(weight, Tensor) and len(weight) == positions:
            return table
    return None


def lacks_padding(model: Any) -> bool:
    """Return whether a network classifies texts and reads a padding id that its config does not define."""
    classifies = type(model).__name__.endswith("ForSequenceClassification")
    return classifies and hasattr(text_config(model.config), "pad_token_id") and pad_id(model.config) is None


def set_padding(model: Any, tokenizer: Any) -> None:
    """Set the padding id of a network to the id of its tokenizer, with a warning, if its config does not define it."""
    padding = getattr(tokenizer, "pad_token_id", None)
    if padding is None or not lacks_padding(model):
        return
    for config in _configs(model.config):
        config.pad_token_id = padding
    warn(f"the config of {type(model).__name__} does not define pad_token_id: using {padding}, from the tokenizer")


def advice(model: Any, tokenizer: Any) -> str:
    """Return advice for batches of a network without a padding id."""
    padding = getattr(tokenizer, "pad_token_id", None)
    if padding is None:
        remedy = (
            "pass a tokenizer with pad_token as processor= to hf_stitch.load; for a live model, first set "
            "model.config.pad_token_id to its id"
        )
    else:
        remedy = f"set model.config.pad_token_id = {padding}, the id of the tokenizer, before hf_stitch.load"
    return f"{type(model).__name__} does not define pad_token_id and accepts one text at a time. For batches, {remedy}"


@contextmanager
def as_if_padded(model: Any) -> Iterator[None]:
    """Let a network run on batches of texts without padding, even if its config does not define a padding id.

    With a padding id that no token has, the network reads the last position of every text, as for a single text.
    """
    configs = _configs(model.config) if lacks_padding(model) else []
    for config in configs:
        config.pad_token_id = NO_TOKEN
    try:
        yield
    finally:
        for config in configs:
            config.pad_token_id = None


def _configs(config: Any) -> list[Any]:
    """Return the configs that may define the padding id: the config of the network, and of its text network."""
    return [candidate for candidate in (config, text_config(config)) if hasattr(candidate, "pad_token_id")]
