"""Encoders exchanged under heads that were trained on others: by anchors, by translation, and as they are."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import experiment
import heads
import numpy as np
import pandas as pd
import torch
from encoders import Encoder
from experiment import Preset
from matplotlib.figure import Figure
from sklearn.metrics import f1_score
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
    ),  # as published: nothing is left out but rounding
    TRUNCATED: registries.matchers.build("inverse_relative", rcond=0.1),
    **{name: registries.matchers.build(name) for name in ("lstsq", "ridge", "procrustes")},
}
"""Method -> what maps the vectors of the encoder at hand to those the absolute head knows.

The truncated one leaves out what the target's anchors have in directions of less than a tenth of the largest singular
value.
"""
CHANCE = "chance"
OWN, OTHER = "non-stitched", "stitched"


@dataclass(frozen=True)
class Encoded:
    """What an encoder says of the samples of its side.

    Attributes:
        train: ``(n, d)``: what a head is trained on.
        train_labels: ``(n,)``.
        test: ``(m, d)``.
        test_labels: ``(m,)``.
        pool: ``(p, d)``: candidates for anchors; row i of every encoder is the same sample, or its translation.
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
    """What an encoder says of labelled samples, and of candidates for anchors, by default the training samples."""
    seen = encoder.vectors(train, cache)
    anchors = seen if pool is None else encoder.vectors(pool, cache)
    labels = torch.tensor(train.labels), torch.tensor(test.labels)
    return Encoded(seen, labels[0], encoder.vectors(test, cache), labels[1], anchors)


def choices(
    pool: hf_stitch.Samples, sides: Iterable[Encoded], selection: str, preset: Preset, by: Tensor | None = None
) -> list[list[int]]:
    """For each seed, the places of its anchors in the pool.

    Args:
        pool: Candidates. Of those that an encoder does not tell apart (a question in upper and lower case), the first.
        sides: What the encoders say.
        selection: A name in the registry of anchors.
        preset: How many anchors and seeds.
        by: ``(p, d)``: what the selection goes by, if it does.
    """
    kept = set(range(len(pool)))
    for side in sides:
        _, kinds = side.pool.unique(dim=0, return_inverse=True)
        kept &= set(np.unique(kinds.numpy(), return_index=True)[1].tolist())
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
    """Relative representations by cosine."""
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
    """Score every encoder under the heads of every other, by every method.

    Heads are trained with each seed on the vectors of one encoder (the decoder's own): one on the vectors as they are,
    one on their relative representations, one on relative representations about the anchors' mean. Translations are
    fitted on the anchors alone.

    Args:
        encoders: By name.
        anchors: For each seed, the places of the anchors in the pool.
        preset: How long heads are trained.
        classes: Number of classes.
        methods: Which heads are trained; translations need ``ABSOLUTE``.
        translations: Method -> matcher.
        paper_heads: Methods that are tried with the norm of the authors' code as well.
        decoders: Encoders whose heads are tried; default: all.

    Returns:
        A row for each decoder, encoder, method and seed: ``f1`` (weighted, in percent) and ``accuracy``.
    """
    rows = []
    for decoder in decoders or list(encoders):
        for seed, places in enumerate(anchors):
            trained = _Heads(
                encoders[decoder], torch.tensor(places), preset, classes, seed, methods, translations, paper_heads
            )
            for encoder, side in encoders.items():
                for method, said in trained.answers(side).items():
                    scores = scored(side.test_labels, said)
                    rows.append({"decoder": decoder, "encoder": encoder, "method": method, "seed": seed, **scores})
    return pd.DataFrame(rows)


def scored(truth: Tensor, said: Tensor) -> dict[str, float]:
    """Weighted F1 and accuracy, in percent."""
    f1 = f1_score(truth, said, average="weighted", zero_division=0)
    return {"f1": 100 * float(f1), "accuracy": 100 * float((truth == said).double().mean())}


