"""How well queries find, after an upgrade, what they would find after re-embedding all documents."""

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
"""``value``, and ``low`` and ``high``, the ends of its 95% interval."""
Relevance: TypeAlias = Sequence[Collection[int]] | Sequence[Mapping[int, float]]

OLD, RE_EMBEDDED = "old model", "re-embedding"
CELLS = 2**25
"""Similarities that are computed at once."""
RERANKED, LEAST_RERANKED = 100, 1000
"""Documents that a lazy upgrade re-embeds for each query, and smallest pool in which this is scored: among the first
hundred of two hundred, chance finds a half."""
CURVE_ERROR = 0.0075
"""Error of a predicted recall per doubling of the pool: 0.03 (root mean square, mean 0.00) from 800 to 12,800 documents
over 14 systems: ridge on documents and on queries and the old model, for four real pairs of encoders, and two synthetic
pairs."""
TIE = 1e-6
"""Difference of two similarities, as a share of the greatest, that is rounding: the documents are equally near."""
ANCHORS, LOCAL, POPULATION = 500, 10, 5000
"""Anchors of relative representations; neighbours and largest number of queries from which CSLS corrects."""


@dataclass(frozen=True)
class System:
    """Queries, documents, and how they are compared; ``shift`` is added to the similarities of each document."""

    queries: Vectors
    documents: Vectors
    metric: Metric = "cosine"
    shift: npt.NDArray[np.float32] | None = None

    def similarities(self, rows: slice) -> Tensor:
        """Compare some queries with all documents; the greater, the nearer."""
        return _compared(
            torch.from_numpy(np.array(self.queries[rows], np.float32)), self._documents(), self.metric, self.shift
        )

    def _documents(self) -> Tensor:
        return torch.from_numpy(np.require(self.documents, np.float32, ["C", "W"]))


def _compared(queries: Tensor, documents: Tensor, metric: Metric, shift: Any = None) -> Tensor:
    if metric == "cosine":
        queries, documents = (torch.from_numpy(normalized(side.numpy())) for side in (queries, documents))
    found = queries @ documents.T
    if metric == "l2":
        found = 2 * found - documents.square().sum(1)  # the length of the query changes no ranking
    return found if shift is None else found + torch.from_numpy(np.asarray(shift, np.float32))


