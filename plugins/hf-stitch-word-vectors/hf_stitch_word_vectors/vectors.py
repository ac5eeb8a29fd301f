"""Word vectors as a network: an embedding with a vocabulary."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_stitch.adapters import Adapter

MAX_NAMES = 5
"""Maximum number of words in an error message."""


class WordVectors(nn.Module):
    """Word embedding with a vocabulary.

    Attributes:
        words: The vocabulary in the order of the vectors; in trained files, the most frequent word comes first.
        vectors: The embedding, ``(words, width)``, the only cut of the network.

    Args:
        words: The vocabulary, without repetitions.
        width: Width of the vectors, which are random until loaded.

    Raises:
        ValueError: If ``words`` is empty, or a word is empty, repeated, or contains a line break.

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
            raise ValueError("words must not be empty")
        for invalid in (word for word in self.words if not isinstance(word, str) or not word or "\n" in word):
            raise ValueError(f"words must be non-empty strings without line breaks, got {invalid!r}")
        self._indices = {word: index for index, word in enumerate(self.words)}
        if len(self._indices) < len(self.words):
            repeated = next(word for index, word in enumerate(self.words) if self._indices[word] != index)
            raise ValueError(f"words must be unique, but {repeated!r} is repeated")
        self.vectors = nn.Embedding(len(self.words), width)
        self.output = nn.Identity()

    @classmethod
    def of(cls, words: Sequence[str], values: Tensor) -> WordVectors:
        """Create word vectors from a copy of values.

        Args:
            words: The vocabulary.
            values: ``(words, width)``, floating point.

        Returns:
            The network in eval mode, without gradients.

        Raises:
            ValueError: If the shape does not match the words, or a value is NaN or infinite.
        """
        if values.ndim != 2 or len(values) != len(words) or not values.is_floating_point():
            raise ValueError(
                f"values must be floating point with shape ({len(words)}, width), got {values.dtype} of "
                f"{tuple(values.shape)}"
            )
        if not bool(values.isfinite().all()):
            word = words[int(values.isfinite().all(1).logical_not().nonzero()[0])]
            raise ValueError(f"the vector of {word!r} contains NaN or infinity; drop the word")
        with torch.device("meta"):
            word_vectors = cls(words, values.shape[1])
        word_vectors.vectors.weight = nn.Parameter(values.detach().clone(), requires_grad=False)
        return word_vectors.eval()

    def forward(self, words: Tensor) -> Tensor:
        """Return the vectors of words.

        Args:
            words: Indices of words in the vocabulary, of any shape, int64.

        Returns:
            Tensor (…, width).
        """
        outputs: Tensor = self.output(self.vectors(words))
        return outputs

    def __len__(self) -> int:
        return len(self.words)

    def __contains__(self, word: object) -> bool:
        return word in self._indices

    def places(self, words: Iterable[str]) -> Tensor:
        """Return the indices of words in the vocabulary.

        Args:
            words: The words.

        Returns:
            Tensor (n,) int64.

        Raises:
            ValueError: If a word does not have a vector.
        """
        words = list(words)
        missing = [word for word in dict.fromkeys(words) if word not in self._indices]
        if missing:
            listing = ", ".join(map(repr, missing[:MAX_NAMES])) + (", …" if len(missing) > MAX_NAMES else "")
            raise ValueError(
                f"{len(missing)} of {len(set(words))} words do not have a vector: {listing}. Pass only words in the "
                "vocabulary (shared_vocabulary(a, b) for two sides), and check upper and lower case"
            )
        return torch.tensor([self._indices[word] for word in words], dtype=torch.int64)

    @torch.no_grad()
    def rows(self, words: Iterable[str]) -> Tensor:
        """Return the vectors of words.

        Args:
            words: The words.

        Returns:
            Tensor (n, width), detached.

        Raises:
            ValueError: If a word does not have a vector.
        """
        return self.vectors.weight[self.places(words).to(self.vectors.weight.device)].detach()


def is_gensim(model: Any) -> bool:
    """Return whether an object is a gensim model with word vectors.

    Args:
        model: Object of any type.
    """
    if "gensim" not in sys.modules:  # then such an object cannot exist
        return False
    from gensim.models import KeyedVectors, Word2Vec  # type: ignore[import-untyped]

    return isinstance(model, (KeyedVectors, Word2Vec))


def as_word_vectors(vectors: Any) -> WordVectors:
    """Convert word vectors to a network.

    Args:
        vectors: ``WordVectors``, an adapter of them, or ``KeyedVectors``, ``Word2Vec`` or ``FastText`` of gensim, which
            are copied. Vectors that FastText generates for unseen words are not included.

    Returns:
        The network.

    Raises:
        TypeError: If the object has a different type.

    Example:
        >>> from gensim.models import KeyedVectors
        >>> keyed = KeyedVectors(2)
        >>> keyed.add_vectors(["cat", "dog"], [[1, 2], [3, 4]])
        >>> as_word_vectors(keyed).words
        ('cat', 'dog')
    """
    if isinstance(vectors, Adapter):
        vectors = vectors.model
    if isinstance(vectors, WordVectors):
        return vectors
    if not is_gensim(vectors):
        raise TypeError(
            "word vectors must be WordVectors, an adapter of them (hf_stitch.load), or KeyedVectors, Word2Vec or "
            f"FastText of gensim, got {type(vectors).__name__}"
        )
    keyed_vectors = getattr(vectors, "wv", vectors)
    return WordVectors.of(keyed_vectors.index_to_key, torch.as_tensor(keyed_vectors.vectors, dtype=torch.float32))
