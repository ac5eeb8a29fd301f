"""Alignment of the word vectors of two languages with a small dictionary."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_stitch import registries
from hf_stitch.matchers import ClosedFormMatcher, Matcher
from hf_stitch.statistics import Moments
from hf_stitch.stitches import Stitch
from hf_stitch_word_vectors.retrieval import nearest_words, unit_rows
from hf_stitch_word_vectors.vectors import WordVectors, as_word_vectors


@dataclass(frozen=True, eq=False)
class Alignment:
    """Map from the word vectors of one language to the word vectors of a second language.

    Attributes:
        source: Word vectors of the first language.
        target: Word vectors of the second language.
        stitch: The map between normalised vectors.
    """

    source: WordVectors
    target: WordVectors
    stitch: Stitch

    def mapped(self, words: Iterable[str]) -> Tensor:
        """Return the vectors of source words in the target space.

        Args:
            words: Words of the source.

        Returns:
            Tensor (n, width of the target).

        Raises:
            ValueError: If a word does not have a vector.
        """
        with torch.no_grad():
            mapped: Tensor = self.stitch(unit_rows(self.source.rows(words), "source"))
        return mapped

    def translate(self, words: Sequence[str], k: int = 5, *, csls: bool = False) -> dict[str, list[str]]:
        """Return the nearest target words.

        Args:
            words: Words of the source.
            k: Number of target words.
            csls: Whether to rank by cross-domain similarity local scaling (see :func:`retrieval_scores`), which maps
                all source vectors.

        Returns:
            Word -> target words, nearest first.

        Raises:
            ValueError: If a word does not have a vector.
        """
        source_rows = self.mapped(self.source.words) if csls else None
        target_rows = self.target.rows(self.target.words)
        nearest = nearest_words(self.mapped(words), target_rows, k, csls=csls, among=source_rows)
        return {
            word: [self.target.words[index] for index in indices]
            for word, indices in zip(words, nearest.tolist(), strict=True)
        }

    def precision(
        self, dictionary: Iterable[tuple[str, str]], k: Sequence[int] = (1, 5), *, csls: bool = False
    ) -> dict[int, float]:
        """Compute the share of source words with a correct translation among the k nearest target words.

        Args:
            dictionary: Held-out pairs of words. A word may have several translations.
            k: Numbers of target words.
            csls: As for :meth:`translate`.

        Returns:
            k -> precision.

        Raises:
            ValueError: If a source word does not have a vector, or the dictionary is empty.
        """
        correct: dict[str, set[str]] = {}
        for word, translation in dictionary:
            correct.setdefault(word, set()).add(translation)
        if not correct:
            raise ValueError("dictionary must not be empty")
        translations = self.translate(list(correct), max(k), csls=csls)
        return {size: sum(bool(correct[w] & set(translations[w][:size])) for w in correct) / len(correct) for size in k}


def align(
    source: Any,
    target: Any,
    dictionary: Iterable[tuple[str, str]],
    matcher: str | Matcher | Mapping[str, Any] = "procrustes",
    **options: Any,
) -> Alignment:
    """Align the word vectors of two languages with a small dictionary.

    Vectors are divided by their norms (Xing et al. 2015); then a closed-form matcher fits the map to the pairs of the
    dictionary.

    Args:
        source: Word vectors of the first language, as for :func:`as_word_vectors`.
        target: Word vectors of the second language.
        dictionary: Pairs of a source word and a target word.
        matcher: A closed-form matcher, as for ``hf_stitch.stitch``.
        **options: Options of the matcher, if passed by name.

    Returns:
        The alignment.

    Raises:
        ValueError: If a word does not have a vector, the matcher is not a closed form, or it requires more pairs.

    Example:
        >>> rotation = torch.linalg.qr(torch.randn(4, 4)).Q
        >>> vectors = torch.randn(40, 4)
        >>> english = WordVectors.of([f"word{i}" for i in range(40)], vectors)
        >>> german = WordVectors.of([f"wort{i}" for i in range(40)], vectors @ rotation)
        >>> aligned = align(english, german, [(f"word{i}", f"wort{i}") for i in range(10)], center=False)
        >>> aligned.precision([(f"word{i}", f"wort{i}") for i in range(10, 40)])
        {1: 1.0, 5: 1.0}
    """
    a, b = as_word_vectors(source), as_word_vectors(target)
    pairs = list(dictionary)
    if not pairs:
        raise ValueError("dictionary must not be empty")
    closed_form = registries.matchers.build(matcher, **options)
    if not isinstance(closed_form, ClosedFormMatcher):
        raise ValueError(f"matcher must be a closed form, such as 'procrustes' or 'ridge', got {closed_form.name!r}")
    x = unit_rows(a.rows(word for word, _ in pairs), "source")
    y = unit_rows(b.rows(word for _, word in pairs), "target")
    return Alignment(a, b, closed_form.fit(Moments(x.shape[1], y.shape[1]).update(x, y)).eval())
