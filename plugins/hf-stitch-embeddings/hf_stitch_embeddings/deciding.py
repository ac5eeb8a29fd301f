"""Decide whether a map is good enough (verdict), which queries to trust, and whether a map has aged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from hf_stitch.options import checked
from hf_stitch.results import Result
from hf_stitch_embeddings.choosing import FEW, Pairs, score as score_pairs
from hf_stitch_embeddings.embedding_map import EmbeddingMap
from hf_stitch_embeddings.retrieval import OLD, Floats, RetrievalResult, Score, exact_search, interval, query_weights
from hf_stitch_embeddings.vectors import check_vectors, read_vectors

if TYPE_CHECKING:
    import pandas

THRESHOLD = 0.8
"""Default threshold: a go requires this recall relative to re-embedding."""
SMALLEST_POOL = 100
"""Minimum number of held-out pairs for a verdict: by chance, a tenth of the ten nearest documents is among them."""
TOLERANCE = 0.02
"""Loss of recall that does not count as ageing."""


class FewPairsError(ValueError):
    """Too few pairs are held out for a verdict."""


@dataclass(frozen=True)
class Verdict(Result):
    """Decision whether a map is good enough.

    Attributes:
        go: Whether the predicted recall reaches the threshold.
        sure: Whether the whole confidence interval is on the same side of the threshold.
        sentence: The verdict in words.
        figure: Name of the recall metric.
        name: Name of the map.
        predicted: Predicted recall in the index, with its interval.
        old: Predicted recall of the old model, with its interval.
        threshold: The threshold.
        margin: Margin subtracted from the prediction before the comparison.
        index_size: Number of documents in the index; None if only the held-out pool was scored.
        more_pairs: Number of pairs -> predicted recall.
        reranked: Predicted recall if the top 100 documents are re-embedded and re-ranked; None if unknown.

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
        embedding_map: The map, with the scores from :func:`~hf_stitch_embeddings.fit_embedding_map`.
        result: Evaluation on separate vectors; takes precedence over the scores of the fit.
        threshold: Recall relative to re-embedding that a go requires, from 0 to 1.
        margin: Margin subtracted from the prediction; see :func:`calibrate`.
        name: Name of the map in the result. Default: the only map of the result.

    Returns:
        The verdict.

    Raises:
        ValueError: If scores are missing, or the threshold is out of range.
        FewPairsError: If the scores are of fewer than 100 held-out pairs.

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
            raise ValueError("the map does not have scores: pass `result` from evaluate_retrieval")
        result = RetrievalResult.from_dict(report["result"])
        if result.documents < SMALLEST_POOL:
            raise FewPairsError(
                f"the map was scored on {result.documents} held-out pairs, too few for recall@10, which requires "
                f"{SMALLEST_POOL}: fit it on {FEW} pairs or more, or pass `result` "
                "from evaluate_retrieval on other vectors"
            )
    if name is None:
        if len(result.maps) != 1:
            raise ValueError(f"the result has several maps: pass one of {', '.join(result.maps)} as `name`")
        name = result.maps[0]
    figure = result.figure
    predicted, old = _recall_score(result, name, figure), _recall_score(result, OLD, figure)
    extrapolated = _has_prediction(result, name, figure)
    pool_description = (
        f"in an index of {result.index_size:,} documents"
        if extrapolated
        else f"in a pool of {result.documents:,} held-out documents (in a larger index it is lower)"
    )
    with_margin = predicted["value"] - margin
    go = with_margin >= threshold
    sure = predicted["low"] - margin >= threshold if go else predicted["high"] - margin < threshold
    reranked = _recall_score(result, name, "reranked@10") if "reranked@10" in result.scores[name] else None
    if extrapolated and not _has_prediction(result, name, "reranked@10"):
        reranked = None
    more_pairs = {} if embedding_map.keeps_old else _extrapolate(embedding_map, predicted, result, name, figure)
    requirement = f"{threshold:g} is required" + (f", with a margin of {margin:.3g}" if margin else "")
    model = "the old model" if embedding_map.keeps_old else name
    decision = f"{'Go' if go else 'No go'}{'' if sure else ', but not beyond doubt,'} with {model}"
    sentences = [
        f"{decision}: predicted {figure} {pool_description} is {predicted['value']:.3f} "
        f"({predicted['low']:.3f} to {predicted['high']:.3f}), and {requirement}."
    ]
    if embedding_map.keeps_old:
        sentences.append("No map improves on it: keep the old model.")
    else:
        gain = {key: float(value) for key, value in result.gains[name][figure].items()}
        worse = "; keep the old model" if gain["high"] < 0 else "; no gain beyond chance" if gain["low"] <= 0 else ""
        sentences.append(
            f"In the pool of {result.documents:,} it is {abs(gain['value']):.3f} "
            f"{'less' if gain['value'] < 0 else 'more'} than with the old model "
            f"({gain['low']:+.3f} to {gain['high']:+.3f}){worse}."
        )
        if extrapolated:
            sentences.append(f"The old model is predicted to reach {old['value']:.3f} in the index.")
        sentences += [f"With {int(pairs):,} pairs, expect about {recall:.3f}." for pairs, recall in more_pairs.items()]
    scores_by_kind = {f: score for f, score in result.scores[name].items() if f.startswith(f"{figure} of ")}
    if scores_by_kind:
        worst = min(scores_by_kind, key=lambda kind: scores_by_kind[kind]["value"])
        score = scores_by_kind[worst]
        sentences.append(
            f"In the pool, {worst} is lowest: {score['value']:.3f} ({score['low']:.3f} to {score['high']:.3f})."
        )
    if reranked is not None and not go:
        sentences.append(
            f"If the top 100 documents are re-embedded and re-ranked, recall@10 is {reranked['value']:.3f}."
        )
    return Verdict(
        go, sure, " ".join(sentences), figure, name, predicted, old, threshold, margin,
        result.index_size if extrapolated else None, more_pairs, reranked,
    )  # fmt: skip


