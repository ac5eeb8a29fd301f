"""Selection of the map, its direction and its penalty by held-out retrieval."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from hf_stitch import Moments, registries
from hf_stitch.matchers import ClosedFormMatcher, Matcher, RowsMatcher, TrainedMatcher
from hf_stitch.options import checked
from hf_stitch.stitches import Stitch
from hf_stitch_embeddings.embedding_map import Direction, EmbeddingMap
from hf_stitch_embeddings.retrieval import Floats, System, interval, measure, query_weights, served
from hf_stitch_embeddings.vectors import Metric, Vectors, are_normalized, batches, lengths, normalized

FEW = 500
"""With fewer pairs, only safe maps are tried, and they must beat the old model significantly."""
OLD_MODEL = "old model"
"""Name of the candidate that keeps the old model."""
MAPS = (
    "identity",
    "procrustes",
    "ridge_to_identity",
    "ridge",
    "low_rank",
    "piecewise",
    "residual_mlp",
    "retrieval",
)
"""Maps that ``auto`` tries, simplest first."""
SAFE = ("identity", "ridge_to_identity")
"""Maps that ``auto`` tries with few pairs and equal widths; for different widths see :data:`SAFE_UNEQUAL`."""
SAFE_UNEQUAL = ("procrustes", "ridge")
PENALTIES = (0.1, 1.0, 10.0, 100.0)
"""Multiples of the penalty with the least generalised cross-validation error that ``auto`` tries."""
MAX_ROWS = 20_000
"""Maximum number of pairs for maps that need all rows at once; larger sets are subsampled at even spacing."""
POOL_SHARE = 10
"""Recall is computed at a tenth of the pool, at most at 10: in a pool of thirty, chance finds a third of the top 10."""


@dataclass(frozen=True)
class Candidate:
    """Map that can be fitted: the name of a matcher, or ``"old model"``, with its options and a direction.

    ``multiple`` scales the penalty with the least generalised cross-validation error; None for maps without a penalty.
    """

    name: str
    direction: Direction
    options: Mapping[str, Any] = field(default_factory=dict)
    multiple: float | None = None

    @property
    def label(self) -> str:
        """Label with name, options and direction."""
        if self.name == OLD_MODEL:
            return OLD_MODEL
        options_text = "".join(f" {key}={value}" for key, value in self.options.items())
        multiple_text = "" if self.multiple in (None, 1.0) else f" x{self.multiple:g}"
        return f"{self.name}{options_text}{multiple_text}, {self.direction}"


@dataclass(frozen=True)
class Scored:
    """Candidate with its held-out recall, R² and cosine; R² and cosine are NaN for the old model."""

    candidate: Candidate
    recall: float
    low: float
    high: float
    r2: float
    cosine: float
    queries: Floats = field(repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields except the queries as JSON values."""
        rounded = {key: round(getattr(self, key), 6) for key in ("recall", "low", "high", "r2", "cosine")}
        scores = {key: None if value != value else value for key, value in rounded.items()}
        candidate = asdict(self.candidate) | {"options": dict(self.candidate.options)}
        return {"label": self.candidate.label, **candidate, **scores}


@checked
def candidates(
    pairs: int,
    old_width: int,
    new_width: int,
    *,
    map: str | Matcher = "auto",
    direction: Direction | Literal["auto"] = "auto",
    metric: Metric = "cosine",
) -> list[Candidate]:
    """Return the maps to choose from; with ``map="auto"``, the first is the old model."""
    equal_widths = old_width == new_width
    directions: tuple[Direction, ...] = ("index", "query", "adjoint") if direction == "auto" else (direction,)
    if metric == "l2":
        if direction == "adjoint":
            raise ValueError("metric l2 does not support direction 'adjoint'; use 'index' or 'query'")
        directions = tuple(map_direction for map_direction in directions if map_direction != "adjoint")
    contenders = [Candidate(OLD_MODEL, "query")] if map == "auto" else []
    if isinstance(map, Matcher):
        options = {key: value for key, value in map.to_dict().items() if key != "name"}
        names: Iterable[tuple[str, dict[str, Any]]] = [(map.name, options)]
    elif map == "auto":
        map_names = MAPS if pairs >= FEW else SAFE if equal_widths else SAFE_UNEQUAL
        names = [(name, {}) for name in map_names]
    else:
        registries.matchers.get(map)  # raises for unknown names
        names = [(map, {})]
    for name, options in names:
        matcher_class = registries.matchers.get(name)
        if not equal_widths and (name == "identity" or not matcher_class.unequal_widths):
            if map == "auto":
                continue
            raise ValueError(f"{name} requires equal widths, got {old_width} and {new_width}; use 'ridge'")
        if issubclass(matcher_class, TrainedMatcher):
            raise ValueError(f"{name} is trained on a task loss and cannot be fitted to vectors")
        variants = (
            [(options, None)] if options else _variants(name, auto=map == "auto", width=min(old_width, new_width))
        )
        collects_rows = matcher_class.collects == "rows"
        for map_direction in directions:
            if map_direction == "adjoint" and (name == "identity" or (collects_rows and name != "retrieval")):
                if direction == "adjoint" and map != "auto":
                    raise ValueError(f"{name} does not support direction 'adjoint'; use 'index' or 'query'")
                continue  # the adjoint of the identity is the identity on queries
            if name == "identity" and map_direction == "index" and "query" in directions:
                continue  # the same ranking
            contenders += [Candidate(name, map_direction, variant, multiple) for variant, multiple in variants]
    return contenders


