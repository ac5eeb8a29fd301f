"""What should be written about images: reference answers, or the names of their classes, as tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_stitch import Samples

MOST = 32
"""Largest number of classes whose names are compared; each of several tokens costs a forward for every row."""

BEFORE = 4
"""Number of tokens of the text that an answer continues, with which it is tokenised."""


@dataclass(frozen=True)
class Asked:
    """What could be written about an image, and which of it is right.

    Attributes:
        choices: The texts.
        right: Place of the right one.
    """

    choices: tuple[str, ...]
    right: int


def asked_of(samples: Samples) -> dict[Any, Asked]:
    """Return what is right for each sample: its ``answer``, or else the name of its class among those of all classes.

    Returns:
        Id -> what could be written; empty if samples have neither, or classes are more than :data:`MOST`.
    """
    raw = [each for batch in samples.batches(256) for each in batch.samples]
    if raw and isinstance(raw[0], Mapping) and "answer" in raw[0]:
        return {name: Asked((str(each["answer"]),), 0) for name, each in zip(samples.ids, raw, strict=True)}
    names = None if samples.undecided else samples.label_names
    if names is None or not 1 < len(names) <= MOST:
        return {}
    return {name: Asked(names, label) for name, label in zip(samples.ids, samples.labels or (), strict=True)}


def tokens_of(tokenizer: Any, ids: Sequence[int], text: str) -> list[int]:
    """Return the tokens of a text behind others, as the tokenizer divides both together.

    Args:
        tokenizer: A tokenizer of transformers.
        ids: Tokens that it continues.
        text: The text.

    Raises:
        ValueError: If it has no tokens.

    Example:
        >>> from tokenizers import Tokenizer, models, pre_tokenizers
        >>> from transformers import PreTrainedTokenizerFast
        >>> raw = Tokenizer(models.WordLevel({"a": 0, "cat": 1, "dog": 2}))
        >>> raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        >>> tokens_of(PreTrainedTokenizerFast(tokenizer_object=raw), [0], "dog")
        [2]
    """
    special, tail = set(tokenizer.all_special_ids), list[int]()
    for each in reversed(ids):
        if each in special or len(tail) == BEFORE:
            break
        tail.insert(0, each)

    def encoded(part: str) -> list[int]:
        found: list[int] = tokenizer(part, add_special_tokens=False)["input_ids"]
        return found

    before = tokenizer.decode(tail)
    joined = text if not before or before[-1].isspace() or text[:1].isspace() else f" {text}"
    start, whole = encoded(before) if before else [], encoded(before + joined)
    found = whole[len(start) :] if whole[: len(start)] == start else encoded(joined)
    if not found:
        raise ValueError(f"the answer {text!r} has no tokens in this tokenizer: leave its sample out")
    return found


def rounds(
    tokenizer: Any, texts: Tensor, asked: Sequence[Asked], padding: int
) -> Iterator[tuple[Tensor, Tensor]]:  # fmt: skip
    """Yield the tokens of the first, second, … choice of all samples behind their texts, and which of them count.

    Raises:
        ValueError: If two choices of a sample have the same tokens.
    """
    rows = [[tokens_of(tokenizer, row, choice) for choice in each.choices]
            for row, each in zip(texts.tolist(), asked, strict=True)]  # fmt: skip
    for each, own in zip(asked, rows, strict=True):
        if len(set(map(tuple, own))) < len(own):
            raise ValueError(f"the tokenizer has the same tokens for some of {', '.join(each.choices)}")
    for several in zip(*rows, strict=True):
        longest = max(map(len, several))
        ids = torch.tensor([[*own, *[padding] * (longest - len(own))] for own in several])
        counted = torch.tensor([[True] * len(own) + [False] * (longest - len(own)) for own in several])
        yield ids.to(texts.device), counted.to(texts.device)
