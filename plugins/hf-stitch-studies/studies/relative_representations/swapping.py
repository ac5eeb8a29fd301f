"""Encoders swapped under trained heads: with relative representations, with translation, and unchanged."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import study
import torch
from matplotlib.figure import Figure
from relative_representations import experiment, heads
from relative_representations.encoders import Encoder
from relative_representations.experiment import Preset
from torch import Tensor

import hf_stitch
from hf_stitch.matchers import Matcher
from hf_stitch.plots import heatmap
from hf_stitch.registry import registries
from hf_stitch.relative import RelativeProjection, select_anchors
from hf_stitch.statistics import Moments

ABSOLUTE, RELATIVE, CENTRED = "absolute", "relative", "relative, centred"
INVERSE, TRUNCATED = "inverse relative", "inverse relative, truncated"
TRANSLATIONS = {
    INVERSE: registries.matchers.build(
        "inverse_relative", rcond=1e-7
    ),  # as published: only rounding errors are truncated
    TRUNCATED: registries.matchers.build("inverse_relative", rcond=0.1),
    **{name: registries.matchers.build(name) for name in ("lstsq", "ridge", "procrustes")},
}
"""Method -> matcher that maps vectors of another encoder to those of the encoder of the absolute head.

The truncated method ignores directions of the target's anchors with less than a tenth of the largest singular value.
"""
CHANCE = "chance"
SAME, BLOCK = 1e-10, 1000
"""One minus the cosine of vectors that are equal up to rounding; and vectors that are compared with all others at once.
"""
OWN, OTHER = "non-stitched", "stitched"


@dataclass(frozen=True)
class Encoded:
    """Vectors of an encoder for training samples, test samples and candidates for anchors.

    Attributes:
        train: Vectors that heads are trained on ``(n, d)``.
        train_labels: Classes ``(n,)``.
        test: Vectors that heads are scored on ``(m, d)``.
        test_labels: Classes ``(m,)``.
        pool: Candidates for anchors ``(p, d)``. Row i of every encoder is the same sample, or its translation.
    """

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor
    pool: Tensor


def encoded(
    encoder: Encoder,
    train: hf_stitch.Samples,
    test: hf_stitch.Samples,
    cache: Path,
    pool: hf_stitch.Samples | None = None,
) -> Encoded:
    """Encode labelled samples and candidates for anchors, by default the training samples."""
    vectors = encoder.vectors(train, cache)
    anchors = vectors if pool is None else encoder.vectors(pool, cache)
    labels = torch.tensor(train.labels), torch.tensor(test.labels)
    return Encoded(vectors, labels[0], encoder.vectors(test, cache), labels[1], anchors)


def choices(
    pool: hf_stitch.Samples, sides: Iterable[Encoded], selection: str, preset: Preset, by: Tensor | None = None
) -> list[list[int]]:
    """Select anchors for each seed.

    Args:
        pool: Candidates. Only the first of several candidates with the same vector up to rounding (for example a
            question in upper and lower case) is considered.
        sides: Vectors of all encoders.
        selection: Name in the registry of anchor selections.
        preset: Number of anchors and seeds.
        by: Features ``(p, d)`` for selections that need them.

    Returns:
        For each seed, the indices of the anchors in the pool.
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
    chosen = (
        select_anchors(candidates, preset.anchors, selection, seed=seed, features=None if by is None else by[places])
        for seed in range(preset.seeds)
    )
    return [[place_of[id_] for id_ in anchors.ids] for anchors in chosen]


@torch.no_grad()
def relative(anchors: Tensor, vectors: Tensor, center: bool) -> Tensor:
    """Compute relative representations ``(n, anchors)`` with cosine similarity."""
    return torch.cat(list(RelativeProjection.of(anchors, "cosine", center=center).stream(vectors)))


def exchange(
    encoders: Mapping[str, Encoded],
    anchors: Sequence[Sequence[int]],
    preset: Preset,
    classes: int,
    *,
    methods: Sequence[str] = (ABSOLUTE, RELATIVE, CENTRED),
    translations: Mapping[str, Matcher] = TRANSLATIONS,
    paper_heads: Sequence[str] = (),
    decoders: Sequence[str] | None = None,
) -> pd.DataFrame:
    """Score every encoder under the heads of every other encoder with every method.

    For each encoder and seed, one head is trained on absolute vectors, one on relative representations, and one on
    relative representations centred on the mean of the anchors. Translations are fitted on the anchors only.

    Args:
        encoders: Name -> vectors of the encoder.
        anchors: For each seed, the indices of the anchors in the pool.
        preset: Training of heads.
        classes: Number of classes.
        methods: Heads to train. Translations need ``ABSOLUTE``.
        translations: Method -> matcher.
        paper_heads: Methods that are also tried with the normalisation of the authors' code.
        decoders: Encoders whose heads are used. ``None``: all.

    Returns:
        One row for each decoder, encoder, method and seed, with ``f1`` (weighted) and ``accuracy``, both in percent.
    """
    rows = []
    for decoder in decoders or list(encoders):
        for seed, places in enumerate(anchors):
            trained = _Heads(
                encoders[decoder], torch.tensor(places), preset, classes, seed, methods, translations, paper_heads
            )
            for encoder, side in encoders.items():
                for method, predictions in trained.answers(side).items():
                    scores = scored(side.test_labels, predictions)
                    rows.append({"decoder": decoder, "encoder": encoder, "method": method, "seed": seed, **scores})
    return pd.DataFrame(rows)


