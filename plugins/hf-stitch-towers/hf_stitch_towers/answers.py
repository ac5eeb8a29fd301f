"""Reference texts of test images, as tokens: their answers, or the names of all classes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_stitch import Samples
from hf_stitch.data.samples import ids_of

MOST = 32
"""Maximum number of classes: the likelihood of each class name costs a forward pass for every row of scores."""

BEFORE = 4
"""Number of preceding tokens that are tokenized together with an answer."""


@dataclass(frozen=True)
class Asked:
    """Possible texts about an image.

    Attributes:
        choices: The texts.
        right: Index of the right text.
    """

    choices: tuple[str, ...]
    right: int


def references_of(samples: Samples, tokenizer: Any) -> tuple[dict[Any, Asked], str]:
    """Return the reference text of each sample: its ``answer``, or the name of its class among all class names.

    Args:
        samples: The samples.
        tokenizer: The tokenizer of the network; ``None`` without a tokenizer.

    Returns:
        Id -> possible texts, empty if samples lack both; and the reason if class names cannot be scored.
    """
    kind = samples._source.table.kinds.get("answer", "text")
    if kind != "text" and samples.modality != "text":
        raise ValueError(
            f"the column 'answer' must contain a text for each sample, got {kind}: omit samples without one"
        )
    first_batches = samples.take(1).batches(1)
    has_answers = any(isinstance(x, Mapping) and "answer" in x for batch in first_batches for x in batch.samples)
    if has_answers and tokenizer is None:
        raise ValueError("scoring answers requires a tokenizer, which the processor of the network lacks")
    if has_answers:
        samples_by_id = (
            (name, sample)
            for batch in samples.batches(256)
            for name, sample in zip(ids_of(batch.samples), batch.samples, strict=True)
        )
        texts = {name: str(sample["answer"]) for name, sample in samples_by_id}
        if blank := [name for name, text in texts.items() if not text.strip()]:
            raise ValueError(f"the answer of sample {blank[0]!r} is empty: omit this sample")
        return {name: Asked((text,), 0) for name, text in texts.items()}, ""
    names = None if samples.undecided or tokenizer is None else samples.label_names
    if names is None or len(names) < 2:
        return {}, ""
    if len(names) > MOST:
        return {}, f"accuracy omitted: it is limited to {MOST} classes, got {len(names)}"
    try:
        check_distinct(names, [tokens_of(tokenizer, [], name) for name in names])
    except Exception as problem:  # tokenizers raise anything for unknown words
        return {}, f"accuracy omitted: the tokenizer does not distinguish the class names ({problem})"
    try:
        labels = samples.labels or ()
    except ValueError as problem:  # labels of another kind
        return {}, f"accuracy omitted: {problem}"
    return {name: Asked(names, label) for name, label in zip(samples.ids, labels, strict=True)}, ""


def check_distinct(choices: Sequence[str], rows: Sequence[Sequence[int]]) -> None:
    """Raise a ValueError if choices have equal tokens, or one is a prefix of another, which it would always beat."""
    for first, first_tokens in zip(choices, rows, strict=True):
        for second, second_tokens in zip(choices, rows, strict=True):
            if first != second and list(second_tokens[: len(first_tokens)]) == list(first_tokens):
                raise ValueError(f"the tokens of {first!r} equal the tokens of {second!r} or their beginning")
    if len(set(map(tuple, rows))) < len(rows):
        raise ValueError(f"some of these texts have equal tokens: {', '.join(choices)}")


def tokens_of(tokenizer: Any, ids: Sequence[int], text: str) -> list[int]:
    """Return the tokens of a text that continues other tokens, tokenized together with them.

    Args:
        tokenizer: A tokenizer of transformers.
        ids: Tokens before the text.
        text: The text.

    Raises:
        ValueError: If the text does not have tokens.

    Example:
        >>> from tokenizers import Tokenizer, models, pre_tokenizers
        >>> from transformers import PreTrainedTokenizerFast
        >>> raw = Tokenizer(models.WordLevel({"a": 0, "cat": 1, "dog": 2}))
        >>> raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        >>> tokens_of(PreTrainedTokenizerFast(tokenizer_object=raw), [0], "dog")
        [2]
    """
    special, tail = set(tokenizer.all_special_ids), list[int]()
    for token in reversed(ids):
        if token in special or len(tail) == BEFORE:
            break
        tail.insert(0, token)

    def encoded(part: str) -> list[int]:
        encoding: list[int] = tokenizer(part, add_special_tokens=False)["input_ids"]
        return encoding

    before = tokenizer.decode(tail)
    joined = text if not before or before[-1].isspace() or text[:1].isspace() else f" {text}"
    start, whole = encoded(before) if before else [], encoded(before + joined)
    continuation = whole[len(start) :] if whole[: len(start)] == start else encoded(joined)
    if not continuation:
        raise ValueError(f"the answer {text!r} does not have tokens in this tokenizer: omit its sample")
    return continuation


def rounds(
    tokenizer: Any, texts: Tensor, asked: Sequence[Asked], padding: int
) -> Iterator[tuple[Tensor, Tensor]]:  # fmt: skip
    """Yield, for the first, second, … choice, its padded tokens for all samples and the mask without padding.

    Raises:
        ValueError: If two choices of a sample have the same tokens.
    """
    rows = [[tokens_of(tokenizer, row, choice) for choice in question.choices]
            for row, question in zip(texts.tolist(), asked, strict=True)]  # fmt: skip
    for question, tokens in zip(asked, rows, strict=True):
        check_distinct(question.choices, tokens)
    for choice_rows in zip(*rows, strict=True):  # one choice of every sample
        longest = max(map(len, choice_rows))
        ids = torch.tensor([[*tokens, *[padding] * (longest - len(tokens))] for tokens in choice_rows])
        counted = torch.tensor([[True] * len(tokens) + [False] * (longest - len(tokens)) for tokens in choice_rows])
        yield ids.to(texts.device), counted.to(texts.device)
