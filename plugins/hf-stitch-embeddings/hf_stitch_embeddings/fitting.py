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

MIN_PAIRS = 20
"""Minimum number of pairs for a split into three parts."""
HELD_OUT_SHARE = 0.2
"""Share of the pairs for the choice, and share for the report."""
MAX_HELD_OUT = 2000
"""Maximum number of pairs for the choice, and maximum for the report."""
DUPLICATE = 0.98
"""Two rows count as near-duplicates if the cosine of centred vectors reaches this threshold in both spaces."""
PROBE_TEXTS = 4
"""Number of texts to test whether an encoder encodes queries and documents identically."""
FOLDS = 4
"""Folds of cross-validation with few pairs; more folds would make the pools too small."""

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Parts:
    """Indices of the pairs of three disjoint parts, and of near-duplicates removed from them."""

    fit: Rows
    choose: Rows
    report: Rows
    removed: Rows


def split_pairs(old: Vectors, new: Vectors, *, texts: Sequence[str] | None = None, seed: int = 0) -> Parts:
    """Split pairs into three disjoint parts without near-duplicates across parts.

    Near-duplicates are removed from the part for the fit first, then from the part for the choice. Two pairs are
    near-duplicates if their texts are equal up to case and spaces, or if the centred vectors have a cosine of .98 or
    more in both spaces. Near-duplicates within a part stay.

    Args:
        old: ``(n, d)``: old vectors.
        new: ``(n, d')``: new vectors of the same texts.
        texts: The texts, if known.
        seed: Seed of the split.

    Returns:
        The parts.

    Raises:
        ValueError: If fewer than 20 pairs are passed, or too few remain without near-duplicates.

    Example:
        >>> rows = np.random.default_rng(0).normal(size=(100, 8))
        >>> parts = split_pairs(rows, rows)
        >>> len(parts.fit), len(parts.choose), len(parts.report), len(parts.removed)
        (60, 20, 20, 0)
    """
    pair_count = len(old)
    if pair_count < MIN_PAIRS:
        raise ValueError(f"at least {MIN_PAIRS} pairs are required (about 1,000 for a good map), got {pair_count}")
    order = np.random.default_rng(seed).permutation(pair_count)
    size = min(MAX_HELD_OUT, max(4, round(HELD_OUT_SHARE * pair_count)))
    report, choice, fit = np.sort(order[:size]), np.sort(order[size : 2 * size]), np.sort(order[2 * size :])
    means = [np.asarray(side[np.sort(order[:MAX_HELD_OUT])], np.float32).mean(0) for side in (old, new)]
    keys = None if texts is None else np.array([" ".join(text.lower().split()) for text in texts], dtype=object)

    def near_duplicates(rows: Rows, references: Rows) -> npt.NDArray[np.bool_]:
        """Mark the rows with a near-duplicate in a second set."""
        duplicate = np.zeros(len(rows), dtype=bool)
        if keys is not None:
            reference_keys = set(keys[references])
            duplicate |= np.array([key in reference_keys for key in keys[rows]])
        reference_sides = [
            normalized(np.asarray(side[references], np.float32) - m) for side, m in zip((old, new), means, strict=True)
        ]
        for start in range(0, len(rows), 2048):
            chunk = rows[start : start + 2048]
            near_in_both = np.ones((len(chunk), len(references)), dtype=bool)
            for side, mean, block in zip((old, new), means, reference_sides, strict=True):
                near_in_both &= normalized(np.asarray(side[chunk], np.float32) - mean) @ block.T >= DUPLICATE
            duplicate[start : start + 2048] |= near_in_both.any(1)
        return duplicate

    duplicate_mask = near_duplicates(choice, report)
    removed, choice = [choice[duplicate_mask]], choice[~duplicate_mask]
    duplicate_mask = near_duplicates(fit, np.concatenate([report, choice]))
    removed, fit = [*removed, fit[duplicate_mask]], fit[~duplicate_mask]
    if len(fit) < MIN_PAIRS // 2 or len(choice) < 2:
        raise ValueError(
            f"only {len(fit) + len(choice) + len(report)} of {pair_count} pairs remain without near-duplicates: "
            "pass pairs of different texts"
        )
    return Parts(fit, choice, report, np.sort(np.concatenate(removed)))


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
    """Fit a map between the vectors of an old and a new encoder.

    The pairs are split into three disjoint parts (:func:`split_pairs`). Maps are fitted to the first part and chosen by
    retrieval recall on the second. The chosen map is refitted to both parts and scored on the third. With fewer than
    500 pairs, the choice is by cross-validation over the first two parts among a few safe maps, and the old model is
    kept if no map beats it significantly (``result.keeps_old``).

    Args:
        source: ``(n, d)`` old vectors, in any form that :func:`~hf_stitch_embeddings.read_vectors` accepts, or the old
            encoder. If an encoder encodes queries and documents differently (``encode_query``, ``encode_document`` of a
            ``SentenceTransformer``), document maps are fitted to document vectors and query maps to query vectors.
        target: ``(n, d')`` new vectors of the same texts, or the new encoder.
        map: ``"auto"``, the name of a matcher (``identity``, ``procrustes``, ``ridge``, ``ridge_to_identity``,
            ``low_rank``, ``piecewise``, ``residual_mlp``, ``retrieval``), or a matcher.
        direction: ``"auto"``, ``"index"``, ``"query"`` or ``"adjoint"``.
        ids: Ids of the rows, or a pair of ids for old and new rows, to check that rows correspond.
        texts: The texts; required if a side is an encoder, and used to find duplicates.
        metric: Metric of the index: ``"cosine"``, ``"dot"`` or ``"l2"``.
        seed: Seed of the split and of trained maps.
        index_size: Number of documents in the index, to predict recall.
        use_all: Whether to refit the returned map to all pairs. The scores still describe the fit to four fifths of the
            pairs, and tend to underestimate the refitted map.
        progress: Whether to show progress.

    Returns:
        The map, with ``scores`` on the third part and the scores of all candidates in ``record["candidates"]``.

    Raises:
        ValueError: If rows do not correspond, are not finite, are zero, or are too few; or if the widths or the metric
            do not support the map or its direction.

    Example:
        >>> old = np.random.default_rng(0).normal(size=(300, 6)).astype("float32")
        >>> new = old @ np.random.default_rng(1).normal(size=(6, 8)).astype("float32")
        >>> fitted = fit_embedding_map(old, new, map="ridge", direction="index", progress=False)
        >>> fitted, fitted.scores["report"]["n"]
        (EmbeddingMap(ridge, index: 6 -> 8, cosine), 60)
    """
    from hf_stitch_embeddings.deciding import recorded_verdict

    (old, old_queries), (new, new_queries) = (
        _read_side(side, texts, name, progress) for side, name in ((source, "source"), (target, "target"))
    )
    pairs = Pairs(old, new, None if old_queries is old and new_queries is new else (old_queries, new_queries))
    check_pairs(old, new, ids=ids, metric=metric)
    if texts is not None and len(texts) != len(old):
        raise ValueError(f"texts must have one text per row ({len(old)}), got {len(texts)}")
    parts = split_pairs(old, new, texts=texts, seed=seed)
    maps = candidates(len(old), old.shape[1], new.shape[1], map=map, direction=direction, metric=metric)
    few = len(old) < FEW
    fit_and_choose = np.sort(np.concatenate([parts.fit, parts.choose]))
    record: dict[str, Any] = {"index_size": index_size}
    if len(maps) == 1:
        best = maps[0]
    else:
        if few:
            folds = np.array_split(np.random.default_rng(seed).permutation(fit_and_choose), FOLDS)
            held_out = [(pairs.take(np.setdiff1d(fit_and_choose, fold)), pairs.take(np.sort(fold))) for fold in folds]
        else:
            held_out = [(pairs.take(parts.fit), pairs.take(parts.choose))]
        best, scored_candidates, reason = choose(maps, held_out, metric=metric, few=few, seed=seed, progress=progress)
        record |= {"candidates": [candidate.to_dict() for candidate in scored_candidates], "reason": reason}
    embedding_map = Fits(pairs.take(fit_and_choose), metric=metric, seed=seed).map(best)
    sizes = {name: len(getattr(parts, name)) for name in ("fit", "choose", "report", "removed")}
    embedding_map.record.update(record, parts=sizes)
    embedding_map.recipe["versions"] = {
        name: importlib.metadata.version(name) for name in ("hf-stitch", "numpy", "torch")
    }
    embedding_map.scores = _report(embedding_map, pairs.take(parts.report), index_size, seed)
    if not embedding_map.keeps_old and len(fit_and_choose) >= 80:
        embedding_map.scores["pairs"] = _recall_by_pairs(best, embedding_map, pairs, fit_and_choose, parts.report, seed)
    embedding_map.record["use_all"] = use_all
    if use_all and not embedding_map.keeps_old:
        refit = Fits(pairs, metric=metric, seed=seed).map(best)
        refit.record.update({key: value for key, value in embedding_map.record.items() if key not in refit.record})
        refit.recipe["versions"], refit.scores = embedding_map.recipe["versions"], embedding_map.scores
        embedding_map = refit
    embedding_map.record["scores"] = embedding_map.scores
    embedding_map.record["verdict"] = recorded_verdict(embedding_map)
    return embedding_map