def recorded_verdict(embedding_map: EmbeddingMap) -> dict[str, Any]:
    """Return the verdict for the record of a map; with too few held-out pairs, a sentence that says so."""
    try:
        return verdict(embedding_map).to_dict()
    except FewPairsError as error:
        return {"sentence": f"No verdict: {str(error).partition(':')[0]}."}


def _has_prediction(result: RetrievalResult, name: str, figure: str) -> bool:
    prediction = result.predicted.get(name, {}).get(figure)
    return prediction is not None and bool(np.isfinite(float(prediction["value"])))


def _recall_score(result: RetrievalResult, name: str, figure: str) -> Score:
    """Return the predicted recall in the index, or the recall in the pool without a prediction."""
    score = result.predicted[name][figure] if _has_prediction(result, name, figure) else result.scores[name][figure]
    return {key: float(value) for key, value in score.items()}


def _extrapolate(
    embedding_map: EmbeddingMap, predicted: Score, result: RetrievalResult, name: str, figure: str
) -> dict[str, float]:
    """Extrapolate recall for two and four times the pairs, with the decay of the gains of the last two doublings."""
    curve = embedding_map.scores.get("pairs")
    if not curve:
        return {}
    first_gain, second_gain = np.diff(curve["recall"])
    if second_gain <= 0:
        return {}
    ratio = float(np.clip(second_gain / first_gain, 0.25, 1)) if first_gain > 0 else 1.0
    scale = predicted["value"] / max(result.scores[name][figure]["value"], 1e-12)
    gains = np.cumsum([second_gain * ratio, second_gain * ratio**2]) * min(scale, 1.0)
    count = curve["sizes"][-1]
    values = np.minimum(predicted["value"] + gains, 1).round(6).tolist()
    return {str(count * factor): value for factor, value in zip((2, 4), values, strict=True)}