def _variants(name: str, *, auto: bool, width: int) -> list[tuple[dict[str, Any], float | None]]:
    if name in ("ridge", "ridge_to_identity"):
        return [({}, multiple) for multiple in (PENALTIES if auto else (1.0,))]
    if name == "procrustes" and auto:
        return [({}, None), ({"center": False}, None)]
    if name == "low_rank":
        return [({"rank": max(1, width // 2)}, None)]
    return [({}, None)]


@dataclass(frozen=True)
class Pairs:
    """Old and new vectors of the same texts, as documents and, if an encoder encodes queries differently, as queries.

    ``queries`` holds the old and the new query vectors; ``None`` means that the document vectors serve as queries.
    """

    old: Vectors
    new: Vectors
    queries: tuple[Vectors, Vectors] | None = None

    @property
    def as_queries(self) -> tuple[Vectors, Vectors]:
        """Query vectors of the texts from the old and the new encoder."""
        return (self.old, self.new) if self.queries is None else self.queries

    def take(self, rows: Any) -> Pairs:
        """Return the selected pairs."""
        queries = None if self.queries is None else (self.queries[0][rows], self.queries[1][rows])
        return Pairs(self.old[rows], self.new[rows], queries)


class Fits:
    """Fitter of candidates that computes moments, and maps shared by several directions, once.

    Document maps are fitted to the document vectors of the pairs, query maps to the query vectors. With metric cosine,
    targets are normalised before the fit.
    """

    def __init__(self, pairs: Pairs, metric: Metric = "cosine", seed: int = 0) -> None:
        self.pairs, self.metric, self.seed = pairs, metric, seed
        self._moments: dict[bool, Moments] = {}
        self._stitches: dict[Any, tuple[Stitch, dict[str, Any]]] = {}

    def map(self, candidate: Candidate) -> EmbeddingMap:
        """Fit a candidate."""
        recipe = {"samples": len(self.pairs.old), "seed": self.seed}
        if candidate.name == OLD_MODEL:
            return EmbeddingMap.old_model(self.pairs.old.shape[1], metric=self.metric, recipe=recipe)
        forward = candidate.direction != "query"
        key = (candidate.name, repr(sorted(candidate.options.items())), candidate.multiple, forward)
        if key not in self._stitches:
            self._stitches[key] = self._fit(candidate, forward)
        stitch, matcher = self._stitches[key]
        vectors_by_side = dict(zip(("old", "new"), self._sides(forward)[:: 1 if forward else -1], strict=True))
        side_lengths = {side: lengths(vectors) for side, vectors in vectors_by_side.items()}
        embedding_map = EmbeddingMap.of(
            stitch,
            direction="index" if forward else "query",
            metric=self.metric,
            recipe={**recipe, "matcher": matcher},
            input_normalized=are_normalized(self._sides(forward)[0]),
            lengths={
                side: [float(norms.min()), float(norms.max())] for side, norms in side_lengths.items() if norms.size
            },
        )
        return embedding_map.adjoint() if candidate.direction == "adjoint" else embedding_map

    def _sides(self, forward: bool) -> tuple[Vectors, Vectors]:
        return (self.pairs.old, self.pairs.new) if forward else self.pairs.as_queries[::-1]

    def _target(self, rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        return normalized(rows) if self.metric == "cosine" else rows

    def moments(self, forward: bool) -> Moments:
        """Return the moments of the pairs, accumulated over batches."""
        if forward not in self._moments:
            x, y = self._sides(forward)
            moments = Moments(x.shape[1], y.shape[1])
            for x_batch, y_batch in zip(batches(x), batches(y), strict=True):
                moments.update(torch.from_numpy(x_batch.copy()), torch.from_numpy(self._target(y_batch).copy()))
            self._moments[forward] = moments
        return self._moments[forward]

    def _fit(self, candidate: Candidate, forward: bool) -> tuple[Stitch, dict[str, Any]]:
        matcher_class = registries.matchers.get(candidate.name)
        options = dict(candidate.options)
        if "seed" in getattr(matcher_class, "__dataclass_fields__", {}) and "seed" not in options:
            options["seed"] = self.seed
        matcher = registries.matchers.build(candidate.name, **options)
        if isinstance(matcher, RowsMatcher):
            count = len(self.pairs.old)
            subset = np.unique(np.linspace(0, count - 1, min(MAX_ROWS, count)).astype(int))
            x, y = (np.array(side[subset], dtype=np.float32) for side in self._sides(forward))
            return matcher.fit(torch.from_numpy(x), torch.from_numpy(self._target(y))), matcher.to_dict()
        assert isinstance(matcher, ClosedFormMatcher)
        stitch = matcher.fit(self.moments(forward))
        if candidate.multiple not in (None, 1.0):
            assert candidate.multiple is not None
            options["ridge"] = float(stitch.fitted["ridge"]) * candidate.multiple
            matcher = registries.matchers.build(candidate.name, **options)
            assert isinstance(matcher, ClosedFormMatcher)
            stitch = matcher.fit(self.moments(forward))
        return stitch, matcher.to_dict()


def pool_k(pool: int) -> int:
    """Return the k of recall@k for a pool: a tenth of its size, between 1 and 10."""
    return max(1, min(10, pool // POOL_SHARE))


def score(
    held_out: Sequence[tuple[EmbeddingMap, Pairs]], *, seed: int = 0, k: int | None = None
) -> tuple[Floats, float, float]:
    """Score maps by retrieval among held-out pairs: each pair is a query against all remaining pairs.

    In cross-validation, each fold (a map, held-out pairs) is a separate pool, because its map was fitted to the rows
    of all remaining folds. Returns the recall of each query, R², and the mean cosine of mapped vectors and targets.
    """
    k = pool_k(min(len(pairs.new) for _, pairs in held_out)) if k is None else k
    queries, mapped, targets = [], [], []
    for embedding_map, pairs in held_out:
        old, new = pairs.as_queries
        system, truth = served(embedding_map, pairs.old, old, new), System(new, pairs.new, embedding_map.metric)
        measures = measure({"map": system}, truth, [k], exclude=np.arange(len(pairs.new)), seed=seed, repeats=0)
        queries.append(measures.values["map"][f"recall@{k}"][0])
        forward = embedding_map.direction == "index"
        mapped.append(np.asarray(system.documents if forward else system.queries, np.float32))
        target = np.asarray(pairs.new if forward else old, np.float32)
        targets.append(normalized(target) if embedding_map.normalized else target)
    if held_out[0][0].keeps_old:
        return np.concatenate(queries), float("nan"), float("nan")
    x, y = np.concatenate(mapped), np.concatenate(targets)
    residual, total = float(np.square(x - y).sum()), float(np.square(y - y.mean(0)).sum())
    cosine = float((normalized(x) * normalized(y)).sum(1).mean())
    return np.concatenate(queries), 1 - residual / max(total, 1e-12), cosine


def choose(
    contenders: Sequence[Candidate],
    splits: Sequence[tuple[Pairs, Pairs]],
    *,
    metric: Metric = "cosine",
    few: bool = False,
    seed: int = 0,
    resamples: int = 1000,
    progress: bool = False,
) -> tuple[Candidate, list[Scored], str]:
    """Choose the candidate with the highest recall over held-out queries and documents.

    With few pairs, a candidate must beat the old model, and a later (less safe) candidate must beat the earlier ones:
    the confidence interval of the gain over queries must exclude 0. Each split holds pairs for the fit and held-out
    pairs; several splits are folds. Returns the choice, all scored candidates (best first), and the reason in words.
    """
    from tqdm.auto import tqdm

    fits = [(Fits(fit, metric=metric, seed=seed), held_out) for fit, held_out in splits]
    scored, weights, failed = [], None, {}
    for candidate in tqdm(contenders, desc="maps", disable=not progress):
        try:
            queries, r2, cosine = score([(fit.map(candidate), held_out) for fit, held_out in fits], seed=seed)
        except (ValueError, torch.linalg.LinAlgError) as error:
            failed[candidate.label] = str(error)
            continue
        weights = query_weights(len(queries), resamples, seed) if weights is None else weights
        recall = interval(queries, weights)
        scored.append(Scored(candidate, recall["value"], recall["low"], recall["high"], r2, cosine, queries))
    if not scored or weights is None:
        raise ValueError(f"no map could be fitted: {failed}")
    best = max(scored, key=lambda scored_map: scored_map.recall)  # among ties the first, i.e. the simplest
    reason = f"highest recall on held-out pairs: {best.recall:.3f}"
    if few and scored[0].candidate.name == OLD_MODEL:
        winner = scored[0]
        for name in dict.fromkeys(scored_map.candidate.name for scored_map in scored):  # the safest first
            rival = max(
                (scored_map for scored_map in scored if scored_map.candidate.name == name),
                key=lambda scored_map: scored_map.recall,
            )
            if interval(rival.queries - winner.queries, weights)["low"] > 0:
                winner = rival
        if winner is scored[0]:
            reason = f"few pairs: no map beats the old model ({winner.recall:.3f}) significantly"
        else:
            reason = f"few pairs: safest map that no candidate beats significantly ({winner.recall:.3f})"
        best = winner
    if failed:
        reason += f"; not fitted: {', '.join(f'{label} ({cause})' for label, cause in failed.items())}"
    return best.candidate, sorted(scored, key=lambda scored_map: -scored_map.recall), reason
