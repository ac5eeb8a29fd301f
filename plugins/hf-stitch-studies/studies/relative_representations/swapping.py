"""Swap encoders under trained heads: with relative representations, with translation, and unchanged."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
from dr_frankenstein import images
from relative_representations import heads
from relative_representations.exchange import ABSOLUTE, CHANCE, RELATIVE
from relative_representations.image_encoders import Published
from sklearn.metrics import f1_score
from torch import Tensor

import hf_stitch
from hf_stitch import Moments, Samples, registries
from hf_stitch.matchers import Matcher
from hf_stitch.relative import RelativeProjection, select_anchors

CENTRED, INVERSE, TRUNCATED = "relative, centred", "inverse relative", "inverse relative, truncated"
TRANSLATIONS = {
    INVERSE: registries.matchers.build("inverse_relative", rcond=1e-7),  # as published: truncates only rounding errors
    TRUNCATED: registries.matchers.build("inverse_relative", rcond=0.1),  # also directions below a tenth of the largest
    **{name: registries.matchers.build(name) for name in ("lstsq", "ridge", "procrustes")},
}
"""Method -> matcher that maps vectors of another encoder to those of the encoder of the absolute head."""
SAME, BLOCK = 1e-10, 1000
"""One minus the cosine of vectors that are equal up to rounding; block size of the comparison with all vectors."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of an experiment."""

    train: int  # samples for training heads
    test: int
    anchors: int
    epochs: int  # of a head

    def samples(self, name: str, data_dir: str | None) -> list[Samples]:
        """Read the training and test images of a dataset."""
        return [images.raw(name, split, getattr(self, split), data_dir) for split in ("train", "test")]


@dataclass(frozen=True)
class Encoded:
    """Vectors of an encoder for training samples, test samples and candidate anchors (the pool).

    Row i of every encoder's pool is the same sample, or its translation.
    """

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor
    pool: Tensor


def encoded(encoder: Published, train: Samples, test: Samples, cache: Path) -> Encoded:
    """Encode labelled samples; the training samples are the candidate anchors."""
    vectors, held_out = encoder.vectors(train, cache), encoder.vectors(test, cache)
    return Encoded(vectors, torch.tensor(train.labels), held_out, torch.tensor(test.labels), vectors)


def choices(
    pool: Samples, sides: Collection[Encoded], selection: str, count: int, by: Tensor | None = None
) -> list[list[int]]:
    """Select anchors for each side, as indices in the pool.

    Only the first of several candidates with equal vectors up to rounding (for example a question in upper and lower
    case) is considered. ``by`` are features ``(p, d)`` for selections that require them.
    """
    distinct = set(range(len(pool)))
    for side in sides:
        unit = torch.nn.functional.normalize(side.pool.double())
        for start in range(0, len(unit), BLOCK):  # equal up to rounding errors, which depend on the batch
            alike = (unit[start : start + BLOCK] @ unit.T > 1 - SAME).tril(start - 1)
            distinct -= set((start + alike.any(1).nonzero().flatten()).tolist())
    places = sorted(distinct)
    candidates = pool.select(places)
    place_of = dict(zip(candidates.ids, places, strict=True))
    features = None if by is None else by[places]
    chosen = (select_anchors(candidates, count, selection, seed=seed, features=features) for seed in range(len(sides)))
    return [[place_of[id_] for id_ in anchors.ids] for anchors in chosen]


@torch.no_grad()
def relative(anchors: Tensor, vectors: Tensor, center: bool) -> Tensor:
    """Compute relative representations ``(n, anchors)`` with cosine similarity."""
    return torch.cat(list(RelativeProjection.of(anchors, "cosine", center=center).stream(vectors)))


def exchange(
    encoders: Mapping[str, Encoded], anchors: Sequence[Sequence[int]], epochs: int, classes: int,
    translations: Mapping[str, Matcher],
) -> pd.DataFrame:  # fmt: skip
    """Score every encoder under the heads of every other encoder with every method.

    Each encoder has separate anchors and three heads: on absolute vectors, on relative representations, and on relative
    representations centred on the mean of the anchors. Translations are fitted only on the anchors.
    """
    rows = []
    for (decoder, decoder_side), places in zip(encoders.items(), anchors, strict=True):
        trained = {
            method: heads.trained(
                _input(method, decoder_side, decoder_side.train, places), decoder_side.train_labels, classes, epochs
            )
            for method in (ABSOLUTE, RELATIVE, CENTRED)
        }
        for encoder, side in encoders.items():
            for method, predictions in _answers(trained, decoder_side, side, places, translations).items():
                f1 = scored(side.test_labels, predictions)
                rows.append({"decoder": decoder, "encoder": encoder, "method": method, "f1": f1})
    return pd.DataFrame(rows)


@torch.no_grad()
def _answers(
    trained: Mapping[str, hf_stitch.artefacts.Head], decoder_side: Encoded, encoder_side: Encoded,
    places: Sequence[int], translations: Mapping[str, Matcher],
) -> dict[str, Tensor]:  # fmt: skip
    """Predict the classes of the test samples of an encoder: method -> ``(m,)``.

    The absolute head is left out for encoders of a different width, and least squares unless anchors outnumber
    features.
    """
    predictions = {}
    for method, head in trained.items():
        if method != ABSOLUTE or encoder_side.test.shape[1] == decoder_side.test.shape[1]:
            predictions[method] = heads.answers(head, _input(method, encoder_side, encoder_side.test, places))
    source, target = encoder_side.pool[list(places)], decoder_side.pool[list(places)]
    moments = Moments(source.shape[1], target.shape[1]).update(source, target)
    for name, matcher in translations.items():
        if matcher.name != "lstsq" or len(source) > source.shape[1]:
            predictions[name] = heads.answers(trained[ABSOLUTE], matcher.fit(moments)(encoder_side.test))
    return {**predictions, CHANCE: by_frequency(decoder_side.train_labels, len(encoder_side.test))}


def _input(method: str, side: Encoded, vectors: Tensor, places: Sequence[int]) -> Tensor:
    if method == ABSOLUTE:
        return vectors
    return relative(side.pool[list(places)], vectors, center=method == CENTRED)


def by_frequency(labels: Tensor, count: int) -> Tensor:
    """Draw classes by their frequency, as a chance baseline."""
    frequency, random = torch.bincount(labels).double(), torch.Generator().manual_seed(0)
    return frequency.multinomial(count, replacement=True, generator=random)


def scored(truth: Tensor, predictions: Tensor) -> float:
    """Return the weighted F1 in percent."""
    return 100 * float(f1_score(truth, predictions, average="weighted", zero_division=0))
