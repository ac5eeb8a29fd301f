"""Whether to go: predicted recall against a threshold, a score for each query, and the ageing of a map."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from hf_stitch.options import checked
from hf_stitch.results import Result
from hf_stitch_embeddings.choosing import Pairs, score as score_pairs
from hf_stitch_embeddings.embedding_map import EmbeddingMap
from hf_stitch_embeddings.retrieval import OLD, Floats, RetrievalResult, Score, exact_search, interval, query_weights
from hf_stitch_embeddings.vectors import check_vectors, read_vectors

if TYPE_CHECKING:
    import pandas

THRESHOLD = 0.8
"""Default threshold: a go needs this share of the documents that re-embedding finds."""
TOLERANCE = 0.02
"""Loss of recall that counts as no ageing."""


@dataclass(frozen=True)
class Verdict(Result):
    """Whether a map is good enough.

    Attributes:
        go: Whether the predicted recall reaches the threshold.
        sure: Whether the whole interval is on the same side of the threshold.
        sentence: The verdict in words.
        figure: The recall.
        name: Name of the map.
        predicted: Predicted recall in the index, with its interval.
        old: The same of the old model.
        threshold: The threshold.
        margin: What was subtracted from the prediction before it was compared.
        index_size: Number of documents of the index; None: only the held-out pool was scored.
        more_pairs: Number of pairs -> predicted recall.
        reranked: Predicted recall if the first 100 documents are re-embedded and ranked again; None if unknown.

    Example:
        >>> score = {"value": 0.9, "low": 0.85, "high": 0.93}
        >>> Verdict(True, True, "Go.", "recall@10", "ridge, index", score, score, 0.8, 0.0, 1000, {}, None).go
        True
    """

    go: bool
    sure: bool
    sentence: str
    figure: str
    name: str
    predicted: Score
    old: Score
    threshold: float
    margin: float
    index_size: int | None
    more_pairs: dict[str, float]
    reranked: Score | None

    def __rich__(self) -> str:
        """Return the sentence."""
        return self.sentence

    def to_pandas(self) -> pandas.DataFrame:
        """Return one row."""
        import pandas

        row = {"go": self.go, "sure": self.sure, "figure": self.figure, "threshold": self.threshold}
        return pandas.DataFrame([row | {f"predicted_{key}": value for key, value in self.predicted.items()}])


def verdict(
    embedding_map: EmbeddingMap,
    *,
    result: RetrievalResult | None = None,
    threshold: float = THRESHOLD,
    margin: float = 0.0,
    name: str | None = None,
) -> Verdict:
    """Decide whether a map is good enough for an index.

    Args:
        embedding_map: The map, with the scores that :func:`~hf_stitch_embeddings.fit_embedding_map` gave it.
        result: An evaluation on other vectors, which takes precedence over those scores.
        threshold: Share of the documents that re-embedding finds, from 0 to 1, that a go needs.
        margin: Subtracted from the prediction first; see :func:`calibrate`.
        name: Name of the map in the result. Default: its only map.

    Returns:
        The verdict.

    Raises:
        ValueError: If there are no scores, or the threshold is out of range.

    Example:
        >>> from hf_stitch_embeddings import evaluate_retrieval
        >>> rows = np.random.default_rng(0).normal(size=(400, 6))
        >>> keep = EmbeddingMap.old_model(6)
        >>> result = evaluate_retrieval(keep, rows[50:], rows[50:], rows[:50], rows[:50], k=10)
        >>> verdict(keep, result=result).go
        True
    """
    if not 0 < threshold <= 1:
        raise ValueError(f"threshold must be above 0 and at most 1, got {threshold}")
    if result is None:
        report = embedding_map.scores.get("report")
        if not report:
            raise ValueError("the map has no scores: pass the result of evaluate_retrieval")
        result = RetrievalResult.from_dict(report["result"])
    if name is None:
        if len(result.maps) != 1:
            raise ValueError(f"the result has maps {', '.join(result.maps)}: pass the name of one")
        name = result.maps[0]
    figure = result.figure
    predicted, old = _known(result, name, figure), _known(result, OLD, figure)
    extrapolated = _predicted(result, name, figure)
    where = (
        f"in an index of {result.index_size:,} documents"
        if extrapolated
        else f"in a pool of {result.documents:,} held-out documents (in a larger index it is lower)"
    )
    value = predicted["value"] - margin
    go = value >= threshold
    sure = predicted["low"] - margin >= threshold if go else predicted["high"] - margin < threshold
    reranked = _known(result, name, "reranked@10") if "reranked@10" in result.scores[name] else None
    if extrapolated and not _predicted(result, name, "reranked@10"):
        reranked = None
    more = {} if embedding_map.keeps_old else _more_pairs(embedding_map, predicted, result, name, figure)
    asked = f"{threshold:g} is required" + (f", with a margin of {margin:.3g}" if margin else "")
    what = "the old model" if embedding_map.keeps_old else name
    start = f"{'Go' if go else 'No go'}{'' if sure else ', but not beyond doubt,'} with {what}"
    sentences = [
        f"{start}: predicted {figure} {where} is {predicted['value']:.3f} "
        f"({predicted['low']:.3f} to {predicted['high']:.3f}), and {asked}."
    ]
    if embedding_map.keeps_old:
        sentences.append("No map helps more: keep the old model.")
    else:
        gain = {key: float(value) for key, value in result.gains[name][figure].items()}
        worse = "; keep the old model" if gain["high"] < 0 else ", which is within chance" if gain["low"] <= 0 else ""
        sentences.append(
            f"In the pool of {result.documents:,} it is {abs(gain['value']):.3f} "
            f"{'less' if gain['value'] < 0 else 'more'} than with the old model "
            f"({gain['low']:+.3f} to {gain['high']:+.3f}){worse}."
        )
        if extrapolated:
            sentences.append(f"Of the old model, {old['value']:.3f} is predicted in the index.")
        sentences += [f"With {int(pairs):,} pairs some {recall:.3f} are expected." for pairs, recall in more.items()]
    kinds = {f: score for f, score in result.scores[name].items() if f.startswith(f"{figure} of ")}
    if kinds:
        worst = min(kinds, key=lambda each: kinds[each]["value"])
        score = kinds[worst]
        sentences.append(
            f"In the pool, {worst} is lowest: {score['value']:.3f} ({score['low']:.3f} to {score['high']:.3f})."
        )
    if reranked is not None and not go:
        sentences.append(
            f"If the first 100 documents are re-embedded and ranked again, recall@10 is {reranked['value']:.3f}."
        )
    return Verdict(
        go, sure, " ".join(sentences), figure, name, predicted, old, threshold, margin,
        result.index_size if extrapolated else None, more, reranked,
    )  # fmt: skip


def _predicted(result: RetrievalResult, name: str, figure: str) -> bool:
    found = result.predicted.get(name, {}).get(figure)
    return found is not None and bool(np.isfinite(float(found["value"])))


def _known(result: RetrievalResult, name: str, figure: str) -> Score:
    """Return a recall in the index, or in the pool if none could be predicted."""
    found = result.predicted[name][figure] if _predicted(result, name, figure) else result.scores[name][figure]
    return {key: float(value) for key, value in found.items()}


def _more_pairs(
    embedding_map: EmbeddingMap, predicted: Score, result: RetrievalResult, name: str, figure: str
) -> dict[str, float]:
    """Expect of each doubling of the pairs the last gain, which shrinks as it did between the last two doublings."""
    known = embedding_map.scores.get("pairs")
    if not known:
        return {}
    first, second = np.diff(known["recall"])
    if second <= 0:
        return {}
    ratio = float(np.clip(second / first, 0.25, 1)) if first > 0 else 1.0
    scale = predicted["value"] / max(result.scores[name][figure]["value"], 1e-12)
    gains = np.cumsum([second * ratio, second * ratio**2]) * min(scale, 1.0)
    count = known["sizes"][-1]
    values = np.minimum(predicted["value"] + gains, 1).round(6).tolist()
    return {str(count * times): value for times, value in zip((2, 4), values, strict=True)}


def query_scores(embedding_map: EmbeddingMap, queries: Any, documents: Any, *, near: int = 10, far: int = 50) -> Floats:
    """Score each query by how clearly its nearest documents stand out: the greater, the more can its answer be trusted.

    Args:
        embedding_map: The map.
        queries: ``(n, d)``: as they are searched: new queries, already mapped in the directions ``query`` and
            ``adjoint``; old ones if the map keeps the old model.
        documents: ``(m, d)``: the index as it is searched.
        near: Rank of the nearer document.
        far: Rank of the farther document.

    Returns:
        ``(n,)``: the similarity at rank ``near`` minus that at rank ``far``.

    Example:
        >>> documents = np.random.default_rng(0).normal(size=(100, 4))
        >>> query_scores(EmbeddingMap.old_model(4), documents[:3], documents).shape
        (3,)
    """
    if not 1 <= near < far:
        raise ValueError(f"near must be at least 1 and below far, got {near} and {far}")
    similarities = exact_search(queries, documents, far, metric=embedding_map.metric)[1].astype(np.float64)
    gaps: Floats = similarities[:, near - 1] - similarities[:, far - 1]
    return gaps


@dataclass(frozen=True)
class Ageing(Result):
    """Whether a map finds less on new pairs than when it was fitted.

    Attributes:
        aged: Whether the loss exceeds the tolerance by its whole interval.
        sentence: The same in words.
        now: Recall on the new pairs, with its interval.
        then: Recall on the held-out pairs of the fit, in a pool of the same size.
        loss: ``then - now`` with its interval.
        old: Recall of the old model on the new pairs.
        n: Number of new pairs.
        pool: Size of the pool.

    Example:
        >>> score = {"value": 0.5, "low": 0.4, "high": 0.6}
        >>> Ageing(False, "As good as before.", score, score, score, score, 100, 100).aged
        False
    """

    aged: bool
    sentence: str
    now: Score
    then: Score
    loss: Score
    old: Score
    n: int
    pool: int

    def __rich__(self) -> str:
        """Return the sentence."""
        return self.sentence

    def to_pandas(self) -> pandas.DataFrame:
        """Return one row."""
        import pandas

        return pandas.DataFrame([{"aged": self.aged, "now": self.now["value"], "then": self.then["value"]}])


def monitor(embedding_map: EmbeddingMap, old: Any, new: Any, *, tolerance: float = TOLERANCE, seed: int = 0) -> Ageing:
    """Compare recall on new pairs with that on the held-out pairs of the fit.

    Pools of the same size are compared, because recall falls with the size. More pairs than the fit reported on are
    sampled; with fewer, the earlier recall is read off at this size.

    Args:
        embedding_map: The map, with the scores of its fit.
        old: ``(n, d)``: old vectors of recent texts.
        new: ``(n, d')``: their new vectors.
        tolerance: Loss that counts as no ageing.
        seed: Seed of the sample and of resampling.

    Returns:
        The comparison.

    Raises:
        ValueError: If the map has no scores, widths differ from those of the fit, or there are too few pairs.

    Example:
        >>> from hf_stitch_embeddings import fit_embedding_map
        >>> rows = np.random.default_rng(0).normal(size=(400, 6)).astype("float32")
        >>> fitted = fit_embedding_map(rows, rows[:, ::-1], map="ridge", direction="index", progress=False)
        >>> fresh = np.random.default_rng(1).normal(size=(200, 6)).astype("float32")
        >>> monitor(fitted, fresh, fresh[:, ::-1]).aged, monitor(fitted, fresh, fresh).aged
        (False, True)
    """
    report = embedding_map.scores.get("report")
    if not report:
        raise ValueError(
            "the map has no scores of its fit to compare with: fit it with fit_embedding_map; an adjoint() has none, "
            "so monitor the index map that it comes from, or fit with direction='adjoint'"
        )
    before, after = read_vectors(old, "old"), read_vectors(new, "new")
    if len(before) != len(after):
        raise ValueError(f"the rows do not correspond: {len(before)} old vectors and {len(after)} new ones")
    for name, side in (("the old vectors", before), ("the new vectors", after)):
        check_vectors(side, name, metric=embedding_map.metric)
    pool, k = int(report["pool"]), int(report["k"])
    if len(before) < max(4 * k, 20):
        raise ValueError(f"{len(before)} new pairs are too few: at least {max(4 * k, 20)} are needed")
    order = np.sort(np.random.default_rng(seed).permutation(len(before))[:pool])
    before, after = before[order], after[order]
    queries = score_pairs([(embedding_map, Pairs(before, after))], seed=seed, k=k)[0]
    weights = query_weights(len(queries), 1000, seed)
    now = interval(queries, weights)
    kept = EmbeddingMap.old_model(before.shape[1], metric=embedding_map.metric)
    kept_now = interval(score_pairs([(kept, Pairs(before, after))], seed=seed, k=k)[0], weights)
    then = dict(report["recall"][embedding_map.name])
    if len(before) < pool:
        result = RetrievalResult.from_dict(report["result"])
        points = np.array(result.pools[embedding_map.name][result.figure], dtype=float)
        pools = np.log2(np.array(result.sizes))[known := np.isfinite(points)]
        slope = min(0.0, float(np.polyfit(pools, points[known], 1)[0])) if len(pools) > 1 else 0.0
        shift = slope * (np.log2(len(before)) - np.log2(pool))
        then = {key: float(np.clip(value + shift, 0, 1)) for key, value in then.items()}
    loss = then["value"] - now["value"]
    width = float(np.hypot(then["high"] - then["low"], now["high"] - now["low"]) / 2)
    lost = {"value": loss, "low": loss - width, "high": loss + width}
    aged = lost["low"] > tolerance
    sentence = (
        f"The map {'has aged' if aged else 'has not aged beyond doubt'}: recall@{k} among {len(before)} new pairs is "
        f"{now['value']:.3f} ({now['low']:.3f} to {now['high']:.3f}), and was {then['value']:.3f} in a pool of this "
        f"size; the old model finds {kept_now['value']:.3f}."
    )
    if aged:
        sentence += " Check that both encoders are the same as then, and fit again with recent pairs."
    return Ageing(aged, sentence, now, then, lost, kept_now, len(before), len(before))


@dataclass(frozen=True)
class Calibration(Result):
    """How well predictions decide, each by a margin from all other pairs of encoders.

    Attributes:
        margin: Margin from all pairs of encoders together.
        decisions: For each: go by the margin of the others.
        truths: For each: whether the true recall reaches the threshold.
        base_rate: Share of true ones.
        accuracy: Share of right decisions.
        auc: Area under the ROC curve of the predictions; NaN if all truths are the same.
        threshold: The threshold.

    Example:
        >>> Calibration(0.0, [True], [True], 1.0, 1.0, float("nan"), 0.8).accuracy
        1.0
    """

    margin: float
    decisions: list[bool]
    truths: list[bool]
    base_rate: float
    accuracy: float
    auc: float
    threshold: float

    def __rich__(self) -> str:
        """Return the figures in a sentence."""
        return (
            f"{self.accuracy:.0%} of {len(self.truths)} decisions are right (base rate {self.base_rate:.0%}), ROC area "
            f"{self.auc:.3f}, margin {self.margin:.3f} at threshold {self.threshold:g}"
        )

    def to_pandas(self) -> pandas.DataFrame:
        """Return one row for each pair of encoders."""
        import pandas

        return pandas.DataFrame({"go": self.decisions, "truth": self.truths})


@checked
def calibrate(
    predicted: Sequence[float],
    true: Sequence[float],
    *,
    threshold: float = THRESHOLD,
    groups: Sequence[Any] | None = None,
    kind: Literal["mean", "safe"] = "mean",
) -> Calibration:
    """Calibrate the go by pairs of encoders whose true recall is known, leaving each out in turn.

    Args:
        predicted: ``(n,)`` predicted recalls.
        true: ``(n,)`` true recalls in the whole index.
        threshold: The threshold.
        groups: Pair of encoders of each; all of a group are left out together. Default: each its own.
        kind: ``"mean"``: the margin is the mean error of predictions; ``"safe"``: nine in ten are overestimated less.

    Returns:
        The calibration.

    Raises:
        ValueError: If there are fewer than two groups.

    Example:
        >>> calibrate([0.5, 0.85, 0.95], [0.4, 0.75, 0.85]).decisions
        [False, False, True]
    """
    guesses, facts = np.asarray(predicted, float), np.asarray(true, float)
    if guesses.shape != facts.shape or guesses.ndim != 1:
        raise ValueError(f"predicted and true must correspond, got {guesses.shape} and {facts.shape}")
    members = np.arange(len(guesses)) if groups is None else np.unique(np.asarray(groups), return_inverse=True)[1]
    if len(set(members.tolist())) < 2:
        raise ValueError("at least two pairs of encoders are needed, to leave one out")

    def margin(rows: Any) -> float:
        errors = guesses[rows] - facts[rows]
        return float(errors.mean() if kind == "mean" else np.quantile(errors, 0.9))

    decisions = [bool(g - margin(members != m) >= threshold - 1e-9) for g, m in zip(guesses, members, strict=True)]
    truths = [bool(fact >= threshold) for fact in facts]
    good, bad = guesses[truths], guesses[[not each for each in truths]]
    wins = (good[:, None] > bad).mean() + (good[:, None] == bad).mean() / 2 if len(good) and len(bad) else np.nan
    accuracy = float(np.mean([a == b for a, b in zip(decisions, truths, strict=True)]))
    whole = margin(np.full(len(guesses), True))
    return Calibration(whole, decisions, truths, float(np.mean(truths)), accuracy, float(wins), threshold)