def query_scores(embedding_map: EmbeddingMap, queries: Any, documents: Any, *, near: int = 10, far: int = 50) -> Floats:
    """Compute a confidence score for each query: how clearly its nearest documents stand out.

    Args:
        embedding_map: The map.
        queries: ``(n, d)`` query vectors as searched: new queries, already mapped in the directions ``query`` and
            ``adjoint``; old queries if the map keeps the old model.
        documents: ``(m, d)`` document vectors as searched.
        near: Rank of the nearer document.
        far: Rank of the farther document.

    Returns:
        ``(n,)``: similarity at rank ``near`` minus similarity at rank ``far``; higher scores are more trustworthy.

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
    """Comparison of recall on new pairs with recall at the time of the fit.

    Attributes:
        aged: Whether the whole confidence interval of the loss exceeds the tolerance.
        sentence: The comparison in words.
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
    """Compare recall on new pairs with recall on the held-out pairs of the fit.

    Recall falls with the pool size, so pools of equal size are compared. More pairs than in the pool of the fit are
    subsampled; with fewer pairs, the earlier recall is interpolated at their number.

    Args:
        embedding_map: The map, with the scores of its fit.
        old: ``(n, d)``: old vectors of recent texts.
        new: ``(n, d')``: their new vectors.
        tolerance: Loss that does not count as ageing.
        seed: Seed of the sample and of resampling.

    Returns:
        The comparison.

    Raises:
        ValueError: If the map does not have scores, the widths do not match the fit, or the pairs are too few.

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
            "monitor requires the scores of the fit: use a map from fit_embedding_map; for an adjoint(), monitor the "
            "original index map, or fit with direction='adjoint'"
        )
    old_rows, new_rows = read_vectors(old, "old"), read_vectors(new, "new")
    if len(old_rows) != len(new_rows):
        raise ValueError(f"old and new must have the same number of rows, got {len(old_rows)} and {len(new_rows)}")
    for name, side in (("the old vectors", old_rows), ("the new vectors", new_rows)):
        check_vectors(side, name, metric=embedding_map.metric)
    pool, k = int(report["pool"]), int(report["k"])
    if len(old_rows) < max(4 * k, 20):
        raise ValueError(f"monitor requires at least {max(4 * k, 20)} new pairs, got {len(old_rows)}")
    subset = np.sort(np.random.default_rng(seed).permutation(len(old_rows))[:pool])
    old_rows, new_rows = old_rows[subset], new_rows[subset]
    query_recalls = score_pairs([(embedding_map, Pairs(old_rows, new_rows))], seed=seed, k=k)[0]
    weights = query_weights(len(query_recalls), 1000, seed)
    now = interval(query_recalls, weights)
    old_map = EmbeddingMap.old_model(old_rows.shape[1], metric=embedding_map.metric)
    old_now = interval(score_pairs([(old_map, Pairs(old_rows, new_rows))], seed=seed, k=k)[0], weights)
    then = dict(report["recall"][embedding_map.name])
    if len(old_rows) < pool:
        result = RetrievalResult.from_dict(report["result"])
        pool_recalls = np.array(result.pools[embedding_map.name][result.figure], dtype=float)
        log_sizes = np.log2(np.array(result.sizes))[finite := np.isfinite(pool_recalls)]
        slope = min(0.0, float(np.polyfit(log_sizes, pool_recalls[finite], 1)[0])) if len(log_sizes) > 1 else 0.0
        change = slope * (np.log2(len(old_rows)) - np.log2(pool))
        then = {key: float(np.clip(value + change, 0, 1)) for key, value in then.items()}
    loss = then["value"] - now["value"]
    width = float(np.hypot(then["high"] - then["low"], now["high"] - now["low"]) / 2)
    loss_interval = {"value": loss, "low": loss - width, "high": loss + width}
    aged = loss_interval["low"] > tolerance
    sentence = (
        f"The map {'has aged' if aged else 'has not aged beyond doubt'}: recall@{k} among {len(old_rows)} new pairs is "
        f"{now['value']:.3f} ({now['low']:.3f} to {now['high']:.3f}), and was {then['value']:.3f} in a pool of this "
        f"size; the old model finds {old_now['value']:.3f}."
    )
    if aged:
        sentence += " Check that both encoders are unchanged since the fit, and refit with recent pairs."
    return Ageing(aged, sentence, now, then, loss_interval, old_now, len(old_rows), len(old_rows))


@dataclass(frozen=True)
class Calibration(Result):
    """Accuracy of decisions on pairs of encoders, by leave-one-out margins.

    Attributes:
        margin: Margin from all pairs of encoders.
        decisions: Decision for each pair, with the margin from the remaining pairs.
        truths: Whether the true recall of each pair reaches the threshold.
        base_rate: Share of pairs that reach the threshold.
        accuracy: Share of correct decisions.
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
            f"{self.accuracy:.0%} of {len(self.truths)} decisions are correct (base rate {self.base_rate:.0%}), "
            f"ROC AUC {self.auc:.3f}, margin {self.margin:.3f} at threshold {self.threshold:g}"
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
    """Calibrate the margin of the verdict on pairs of encoders with known recall, by leave-one-out.

    Args:
        predicted: ``(n,)`` predicted recalls.
        true: ``(n,)`` true recalls in the whole index.
        threshold: The threshold.
        groups: Pair of encoders of each recall; a group is left out as a whole. Default: each recall is a group.
        kind: ``"mean"``: the margin is the mean error; ``"safe"``: the 90th percentile of the errors.

    Returns:
        The calibration.

    Raises:
        ValueError: If there are fewer than two groups.

    Example:
        >>> calibrate([0.5, 0.85, 0.95], [0.4, 0.75, 0.85]).decisions
        [False, False, True]
    """
    predictions, recalls = np.asarray(predicted, float), np.asarray(true, float)
    if predictions.shape != recalls.shape or predictions.ndim != 1:
        shapes = f"{predictions.shape} and {recalls.shape}"
        raise ValueError(f"predicted and true must have the same 1-d shape, got {shapes}")
    group_ids = np.arange(len(predictions)) if groups is None else np.unique(np.asarray(groups), return_inverse=True)[1]
    if len(set(group_ids.tolist())) < 2:
        raise ValueError("calibrate requires at least two pairs of encoders")

    def margin(rows: Any) -> float:
        errors = predictions[rows] - recalls[rows]
        return float(errors.mean() if kind == "mean" else np.quantile(errors, 0.9))

    margins = np.array([margin(group_ids != group) for group in group_ids])
    decisions = [bool(go) for go in predictions - margins >= threshold - 1e-9]
    truths = [bool(recall >= threshold) for recall in recalls]
    above, below = predictions[truths], predictions[[not reached for reached in truths]]
    higher, equal = above[:, None] > below, above[:, None] == below
    auc = higher.mean() + equal.mean() / 2 if higher.size else np.nan
    accuracy = float(np.mean([a == b for a, b in zip(decisions, truths, strict=True)]))
    final_margin = margin(np.full(len(predictions), True))
    return Calibration(final_margin, decisions, truths, float(np.mean(truths)), accuracy, float(auc), threshold)
