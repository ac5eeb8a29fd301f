"""What classes and configs of transformers tell of a network: its head, and its padding.

Decoders that classify texts look for the last token that is not padding. Without an id for padding in their config,
which is the default of many types, they take batches of one text only.
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
"""Heads, as :func:`unscored_head` names them, that may be the language model which a task has loaded."""


def task_of_head(name: str, config: Any) -> str | None:
    """Return the task of a head; ``None`` for a class without a head, or with one that no task scores."""
    return next((str(task.name) for task in registries.tasks.usable() if task.takes(name, config)), None)


def unscored_head(name: str, config: Any) -> str:
    """Return what a head predicts that no task scores, in a few words; empty for other classes."""
    found = None if task_of_head(name, config) else re.search(r"(?<=For)[A-Z]\w*|DoubleHeads", name)
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z][a-z\d]*", found.group()) if found else []
    return " ".join(word if word.isupper() else word.lower() for word in words)


NO_TOKEN = -1
"""An id that no token has."""


def text_config(config: Any) -> Any:
    """Return the config of the text network, which is a part of the config of some networks."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def pad_id(config: Any) -> int | None:
    """Return the token id of padding; ``None`` if the config defines none."""
    found: int | None = getattr(text_config(config), "pad_token_id", None)
    return found


def positions_from_padding(model: Any) -> Any:
    """Return the embedding of positions of a network that numbers them from the padding id + 1, as RoBERTa does."""
    config = getattr(model, "config", None)
    positions = getattr(text_config(config), "max_position_embeddings", None)
    for table in model.modules():
        known, weight = getattr(table, "padding_idx", None), getattr(table, "weight", None)
        if known is not None and isinstance(weight, Tensor) and len(weight) == positions:
            return table
    return None


def lacks_padding(model: Any) -> bool:
    """Return whether a network classifies texts and reads a padding id that its config leaves open."""
    classifies = type(model).__name__.endswith("ForSequenceClassification")
    return classifies and hasattr(text_config(model.config), "pad_token_id") and pad_id(model.config) is None


def set_padding(model: Any, tokenizer: Any) -> None:
    """Give a loaded network the padding id of its tokenizer, with a warning, if its config defines none."""
    found = getattr(tokenizer, "pad_token_id", None)
    if found is None or not lacks_padding(model):
        return
    for config in _configs(model.config):
        config.pad_token_id = found
    warn(f"the config of {type(model).__name__} defines no pad_token_id: that of the tokenizer, {found}, is used")


def advice(model: Any, tokenizer: Any) -> str:
    """Describe what a network without a padding id needs for batches."""
    found = getattr(tokenizer, "pad_token_id", None)
    if found is None:
        how = (
            "pass a tokenizer whose pad_token is set as processor= to hf_stitch.load, and before, set "
            "model.config.pad_token_id of a live model to its id"
        )
    else:
        how = f"set model.config.pad_token_id = {found}, the id of the tokenizer, before hf_stitch.load"
    return f"{type(model).__name__} defines no pad_token_id and takes one text at a time. For batches, {how}"


@contextmanager
def as_if_padded(model: Any) -> Iterator[None]:
    """Let a network run on batches of texts without padding, even if its config defines no padding id.

    With an id that no token has, the last token of a text is the last of the batch: what the network takes of a single
    text.
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
    """Return the configs from which a network may read the padding id: its own, and that of its text network."""
    return [each for each in (config, text_config(config)) if hasattr(each, "pad_token_id")]
