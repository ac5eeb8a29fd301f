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
"""Name of the only cut."""
EXAMPLE = 3
"""Number of words to verify the cut with."""


class Vocabulary:
    """Function from a word to its index in the vocabulary.

    Args:
        vectors: The word vectors.
    """

    def __init__(self, vectors: WordVectors) -> None:
        self._vectors = vectors

    def __call__(self, word: str) -> torch.Tensor:
        """Return the index of a word as a 0-d int64 tensor.

        Args:
            word: The word.

        Raises:
            ValueError: If the word does not have a vector.
        """
        return self._vectors.places([word])[0]


class WordVectorsOverride(Override):
    """Override that makes the embedding the cut of :class:`WordVectors`."""

    def blocks(self, model: nn.Module) -> tuple[str, ...]:
        """Return the embedding.

        Args:
            model: The network.
        """
        return (LAYER,)


class WordAdapter(Adapter):
    """Adapter of word vectors with an error that names all words without a vector."""

    def preprocess(self, samples: Sequence[Any], *, offsets: bool = False) -> dict[str, Any]:
        """Convert words to their indices in the vocabulary.

        Args:
            samples: Words; tensors count as preprocessed.
            offsets: Must be False, because a word has one vector.

        Returns:
            ``words``, (n,) int64.

        Raises:
            ValueError: If words do not have a vector; the message names up to five.
        """
        if isinstance(self.processor, Vocabulary) and len(samples) and all(isinstance(s, str) for s in samples):
            model: WordVectors = self.model  # type: ignore[assignment]
            model.places(samples)  # names all words without a vector
        return super().preprocess(samples, offsets=offsets)


class WordVectorsAdapter(Library):
    """Adapter for :class:`WordVectors`, and for ``KeyedVectors``, ``Word2Vec`` and ``FastText`` of gensim.

    A sample is a word (a string). The only cut is ``vectors``.

    ``hf_stitch.load("word_vectors:PATH")`` reads a file (see :func:`read_vectors`), and
    ``hf_stitch.load("word_vectors:OWNER/NAME/FILE")`` reads a file from the Hub. Options: ``most_frequent``, the number
    of words to read; ``trust_remote_code=True`` to open a pickle of gensim; ``token``, ``cache_dir``,
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
        """Describe word vectors; gensim vectors are copied.

        Args:
            model: The word vectors.
            example_inputs: Unused; the first words of the vocabulary serve as example.
            processor: Function from a sample to the index of its word. ``None`` (default): samples are words.
            content: Unused, because the network has one argument.
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
        """Load word vectors from a local file or from the Hub.

        Args:
            reference: ``word_vectors:PATH`` or ``word_vectors:OWNER/NAME/FILE``.
            processor: Function from a sample to the index of its word. ``None`` (default): samples are words.
            most_frequent: Number of words to read from the start of the file. ``None`` (default): all.
            trust_remote_code: Whether to open a pickle from gensim's ``save``.
            **options: Options of downloads from the Hub.

        Raises:
            FileNotFoundError: If the file does not exist.
            ValueError: If the file is a pickle, or its format is unknown.
            TypeError: If an option is unknown.
        """
        if unknown := options.keys() - hub.DownloadOptions.__annotations__.keys():
            raise TypeError(f"unknown loading option of word vectors: {', '.join(sorted(unknown))}")
        location = str(reference.id).partition(":")[2]
        path = _find_file(location, options)
        if Path(location).expanduser().is_file():  # relative paths depend on the working directory
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
        """Construct a network from a :meth:`blueprint`.

        Args:
            blueprint: The result of :meth:`blueprint`.

        Returns:
            The network without trained weights.

        Raises:
            ValueError: If the words are not a string, or the width is not a positive integer.
        """
        words, width = blueprint.get("words"), blueprint.get("width")
        if not isinstance(words, str) or type(width) is not int or width < 1:
            raise ValueError("a blueprint of word vectors must have words, one per line, and a width")
        return WordVectors(words.split("\n"), width).eval()

    def processor_of(self, blueprint: Mapping[str, Any], folder: str) -> Vocabulary:
        """Return the function from a word to its index.

        Args:
            blueprint: The :meth:`blueprint` of the network.
            folder: Unused; the vocabulary is in the blueprint.
        """
        words = blueprint["words"].split("\n")
        return Vocabulary(WordVectors.of(words, torch.zeros(len(words), 1)))


def _find_file(location: str, options: dict[str, Any]) -> Path:
    """Return the path of a local file, or of a file downloaded from the Hub."""
    path = Path(location).expanduser()
    if path.is_file():
        return path
    owner, _, rest = location.partition("/")
    name, _, file = rest.partition("/")
    if path.is_absolute() or location.startswith((".", "~")) or not file:
        raise FileNotFoundError(
            f"{path} does not exist; pass word_vectors:PATH for a file, or word_vectors:OWNER/NAME/FILE for the Hub"
        )
    folder, _, file = file.rpartition("/")
    downloaded = hub.download(f"{owner}/{name}", files=[file], subfolder=folder, **options) / file
    if not downloaded.is_file():
        raise FileNotFoundError(f"file {location.split('/', 2)[2]} does not exist in {owner}/{name} on the Hub")
    return downloaded
