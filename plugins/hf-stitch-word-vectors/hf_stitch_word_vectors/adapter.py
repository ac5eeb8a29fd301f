"""Adapter for word vectors."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from hf_stitch import hub
from hf_stitch.adapters import Adapter, Described, Interface, Library, Loaded
from hf_stitch.adapters.overrides import Override
from hf_stitch.reference import ModelReference
from hf_stitch_word_vectors.files import read_vectors
from hf_stitch_word_vectors.vectors import WordVectors, as_word_vectors, is_gensim

LAYER = "vectors"
"""The one cut."""
EXAMPLE = 3
"""Number of words with which the cut is verified."""


class Vocabulary:
    """A function from a word to its place in the vocabulary.

    Args:
        vectors: The word vectors.
    """

    def __init__(self, vectors: WordVectors) -> None:
        self._vectors = vectors

    def __call__(self, word: str) -> torch.Tensor:
        """Return the place of a word, int64 without axes.

        Args:
            word: The word.

        Raises:
            ValueError: It has no vector.
        """
        return self._vectors.places([word])[0]


class WordVectorsOverride(Override):
    """The cut of :class:`WordVectors` is its embedding."""

    def blocks(self, model: nn.Module) -> tuple[str, ...]:
        """Return the embedding.

        Args:
            model: The network.
        """
        return (LAYER,)


class WordAdapter(Adapter):
    """Adapter of word vectors, which names all words without a vector."""

    def preprocess(self, samples: Sequence[Any], *, offsets: bool = False) -> dict[str, Any]:
        """Turn words into their places in the vocabulary.

        Args:
            samples: Words; tensors count as preprocessed.
            offsets: Must be False: a word has one vector.

        Returns:
            ``words``, (n,) int64.

        Raises:
            ValueError: A word has no vector; the message names some of them.
        """
        if isinstance(self.processor, Vocabulary) and len(samples) and all(isinstance(s, str) for s in samples):
            model: WordVectors = self.model  # type: ignore[assignment]
            model.places(samples)  # names all words without a vector
        return super().preprocess(samples, offsets=offsets)


class WordVectorsAdapter(Library):
    """Word vectors: :class:`WordVectors`, and ``KeyedVectors``, ``Word2Vec`` and ``FastText`` of gensim.

    A sample is a word, as text. The one cut is ``vectors``.

    ``hf_stitch.load("word_vectors:PATH")`` reads a file (see :func:`read_vectors`), and
    ``hf_stitch.load("word_vectors:OWNER/NAME/FILE")`` one of a repository on the Hub. Options: ``most_frequent``, the
    number of words to read; ``trust_remote_code=True`` to open a pickle of gensim; ``token``, ``cache_dir``,
    ``local_files_only`` and ``force_download`` for the Hub.

    Example:
        >>> import hf_stitch
        >>> net = WordVectors.of(["cat", "dog", "cow"], torch.eye(3))
        >>> adapter = hf_stitch.load(net)
        >>> adapter.encode(adapter.preprocess(["cow", "cat"]), "vectors")["vectors"].values
        tensor([[0., 0., 1.],
                [1., 0., 0.]])
    """

    name: ClassVar[str] = "word_vectors"
    adapter_class: ClassVar[type[Adapter]] = WordAdapter
    trusted_options: ClassVar[frozenset[str]] = frozenset({"most_frequent"})

    def serves(self, model: Any) -> bool:
        """Return whether the model is word vectors of this package or of gensim.

        Args:
            model: Object of any type.
        """
        return isinstance(model, WordVectors) or is_gensim(model)

    def describe(
        self, model: Any, example_inputs: Any = None, processor: Any = None, content: str | None = None
    ) -> Described:
        """Describe word vectors; those of gensim are copied.

        Args:
            model: The word vectors.
            example_inputs: Has no effect: the first words of the vocabulary serve as example.
            processor: Function from a sample to the place of its word. ``None`` (default): samples are words.
            content: Has no effect: there is one argument.
        """
        network = as_word_vectors(model)
        interface = Interface(("words",), "tensor", {"words": ()}, {"words": "int64"})
        example = {"words": torch.arange(min(EXAMPLE, len(network)))}
        return Described(network, interface, example, processor or Vocabulary(network))

    def load(
        self,
        reference: ModelReference,
        processor: Any = None,
        most_frequent: int | None = None,
        trust_remote_code: bool = False,
        **options: Any,
    ) -> Loaded:
        """Load word vectors from a file on this machine or on the Hub.

        Args:
            reference: ``word_vectors:PATH`` or ``word_vectors:OWNER/NAME/FILE``.
            processor: Function from a sample to the place of its word. ``None`` (default): samples are words.
            most_frequent: Number of words to read, the first ones. ``None`` (default): all.
            trust_remote_code: Whether to open a pickle, as gensim's ``save`` writes it.
            **options: Options of downloads from the Hub.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: The file is a pickle, or has no known format.
            TypeError: An option is unknown.
        """
        if unknown := options.keys() - hub.DownloadOptions.__annotations__.keys():
            raise TypeError(f"word vectors have no loading option {', '.join(sorted(unknown))}")
        place = str(reference.id).partition(":")[2]
        path = _found(place, options)
        if Path(place).expanduser().is_file():  # the folder of this process is not that of others
            reference = dataclasses.replace(reference, id=f"{self.name}:{path.resolve()}")
        vectors = read_vectors(path, most_frequent, trust_pickle=trust_remote_code)
        return Loaded(vectors, reference, processor)

    def blueprint(self, model: nn.Module) -> dict[str, Any]:
        """Return the vocabulary and the width.

        Args:
            model: The word vectors.
        """
        net: WordVectors = model  # type: ignore[assignment]
        return {"words": "\n".join(net.words), "width": net.vectors.embedding_dim}

    def build(self, blueprint: Mapping[str, Any]) -> nn.Module:
        """Construct the network that a :meth:`blueprint` describes.

        Args:
            blueprint: The result of :meth:`blueprint`.

        Returns:
            The network, without trained weights.

        Raises:
            ValueError: The words are no text, or the width no number.
        """
        words, width = blueprint.get("words"), blueprint.get("width")
        if not isinstance(words, str) or type(width) is not int or width < 1:
            raise ValueError("a record of word vectors must have words, one in each line, and a width")
        return WordVectors(words.split("\n"), width).eval()

    def processor_of(self, blueprint: Mapping[str, Any], folder: str) -> Vocabulary:
        """Return the function from a word to its place.

        Args:
            blueprint: The :meth:`blueprint` of the network.
            folder: Has no effect: the vocabulary is in the blueprint.
        """
        words = blueprint["words"].split("\n")
        return Vocabulary(WordVectors.of(words, torch.zeros(len(words), 1)))


def _found(place: str, options: dict[str, Any]) -> Path:
    """Return the path of a file, which is downloaded if it is on the Hub."""
    path = Path(place).expanduser()
    if path.is_file():
        return path
    owner, _, rest = place.partition("/")
    name, _, file = rest.partition("/")
    if path.is_absolute() or place.startswith((".", "~")) or not file:
        raise FileNotFoundError(
            f"no file {path}. Word vectors are loaded by the path of a file, word_vectors:PATH, or from the Hub, "
            "word_vectors:OWNER/NAME/FILE"
        )
    folder, _, file = file.rpartition("/")
    found = hub.download(f"{owner}/{name}", files=[file], subfolder=folder, **options) / file
    if not found.is_file():
        raise FileNotFoundError(f"{owner}/{name} on the Hub has no file {place.split('/', 2)[2]}")
    return found
