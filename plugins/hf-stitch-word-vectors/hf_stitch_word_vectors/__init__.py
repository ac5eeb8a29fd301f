"""Static word vectors as encoders of hf-stitch; public names are imported on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_stitch_word_vectors.adapter import WordVectorsAdapter
    from hf_stitch_word_vectors.alignment import Alignment, align
    from hf_stitch_word_vectors.files import read_vectors
    from hf_stitch_word_vectors.retrieval import RetrievalScores, retrieval_scores
    from hf_stitch_word_vectors.vectors import WordVectors, as_word_vectors
    from hf_stitch_word_vectors.vocabulary import shared_vocabulary, word_samples

__all__ = [
    "Alignment",
    "RetrievalScores",
    "WordVectors",
    "WordVectorsAdapter",
    "align",
    "as_word_vectors",
    "read_vectors",
    "retrieval_scores",
    "shared_vocabulary",
    "word_samples",
]

MODULES = {
    "Alignment": "alignment",
    "RetrievalScores": "retrieval",
    "WordVectorsAdapter": "adapter",
    "align": "alignment",
    "read_vectors": "files",
    "retrieval_scores": "retrieval",
    "shared_vocabulary": "vocabulary",
    "word_samples": "vocabulary",
}
"""Name -> module, if it is not ``vectors``."""


def __getattr__(name: str) -> Any:
    """Import a name from its module on first use: hf-stitch imports the adapter for every live network."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{MODULES.get(name, 'vectors')}"), name)
