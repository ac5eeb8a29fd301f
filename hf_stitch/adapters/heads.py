"""What the head of a network of transformers predicts, by the name of its class and its config."""

from __future__ import annotations

import re
from typing import Any

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