def _read_side(source: Any, texts: Sequence[str] | None, name: str, progress: bool) -> tuple[Vectors, Vectors]:
    """Return the document and query vectors of a side; both are one array if the encoder treats them alike."""
    if not is_encoder(source):
        documents = read_vectors(source, name)
        return documents, documents
    if texts is None:
        raise ValueError(f"{name} is an encoder: pass `texts`")
    documents, probe_texts = encode(source, texts, progress=progress), list(texts[:PROBE_TEXTS])
    alike = not hasattr(source, "encode_query") or np.array_equal(
        encode(source, probe_texts), encode(source, probe_texts, queries=True)
    )
    return documents, documents if alike else encode(source, texts, queries=True, progress=progress)


def _report(embedding_map: EmbeddingMap, pairs: Pairs, index_size: int | None, seed: int) -> dict[str, Any]:
    """Score a map on held-out pairs: each pair is a query against all remaining pairs."""
    old, new = pairs.old, pairs.new
    ks = sorted({1, pool_k(len(old)), 100} if len(old) >= 1000 else {1, pool_k(len(old))})
    result = evaluate_retrieval(
        {embedding_map.name: embedding_map},
        *(old, new, *pairs.as_queries),
        k=[k for k in ks if 4 * k <= len(old)],
        index_size=index_size,
        exclude=np.arange(len(old)),
        baselines=False,
        seed=seed,
    )
    k = int(result.figure.partition("@")[2])
    recall = {name: result.scores[name][result.figure] for name in dict.fromkeys([embedding_map.name, "old model"])}
    return {"report": {"n": len(old), "pool": len(old), "k": k, "recall": recall, "result": result.to_dict()}}


