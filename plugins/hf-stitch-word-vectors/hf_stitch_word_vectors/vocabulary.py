"""Shared words of two vocabularies, and words as samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hf_stitch import Samples
from hf_stitch_word_vectors.vectors import as_word_vectors


def shared_vocabulary(a: Any, b: Any, min_length: int = 4, most_frequent: int | None = 20_000) -> list[str]:
    """Return the shared words of two vocabularies, most frequent first.

    Both vocabularies must be sorted by frequency, like trained ones. Words are sorted by the sum of their ranks.

    Args:
        a: Word vectors, as for :func:`as_word_vectors`.
        b: Word vectors of the second vocabulary.
        min_length: Minimum number of characters of a word (4 in Moschella et al. 2023).
        most_frequent: Maximum number of words. ``None``: all.

    Returns:
        The words.

    Raises:
        ValueError: If the vocabularies do not share such words.

    Example:
        >>> import torch
        >>> from hf_stitch_word_vectors import WordVectors
        >>> a = WordVectors.of(["the", "house", "tree", "green"], torch.eye(4))
        >>> b = WordVectors.of(["tree", "the", "house"], torch.eye(3))
        >>> shared_vocabulary(a, b)
        ['tree', 'house']
    """
    ranks = [{word: rank for rank, word in enumerate(as_word_vectors(side).words)} for side in (a, b)]
    shared = [word for word in ranks[0] if word in ranks[1] and len(word) >= min_length]
    if not shared:
        raise ValueError(
            f"the vocabularies must share words of at least {min_length} characters; check upper and lower case"
        )
    return sorted(shared, key=lambda word: ranks[0][word] + ranks[1][word])[:most_frequent]


def word_samples(words: Sequence[str]) -> Samples:
    """Return words as samples with the words as ids, to select anchors by word.

    Args:
        words: The words, without repetitions.

    Returns:
        The samples.

    Example:
        >>> from hf_stitch.relative import select_anchors
        >>> words = word_samples(["house", "tree", "green"])
        >>> select_anchors(words, 2, "parallel", ids=["green", "house"]).ids
        ('green', 'house')
        >>> select_anchors(words, 2, "frequency", counts={"tree": 5, "house": 3}).ids
        ('tree', 'house')
    """
    return Samples.of(list(words), id=list(words))
