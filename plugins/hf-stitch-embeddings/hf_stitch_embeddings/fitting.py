"""Fitting a map to pairs of old and new vectors."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from hf_stitch.matchers import Matcher
from hf_stitch.options import checked
from hf_stitch.results import Result
from hf_stitch.scoring.measured import as_score
from hf_stitch_embeddings.choosing import FEW, Candidate, Fits, Pairs, candidates, choose, pool_k
from hf_stitch_embeddings.embedding_map import Direction, EmbeddingMap
from hf_stitch_embeddings.retrieval import Score, evaluate_retrieval, nearest_to_ten, query_weights
from hf_stitch_embeddings.vectors import Metric, Vectors, check_pairs, encode, is_encoder, normalized, read_vectors

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure
    from rich.table import Table

LEAST = 20
"""Fewest pairs that can be split into three parts."""
SHARE = 0.2
"""Share of the pairs to choose by, and share to report on."""
MOST = 2000
"""Most pairs to choose by, and most to report on."""
DUPLICATE = 0.98
"""Cosine of centred vectors, in both spaces, from which two rows count as near-duplicates."""
PROBED = 4
"""Texts by which an encoder shows whether it encodes queries and documents alike."""
FOLDS = 4
"""Folds of cross-validation with few pairs: each must be large enough to be a pool."""

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Parts:
    """Numbers of the pairs of three disjoint parts, and of near-duplicates across them, which are in none."""

    fit: Rows
    choose: Rows
    report: Rows
    removed: Rows


def split_pairs(old: Vectors, new: Vectors, *, texts: Sequence[str] | None = None, seed: int = 0) -> Parts:
    """Split pairs into three disjoint parts, without near-duplicates across them.

    A pair is removed from the part to fit to if it is near to one of the other parts, and from the part to choose by if
    it is near to one to report on: if texts are equal but for case and spaces, or both the old and the new vectors,
    centred, have a cosine of .98 or more. Near-duplicates within a part stay.

    Args:
        old: ``(n, d)``: old vectors.
        new: ``(n, d')``: new vectors of the same texts.
        texts: The texts, if known.
        seed: Seed of the split.

    Returns:
        The parts.

    Raises:
        ValueError: If there are fewer than 20 pairs, or too few after near-duplicates are removed.

    Example:
        >>> rows = np.random.default_rng(0).normal(size=(100, 8))
        >>> parts = split_pairs(rows, rows)
        >>> len(parts.fit), len(parts.choose), len(parts.report), len(parts.removed)
        (60, 20, 20, 0)
    """
    count = len(old)
    if count < LEAST:
        raise ValueError(f"{count} pairs are too few: at least {LEAST} are needed, and some 1,000 for a good map")
    order = np.random.default_rng(seed).permutation(count)
    size = min(MOST, max(4, round(SHARE * count)))
    report, chosen, fit = np.sort(order[:size]), np.sort(order[size : 2 * size]), np.sort(order[2 * size :])
    means = [np.asarray(side[np.sort(order[:MOST])], np.float32).mean(0) for side in (old, new)]
    keys = None if texts is None else np.array([" ".join(text.lower().split()) for text in texts], dtype=object)

    def near(rows: Rows, others: Rows) -> npt.NDArray[np.bool_]:
        """Mark the rows that are near to one of the others."""
        found = np.zeros(len(rows), dtype=bool)
        if keys is not None:
            there = set(keys[others])
            found |= np.array([key in there for key in keys[rows]])
        held = [normalized(np.asarray(side[others], np.float32) - m) for side, m in zip((old, new), means, strict=True)]
        for start in range(0, len(rows), 2048):
            some = rows[start : start + 2048]
            both = np.ones((len(some), len(others)), dtype=bool)
            for side, mean, block in zip((old, new), means, held, strict=True):
                both &= normalized(np.asarray(side[some], np.float32) - mean) @ block.T >= DUPLICATE
            found[start : start + 2048] |= both.any(1)
        return found

    doubled = near(chosen, report)
    removed, chosen = [chosen[doubled]], chosen[~doubled]
    doubled = near(fit, np.concatenate([report, chosen]))
    removed, fit = [*removed, fit[doubled]], fit[~doubled]
    if len(fit) < LEAST // 2 or len(chosen) < 2:
        raise ValueError(
            f"of {count} pairs only {len(fit) + len(chosen) + len(report)} are left without near-duplicates: "
            "give pairs of different texts"
        )
    return Parts(fit, chosen, report, np.sort(np.concatenate(removed)))


@checked
def fit_embedding_map(
    source: Any,
    target: Any,
    *,
    map: str | Matcher = "auto",
    direction: Direction | Literal["auto"] = "auto",
    ids: Any = None,
    texts: Sequence[str] | None = None,
    metric: Metric = "cosine",
    seed: int = 0,
    index_size: int | None = None,
    use_all: bool = False,
    progress: bool = True,
) -> EmbeddingMap:
    """Fit a map between the vectors of an old encoder and those of a new one.

    The pairs are split into three disjoint parts (:func:`split_pairs`): maps are fitted to the first, chosen by the
    recall of held-out queries over held-out documents of the second, and the choice is fitted again to both and scored
    on the third. With fewer than 500 pairs, the choice is by cross-validation over the first two, among few safe maps,
    and the old model is kept unless one beats it beyond chance (``result.keeps_old``).

    Args:
        source: ``(n, d)``: old vectors, in any form that :func:`~hf_stitch_embeddings.read_vectors` reads; or the old
            encoder. If it encodes queries and documents in different ways (``encode_query``, ``encode_document`` of a
            ``SentenceTransformer``), maps of documents are fitted to texts as documents, and maps of queries to texts
            as queries.
        target: ``(n, d')``: new vectors of the same texts; or the new encoder.
        map: ``"auto"``, the name of a matcher (``identity``, ``procrustes``, ``ridge``, ``ridge_to_identity``,
            ``low_rank``, ``piecewise``, ``residual_mlp``, ``retrieval``), or a matcher.
        direction: ``"auto"``, ``"index"``, ``"query"`` or ``"adjoint"``.
        ids: Ids of the rows, or a pair of them (of the old and of the new rows), to check that rows correspond.
        texts: The texts; needed if a side is an encoder, and used to find duplicates.
        metric: How the index ranks: ``"cosine"``, ``"dot"`` or ``"l2"``.
        seed: Seed of the split and of trained maps.
        index_size: Number of documents of the index, for which recall is predicted.
        use_all: Whether the returned map is at last fitted to all pairs. Its scores then are those of the same recipe
            on four fifths of the pairs, and tend to be lower than its own.
        progress: Whether to show progress.

    Returns:
        The map, with ``scores`` on the third part and the scores of all candidates in ``record["candidates"]``.

    Raises:
        ValueError: If rows do not correspond, are not finite, are zero, or are too few; or map and direction do not
            fit the widths or the metric.

    Example:
        >>> old = np.random.default_rng(0).normal(size=(300, 6)).astype("float32")
        >>> new = old @ np.random.default_rng(1).normal(size=(6, 8)).astype("float32")
        >>> fitted = fit_embedding_map(old, new, map="ridge", direction="index", progress=False)
        >>> fitted, fitted.scores["report"]["n"]
        (EmbeddingMap(ridge, index: 6 -> 8, cosine), 60)
    """
    from hf_stitch_embeddings.deciding import verdict

    (old, olds), (new, news) = (
        _side(side, texts, name, progress) for side, name in ((source, "source"), (target, "target"))
    )
    pairs = Pairs(old, new, None if olds is old and news is new else (olds, news))
    check_pairs(old, new, ids=ids, metric=metric)
    if texts is not None and len(texts) != len(old):
        raise ValueError(f"there are {len(texts)} texts for {len(old)} rows")
    parts = split_pairs(old, new, texts=texts, seed=seed)
    listed = candidates(len(old), old.shape[1], new.shape[1], map=map, direction=direction, metric=metric)
    few = len(old) < FEW
    both = np.sort(np.concatenate([parts.fit, parts.choose]))
    record: dict[str, Any] = {"index_size": index_size}
    if len(listed) == 1:
        chosen = listed[0]
    else:
        if few:
            folds = np.array_split(np.random.default_rng(seed).permutation(both), FOLDS)
            held_out = [(pairs.take(np.setdiff1d(both, fold)), pairs.take(np.sort(fold))) for fold in folds]
        else:
            held_out = [(pairs.take(parts.fit), pairs.take(parts.choose))]
        chosen, scored, reason = choose(listed, held_out, metric=metric, few=few, seed=seed, progress=progress)
        record |= {"candidates": [each.to_dict() for each in scored], "reason": reason}
    found = Fits(pairs.take(both), metric=metric, seed=seed).map(chosen)
    sizes = {name: len(getattr(parts, name)) for name in ("fit", "choose", "report", "removed")}
    found.record.update(record, parts=sizes)
    found.recipe["versions"] = {name: importlib.metadata.version(name) for name in ("hf-stitch", "numpy", "torch")}
    found.scores = _report(found, pairs.take(parts.report), index_size, seed)
    if not found.keeps_old and len(both) >= 80:
        found.scores["pairs"] = _more_pairs(chosen, found, pairs, both, parts.report, seed)
    found.record["use_all"] = use_all
    if use_all and not found.keeps_old:
        final = Fits(pairs, metric=metric, seed=seed).map(chosen)
        final.record.update({key: value for key, value in found.record.items() if key not in final.record})
        final.recipe["versions"], final.scores = found.recipe["versions"], found.scores
        found = final
    found.record["scores"] = found.scores
    found.record["verdict"] = verdict(found).to_dict()
    return found


def _side(given: Any, texts: Sequence[str] | None, name: str, progress: bool) -> tuple[Vectors, Vectors]:
    """Return the vectors of a side as documents and as queries: the same ones if the encoder makes no difference."""
    if not is_encoder(given):
        found = read_vectors(given, name)
        return found, found
    if texts is None:
        raise ValueError(f"{name} is an encoder: pass texts to encode")
    found, some = encode(given, texts, progress=progress), list(texts[:PROBED])
    alike = not hasattr(given, "encode_query") or np.array_equal(encode(given, some), encode(given, some, queries=True))
    return found, found if alike else encode(given, texts, queries=True, progress=progress)


def _report(found: EmbeddingMap, pairs: Pairs, index_size: int | None, seed: int) -> dict[str, Any]:
    """Score a map on pairs that were used for nothing else; each is a query, and all others are the documents."""
    old, new = pairs.old, pairs.new
    ks = sorted({1, pool_k(len(old)), 100} if len(old) >= 1000 else {1, pool_k(len(old))})
    result = evaluate_retrieval(
        {found.name: found},
        *(old, new, *pairs.as_queries),
        k=[k for k in ks if 4 * k <= len(old)],
        index_size=index_size,
        exclude=np.arange(len(old)),
        baselines=False,
        seed=seed,
    )
    k = int(result.figure.partition("@")[2])
    recall = {name: result.scores[name][result.figure] for name in dict.fromkeys([found.name, "old model"])}
    return {"report": {"n": len(old), "pool": len(old), "k": k, "recall": recall, "result": result.to_dict()}}


def _more_pairs(
    chosen: Candidate, found: EmbeddingMap, pairs: Pairs, rows: Rows, report: Rows, seed: int
) -> dict[str, Any]:
    """Recall on the part to report on, of maps fitted to a quarter and to a half of the pairs."""
    order = np.random.default_rng(seed).permutation(rows)
    held_out = pairs.take(report)
    old, new = held_out.old, held_out.new
    report_k = pool_k(len(report))
    recalls = []
    for share in (4, 2):
        some = pairs.take(np.sort(order[: len(rows) // share]))
        smaller = Fits(some, metric=found.metric, seed=seed).map(chosen)
        result = evaluate_retrieval(
            smaller,
            old,
            new,
            *held_out.as_queries,
            k=report_k,
            exclude=np.arange(len(old)),
            baselines=False,
            resamples=2,
        )
        recalls.append(result.scores[smaller.name][result.figure]["value"])
    recalls.append(found.scores["report"]["recall"][found.name]["value"])
    return {"sizes": [len(rows) // 4, len(rows) // 2, len(rows)], "recall": recalls}


@dataclass(frozen=True)
class PairsCurve(Result):
    """Recall by the number of fitted pairs.

    Attributes:
        scores: Map -> number of pairs -> ``value``, and ``low`` and ``high`` over queries and seeds.
        figure: The recall.
        seeds: Number of seeds.
        old: The recall of the old model.

    Example:
        >>> PairsCurve({"ridge": {"100": {"value": 0.5, "low": 0.4, "high": 0.6}}}, "recall@10", 1, 0.3).old
        0.3
    """

    scores: dict[str, dict[str, Score]]
    figure: str
    seeds: int
    old: float

    def to_pandas(self) -> pandas.DataFrame:
        """Return one row for each map and number of pairs."""
        import pandas

        return pandas.DataFrame(
            [{"map": n, "pairs": int(c), **score} for n, row in self.scores.items() for c, score in row.items()]
        )

    def __rich__(self) -> Table:
        """Return the table."""
        from rich.table import Table

        table = Table(title=f"{self.figure} by number of pairs, {self.seeds} seeds; old model {self.old:.3f}")
        table.add_column("map")
        counts = list(dict.fromkeys(count for row in self.scores.values() for count in row))
        for count in counts:
            table.add_column(count, justify="right")
        for name, row in self.scores.items():
            cells = (row.get(count) for count in counts)
            table.add_row(name, *(f"{c['value']:.3f} [{c['low']:.3f}, {c['high']:.3f}]" if c else "–" for c in cells))
        return table

    def plot(self) -> Figure:
        """Draw recall by the logarithm of the number of pairs."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6, 4), layout="constrained")
        axes = figure.subplots()
        for name, row in self.scores.items():
            counts = [int(count) for count in row]
            axes.plot(counts, [score["value"] for score in row.values()], marker="o", label=name)
            axes.fill_between(
                counts, [s["low"] for s in row.values()], [s["high"] for s in row.values()], alpha=0.15, linewidth=0
            )
        axes.axhline(self.old, color="grey", linestyle="--", label="old model")
        axes.set(xscale="log", xlabel="pairs", ylabel=self.figure)
        axes.legend()
        return figure


@checked
def pairs_curve(
    old_pairs: Any,
    new_pairs: Any,
    old_documents: Any,
    new_documents: Any,
    old_queries: Any,
    new_queries: Any,
    *,
    maps: Mapping[str, tuple[str, Direction]] | None = None,
    sizes: Sequence[int] = (100, 300, 1000, 3000),
    seeds: Sequence[int] = (0, 1, 2),
    k: int = 10,
    metric: Metric = "cosine",
    resamples: int = 1000,
) -> PairsCurve:
    """Compute recall by the number of fitted pairs.

    Args:
        old_pairs: ``(n, d)``: old vectors to fit to.
        new_pairs: ``(n, d')``: new vectors to fit to.
        old_documents: As for :func:`~hf_stitch_embeddings.evaluate_retrieval`, as are the following three.
        new_documents: Documents by the new model.
        old_queries: Queries by the old model.
        new_queries: Queries by the new model.
        maps: Name -> name of a matcher and direction. Default: ``ridge`` in all directions.
        sizes: Numbers of pairs; those above n are left out.
        seeds: Seeds of the drawn pairs.
        k: Number of nearest documents.
        metric: Metric of the index.
        resamples: Bootstrap samples, of queries and seeds together.

    Returns:
        The curve.

    Example:
        >>> rows = np.random.default_rng(0).normal(size=(300, 4))
        >>> curve = pairs_curve(rows, rows, rows[:100], rows[:100], rows[:9], rows[:9], sizes=(50,), resamples=20)
        >>> curve.old, list(curve.scores)
        (1.0, ['ridge, index', 'ridge, query', 'ridge, adjoint'])
    """
    before, after = read_vectors(old_pairs, "old_pairs"), read_vectors(new_pairs, "new_pairs")
    directions: tuple[Direction, ...] = ("index", "query") if metric == "l2" else ("index", "query", "adjoint")
    maps = dict(maps or {f"ridge, {each}": ("ridge", each) for each in directions})
    fitting = {
        name: candidates(len(before), before.shape[1], after.shape[1], map=m, direction=d, metric=metric)[0]
        for name, (m, d) in maps.items()
    }
    values: dict[str, dict[str, list[Any]]] = {name: {} for name in maps}
    figure, old = f"recall@{k}", float("nan")
    for count in [size for size in sizes if size <= len(before)]:
        for seed in seeds:
            rows = np.sort(np.random.default_rng(seed).permutation(len(before))[:count])
            fits = Fits(Pairs(before[rows], after[rows]), metric=metric, seed=seed)
            result = evaluate_retrieval(
                {name: fits.map(each) for name, each in fitting.items()},
                *(old_documents, new_documents, old_queries, new_queries),
                k=k,
                baselines=False,
                resamples=2,
            )
            figure, old = result.figure, result.scores["old model"][nearest_to_ten([figure])]["value"]
            for name in maps:
                values[name].setdefault(str(count), []).append(result.per_query[name])
    scores: dict[str, dict[str, Score]] = {name: {} for name in maps}
    for name, row in values.items():
        for size, drawn in row.items():
            table = np.stack(drawn)
            over_seeds, over_queries = (query_weights(n, resamples, place) for place, n in enumerate(table.shape))
            means = np.einsum("rs,sq,rq->r", over_seeds, table, over_queries) / table.size
            scores[name][size] = asdict(as_score(means))
    return PairsCurve(scores, figure, len(seeds), old)
