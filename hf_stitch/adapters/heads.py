"""What the head of a network of transformers predicts, by the name of its class and its config."""

from __future__ import annotations

import re
from typing import Any

HEADS = {
    "ForImageClassification": "image-classification",
    "ForSequenceClassification": "text-classification",
    "ForCausalLM": "text-generation",
    "LMHead": "text-generation",
    "GenerationDecoder": "text-generation",
}
"""Part of the name of a class with a head -> its task."""
GENERATES = ("", "conditional generation")
"""Heads, as :func:`unscored_head` names them, that may be the language model which a task has loaded."""


def unscored_head(name: str, config: Any) -> str:
    """Return what a head predicts that is neither one class of a sample nor the next token.

    Returns a few words; empty for classifiers with one class per sample, causal language models and networks without a
    head.
    """
    task = next((task for part, task in HEADS.items() if part in name), "")
    if task.endswith("classification"):
        kind = getattr(config, "problem_type", None)
        if kind == "multi_label_classification":
            return "multi-label classification"
        return "regression" if kind == "regression" or getattr(config, "num_labels", None) == 1 else ""
    found = None if task else re.search(r"(?<=For)[A-Z]\w*|DoubleHeads", name)
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z][a-z\d]*", found.group()) if found else []
    return " ".join(word if word.isupper() else word.lower() for word in words)
