"""Encoders of short sentences in one language, fitted in seconds to a few thousand sentences.

They form a ladder: a random projection without learning; the reduced TF-IDF of a language; the same, fine-tuned on
labels; and students of a sentence encoder for English, which learn from translations. All use character n-grams and do
not need a tokenizer. Every function accepts and returns a dict of several sets of sentences; ``train`` is the set for
the fit.
"""

import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from relative_representations.training import train
from scipy.sparse import csr_matrix
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import HashingVectorizer, TfidfVectorizer
from sklearn.kernel_ridge import KernelRidge
from sklearn.random_projection import SparseRandomProjection
from torch import Tensor, nn
from torch.nn import functional

Vectors = dict[str, Tensor]
"""Name of a set of sentences -> one vector per sentence ``(n, width)``."""
NGRAMS = {"analyzer": "char_wb", "ngram_range": (1, 4), "lowercase": False}
EPOCHS = 10
"""Epochs of fine-tuning on labelled sentences."""
SMOOTHING = 1.0
"""Ridge penalty of a student, for TF-IDF vectors of length 1."""


def plain(text: str) -> str:
    """Return a text in lower case, without punctuation and symbols, with single spaces."""
    normalised = unicodedata.normalize("NFKC", text)
    cleaned = "".join(" " if unicodedata.category(letter)[0] in "PS" else letter for letter in normalised)
    return " ".join(cleaned.lower().split())


def projected(texts: Mapping[str, Sequence[str]], width: int, seed: int) -> Vectors:
    """Project the counts of n-grams at random (Achlioptas 2003), without learning."""
    counts = HashingVectorizer(**NGRAMS, n_features=2**16, alternate_sign=False)
    projection = SparseRandomProjection(width, density=1 / 3, random_state=seed, dense_output=True)
    projection.fit(counts.transform(texts["train"]))
    return {name: _tensor(projection.transform(counts.transform(some))) for name, some in texts.items()}


def tfidf(texts: Mapping[str, Sequence[str]]) -> dict[str, csr_matrix]:
    """Weight the n-grams that occur in at least two training sentences by TF-IDF. Rows have length 1."""
    weights = TfidfVectorizer(**NGRAMS, sublinear_tf=True, min_df=2).fit(texts["train"])
    return {name: weights.transform(some) for name, some in texts.items()}


def reduced(features: Mapping[str, csr_matrix], width: int, seed: int) -> Vectors:
    """Reduce TF-IDF to the leading singular vectors of the training sentences (latent semantic analysis)."""
    directions = TruncatedSVD(width, random_state=seed).fit(features["train"])
    return {name: _tensor(directions.transform(some)) for name, some in features.items()}


class _Residual(nn.Module):
    def __init__(self, width: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.added = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, vectors: Tensor) -> Tensor:
        vectors = vectors / self.scale
        return vectors + self.added(vectors)


def tuned(vectors: Vectors, labels: Tensor, seed: int) -> Vectors:
    """Add a residual layer to an encoder, train it with a linear head on labels, and discard the head.

    The seed also determines the initial head, because a shared initial head would align several encoders.
    """
    inputs = vectors["train"]
    torch.manual_seed(seed)
    body = _Residual(inputs.shape[1], inputs.square().mean().sqrt().item())
    head = nn.Linear(inputs.shape[1], int(labels.max()) + 1)
    train(
        nn.ModuleList([body, head]), len(inputs),
        lambda places: functional.cross_entropy(head(body(inputs[places])), labels[places]),
        epochs=EPOCHS, batch=64, learning_rate=2e-3, seed=seed, name="fine-tuning an encoder",
    )  # fmt: skip
    with torch.no_grad():
        return {name: body(some) for name, some in vectors.items()}


def student(features: Mapping[str, csr_matrix], teacher: Tensor, seed: int) -> Vectors:
    """Predict a randomly rotated encoder of the first sentences' translations by ridge regression from TF-IDF."""
    generator = torch.Generator().manual_seed(seed)
    rotation = torch.linalg.qr(torch.randn(teacher.shape[1], teacher.shape[1], generator=generator)).Q
    fitted = KernelRidge(alpha=SMOOTHING).fit(features["train"][: len(teacher)], (teacher @ rotation).numpy())
    return {name: _tensor(fitted.predict(some)) for name, some in features.items()}


def _tensor(rows: NDArray[np.floating[Any]]) -> Tensor:
    return torch.as_tensor(rows, dtype=torch.float32)