@checked
def exact_search(
    queries: Any, documents: Any, k: int = 10, *, metric: Metric = "cosine", shift: Any = None
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Find the nearest documents by comparing with all; memory-mapped documents are read in blocks.

    Args:
        queries: ``(n, d)``.
        documents: ``(m, d)``.
        k: Number of documents, at most m.
        metric: The metric.
        shift: ``(m,)``: added to the similarities of each document. None: nothing.

    Returns:
        ``(n, k)`` numbers of documents, nearest first, and ``(n, k)`` similarities (with l2: ``2⟨q, d⟩ - ‖d‖²``).

    Raises:
        ValueError: If k is out of range or the widths differ.

    Example:
        >>> exact_search([[1.0, 0.1]], [[0.0, 1.0], [2.0, 0.0]], k=2)[0].tolist()
        [[1, 0]]
    """
    asked, there = read_vectors(queries, "queries"), read_vectors(documents, "documents")
    _same_width(asked, there, "queries", "documents")
    if not 1 <= k <= len(there):
        raise ValueError(f"k must be from 1 to the number of documents, {len(there)}, got {k}")
    rows, step = 512, max(k, CELLS // 512)
    numbers, nearest = [], []
    for start in range(0, len(asked), rows):
        block = torch.from_numpy(np.array(asked[start : start + rows], np.float32))
        best, places = torch.empty(len(block), 0), torch.empty(len(block), 0, dtype=torch.long)
        for first in range(0, len(there), step):
            some = torch.from_numpy(np.array(there[first : first + step], np.float32))
            added = None if shift is None else shift[first : first + step]
            found = _compared(block, some, metric, added).topk(min(k, len(some)))
            best, places = torch.cat([best, found.values], 1), torch.cat([places, found.indices + first], 1)
            top = best.topk(min(k, best.shape[1]))
            best, places = top.values, places.gather(1, top.indices)
        numbers.append(places.numpy())
        nearest.append(best.numpy())
    return np.concatenate(numbers), np.concatenate(nearest)


def quality(similarities: Tensor, relevance: Relevance, k: int) -> tuple[Floats, Floats]:
    """Return the nDCG@k with linear gains and the reciprocal rank of each query, cut at rank k.

    Equally near documents share their ranks: both are expectations over all orders of such documents (McSherry and
    Najork 2008). NaN for a query without relevant documents.
    """
    discount = np.append(0.0, np.cumsum(1 / np.log2(np.arange(2, k + 2))))
    gain, rank = np.full(len(similarities), np.nan), np.full(len(similarities), np.nan)
    for query, (row, gains) in enumerate(zip(similarities, map(_gains, relevance), strict=True)):
        relevant = {document: gain for document, gain in gains.items() if gain > 0}
        if not relevant:
            continue
        near = row[[*relevant]][:, None]
        slack = TIE * torch.maximum(row.max().abs(), near.abs())
        above = (row > near + slack).sum(1).numpy()
        level = ((row - near).abs() <= slack).sum(1).numpy()  # 0 of an excluded document
        share = (discount[np.minimum(above + level, k)] - discount[np.minimum(above, k)]) / np.maximum(level, 1)
        ideal = np.sort([*relevant.values()])[::-1][:k]
        gain[query] = share @ [*relevant.values()] / (ideal @ np.diff(discount)[: len(ideal)])
        first = int(above.argmin())
        rank[query] = _first_rank(int(above[first]), int(level[first]), int((above == above[first]).sum()), k)
    return gain, rank


def _first_rank(above: int, level: int, relevant: int, k: int) -> float:
    """Return the expectation of one over the first rank of the relevant ones among ``level`` equally near documents."""
    last = min(level - relevant + 1, k - above)
    orders = [math.comb(level - place, relevant - 1) / (above + place) for place in range(1, last + 1)]
    return sum(orders) / math.comb(level, relevant) if level else 0.0


def _gains(relevant: Any) -> dict[int, float]:
    if isinstance(relevant, Mapping):
        return {int(document): float(gain) for document, gain in relevant.items()}
    return {int(document): 1.0 for document in relevant}


def served(
    embedding_map: EmbeddingMap, old_documents: Vectors, old_queries: Vectors | None, new_queries: Vectors
) -> System:
    """Return what is searched after an upgrade with a map."""
    metric = embedding_map.metric
    if embedding_map.keeps_old:
        if old_queries is None:
            raise ValueError("the map keeps the old model, which needs old_queries")
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
    """Per-query figures of several systems in pools of several sizes, the greatest, of all documents, first.

    ``values`` has for each system and figure ``(sizes, queries)``, ``quality`` the figures of relevance among all.
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
    """Compute recall in the pool and in random parts of it, ``repeats`` of each size, of which the mean counts.

    No figure depends on the order of the documents: all that are as near as the k-th count as true, and found ones that
    are equally near share the last places (the expectation over all orders).

    ``exclude`` has for each query the document that is itself, which counts neither as found nor as true. The figures:
    ``recall@k``, NaN in parts with fewer than 4 k documents; in pools of 1,000 or more ``reranked@10``, the recall@10
    if the first 100 are re-embedded and ranked again; with ``inside``, ``recall@k in`` and ``recall@k out`` of the
    documents it marks and of the others, NaN for queries without such true documents; with ``relevance``, ``ndcg@10``
    and ``mrr@10`` in the pool (or at the greatest k, if that is less).
    """
    count, pool, top = len(truth.queries), len(truth.documents), max(ks)
    generator = torch.Generator().manual_seed(seed)
    parts: list[tuple[int, Tensor | None]] = [(pool, None)]
    while repeats and len({size for size, _ in parts}) < 5 and (size := parts[-1][0] // 2) >= max(4 * min(ks), 20):
        parts += [(size, torch.randperm(pool, generator=generator)[:size]) for _ in range(repeats)]
    sizes = list(dict.fromkeys(size for size, _ in parts))
    share = {size: sum(1 for other, _ in parts if other == size) for size in sizes}
    reranks = 10 in ks and pool >= LEAST_RERANKED
    least = {f"recall@{k}": min(4 * k, pool) for k in ks} | ({"reranked@10": 2 * RERANKED} if reranks else {})
    values: dict[str, dict[str, Floats]] = {
        name: {f: np.array([[0.0 if size >= few else np.nan] * count for size in sizes]) for f, few in least.items()}
        for name in systems
    }
    if inside is not None:
        for name in systems:
            values[name] |= {f"recall@{k} {side}": np.full((1, count), np.nan) for k in ks for side in ("in", "out")}
    deep = min(10, top)
    graded: dict[str, dict[str, Floats]] = {name: {} for name in systems}
    if relevance is not None:
        graded = {name: {f"{f}@{deep}": np.full(count, np.nan) for f in ("ndcg", "mrr")} for name in systems}
    step = max(1, CELLS // pool)
    for start in range(0, count, step):
        rows = slice(start, min(start + step, count))
        own = None if exclude is None else torch.from_numpy(np.asarray(exclude[rows], dtype=np.int64))[:, None]
        exact = _without(truth.similarities(rows), own)
        cuts = [exact if part is None else exact[:, part] for _, part in parts]
        masks = [{k: _true(cells, k) for k in ks if k <= cells.shape[1]} for cells in cuts]
        for name, system in systems.items():
            near = _without(system.similarities(rows), own)
            for (size, part), true in zip(parts, masks, strict=True):
                place = sizes.index(size)
                again = reranks and size >= 2 * RERANKED
                cells = near if part is None else near[:, part]
                order = cells.topk(min(max(top, RERANKED if again else 0) + 1, size))
                for k in true:
                    values[name][f"recall@{k}"][place, rows] += _expected(true[k], cells, order, k) / k / share[size]
                if again:
                    hits = np.minimum(_expected(true[10], cells, order, RERANKED), 10)  # more, if some are equally near
                    values[name]["reranked@10"][place, rows] += hits / 10 / share[size]
                if part is None:
                    if relevance is not None:
                        both = quality(near, relevance[rows], deep)
                        graded[name][f"ndcg@{deep}"][rows], graded[name][f"mrr@{deep}"][rows] = both
                    if inside is not None:
                        _apart(values[name], true, exact, cells, rows, torch.from_numpy(inside))
    return Measured(sizes, values, graded)


def _without(similarities: Tensor, own: Tensor | None) -> Tensor:
    return similarities if own is None else similarities.scatter(1, own, -torch.inf)


def _slack(order: Any, k: int) -> Tensor:
    """Return what counts as rounding at rank k of similarities in descending order."""
    best: Tensor = torch.maximum(order.values[:, :1].abs(), order.values[:, k - 1 : k].abs())
    return TIE * best


def _true(similarities: Tensor, k: int) -> Tensor:
    """Mark the k nearest documents of each query, and those that are as near as the last of them."""
    order = similarities.topk(k)
    return similarities >= order.values[:, -1:] - _slack(order, k)


def _expected(marked: Tensor, similarities: Tensor, order: Any, k: int) -> Floats:
    """Count the marked documents among the k nearest; of equally near ones at rank k each has an equal chance."""
    hits = marked.gather(1, order.indices[:, :k]).sum(1).double()
    slack = _slack(order, k)
    if order.values.shape[1] > k:
        tied = (order.values[:, k - 1 : k] - order.values[:, k : k + 1] <= slack)[:, 0].nonzero()[:, 0]
        cells, last, slack = similarities[tied], order.values[tied, k - 1 : k], slack[tied]
        above = cells > last + slack
        level = (cells >= last - slack) & ~above
        left, share = k - above.sum(1), (marked[tied] & level).sum(1).double() / level.sum(1)
        hits[tied] = (marked[tied] & above).sum(1) + left * share
    counted: Floats = hits.numpy()
    return counted


def _apart(
    values: dict[str, Floats], true: dict[int, Tensor], exact: Tensor, near: Tensor, rows: slice, inside: Tensor
) -> None:
    """Fill in the recall of marked documents and of all others."""
    top = min(max(true) + 1, near.shape[1])
    best, found = exact.topk(top), near.topk(top)
    for k in true:
        for side, documents in (("in", inside), ("out", ~inside)):
            wanted = _expected(documents.expand(near.shape), exact, best, k)
            got = np.minimum(_expected(true[k] & documents, near, found, k), wanted)
            values[f"recall@{k} {side}"][0, rows] = np.where(wanted > 0, got / np.maximum(wanted, 1e-12), np.nan)


# -- intervals and extrapolation ---------------------------------------------------------------------------------------
def query_weights(count: int, resamples: int, seed: int) -> Floats:
    """Return how often each query counts: once in the first row, and as drawn in those of the bootstrap samples."""
    return np.concatenate(list(resampled(count, resamples, seed)))


def interval(values: Floats, weights: Floats) -> Score:
    """Return a mean over queries with its bootstrap interval; NaN values are left out."""
    valid = np.isfinite(values)
    drawn = weights[:, valid]
    means = drawn @ values[valid] / np.maximum(drawn.sum(1), 1e-12) if valid.any() else np.full(2, np.nan)
    return {end: round(value, 12) for end, value in asdict(as_score(means)).items()}


def extrapolate(
    values: Floats, sizes: Sequence[int], index_size: int, weights: Floats, *, considered: int = 10
) -> Score:
    """Predict a recall in an index from that in smaller pools, where it is higher.

    Recall falls with the logarithm of the number of documents, and in a small pool chance finds many. Recall above
    chance, ``(r - c/n) / (1 - c/n)`` for c considered of n documents, is therefore fitted by a line and by a line of
    its log odds, to pools with at least 10 c documents if there are two. The value is the mean of both predictions. The
    interval covers both, each over bootstrap samples of queries, and an error of the curve of :data:`CURVE_ERROR` per
    doubling.
    """
    if sizes[0] == index_size:
        return interval(values[0], weights)
    pools = np.array(sizes)
    kept = np.isfinite(values).all(1) & (pools > considered)
    if (kept & (pools >= 10 * considered)).sum() >= 2:
        kept &= pools >= 10 * considered
    if kept.sum() < 2:
        return {"value": float("nan"), "low": float("nan"), "high": float("nan")}
    values, pools = values[kept], pools[kept]
    chance, floor = considered / pools, min(1.0, considered / index_size)
    above = (weights @ values.T / weights.shape[1] - chance) / (1 - chance)
    edge = 0.5 / (values.shape[1] + 1)
    odds = np.log(np.clip(above, edge, 1 - edge) / (1 - np.clip(above, edge, 1 - edge)))
    places = np.log2(pools)
    centred, step = places - places.mean(), np.log2(index_size) - places.mean()

    def line(points: Floats) -> Floats:
        slope = np.minimum(points @ centred / (centred @ centred), 0)  # a larger index is never easier
        fitted: Floats = points.mean(1) + slope * step
        return fitted

    both = (np.clip(line(above), 0, 1), 1 / (1 + np.exp(-line(odds))))
    predictions = [floor + (1 - floor) * each for each in both]
    lows, highs = zip(*(with_interval(each)[1:] for each in predictions), strict=True)
    value = float(np.mean([each[0] for each in predictions]))
    low, high = np.min([value, *lows]), np.max([value, *highs])  # NaN for a single query: then from 0 to 1
    curve = 1.96 * CURVE_ERROR * abs(np.log2(index_size / pools[0]))
    low, high = value - np.hypot(value - low, curve), value + np.hypot(high - value, curve)
    return {"value": value, "low": max(0.0, float(low)), "high": min(1.0, float(high))}


# -- evaluation --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class RetrievalResult(Result):
    """How well each system finds what re-embedding would find.

    Attributes:
        scores: system -> figure -> ``value``, ``low``, ``high`` (95%, over queries). Figures: ``recall@k`` (fidelity
            to re-embedding), the same ``of`` each kind of query, ``reranked@10``, and with relevance labels
            ``ndcg@10`` and ``mrr@10`` (quality).
        predicted: The same recalls in an index of ``index_size`` documents; empty without ``index_size``.
        gains: The same as ``scores``, minus those of the old model, query by query.
        pools: system -> recall -> mean in pools of each of ``sizes``.
        sizes: Numbers of documents, the greatest first.
        maps: Names of the maps; all others are baselines.
        queries: Number of queries.
        documents: Number of documents.
        metric: Metric.
        index_size: Number of documents of the index for which recall is predicted, or None.
        notes: What could not be computed, and why.
        per_query: system -> recall of each query, of the k nearest to 10.

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
        """The recall whose k is nearest to 10."""
        return nearest_to_ten(next(iter(self.scores.values())))

    def best(self, figure: str | None = None) -> str:
        """Return the map or baseline that is best without re-embedding.

        Args:
            figure: The figure. Default: the recall whose k is nearest to 10.

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
        """Draw the recalls with their intervals."""
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
            "share of the documents that re-embedding finds",
        )


def _cell(score: Score | None) -> str:
    if score is None or not np.isfinite(score["value"]):
        return "–"
    return f"{score['value']:.3f} [{score['low']:.3f}, {score['high']:.3f}]"


def nearest_to_ten(figures: Collection[str]) -> str:
    """Return the figure ``recall@k`` whose k is nearest to 10."""
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
    """Compare maps with the old model, with baselines and with re-embedding.

    Fidelity is the share of the k documents nearest to the new query among re-embedded documents that are also among
    the k nearest after the upgrade. It is not quality: pass ``relevance`` for that. Recall is predicted for the size of
    the index (:func:`extrapolate`), because it is higher in a small pool.

    Args:
        maps: One map, or name -> map, all of the same metric.
        old_documents: ``(m, d)``: documents by the old model. They and the queries must not be among the fitted pairs,
            except those marked by ``in_pairs``.
        new_documents: ``(m, d')``: the same documents by the new model.
        old_queries: ``(n, d)``: queries by the old model.
        new_queries: ``(n, d')``: the same queries by the new model.
        k: Numbers of nearest documents. Those above a quarter of the documents are left out.
        relevance: For each query its relevant documents, or document -> gain. None: only fidelity.
        index_size: Number of documents of the index. None: no prediction.
        pairs: The old and new vectors of the fitted pairs, for relative representations, whitening and CSLS.
        exclude: For each query the document that is the query itself, if queries are documents.
        in_pairs: ``(m,)``: which documents are among the fitted pairs; their recall is then reported apart.
        kinds: For each query the kind of its text, e.g. ``"news"``: the main recall is reported for each kind, too. Of
            kinds that are not among the pairs it is often far lower.
        baselines: Whether to compute the baselines other than the old model.
        resamples: Bootstrap samples of queries.
        seed: Seed of resampling, of pools and of the random map.

    Returns:
        The result.

    Raises:
        ValueError: If vectors do not fit together.

    Example:
        >>> old = np.random.default_rng(0).normal(size=(400, 6))
        >>> new = old[:, ::-1].copy()
        >>> from hf_stitch.stitches import LinearStitch
        >>> exact = EmbeddingMap.of(LinearStitch.of(weight=torch.eye(6).flip(0)))
        >>> result = evaluate_retrieval(exact, old[50:], new[50:], old[:50], new[:50], k=10, resamples=50)
        >>> result.best(), round(result.scores["linear, index"]["recall@10"]["value"], 3)
        ('linear, index', 1.0)
    """
    named = {maps.name: maps} if isinstance(maps, EmbeddingMap) else dict(maps)
    metrics = {each.metric for each in named.values()} or {"cosine"}
    if len(metrics) > 1:
        raise ValueError(f"maps of one metric can be compared, got {', '.join(sorted(metrics))}")
    metric: Metric = metrics.pop()
    old, new, old_asked, asked = _sides(old_documents, new_documents, old_queries, new_queries, metric)
    for what, given in (("relevance", relevance), ("kinds", kinds)):
        if given is not None and len(given) != len(asked):
            raise ValueError(f"{what} must have one item for each of {len(asked)} queries, got {len(given)}")
    own = None if exclude is None else np.asarray(exclude, dtype=np.int64)
    if own is not None and (own.shape != (len(asked),) or own.min() < 0 or own.max() >= len(old)):
        raise ValueError(f"exclude must be {len(asked)} numbers of documents, below {len(old)}")
    marked = None if in_pairs is None else np.asarray(in_pairs, dtype=bool)
    if marked is not None and marked.shape != (len(old),):
        raise ValueError(f"in_pairs must mark each of {len(old)} documents, got shape {marked.shape}")
    if index_size is not None and index_size < 1:
        raise ValueError(f"index_size must be at least 1, got {index_size}")
    notes: list[str] = []
    ks = _possible(k, len(old), notes)

    for each in named.values():
        if metric != "cosine" and not each.keeps_old:
            each.check_lengths(new, "new_documents", "new")
    truth = System(asked, new, metric)
    systems = {name: served(each, old, old_asked, asked) for name, each in named.items()}
    systems[OLD] = System(old_asked, old, metric)
    if baselines:
        systems |= _baselines(old, asked, pairs, metric, seed, notes)
        if pairs is not None and named and metric == "cosine":
            systems |= {f"{name} + CSLS": _csls(each, systems[name], pairs) for name, each in named.items()}
    systems[RE_EMBEDDED] = truth
    measured = measure(systems, truth, ks, exclude=own, seed=seed, inside=marked, relevance=relevance)
    weights = query_weights(len(asked), resamples, seed)
    main = nearest_to_ten([f"recall@{each}" for each in ks])
    per_query = _per_query(measured, main, kinds)
    scores = {name: {f: interval(each, weights) for f, each in row.items()} for name, row in per_query.items()}
    gains = {
        name: {f: interval(each - per_query[OLD][f], weights) for f, each in row.items()}
        for name, row in per_query.items()
        if name != OLD
    }
    whole = {
        name: {f: each for f, each in row.items() if len(each) == len(measured.sizes)}
        for name, row in measured.values.items()
    }
    predicted = {} if index_size is None else _predicted(whole, measured.sizes, index_size, weights)
    if index_size not in (None, len(old)) and len(measured.sizes) < 2:
        notes.append(f"{len(old)} documents are too few to predict recall in an index of {index_size}")
    return RetrievalResult(
        scores=scores,
        predicted=predicted,
        gains=gains,
        pools={
            n: {f: each.mean(1).round(6).tolist() for f, each in row.items() if " " not in f}
            for n, row in whole.items()
        },
        sizes=measured.sizes,
        maps=list(named),
        queries=len(asked),
        documents=len(old),
        metric=metric,
        index_size=index_size,
        notes=notes,
        per_query={name: row[main] for name, row in per_query.items()},
    )


def _sides(
    old_documents: Any, new_documents: Any, old_queries: Any, new_queries: Any, metric: Metric
) -> tuple[Vectors, Vectors, Vectors, Vectors]:
    """Read and check documents and queries of both models."""
    given = {
        "old_documents": old_documents, "new_documents": new_documents,
        "old_queries": old_queries, "new_queries": new_queries,
    }  # fmt: skip
    sides = {name: read_vectors(side, name) for name, side in given.items()}
    for name, side in sides.items():
        check_vectors(side, name, metric=metric)
    for what in ("documents", "queries"):
        rows = [len(sides[f"{model}_{what}"]) for model in ("old", "new")]
        if rows[0] != rows[1]:
            raise ValueError(f"old_{what} and new_{what} do not correspond: {rows[0]} and {rows[1]} rows")
    for model in ("old", "new"):
        one, other = f"{model}_queries", f"{model}_documents"
        _same_width(sides[one], sides[other], one, other)
    old, new, old_asked, asked = sides.values()
    return old, new, old_asked, asked


def _per_query(measured: Measured, main: str, kinds: Sequence[str] | None) -> dict[str, dict[str, Floats]]:
    """Return the figures of each query in the whole pool, with its quality, and the main recall by kind."""
    found = {name: {figure: each[0] for figure, each in row.items()} for name, row in measured.values.items()}
    for name, row in found.items():
        row |= measured.quality[name]
        for kind in sorted(set(kinds or ())):
            row[f"{main} of {kind}"] = np.where([each == kind for each in kinds or ()], row[main], np.nan)
    return found


def _predicted(
    whole: Mapping[str, Mapping[str, Floats]], sizes: Sequence[int], index_size: int, weights: Floats
) -> dict[str, dict[str, Score]]:
    """Extrapolate all recalls to the size of the index."""

    def of(figure: str, values: Floats) -> Score:
        considered = int(figure.partition("@")[2]) if figure.startswith("recall") else RERANKED
        return extrapolate(values, sizes, index_size, weights, considered=considered)

    return {name: {f: of(f, each) for f, each in row.items() if " " not in f} for name, row in whole.items()}


def _possible(k: int | Sequence[int], documents: int, notes: list[str]) -> list[int]:
    wanted = sorted({k} if isinstance(k, int) else set(k))
    if not wanted or wanted[0] < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    kept = [each for each in wanted if 4 * each <= documents]
    if not kept:
        raise ValueError(f"recall@{wanted[0]} needs at least {4 * wanted[0]} documents, got {documents}")
    if len(kept) < len(wanted):
        left = ", ".join(str(each) for each in wanted if each not in kept)
        notes.append(f"recall@{left} is left out: there are only {documents} documents")
    return kept


def _same_width(one: Vectors, other: Vectors, name: str, second: str) -> None:
    if one.shape[1] != other.shape[1]:
        raise ValueError(f"{name} and {second} have different widths: {one.shape[1]} and {other.shape[1]}")


# -- baselines ---------------------------------------------------------------------------------------------------------
def _baselines(
    old: Vectors, asked: Vectors, pairs: tuple[Any, Any] | None, metric: Metric, seed: int, notes: list[str]
) -> dict[str, System]:
    generator = np.random.default_rng(seed)
    found = {}
    if old.shape[1] == asked.shape[1]:
        found["no map"] = System(asked, old, metric)
    else:
        notes.append(f"no map: impossible between widths {old.shape[1]} and {asked.shape[1]}")
    random = generator.normal(size=(asked.shape[1], old.shape[1])).astype(np.float32)
    found["random map"] = System(np.asarray(asked, np.float32) @ random, old, metric)
    if pairs is None:
        notes.append("relative representations, whitening and CSLS are left out: pass the fitted pairs")
        return found
    before, after = (read_vectors(side, "pairs") for side in pairs)
    if len(before) != len(after) or before.shape[1] != old.shape[1] or after.shape[1] != asked.shape[1]:
        raise ValueError(f"pairs must be old and new vectors of the same texts, got {before.shape} and {after.shape}")
    chosen = np.sort(generator.permutation(len(before))[:ANCHORS])
    found["relative representations"] = System(_relative(asked, after[chosen]), _relative(old, before[chosen]))
    white = [_whitening(side) for side in (before, after)]
    left, right = ((np.asarray(s, np.float32) - m) @ w for s, (m, w) in zip((before, after), white, strict=True))
    u, _, v = np.linalg.svd(left.T @ right, full_matrices=False)
    (m, w), (m2, w2) = white
    documents = ((np.asarray(old, np.float32) - m) @ w) @ (u @ v)
    found["centring + whitening"] = System((np.asarray(asked, np.float32) - m2) @ w2, documents)
    return found


def _relative(vectors: Vectors, anchors: Vectors) -> npt.NDArray[np.float32]:
    """Cosines to the anchors (Moschella et al. 2023)."""
    return normalized(np.asarray(vectors, np.float32)) @ normalized(np.asarray(anchors, np.float32)).T


def _whitening(vectors: Vectors) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Mean, and the inverse square root of the covariance, shrunk by a tenth of its mean eigenvalue."""
    rows = np.asarray(vectors, np.float64)
    values, directions = np.linalg.eigh(np.cov(rows, rowvar=False).reshape(rows.shape[1], rows.shape[1]))
    scale = 1 / np.sqrt(np.maximum(values, 0) + 0.1 * max(values.mean(), 1e-12))
    return rows.mean(0).astype(np.float32), ((directions * scale) @ directions.T).astype(np.float32)


def _csls(embedding_map: EmbeddingMap, system: System, pairs: tuple[Any, Any]) -> System:
    before, after = (read_vectors(side)[:POPULATION] for side in pairs)
    mapped = not embedding_map.keeps_old and embedding_map.direction != "index"
    population = embedding_map(after) if mapped else before if embedding_map.keeps_old else after
    return System(system.queries, system.documents, system.metric, csls_shift(system.documents, population))


def csls_shift(documents: Vectors, population: Vectors) -> npt.NDArray[np.float32]:
    """Return minus half the mean cosine of each document to its nearest queries: fewer hubs (Lample et al. 2018)."""
    nearest = exact_search(documents, population, min(LOCAL, len(population)))[1]
    return (-nearest.mean(1) / 2).astype(np.float32)
