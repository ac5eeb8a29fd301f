"""Evaluation of retrieval after an upgrade, compared with retrieval after re-embedding all documents."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hf_stitch.options import checked
from hf_stitch.results import Result
from hf_stitch.scoring.measured import as_score, with_interval
from hf_stitch.tasks.base import resampled
from hf_stitch_embeddings.embedding_map import EmbeddingMap
from hf_stitch_embeddings.vectors import Metric, Vectors, check_vectors, normalized, read_vectors

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure
    from rich.console import RenderableType

Floats: TypeAlias = npt.NDArray[np.float64]
Score: TypeAlias = dict[str, float]
"""``value``, and the bounds ``low`` and ``high`` of its 95% confidence interval."""
Relevance: TypeAlias = Sequence[Collection[int]] | Sequence[Mapping[int, float]]

OLD, RE_EMBEDDED = "old model", "re-embedding"
CELLS = 2**25
"""Maximum number of similarities (queries x documents) per block."""
RERANKED, LEAST_RERANKED = 100, 1000
"""Documents that a lazy upgrade re-embeds for each query, and minimum pool size for this score: in a pool of two
hundred, chance finds half of the documents."""
CURVE_ERROR = 0.0075
"""Error of a predicted recall per doubling of the pool: 0.03 (root mean square, mean 0.00) from 800 to 12,800 documents
over 14 systems (ridge on documents, ridge on queries and the old model, for four real pairs of encoders, and two
synthetic pairs)."""
TIE = 1e-6
"""Two similarities that differ by less than this share of the greatest are tied: the difference is rounding error."""
ANCHORS, LOCAL, POPULATION = 500, 10, 5000
"""Anchors of relative representations; neighbours and maximum number of queries for CSLS."""


@dataclass(frozen=True)
class System:
    """Queries, documents and their metric; ``shift`` is added to the similarities of each document."""

    queries: Vectors
    documents: Vectors
    metric: Metric = "cosine"
    shift: npt.NDArray[np.float32] | None = None

    def similarities(self, rows: slice) -> Tensor:
        """Return the similarities of a slice of queries to all documents."""
        return _similarities(
            torch.from_numpy(np.array(self.queries[rows], np.float32)), self._documents(), self.metric, self.shift
        )

    def _documents(self) -> Tensor:
        return torch.from_numpy(np.require(self.documents, np.float32, ["C", "W"]))


def _similarities(queries: Tensor, documents: Tensor, metric: Metric, shift: Any = None) -> Tensor:
    if metric == "cosine":
        queries, documents = (torch.from_numpy(normalized(side.numpy())) for side in (queries, documents))
    scores = queries @ documents.T
    if metric == "l2":
        scores = 2 * scores - documents.square().sum(1)  # the length of the query changes no ranking
    return scores if shift is None else scores + torch.from_numpy(np.asarray(shift, np.float32))


@checked
def exact_search(
    queries: Any, documents: Any, k: int = 10, *, metric: Metric = "cosine", shift: Any = None
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Return the nearest documents by exhaustive search; memory-mapped documents are read in blocks.

    Args:
        queries: ``(n, d)``.
        documents: ``(m, d)``.
        k: Number of documents, at most m.
        metric: The metric.
        shift: ``(m,)`` values to add to the similarities of each document. Default: zero.

    Returns:
        ``(n, k)`` document numbers, nearest first, and ``(n, k)`` similarities (with l2: ``2⟨q, d⟩ - ‖d‖²``).

    Raises:
        ValueError: If k is out of range or the widths differ.

    Example:
        >>> exact_search([[1.0, 0.1]], [[0.0, 1.0], [2.0, 0.0]], k=2)[0].tolist()
        [[1, 0]]
    """
    query_rows, document_rows = read_vectors(queries, "queries"), read_vectors(documents, "documents")
    _same_width(query_rows, document_rows, "queries", "documents")
    if not 1 <= k <= len(document_rows):
        raise ValueError(f"k must be from 1 to the number of documents, {len(document_rows)}, got {k}")
    rows, step = 512, max(k, CELLS // 512)
    document_numbers, similarities = [], []
    for start in range(0, len(query_rows), rows):
        block = torch.from_numpy(np.array(query_rows[start : start + rows], np.float32))
        best_scores, best_numbers = torch.empty(len(block), 0), torch.empty(len(block), 0, dtype=torch.long)
        for first in range(0, len(document_rows), step):
            document_block = torch.from_numpy(np.array(document_rows[first : first + step], np.float32))
            block_shift = None if shift is None else shift[first : first + step]
            block_top = _similarities(block, document_block, metric, block_shift).topk(min(k, len(document_block)))
            best_scores = torch.cat([best_scores, block_top.values], 1)
            best_numbers = torch.cat([best_numbers, block_top.indices + first], 1)
            top = best_scores.topk(min(k, best_scores.shape[1]))
            best_scores, best_numbers = top.values, best_numbers.gather(1, top.indices)
        document_numbers.append(best_numbers.numpy())
        similarities.append(best_scores.numpy())
    return np.concatenate(document_numbers), np.concatenate(similarities)


def quality(similarities: Tensor, relevance: Relevance, k: int) -> tuple[Floats, Floats]:
    """Return the nDCG@k with linear gains (Järvelin and Kekäläinen 2002) and the reciprocal rank@k of each query.

    Both are expectations over all orders of tied documents (McSherry and Najork 2008); NaN without relevant documents.
    """
    discount = np.append(0.0, np.cumsum(1 / np.log2(np.arange(2, k + 2))))
    ndcg, reciprocal = np.full(len(similarities), np.nan), np.full(len(similarities), np.nan)
    for query, (scores, document_gains) in enumerate(zip(similarities, map(_gains, relevance), strict=True)):
        relevant = {document: gain for document, gain in document_gains.items() if gain > 0}
        if not relevant:
            continue
        gains, relevant_scores = np.array([*relevant.values()]), scores[[*relevant]][:, None]
        slack = TIE * torch.maximum(scores.max().abs(), relevant_scores.abs())
        above = (scores > relevant_scores + slack).sum(1).numpy()
        tied = ((scores - relevant_scores).abs() <= slack).sum(1).numpy()  # 0 for an excluded document
        gained = discount[np.minimum(above + tied, k)] - discount[np.minimum(above, k)]
        ideal = np.sort(gains)[::-1][:k]
        ndcg[query] = gains @ (gained / np.maximum(tied, 1)) / (ideal @ np.diff(discount)[: len(ideal)])
        best = int(above.argmin())
        reciprocal[query] = _first_rank(int(above[best]), int(tied[best]), int((above == above[best]).sum()), k)
    return ndcg, reciprocal


def _first_rank(above: int, tied: int, relevant: int, k: int) -> float:
    """Return the expected reciprocal of the first rank of a relevant document among tied documents."""
    last = min(tied - relevant + 1, k - above)
    orders = [math.comb(tied - place, relevant - 1) / (above + place) for place in range(1, last + 1)]
    return sum(orders) / math.comb(tied, relevant) if tied else 0.0


def _gains(relevant: Any) -> dict[int, float]:
    if isinstance(relevant, Mapping):
        return {int(document): float(gain) for document, gain in relevant.items()}
    return {int(document): 1.0 for document in relevant}


def served(
    embedding_map: EmbeddingMap, old_documents: Vectors, old_queries: Vectors | None, new_queries: Vectors
) -> System:
    """Return the queries and documents of the search after an upgrade with a map."""
    metric = embedding_map.metric
    if embedding_map.keeps_old:
        if old_queries is None:
            raise ValueError("the map keeps the old model: pass old_queries")
        return System(old_queries, old_documents, metric)
    if embedding_map.direction == "index":
        return System(new_queries, embedding_map(old_documents), metric)
    if metric != "cosine":
        embedding_map.check_lengths(old_documents, "the old documents", "old")
    # <Wᵀq, d> of the adjoint ranks by inner product; with cosine, lengths of documents are 1 in both spaces.
    return System(embedding_map(new_queries), old_documents, metric)


# -- recall in pools of several sizes ----------------------------------------------------------------------------------
@dataclass(frozen=True)
class Measured:
    """Per-query figures of several systems in pools of several sizes, largest first.

    ``values`` holds an array ``(sizes, queries)`` for each system and figure, ``quality`` the nDCG and reciprocal ranks
    in the whole pool.
    """

    sizes: list[int]
    values: dict[str, dict[str, Floats]]
    quality: dict[str, dict[str, Floats]]


@torch.no_grad()
def measure(
    systems: Mapping[str, System],
    truth: System,
    ks: Sequence[int],
    *,
    exclude: npt.NDArray[np.int64] | None = None,
    seed: int = 0,
    repeats: int = 3,
    inside: npt.NDArray[np.bool_] | None = None,
    relevance: Relevance | None = None,
) -> Measured:
    """Compute recall in the pool and in random subsets of it, as means over ``repeats`` subsets of each size.

    The figures do not depend on the order of the documents: all documents tied with the k-th count as true, and tied
    retrieved documents share the last ranks (the expectation over all orders).

    ``exclude`` holds the document number of each query itself; this document counts neither as retrieved nor as true.
    The figures are ``recall@k`` (NaN in subsets with fewer than 4 k documents), and in pools of 1,000 or more
    documents ``reranked@10``: recall@10 if the top 100 documents are re-embedded and re-ranked. With ``inside``, the
    figures ``recall@k in`` and ``recall@k out`` describe marked and unmarked documents; they are NaN for queries
    without such true documents. ``relevance`` adds ``ndcg@10`` and ``mrr@10``, or these figures at a smaller maximum k.
    """
    count, pool, top = len(truth.queries), len(truth.documents), max(ks)
    generator = torch.Generator().manual_seed(seed)
    pools: list[tuple[int, Tensor | None]] = [(pool, None)]
    while repeats and len({size for size, _ in pools}) < 5 and (size := pools[-1][0] // 2) >= max(4 * min(ks), 20):
        pools += [(size, torch.randperm(pool, generator=generator)[:size]) for _ in range(repeats)]
    sizes = list(dict.fromkeys(size for size, _ in pools))
    draws = {size: sum(1 for drawn_size, _ in pools if drawn_size == size) for size in sizes}
    reranks = 10 in ks and pool >= LEAST_RERANKED
    min_sizes = {f"recall@{k}": min(4 * k, pool) for k in ks} | ({"reranked@10": 2 * RERANKED} if reranks else {})
    values: dict[str, dict[str, Floats]] = {
        name: {f: np.array([[0.0 if size >= n else np.nan] * count for size in sizes]) for f, n in min_sizes.items()}
        for name in systems
    }
    if inside is not None:
        for name in systems:
            values[name] |= {f"recall@{k} {side}": np.full((1, count), np.nan) for k in ks for side in ("in", "out")}
    depth = min(10, top)
    graded: dict[str, dict[str, Floats]] = {name: {} for name in systems}
    if relevance is not None:
        graded = {name: {f"{f}@{depth}": np.full(count, np.nan) for f in ("ndcg", "mrr")} for name in systems}
    step = max(1, CELLS // pool)
    for start in range(0, count, step):
        rows = slice(start, min(start + step, count))
        query_documents = (
            None if exclude is None else torch.from_numpy(np.asarray(exclude[rows], dtype=np.int64))[:, None]
        )
        true_scores = _mask_query_itself(truth.similarities(rows), query_documents)
        pool_scores = [true_scores if documents is None else true_scores[:, documents] for _, documents in pools]
        true_masks = [{k: _true_neighbours(cells, k) for k in ks if k <= cells.shape[1]} for cells in pool_scores]
        for name, system in systems.items():
            scores = _mask_query_itself(system.similarities(rows), query_documents)
            for (size, documents), true in zip(pools, true_masks, strict=True):
                size_index = sizes.index(size)
                with_reranked = reranks and size >= 2 * RERANKED
                cells = scores if documents is None else scores[:, documents]
                order = cells.topk(min(max(top, RERANKED if with_reranked else 0) + 1, size))
                for k in true:
                    hits = _expected_hits(true[k], cells, order, k)
                    values[name][f"recall@{k}"][size_index, rows] += hits / k / draws[size]
                if with_reranked:
                    hits = np.minimum(_expected_hits(true[10], cells, order, RERANKED), 10)  # ties can exceed 10
                    values[name]["reranked@10"][size_index, rows] += hits / 10 / draws[size]
                if documents is None:
                    if relevance is not None:
                        ndcg, mrr = quality(scores, relevance[rows], depth)
                        graded[name][f"ndcg@{depth}"][rows], graded[name][f"mrr@{depth}"][rows] = ndcg, mrr
                    if inside is not None:
                        _fill_marked_recall(values[name], true, true_scores, cells, rows, torch.from_numpy(inside))
    return Measured(sizes, values, graded)


def _mask_query_itself(similarities: Tensor, query_documents: Tensor | None) -> Tensor:
    return similarities if query_documents is None else similarities.scatter(1, query_documents, -torch.inf)


def _slack(order: Any, k: int) -> Tensor:
    """Return the tolerance for ties at rank k of similarities in descending order."""
    best: Tensor = torch.maximum(order.values[:, :1].abs(), order.values[:, k - 1 : k].abs())
    return TIE * best


def _true_neighbours(similarities: Tensor, k: int) -> Tensor:
    """Mark the k nearest documents of each query, including documents tied with the k-th."""
    order = similarities.topk(k)
    return similarities >= order.values[:, -1:] - _slack(order, k)


def _expected_hits(marked: Tensor, similarities: Tensor, order: Any, k: int) -> Floats:
    """Return the expected number of marked documents among the k nearest, with ties at rank k broken at random."""
    hits = marked.gather(1, order.indices[:, :k]).sum(1).double()
    slack = _slack(order, k)
    if order.values.shape[1] > k:
        tied = (order.values[:, k - 1 : k] - order.values[:, k : k + 1] <= slack)[:, 0].nonzero()[:, 0]
        cells, last, slack = similarities[tied], order.values[tied, k - 1 : k], slack[tied]
        above = cells > last + slack
        tied_documents = (cells >= last - slack) & ~above
        marked_share = (marked[tied] & tied_documents).sum(1).double() / tied_documents.sum(1)
        hits[tied] = (marked[tied] & above).sum(1) + (k - above.sum(1)) * marked_share
    hit_counts: Floats = hits.numpy()
    return hit_counts


def _fill_marked_recall(
    values: dict[str, Floats], true: dict[int, Tensor], exact: Tensor, near: Tensor, rows: slice, inside: Tensor
) -> None:
    """Fill in the recall of marked and of unmarked documents."""
    top = min(max(true) + 1, near.shape[1])
    exact_top, near_top = exact.topk(top), near.topk(top)
    for k in true:
        for side, documents in (("in", inside), ("out", ~inside)):
            expected = _expected_hits(documents.expand(near.shape), exact, exact_top, k)
            retrieved = np.minimum(_expected_hits(true[k] & documents, near, near_top, k), expected)
            values[f"recall@{k} {side}"][0, rows] = np.where(
                expected > 0, retrieved / np.maximum(expected, 1e-12), np.nan
            )


# -- intervals and extrapolation ---------------------------------------------------------------------------------------
def query_weights(count: int, resamples: int, seed: int) -> Floats:
    """Return the weights of queries: one in the first row, counts in a bootstrap sample in each further row."""
    return np.concatenate(list(resampled(count, resamples, seed)))


def interval(values: Floats, weights: Floats) -> Score:
    """Return a mean over queries with its bootstrap interval; NaN values are ignored."""
    valid = np.isfinite(values)
    weights = weights[:, valid]
    means = weights @ values[valid] / np.maximum(weights.sum(1), 1e-12) if valid.any() else np.full(2, np.nan)
    return {end: round(value, 12) for end, value in asdict(as_score(means)).items()}


def extrapolate(
    values: Floats, sizes: Sequence[int], index_size: int, weights: Floats, *, considered: int = 10
) -> Score:
    """Predict recall in an index from recall in smaller pools.

    Recall falls with the logarithm of the number of documents, and chance contributes in small pools. The recall above
    chance, ``(r - c/n) / (1 - c/n)`` with c of n documents considered, is fitted by a line and by a line of its log
    odds. The fit uses pools with at least 10 c documents if there are two. The prediction is the mean of both lines.
    Its interval covers both lines over bootstrap samples of queries, and a curve error of :data:`CURVE_ERROR` per
    doubling.
    """
    if sizes[0] == index_size:
        return interval(values[0], weights)
    pools = np.array(sizes)
    usable = np.isfinite(values).all(1) & (pools > considered)
    if (usable & (pools >= 10 * considered)).sum() >= 2:
        usable &= pools >= 10 * considered
    if usable.sum() < 2:
        return {"value": float("nan"), "low": float("nan"), "high": float("nan")}
    values, pools = values[usable], pools[usable]
    chance, index_chance = considered / pools, min(1.0, considered / index_size)
    above_chance = (weights @ values.T / weights.shape[1] - chance) / (1 - chance)
    margin = 0.5 / (values.shape[1] + 1)
    odds = np.log(np.clip(above_chance, margin, 1 - margin) / (1 - np.clip(above_chance, margin, 1 - margin)))
    log_sizes = np.log2(pools)
    centred, step = log_sizes - log_sizes.mean(), np.log2(index_size) - log_sizes.mean()

    def extend_line(points: Floats) -> Floats:
        slope = np.minimum(points @ centred / (centred @ centred), 0)  # a larger index is never easier
        extended: Floats = points.mean(1) + slope * step
        return extended

    line_predictions = (np.clip(extend_line(above_chance), 0, 1), 1 / (1 + np.exp(-extend_line(odds))))
    predictions = [index_chance + (1 - index_chance) * prediction for prediction in line_predictions]
    lows, highs = zip(*(with_interval(prediction)[1:] for prediction in predictions), strict=True)
    value = float(np.mean([prediction[0] for prediction in predictions]))
    low, high = np.min([value, *lows]), np.max([value, *highs])  # NaN for a single query: then from 0 to 1
    curve_error = 1.96 * CURVE_ERROR * abs(np.log2(index_size / pools[0]))
    low, high = value - np.hypot(value - low, curve_error), value + np.hypot(high - value, curve_error)
    return {"value": value, "low": max(0.0, float(low)), "high": min(1.0, float(high))}


# -- evaluation --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class RetrievalResult(Result):
    """Retrieval scores of maps and baselines, relative to re-embedding.

    Attributes:
        scores: system -> figure -> ``value``, ``low``, ``high`` (95% confidence interval over queries). Figures:
            ``recall@k`` (fidelity to re-embedding), ``recall@k of`` each kind of query, ``reranked@10``, and with
            relevance labels ``ndcg@10`` and ``mrr@10`` (quality).
        predicted: Recalls predicted for an index of ``index_size`` documents; empty without ``index_size``.
        gains: Paired differences between ``scores`` and the scores of the old model.
        pools: system -> recall -> mean in pools of each size in ``sizes``.
        sizes: Pool sizes, largest first.
        maps: Names of the maps; all remaining systems are baselines.
        queries: Number of queries.
        documents: Number of documents.
        metric: Metric.
        index_size: Number of documents in the index for the prediction, or None.
        notes: Figures that could not be computed, with the reason.
        per_query: system -> recall of each query, for the k nearest to 10.

    Example:
        >>> vectors = np.random.default_rng(0).normal(size=(300, 8))
        >>> result = evaluate_retrieval({}, vectors[20:], vectors[20:], vectors[:20], vectors[:20], k=10, resamples=50)
        >>> result.scores["old model"]["recall@10"]["value"]
        1.0
    """

    scores: dict[str, dict[str, Score]]
    predicted: dict[str, dict[str, Score]]
    gains: dict[str, dict[str, Score]]
    pools: dict[str, dict[str, list[float]]]
    sizes: list[int]
    maps: list[str]
    queries: int
    documents: int
    metric: str
    index_size: int | None
    notes: list[str]
    per_query: dict[str, Any] = field(default_factory=dict, metadata={"saved": False}, compare=False, repr=False)

    @property
    def figure(self) -> str:
        """Name of the recall with k nearest to 10."""
        return nearest_to_ten(next(iter(self.scores.values())))

    def best(self, figure: str | None = None) -> str:
        """Return the best map or baseline, re-embedding excluded.

        Args:
            figure: Name of the figure. Default: the recall with k nearest to 10.

        Returns:
            The name.
        """
        names = [name for name in self.scores if name != RE_EMBEDDED]
        return max(names, key=lambda name: self.scores[name][figure or self.figure]["value"])

    def to_pandas(self) -> pandas.DataFrame:
        """Return one row for each system and figure."""
        import pandas

        rows = []
        for name, figures in self.scores.items():
            for figure, score in figures.items():
                guess = self.predicted.get(name, {}).get(figure, {})
                gain = self.gains.get(name, {}).get(figure, {})
                rows.append(
                    {"system": name, "map": name in self.maps, "figure": figure, **score}
                    | {f"predicted_{key}": value for key, value in guess.items()}
                    | {f"gain_{key}": value for key, value in gain.items()}
                )
        return pandas.DataFrame(rows)

    def __rich__(self) -> RenderableType:
        """Return the table."""
        from rich.console import Group
        from rich.table import Table

        figures = list(dict.fromkeys(figure for row in self.scores.values() for figure in row))
        table = Table(title=f"{self.queries} queries, {self.documents} documents, {self.metric}")
        table.add_column("system")
        for figure in figures:
            table.add_column(figure, justify="right")
        if self.index_size:
            table.add_column(f"{self.figure} of {self.index_size:,}", justify="right")
        for name, row in self.scores.items():
            cells = [_cell(row.get(figure)) for figure in figures]
            if self.index_size:
                cells.append(_cell(self.predicted.get(name, {}).get(self.figure)))
            table.add_row(name, *cells)
        return Group(table, *self.notes)

    def plot(self) -> Figure:
        """Plot the recalls with their confidence intervals."""
        from hf_stitch.plots.charts import interval_panels

        recalls = [figure for figure in next(iter(self.scores.values())) if figure.startswith("recall")]
        return interval_panels(
            {
                figure: {
                    name: (row[figure]["value"], row[figure]["low"], row[figure]["high"])
                    for name, row in self.scores.items()
                    if figure in row
                }
                for figure in recalls
            },
            "recall relative to re-embedding",
        )


def _cell(score: Score | None) -> str:
    if score is None or not np.isfinite(score["value"]):
        return "–"
    return f"{score['value']:.3f} [{score['low']:.3f}, {score['high']:.3f}]"


def nearest_to_ten(figures: Collection[str]) -> str:
    """Return the figure ``recall@k`` with k nearest to 10."""
    recalls = [figure for figure in figures if figure.startswith("recall@") and " " not in figure]
    return min(recalls, key=lambda figure: abs(int(figure.partition("@")[2]) - 10))


def evaluate_retrieval(
    maps: EmbeddingMap | Mapping[str, EmbeddingMap],
    old_documents: Any,
    new_documents: Any,
    old_queries: Any,
    new_queries: Any,
    *,
    k: int | Sequence[int] = (1, 10, 100),
    relevance: Relevance | None = None,
    index_size: int | None = None,
    pairs: tuple[Any, Any] | None = None,
    exclude: Any = None,
    in_pairs: Any = None,
    kinds: Sequence[str] | None = None,
    baselines: bool = True,
    resamples: int = 1000,
    seed: int = 0,
) -> RetrievalResult:
    """Compare maps with the old model, baselines and re-embedding.

    ``recall@k`` measures fidelity: the share of the k nearest re-embedded documents that are among the k nearest
    documents after the upgrade. Pass ``relevance`` to measure quality. Recall is higher in a small pool, so that it is
    also predicted for the size of the index (:func:`extrapolate`).

    Args:
        maps: One map, or name -> map, all with the same metric.
        old_documents: ``(m, d)`` documents from the old model. Documents and queries must not be among the fitted
            pairs, except documents marked by ``in_pairs``.
        new_documents: ``(m, d')`` the same documents from the new model.
        old_queries: ``(n, d)`` queries from the old model.
        new_queries: ``(n, d')`` the same queries from the new model.
        k: Numbers of nearest documents. Values above a quarter of the documents are skipped.
        relevance: Relevant documents of each query, or document -> gain. None: only fidelity.
        index_size: Number of documents in the index. None: no prediction.
        pairs: The old and new vectors of the fitted pairs, for relative representations, whitening and CSLS.
        exclude: Document number of each query, if queries are documents.
        in_pairs: ``(m,)`` mask of documents among the fitted pairs; their recall is reported separately.
        kinds: Kind of text of each query, e.g. ``"news"``; the main recall is also reported for each kind. It is often
            far lower for kinds that do not occur in the pairs.
        baselines: Whether to compute baselines in addition to the old model.
        resamples: Bootstrap samples of queries.
        seed: Seed of resampling, of pools and of the random map.

    Returns:
        The result.

    Raises:
        ValueError: If the shapes of vectors or the metrics of maps do not match.

    Example:
        >>> old = np.random.default_rng(0).normal(size=(400, 6))
        >>> new = old[:, ::-1].copy()
        >>> from hf_stitch.stitches import LinearStitch
        >>> exact = EmbeddingMap.of(LinearStitch.of(weight=torch.eye(6).flip(0)))
        >>> result = evaluate_retrieval(exact, old[50:], new[50:], old[:50], new[:50], k=10, resamples=50)
        >>> result.best(), round(result.scores["linear, index"]["recall@10"]["value"], 3)
        ('linear, index', 1.0)
    """
    named_maps = {maps.name: maps} if isinstance(maps, EmbeddingMap) else dict(maps)
    metrics = {embedding_map.metric for embedding_map in named_maps.values()} or {"cosine"}
    if len(metrics) > 1:
        raise ValueError(f"maps must have the same metric, got {', '.join(sorted(metrics))}")
    metric: Metric = metrics.pop()
    old, new, old_queries, new_queries = _read_sides(old_documents, new_documents, old_queries, new_queries, metric)
    for name, per_row in (("relevance", relevance), ("kinds", kinds)):
        if per_row is not None and len(per_row) != len(new_queries):
            raise ValueError(f"{name} must have one item for each of {len(new_queries)} queries, got {len(per_row)}")
    query_documents = None if exclude is None else np.asarray(exclude, dtype=np.int64)
    if query_documents is not None and (
        query_documents.shape != (len(new_queries),) or query_documents.min() < 0 or query_documents.max() >= len(old)
    ):
        raise ValueError(f"exclude must be {len(new_queries)} document numbers from 0 to {len(old) - 1}")
    pairs_mask = None if in_pairs is None else np.asarray(in_pairs, dtype=bool)
    if pairs_mask is not None and pairs_mask.shape != (len(old),):
        raise ValueError(f"in_pairs must mark each of {len(old)} documents, got shape {pairs_mask.shape}")
    if index_size is not None and index_size < 1:
        raise ValueError(f"index_size must be at least 1, got {index_size}")
    notes: list[str] = []
    ks = _usable_ks(k, len(old), notes)

    for embedding_map in named_maps.values():
        if metric != "cosine" and not embedding_map.keeps_old:
            embedding_map.check_lengths(new, "new_documents", "new")
    truth = System(new_queries, new, metric)
    systems = {name: served(embedding_map, old, old_queries, new_queries) for name, embedding_map in named_maps.items()}
    systems[OLD] = System(old_queries, old, metric)
    if baselines:
        systems |= _baselines(old, new_queries, pairs, metric, seed, notes)
        if pairs is not None and named_maps and metric == "cosine":
            systems |= {
                f"{name} + CSLS": _csls(served_map, systems[name], pairs) for name, served_map in named_maps.items()
            }
    systems[RE_EMBEDDED] = truth
    measures = measure(systems, truth, ks, exclude=query_documents, seed=seed, inside=pairs_mask, relevance=relevance)
    weights = query_weights(len(new_queries), resamples, seed)
    main_recall = nearest_to_ten([f"recall@{nearest}" for nearest in ks])
    per_query = _per_query(measures, main_recall, kinds)
    scores = {name: {f: interval(recalls, weights) for f, recalls in row.items()} for name, row in per_query.items()}
    gains = {
        name: {f: interval(recalls - per_query[OLD][f], weights) for f, recalls in row.items()}
        for name, row in per_query.items()
        if name != OLD
    }
    recalls_by_size = {
        name: {f: recalls for f, recalls in row.items() if len(recalls) == len(measures.sizes)}
        for name, row in measures.values.items()
    }
    predicted = {} if index_size is None else _predict_recalls(recalls_by_size, measures.sizes, index_size, weights)
    if index_size not in (None, len(old)) and len(measures.sizes) < 2:
        notes.append(f"recall in an index of {index_size} is not predicted: {len(old)} documents are too few")
    return RetrievalResult(
        scores=scores,
        predicted=predicted,
        gains=gains,
        pools={
            n: {f: recalls.mean(1).round(6).tolist() for f, recalls in row.items() if " " not in f}
            for n, row in recalls_by_size.items()
        },
        sizes=measures.sizes,
        maps=list(named_maps),
        queries=len(new_queries),
        documents=len(old),
        metric=metric,
        index_size=index_size,
        notes=notes,
        per_query={name: row[main_recall] for name, row in per_query.items()},
    )


def _read_sides(
    old_documents: Any, new_documents: Any, old_queries: Any, new_queries: Any, metric: Metric
) -> tuple[Vectors, Vectors, Vectors, Vectors]:
    """Read and check documents and queries of both models."""
    containers = {
        "old_documents": old_documents, "new_documents": new_documents,
        "old_queries": old_queries, "new_queries": new_queries,
    }  # fmt: skip
    sides = {name: read_vectors(side, name) for name, side in containers.items()}
    for name, side in sides.items():
        check_vectors(side, name, metric=metric)
    for role in ("documents", "queries"):
        rows = [len(sides[f"{model}_{role}"]) for model in ("old", "new")]
        if rows[0] != rows[1]:
            raise ValueError(f"old_{role} and new_{role} must have equal numbers of rows, got {rows[0]} and {rows[1]}")
    for model in ("old", "new"):
        queries, documents = f"{model}_queries", f"{model}_documents"
        _same_width(sides[queries], sides[documents], queries, documents)
    old, new, old_queries, new_queries = sides.values()
    return old, new, old_queries, new_queries


def _per_query(measures: Measured, main: str, kinds: Sequence[str] | None) -> dict[str, dict[str, Floats]]:
    """Return the figures of each query in the whole pool, with quality figures and the main recall by kind."""
    per_query = {name: {figure: by_size[0] for figure, by_size in row.items()} for name, row in measures.values.items()}
    for name, row in per_query.items():
        row |= measures.quality[name]
        for kind in sorted(set(kinds or ())):
            row[f"{main} of {kind}"] = np.where(
                [kind_of_query == kind for kind_of_query in kinds or ()], row[main], np.nan
            )
    return per_query


def _predict_recalls(
    recalls_by_size: Mapping[str, Mapping[str, Floats]], sizes: Sequence[int], index_size: int, weights: Floats
) -> dict[str, dict[str, Score]]:
    """Extrapolate all recalls to the size of the index."""

    def predict(figure: str, values: Floats) -> Score:
        considered = int(figure.partition("@")[2]) if figure.startswith("recall") else RERANKED
        return extrapolate(values, sizes, index_size, weights, considered=considered)

    return {
        name: {f: predict(f, recall_values) for f, recall_values in row.items() if " " not in f}
        for name, row in recalls_by_size.items()
    }


def _usable_ks(k: int | Sequence[int], documents: int, notes: list[str]) -> list[int]:
    requested = sorted({k} if isinstance(k, int) else set(k))
    if not requested or requested[0] < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    usable = [size for size in requested if 4 * size <= documents]
    if not usable:
        raise ValueError(f"recall@{requested[0]} requires at least {4 * requested[0]} documents, got {documents}")
    if len(usable) < len(requested):
        skipped = ", ".join(str(size) for size in requested if size not in usable)
        notes.append(f"recall@{skipped} is not computed: {documents} documents are too few")
    return usable


def _same_width(first: Vectors, second: Vectors, first_name: str, second_name: str) -> None:
    if first.shape[1] != second.shape[1]:
        raise ValueError(
            f"{first_name} and {second_name} must have the same width, got {first.shape[1]} and {second.shape[1]}"
        )


# -- baselines ---------------------------------------------------------------------------------------------------------
def _baselines(
    old: Vectors, queries: Vectors, pairs: tuple[Any, Any] | None, metric: Metric, seed: int, notes: list[str]
) -> dict[str, System]:
    generator = np.random.default_rng(seed)
    systems = {}
    if old.shape[1] == queries.shape[1]:
        systems["no map"] = System(queries, old, metric)
    else:
        notes.append(f"no map is not computed: the widths {old.shape[1]} and {queries.shape[1]} differ")
    random = generator.normal(size=(queries.shape[1], old.shape[1])).astype(np.float32)
    systems["random map"] = System(np.asarray(queries, np.float32) @ random, old, metric)
    if pairs is None:
        notes.append("relative representations, whitening and CSLS are not computed: pass the fitted `pairs`")
        return systems
    old_pairs, new_pairs = (read_vectors(side, "pairs") for side in pairs)
    shapes = old_pairs.shape, new_pairs.shape
    if len(old_pairs) != len(new_pairs) or (shapes[0][1], shapes[1][1]) != (old.shape[1], queries.shape[1]):
        raise ValueError(f"pairs must be old and new vectors of the same texts, got {shapes[0]} and {shapes[1]}")
    anchors = np.sort(generator.permutation(len(old_pairs))[:ANCHORS])
    relative_queries, relative_documents = _relative(queries, new_pairs[anchors]), _relative(old, old_pairs[anchors])
    systems["relative representations"] = System(relative_queries, relative_documents)
    (old_mean, old_scale), (new_mean, new_scale) = (_whitening(side) for side in (old_pairs, new_pairs))
    old_white = (np.asarray(old_pairs, np.float32) - old_mean) @ old_scale
    new_white = (np.asarray(new_pairs, np.float32) - new_mean) @ new_scale
    u, _, v = np.linalg.svd(old_white.T @ new_white, full_matrices=False)
    documents = ((np.asarray(old, np.float32) - old_mean) @ old_scale) @ (u @ v)
    systems["centring + whitening"] = System((np.asarray(queries, np.float32) - new_mean) @ new_scale, documents)
    return systems


def _relative(vectors: Vectors, anchors: Vectors) -> npt.NDArray[np.float32]:
    """Return the cosines to the anchors (Moschella et al. 2023)."""
    return normalized(np.asarray(vectors, np.float32)) @ normalized(np.asarray(anchors, np.float32)).T


def _whitening(vectors: Vectors) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Return the mean and the inverse square root of the covariance, shrunk by a tenth of its mean eigenvalue."""
    rows = np.asarray(vectors, np.float64)
    eigenvalues, directions = np.linalg.eigh(np.cov(rows, rowvar=False).reshape(rows.shape[1], rows.shape[1]))
    scale = 1 / np.sqrt(np.maximum(eigenvalues, 0) + 0.1 * max(eigenvalues.mean(), 1e-12))
    return rows.mean(0).astype(np.float32), ((directions * scale) @ directions.T).astype(np.float32)


def _csls(embedding_map: EmbeddingMap, system: System, pairs: tuple[Any, Any]) -> System:
    old_pairs, new_pairs = (read_vectors(side)[:POPULATION] for side in pairs)
    maps_queries = not embedding_map.keeps_old and embedding_map.direction != "index"
    population = embedding_map(new_pairs) if maps_queries else old_pairs if embedding_map.keeps_old else new_pairs
    return System(system.queries, system.documents, system.metric, csls_shift(system.documents, population))


def csls_shift(documents: Vectors, population: Vectors) -> npt.NDArray[np.float32]:
    """Return minus half the mean cosine of each document to its nearest queries (Lample et al. 2018: fewer hubs)."""
    nearest = exact_search(documents, population, min(LOCAL, len(population)))[1]
    return (-nearest.mean(1) / 2).astype(np.float32)
