"""What should be written about images: reference answers, or the names of their classes, as tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_stitch import Samples
from hf_stitch.data.samples import ids_of

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


def asked_of(samples: Samples, tokenizer: Any) -> tuple[dict[Any, Asked], str]:
    """Return what is right for each sample: its ``answer``, or else the name of its class among those of all classes.

    Args:
        samples: The samples.
        tokenizer: The tokenizer of the network; ``None`` if it has none.

    Returns:
        Id -> what could be written, empty if samples have neither; and why names of classes are not asked for.
    """
    kind = samples._source.table.kinds.get("answer", "text")
    if kind != "text" and samples.modality != "text":
        raise ValueError(f"the column 'answer' must have a text for each sample, got {kind}: leave the others out")
    raw = samples.take(1).batches(1)
    answers = any(isinstance(each, Mapping) and "answer" in each for batch in raw for each in batch.samples)
    if answers and tokenizer is None:
        raise ValueError("samples have answers, and the processor of the network has no tokenizer to read them with")
    if answers:
        rows = (
            (name, each)
            for batch in samples.batches(256)
            for name, each in zip(ids_of(batch.samples), batch.samples, strict=True)
        )
        found = {name: str(each["answer"]) for name, each in rows}
        if blank := [name for name, text in found.items() if not text.strip()]:
            raise ValueError(f"the answer of sample {blank[0]!r} is empty: leave it out")
        return {name: Asked((text,), 0) for name, text in found.items()}, ""
    names = None if samples.undecided or tokenizer is None else samples.label_names
    if names is None or len(names) < 2:
        return {}, ""
    if len(names) > MOST:
        return {}, f"no accuracy: names of {len(names)} classes are more than the {MOST} that are compared"
    try:
        different(names, [tokens_of(tokenizer, [], name) for name in names])
    except Exception as problem:  # tokenizers raise anything for a word that they do not know
        return {}, f"no accuracy: the tokenizer cannot tell the names of classes apart ({problem})"
    try:
        labels = samples.labels or ()
    except ValueError as problem:  # labels are not what the images are for
        return {}, f"no accuracy: {problem}"
    return {name: Asked(names, label) for name, label in zip(samples.ids, labels, strict=True)}, ""


def different(choices: Sequence[str], rows: Sequence[Sequence[int]]) -> None:
    """Raise a ValueError if two choices have the same tokens, or one begins another, which it would always beat."""
    for one, own in zip(choices, rows, strict=True):
        for other, its in zip(choices, rows, strict=True):
            if one != other and list(its[: len(own)]) == list(own):
                raise ValueError(
                    f"the tokenizer has the same tokens for {one!r} as for {other!r}, or for its beginning"
                )
    if len(set(map(tuple, rows))) < len(rows):
        raise ValueError(f"the tokenizer has the same tokens for some of {', '.join(choices)}")


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
        different(each.choices, own)
    for several in zip(*rows, strict=True):
        longest = max(map(len, several))
        ids = torch.tensor([[*own, *[padding] * (longest - len(own))] for own in several])
        counted = torch.tensor([[True] * len(own) + [False] * (longest - len(own)) for own in several])
        yield ids.to(texts.device), counted.to(texts.device)