def _recall_by_pairs(
    chosen: Candidate, embedding_map: EmbeddingMap, pairs: Pairs, rows: Rows, report: Rows, seed: int
) -> dict[str, Any]:
    """Return held-out recall of maps fitted to a quarter, a half and all of the pairs."""
    order = np.random.default_rng(seed).permutation(rows)
    held_out = pairs.take(report)
    old, new = held_out.old, held_out.new
    report_k = pool_k(len(report))
    recalls = []
    for share in (4, 2):
        subset = pairs.take(np.sort(order[: len(rows) // share]))
        smaller = Fits(subset, metric=embedding_map.metric, seed=seed).map(chosen)
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
    recalls.append(embedding_map.scores["report"]["recall"][embedding_map.name]["value"])
    return {"sizes": [len(rows) // 4, len(rows) // 2, len(rows)], "recall": recalls}


@dataclass(frozen=True)
class PairsCurve(Result):
    """Recall as a function of the number of pairs.

    Attributes:
        scores: Map -> number of pairs -> ``value``, and ``low`` and ``high`` over queries and seeds.
        figure: Name of the recall metric.
        seeds: Number of seeds.
        old: Recall of the old model.

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
        """Plot recall against the number of pairs on a logarithmic axis."""
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
    """Compute recall as a function of the number of pairs.

    Args:
        old_pairs: ``(n, d)`` old vectors for the fit.
        new_pairs: ``(n, d')`` new vectors for the fit.
        old_documents: Documents from the old model; see :func:`~hf_stitch_embeddings.evaluate_retrieval`.
        new_documents: Documents from the new model.
        old_queries: Queries from the old model.
        new_queries: Queries from the new model.
        maps: Name -> matcher name and direction. Default: ``ridge`` in all directions.
        sizes: Numbers of pairs; sizes above n are skipped.
        seeds: Seeds of the sampled pairs.
        k: Number of nearest documents.
        metric: Metric of the index.
        resamples: Bootstrap samples over queries and seeds.

    Returns:
        The curve.

    Example:
        >>> rows = np.random.default_rng(0).normal(size=(300, 4))
        >>> curve = pairs_curve(rows, rows, rows[:100], rows[:100], rows[:9], rows[:9], sizes=(50,), resamples=20)
        >>> curve.old, list(curve.scores)
        (1.0, ['ridge, index', 'ridge, query', 'ridge, adjoint'])
    """
    old_rows, new_rows = read_vectors(old_pairs, "old_pairs"), read_vectors(new_pairs, "new_pairs")
    directions: tuple[Direction, ...] = ("index", "query") if metric == "l2" else ("index", "query", "adjoint")
    maps = dict(maps or {f"ridge, {map_direction}": ("ridge", map_direction) for map_direction in directions})
    candidates_by_name = {
        name: candidates(
            len(old_rows), old_rows.shape[1], new_rows.shape[1], map=matcher, direction=map_direction, metric=metric
        )[0]
        for name, (matcher, map_direction) in maps.items()
    }
    recalls: dict[str, dict[str, list[Any]]] = {name: {} for name in maps}
    figure, old = f"recall@{k}", float("nan")
    for count in [size for size in sizes if size <= len(old_rows)]:
        for seed in seeds:
            rows = np.sort(np.random.default_rng(seed).permutation(len(old_rows))[:count])
            fits = Fits(Pairs(old_rows[rows], new_rows[rows]), metric=metric, seed=seed)
            result = evaluate_retrieval(
                {name: fits.map(candidate) for name, candidate in candidates_by_name.items()},
                *(old_documents, new_documents, old_queries, new_queries),
                k=k,
                baselines=False,
                resamples=2,
            )
            figure, old = result.figure, result.scores["old model"][nearest_to_ten([figure])]["value"]
            for name in maps:
                recalls[name].setdefault(str(count), []).append(result.per_query[name])
    scores: dict[str, dict[str, Score]] = {name: {} for name in maps}
    for name, row in recalls.items():
        for size, per_seed in row.items():
            seed_recalls = np.stack(per_seed)
            over_seeds, over_queries = (query_weights(n, resamples, axis) for axis, n in enumerate(seed_recalls.shape))
            means = np.einsum("rs,sq,rq->r", over_seeds, seed_recalls, over_queries) / seed_recalls.size
            scores[name][size] = asdict(as_score(means))
    return PairsCurve(scores, figure, len(seeds), old)