def scored(truth: Tensor, predictions: Tensor) -> dict[str, float]:
    """Return weighted F1 and accuracy in percent."""
    classes = int(max(truth.max(), predictions.max())) + 1
    actual, predicted, right = (
        torch.bincount(some, minlength=classes).double() for some in (truth, predictions, truth[truth == predictions])
    )
    f1 = 2 * right / (actual + predicted).clamp_min(1)  # 2 · precision · recall / (precision + recall)
    return {"f1": 100 * float((f1 * actual).sum() / len(truth)), "accuracy": 100 * float(right.sum() / len(truth))}


class _Heads:
    """The trained heads of one encoder and one seed."""

    def __init__(
        self,
        own: Encoded,
        places: Tensor,
        preset: Preset,
        classes: int,
        seed: int,
        methods: Sequence[str],
        translations: Mapping[str, Matcher],
        paper_heads: Sequence[str],
    ) -> None:
        self._own, self._places, self._seed, self._translations = own, places, seed, translations
        options = {
            "epochs": preset.epochs, "batch": preset.batch, "learning_rate": preset.learning_rate, "seed": seed
        }  # fmt: skip
        self._heads = {
            f"{method}{', paper head' if paper else ''}": heads.trained(
                self._input(method, own, own.train), own.train_labels, classes, **options, paper=paper
            )
            for paper, kinds in ((False, methods), (True, paper_heads))
            for method in kinds
        }

    @torch.no_grad()
    def answers(self, other: Encoded) -> dict[str, Tensor]:
        """Return the predicted classes of the test samples of an encoder: method -> ``(m,)``.

        The absolute head is left out for encoders of another width, and least squares if there are not more anchors
        than features.
        """
        found = {}
        for name, head in self._heads.items():
            method = name.removesuffix(", paper head")
            if method != ABSOLUTE or other.test.shape[1] == self._own.test.shape[1]:
                found[name] = heads.answers(head, self._input(method, other, other.test))
        for name, matcher in self._translations.items():
            source, target = other.pool[self._places], self._own.pool[self._places]
            if matcher.name == "lstsq" and len(source) <= source.shape[1]:
                continue  # underdetermined
            moments = Moments(source.shape[1], target.shape[1]).update(source, target)
            translated = matcher.fit(moments)(other.test)
            found[name] = heads.answers(self._heads[ABSOLUTE], translated)
        frequency = torch.bincount(self._own.train_labels).double()
        generator = torch.Generator().manual_seed(self._seed)
        found[CHANCE] = frequency.multinomial(len(other.test), replacement=True, generator=generator)
        return found

    def _input(self, method: str, side: Encoded, vectors: Tensor) -> Tensor:
        if method == ABSOLUTE:
            return vectors
        return relative(side.pool[self._places], vectors, center=method == CENTRED)


def summary(found: pd.DataFrame, figure: str = "f1") -> dict[str, dict[str, list[float]]]:
    """Average over pairs: method -> own or other encoder -> mean for each seed."""
    kind = np.where(found.decoder == found.encoder, OWN, OTHER)
    means = found.groupby([kind, "method", "seed"], sort=False)[figure].mean()
    found_of: dict[str, dict[str, list[float]]] = {method: {} for method in found.method.unique()}
    for (of, method), part in means.groupby(level=[0, 1], sort=False):
        found_of[method][of] = part.tolist()
    return found_of


def table(found: pd.DataFrame, paper: Mapping[str, tuple[str, str]] | None = None) -> str:
    """Format one row for each method: mean ± standard deviation over seeds, and the range over pairs.

    Args:
        found: Scores from :func:`exchange`.
        paper: Method -> results of the paper with the own and with another encoder.

    Returns:
        A Markdown table.
    """
    other = found[found.decoder != found.encoder]
    pairs = other.groupby(["method", "decoder", "encoder"]).f1.mean()
    rows = []
    for method, kinds in summary(found).items():
        own, stitched = (experiment.spread(kinds[kind]) if kind in kinds else "–" for kind in (OWN, OTHER))
        spans = f"{pairs[method].min():.1f} to {pairs[method].max():.1f}" if method in pairs.index else "–"
        rows.append((method, own, stitched, spans, *((paper or {}).get(method, ("", "")) if paper else ())))
    header = ("method", OWN, OTHER, "pairs, minimum to maximum")
    return study.markdown((*header, f"paper, {OWN}", f"paper, {OTHER}") if paper else header, rows)


def by_pair(found: pd.DataFrame, methods: Sequence[str]) -> str:
    """Format a Markdown table with one row for each pair."""
    rows = []
    for (decoder, encoder), part in found.groupby(["decoder", "encoder"], sort=False):
        cells = [part[part.method == method].f1.tolist() for method in methods]
        rows.append((decoder, encoder, *(experiment.spread(cell) if cell else "–" for cell in cells)))
    return study.markdown(("decoder", "encoder", *methods), rows)


def by_method(found: pd.DataFrame, methods: Sequence[str], title: str) -> Figure:
    """Draw a heat map of methods by encoders."""
    encoders = list(found.encoder.unique())
    means = found.groupby(["method", "encoder"]).f1.mean() / 100
    values = [[means.get((method, encoder), np.nan) for encoder in encoders] for method in methods]
    return heatmap(values, list(methods), encoders, title=title, label="weighted F1", low=0, high=1)


def matrices(found: pd.DataFrame, methods: Sequence[str], title: str) -> dict[str, Figure]:
    """Draw a heat map of decoders by encoders for each method."""
    decoders, encoders = list(found.decoder.unique()), list(found.encoder.unique())
    means = found.groupby(["method", "decoder", "encoder"]).f1.mean() / 100
    return {
        method: heatmap(
            [[means.get((method, d, e), np.nan) for e in encoders] for d in decoders],
            [f"head of {d}" for d in decoders], encoders, title=f"{title}: {method}", label="weighted F1",
            low=0, high=1,
        )
        for method in methods
    }  # fmt: skip
