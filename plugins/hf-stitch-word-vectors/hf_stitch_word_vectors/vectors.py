"""Word vectors as a network: an embedding with a vocabulary."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_stitch.adapters import Adapter

NAMED = 5
"""Number of words that an error names."""


class WordVectors(nn.Module):
    """A vector for every word of a vocabulary.

    Attributes:
        words: The vocabulary in the order of the vectors: in trained files, the most frequent word first.
        vectors: The embedding, ``(words, width)``: the one layer at which the network is cut.

    Args:
        words: The vocabulary, without repetitions.
        width: Width of the vectors, which are random until loaded.

    Raises:
        ValueError: A word is empty, repeated, or contains a line break, or there is none.

    Example:
        >>> net = WordVectors.of(["cat", "dog"], torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        >>> net.rows(["dog"])
        tensor([[3., 4.]])
        >>> "mouse" in net, len(net)
        (False, 2)
    """

    def __init__(self, words: Sequence[str], width: int) -> None:
        super().__init__()
        self.words = tuple(words)
        if not self.words:
            raise ValueError("there are no words")
        for bad in (word for word in self.words if not isinstance(word, str) or not word or "\n" in word):
            raise ValueError(f"words must be texts, neither empty nor with line breaks, got {bad!r}")
        self._places = {word: place for place, word in enumerate(self.words)}
        if len(self._places) < len(self.words):
            repeated = next(word for place, word in enumerate(self.words) if self._places[word] != place)
            raise ValueError(f"a word must have one vector, but {repeated!r} is repeated")
        self.vectors = nn.Embedding(len(self.words), width)
        self.output = nn.Identity()

    @classmethod
    def of(cls, words: Sequence[str], values: Tensor) -> WordVectors:
        """Create word vectors from values, which are copied.

        Args:
            words: The vocabulary.
            values: ``(words, width)``, floating point.

        Returns:
            The network in eval mode, without gradients.

        Raises:
            ValueError: The shape is another one, or a value is NaN or infinite.
        """
        if values.ndim != 2 or len(values) != len(words) or not values.is_floating_point():
            raise ValueError(
                f"values must be floating-point of shape ({len(words)}, width), got {values.dtype} of "
                f"{tuple(values.shape)}"
            )
        if not bool(values.isfinite().all()):
            word = words[int(values.isfinite().all(1).logical_not().nonzero()[0])]
            raise ValueError(f"the vector of {word!r} contains NaN or infinity; drop the word")
        with torch.device("meta"):
            made = cls(words, values.shape[1])
        made.vectors.weight = nn.Parameter(values.detach().clone(), requires_grad=False)
        return made.eval()

    def forward(self, words: Tensor) -> Tensor:
        """Return vectors.

        Args:
            words: Places of words in the vocabulary, of any shape, int64.

        Returns:
            Tensor (…, width).
        """
        found: Tensor = self.output(self.vectors(words))
        return found

    def __len__(self) -> int:
        return len(self.words)

    def __contains__(self, word: object) -> bool:
        return word in self._places

    def places(self, words: Iterable[str]) -> Tensor:
        """Return the places of words in the vocabulary.

        Args:
            words: The words.

        Returns:
            Tensor (n,) int64.

        Raises:
            ValueError: A word has no vector.
        """
        words = list(words)
        missing = [word for word in dict.fromkeys(words) if word not in self._places]
        if missing:
            named = ", ".join(map(repr, missing[:NAMED])) + (", …" if len(missing) > NAMED else "")
            raise ValueError(
                f"{len(missing)} of {len(set(words))} words have no vector: {named}. Keep the words that are in the "
                "vocabulary (of both sides: shared_vocabulary(a, b)); mind upper and lower case"
            )
        return torch.tensor([self._places[word] for word in words], dtype=torch.int64)

    @torch.no_grad()
    def rows(self, words: Iterable[str]) -> Tensor:
        """Return the vectors of words.

        Args:
            words: The words.

        Returns:
            Tensor (n, width), detached.

        Raises:
            ValueError: A word has no vector.
        """
        return self.vectors.weight[self.places(words).to(self.vectors.weight.device)].detach()


def is_gensim(model: Any) -> bool:
    """Return whether an object is word vectors of gensim, or a model that has some.

    Args:
        model: Object of any type.
    """
    if "gensim" not in sys.modules:  # then there is none
        return False
    from gensim.models import KeyedVectors, Word2Vec  # type: ignore[import-untyped]

    return isinstance(model, (KeyedVectors, Word2Vec))


def as_word_vectors(vectors: Any) -> WordVectors:
    """Return word vectors as a network.

    Args:
        vectors: ``WordVectors``, an adapter of them, or ``KeyedVectors``, ``Word2Vec`` or ``FastText`` of gensim, whose
            vectors are copied. FastText can make vectors of words that it has not seen; these are left out.

    Returns:
        The network.

    Raises:
        TypeError: The object is none of these.

    Example:
        >>> from gensim.models import KeyedVectors
        >>> kept = KeyedVectors(2)
        >>> kept.add_vectors(["cat", "dog"], [[1, 2], [3, 4]])
        >>> as_word_vectors(kept).words
        ('cat', 'dog')
    """
    if isinstance(vectors, Adapter):
        vectors = vectors.model
    if isinstance(vectors, WordVectors):
        return vectors
    if not is_gensim(vectors):
        raise TypeError(
            "expected word vectors: WordVectors, an adapter of them (hf_stitch.load), or KeyedVectors, Word2Vec or "
            f"FastText of gensim, got {type(vectors).__name__}"
        )
    kept = getattr(vectors, "wv", vectors)
    return WordVectors.of(kept.index_to_key, torch.as_tensor(kept.vectors, dtype=torch.float32))