class _Heads:
    """The heads of one encoder and one seed."""

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
                self._seen(method, own, own.train), own.train_labels, classes, **options, paper=paper
            )
            for paper, kinds in ((False, methods), (True, paper_heads))
            for method in kinds
        }

    @torch.no_grad()
    def answers(self, other: Encoded) -> dict[str, Tensor]:
        """What the heads say of the test samples of an encoder, by method.

        The absolute head takes vectors of its own width only; least squares needs more anchors than features.
        """
        found = {}
        for name, head in self._heads.items():
            method = name.removesuffix(", paper head")
            if method != ABSOLUTE or other.test.shape[1] == self._own.test.shape[1]:
                found[name] = heads.answers(head, self._seen(method, other, other.test))
        for name, matcher in self._translations.items():
            source, target = other.pool[self._places], self._own.pool[self._places]
            if matcher.name == "lstsq" and len(source) <= source.shape[1]:
                continue  # so few anchors determine no map
            moments = Moments(source.shape[1], target.shape[1]).update(source, target)
            translated = matcher.fit(moments)(other.test)
            found[name] = heads.answers(self._heads[ABSOLUTE], translated)
        frequency = torch.bincount(self._own.train_labels).double()
        generator = torch.Generator().manual_seed(self._seed)
        found[CHANCE] = frequency.multinomial(len(other.test), replacement=True, generator=generator)
        return found

    def _seen(self, method: str, side: Encoded, vectors: Tensor) -> Tensor:
        if method == ABSOLUTE:
            return vectors
        return relative(side.pool[self._places], vectors, center=method == CENTRED)


def summary(found: pd.DataFrame, figure: str = "f1") -> dict[str, dict[str, list[float]]]:
    """Method -> own or other encoder -> the mean over pairs, for each seed."""
    kind = np.where(found.decoder == found.encoder, OWN, OTHER)
    means = found.groupby([kind, "method", "seed"], sort=False)[figure].mean()
    found_of: dict[str, dict[str, list[float]]] = {method: {} for method in found.method.unique()}
    for (of, method), part in means.groupby(level=[0, 1], sort=False):
        found_of[method][of] = part.tolist()
    return found_of


def table(found: pd.DataFrame, paper: Mapping[str, tuple[str, str]] | None = None) -> str:
    """A row for each method: mean ± standard deviation over seeds of the mean over pairs, and the range of pairs.

    Args:
        found: As :func:`exchange` gives it.
        paper: Method -> what the paper has, own and other encoder.
    """
    other = found[found.decoder != found.encoder]
    pairs = other.groupby(["method", "decoder", "encoder"]).f1.mean()
    rows = []
    for method, kinds in summary(found).items():
        own, stitched = (experiment.spread(kinds[kind]) if kind in kinds else "–" for kind in (OWN, OTHER))
        spans = f"{pairs[method].min():.1f} to {pairs[method].max():.1f}" if method in pairs.index else "–"
        rows.append((method, own, stitched, spans, *((paper or {}).get(method, ("", "")) if paper else ())))
    header = ("method", OWN, OTHER, "pairs, least to most")
    return experiment.markdown(rows, (*header, f"paper, {OWN}", f"paper, {OTHER}") if paper else header)


def by_pair(found: pd.DataFrame, methods: Sequence[str]) -> str:
    """A row for each pair."""
    rows = []
    for (decoder, encoder), part in found.groupby(["decoder", "encoder"], sort=False):
        cells = [part[part.method == method].f1.tolist() for method in methods]
        rows.append((decoder, encoder, *(experiment.spread(cell) if cell else "–" for cell in cells)))
    return experiment.markdown(rows, ("decoder", "encoder", *methods))


def by_method(found: pd.DataFrame, methods: Sequence[str], title: str) -> Figure:
    """One decoder: encoders by methods."""
    encoders = list(found.encoder.unique())
    means = found.groupby(["method", "encoder"]).f1.mean() / 100
    values = [[means.get((method, encoder), np.nan) for encoder in encoders] for method in methods]
    return heatmap(values, list(methods), encoders, title=title, label="weighted F1", low=0, high=1)


def matrices(found: pd.DataFrame, methods: Sequence[str], title: str) -> dict[str, Figure]:
    """Method -> figure of decoders by encoders."""
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
