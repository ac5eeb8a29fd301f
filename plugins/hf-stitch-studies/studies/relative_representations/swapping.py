"""Encoders swapped under trained heads: with relative representations, with translation, and unchanged."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
from relative_representations import heads
from relative_representations.encoders import Encoder
from relative_representations.kept import ABSOLUTE, CHANCE, RELATIVE
from torch import Tensor

import hf_stitch
from hf_stitch.matchers import Matcher
from hf_stitch.registry import registries
from hf_stitch.relative import RelativeProjection, select_anchors
from hf_stitch.statistics import Moments

CENTRED, INVERSE, TRUNCATED = "relative, centred", "inverse relative", "inverse relative, truncated"
TRANSLATIONS = {
    INVERSE: registries.matchers.build("inverse_relative", rcond=1e-7),  # as published: truncates rounding errors only
    TRUNCATED: registries.matchers.build("inverse_relative", rcond=0.1),  # and directions below a tenth of the largest
    **{name: registries.matchers.build(name) for name in ("lstsq", "ridge", "procrustes")},
}
"""Method -> matcher that maps vectors of another encoder to those of the encoder of the absolute head."""
PAPER_HEAD = ", paper head"
SAME, BLOCK = 1e-10, 1000
"""One minus the cosine of vectors equal up to rounding; and vectors that are compared with all others at once."""


@dataclass(frozen=True)
class Preset:
    """Sizes and hyperparameters of an experiment. Numbers of samples are upper limits."""

    train: int  # samples for training heads
    test: int
    anchors: int
    epochs: int  # of a head, as batch and learning rate
    batch: int
    learning_rate: float
    seeds: int  # of heads and anchors
    corpus: int  # samples for training local encoders
    pretraining: int  # epochs of local encoders


@dataclass(frozen=True)
class Encoded:
    """Vectors of an encoder for training samples, test samples and candidates for anchors (the pool).

    Row i of every encoder's pool is the same sample, or its translation.
    """

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor
    pool: Tensor


def encoded(
    encoder: Encoder, train: hf_stitch.Samples, test: hf_stitch.Samples, cache: Path,
    pool: hf_stitch.Samples | None = None,
) -> Encoded:  # fmt: skip
    """Encode labelled samples and candidates for anchors, by default the training samples."""
    vectors = encoder.vectors(train, cache)
    anchors = vectors if pool is None else encoder.vectors(pool, cache)
    labels = torch.tensor(train.labels), torch.tensor(test.labels)
    return Encoded(vectors, labels[0], encoder.vectors(test, cache), labels[1], anchors)


def choices(
    pool: hf_stitch.Samples, sides: Iterable[Encoded], selection: str, count: int, seeds: int, by: Tensor | None = None
) -> list[list[int]]:
    """Select anchors for each seed, as indices in the pool.

    Only the first of several candidates with the same vector up to rounding (for example a question in upper and lower
    case) is considered. ``by`` are features ``(p, d)`` for selections that need them.
    """
    kept = set(range(len(pool)))
    for side in sides:
        unit = torch.nn.functional.normalize(side.pool.double())
        for start in range(0, len(unit), BLOCK):  # equal up to rounding, which depends on the batch
            alike = (unit[start : start + BLOCK] @ unit.T > 1 - SAME).tril(start - 1)
            kept -= set((start + alike.any(1).nonzero().flatten()).tolist())
    places = sorted(kept)
    candidates = pool.select(places)
    place_of = dict(zip(candidates.ids, places, strict=True))
    features = None if by is None else by[places]
    chosen = (select_anchors(candidates, count, selection, seed=seed, features=features) for seed in range(seeds))
    return [[place_of[id_] for id_ in anchors.ids] for anchors in chosen]


@torch.no_grad()
def relative(anchors: Tensor, vectors: Tensor, center: bool) -> Tensor:
    """Compute relative representations ``(n, anchors)`` with cosine similarity."""
    return torch.cat(list(RelativeProjection.of(anchors, "cosine", center=center).stream(vectors)))


def exchange(
    encoders: Mapping[str, Encoded], anchors: Sequence[Sequence[int]], preset: Preset, classes: int, *,
    translations: Mapping[str, Matcher] = TRANSLATIONS, paper_heads: Sequence[str] = (),
    decoders: Sequence[str] | None = None,
) -> pd.DataFrame:  # fmt: skip
    """Score every encoder under the heads of every other encoder with every method.

    For each encoder and seed, one head is trained on absolute vectors, one on relative representations, and one on
    relative representations centred on the mean of the anchors; of some methods another one with the normalisation of
    the authors' code. Translations are fitted on the anchors only.
    """
    rows = []
    for decoder in decoders or list(encoders):
        for seed, places in enumerate(anchors):
            own = encoders[decoder]
            trained = {
                f"{method}{PAPER_HEAD if paper else ''}": heads.trained(
                    _input(method, own, own.train, places), own.train_labels, classes, seed=seed, paper=paper,
                    epochs=preset.epochs, batch=preset.batch, learning_rate=preset.learning_rate,
                )
                for paper, kinds in ((False, (ABSOLUTE, RELATIVE, CENTRED)), (True, paper_heads))
                for method in kinds
            }  # fmt: skip
            for encoder, side in encoders.items():
                for method, predictions in _answers(trained, own, side, places, seed, translations).items():
                    scores = scored(side.test_labels, predictions)
                    rows.append({"decoder": decoder, "encoder": encoder, "method": method, "seed": seed, **scores})
    return pd.DataFrame(rows)


@torch.no_grad()
def _answers(
    trained: Mapping[str, hf_stitch.artefacts.Head], own: Encoded, other: Encoded, places: Sequence[int], seed: int,
    translations: Mapping[str, Matcher],
) -> dict[str, Tensor]:  # fmt: skip
    """Predict the classes of the test samples of an encoder: method -> ``(m,)``.

    The absolute head is left out for encoders of another width, and least squares if there are not more anchors than
    features.
    """
    found = {}
    for name, head in trained.items():
        method = name.removesuffix(PAPER_HEAD)
        if method != ABSOLUTE or other.test.shape[1] == own.test.shape[1]:
            found[name] = heads.answers(head, _input(method, other, other.test, places))
    source, target = other.pool[list(places)], own.pool[list(places)]
    moments = Moments(source.shape[1], target.shape[1]).update(source, target)
    for name, matcher in translations.items():
        if matcher.name != "lstsq" or len(source) > source.shape[1]:
            found[name] = heads.answers(trained[ABSOLUTE], matcher.fit(moments)(other.test))
    return {**found, CHANCE: by_frequency(own.train_labels, len(other.test), seed)}


def _input(method: str, side: Encoded, vectors: Tensor, places: Sequence[int]) -> Tensor:
    if method == ABSOLUTE:
        return vectors
    return relative(side.pool[list(places)], vectors, center=method == CENTRED)


def by_frequency(labels: Tensor, count: int, seed: int = 0) -> Tensor:
    """Predict classes by their frequency, which is chance."""
    frequency, random = torch.bincount(labels).double(), torch.Generator().manual_seed(seed)
    return frequency.multinomial(count, replacement=True, generator=random)


def scored(truth: Tensor, predictions: Tensor) -> dict[str, float]:
    """Return weighted F1 and accuracy in percent."""
    classes = int(max(truth.max(), predictions.max())) + 1
    actual, predicted, right = (
        torch.bincount(some, minlength=classes).double() for some in (truth, predictions, truth[truth == predictions])
    )
    f1 = 2 * right / (actual + predicted).clamp_min(1)  # 2 · precision · recall / (precision + recall)
    return {"f1": 100 * float((f1 * actual).sum() / len(truth)), "accuracy": 100 * float(right.sum() / len(truth))}
