"""The choice of map, direction and penalty by held-out retrieval."""

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
"""Pairs below which only maps with a safe start are tried, and must beat the old model beyond chance."""
KEEP = "old model"
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
"""Maps that ``auto`` tries, simple ones first."""
SAFE = ("identity", "ridge_to_identity")
"""Maps that ``auto`` tries with few pairs; between different widths, where there are none, :data:`SAFE_ELSE`."""
SAFE_ELSE = ("procrustes", "ridge")
PENALTIES = (0.1, 1.0, 10.0, 100.0)
"""Multiples of the penalty of least generalised cross-validation error that ``auto`` tries."""
ROWS = 20_000
"""Most pairs to which maps that need all rows at once are fitted; of more, evenly spaced ones."""
POOL_SHARE = 10
"""Recall is computed at a tenth of the pool, at most at 10: of the ten nearest of thirty, chance finds a third."""


@dataclass(frozen=True)
class Candidate:
    """A map that can be fitted: the name of a matcher, or ``"old model"``, with its options and a direction.

    ``multiple`` is that of the penalty of least generalised cross-validation error; None for maps without one.
    """

    name: str
    direction: Direction
    options: Mapping[str, Any] = field(default_factory=dict)
    multiple: float | None = None

    @property
    def label(self) -> str:
        """Name, options and direction as text."""
        if self.name == KEEP:
            return KEEP
        more = "".join(f" {key}={value}" for key, value in self.options.items())
        times = "" if self.multiple in (None, 1.0) else f" x{self.multiple:g}"
        return f"{self.name}{more}{times}, {self.direction}"


@dataclass(frozen=True)
class Scored:
    """A candidate with its recall over held-out queries and documents, and R² and cosine, NaN for the old model."""

    candidate: Candidate
    recall: float
    low: float
    high: float
    r2: float
    cosine: float
    queries: Floats = field(repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Return all but the queries as JSON values."""
        figures = {key: round(getattr(self, key), 6) for key in ("recall", "low", "high", "r2", "cosine")}
        shown = {key: None if value != value else value for key, value in figures.items()}
        candidate = asdict(self.candidate) | {"options": dict(self.candidate.options)}
        return {"label": self.candidate.label, **candidate, **shown}


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
    """List the maps to choose from; with ``map="auto"``, the first is the old model."""
    equal = old_width == new_width
    directions: tuple[Direction, ...] = ("index", "query", "adjoint") if direction == "auto" else (direction,)
    if metric == "l2":
        if direction == "adjoint":
            raise ValueError("with metric l2 there is no adjoint; choose direction 'index' or 'query'")
        directions = tuple(each for each in directions if each != "adjoint")
    found = [Candidate(KEEP, "query")] if map == "auto" else []
    if isinstance(map, Matcher):
        options = {key: value for key, value in map.to_dict().items() if key != "name"}
        names: Iterable[tuple[str, dict[str, Any]]] = [(map.name, options)]
    elif map == "auto":
        known = MAPS if pairs >= FEW else SAFE if equal else SAFE_ELSE
        names = [(name, {}) for name in known]
    else:
        registries.matchers.get(map)
        names = [(map, {})]
    for name, options in names:
        kind = registries.matchers.get(name)
        if not equal and (name == "identity" or not kind.unequal_widths):
            if map == "auto":
                continue
            raise ValueError(f"{name} needs equal widths, got {old_width} and {new_width}; use 'ridge'")
        if issubclass(kind, TrainedMatcher):
            raise ValueError(f"{name} is trained on the loss of a task and cannot be fitted to vectors")
        variants = (
            [(options, None)] if options else _variants(name, auto=map == "auto", width=min(old_width, new_width))
        )
        for each in directions:
            if each == "adjoint" and ((kind.collects == "rows" and name != "retrieval") or name == "identity"):
                if direction == "adjoint" and map != "auto":
                    raise ValueError(f"{name} has no adjoint of use: choose direction 'index' or 'query'")
                continue  # the adjoint of the identity is the identity on queries
            if name == "identity" and each == "index" and "query" in directions:
                continue  # the same ranking
            found += [Candidate(name, each, more, multiple) for more, multiple in variants]
    return found


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
    """Old and new vectors of the same texts, as documents, and as queries if an encoder encodes these in another way.

    ``queries`` are the old and the new ones; ``None``: the documents.
    """

    old: Vectors
    new: Vectors
    queries: tuple[Vectors, Vectors] | None = None

    @property
    def as_queries(self) -> tuple[Vectors, Vectors]:
        """The texts as queries, by the old encoder and by the new one."""
        return (self.old, self.new) if self.queries is None else self.queries

    def take(self, rows: Any) -> Pairs:
        """Return some of the pairs."""
        queries = None if self.queries is None else (self.queries[0][rows], self.queries[1][rows])
        return Pairs(self.old[rows], self.new[rows], queries)


class Fits:
    """Fits candidates to pairs; the moments, and maps that several directions share, are computed once.

    Maps of documents are fitted to vectors of the pairs as documents, maps of queries to those as queries. With cosine,
    targets are normalised before the fit.
    """

    def __init__(self, pairs: Pairs, metric: Metric = "cosine", seed: int = 0) -> None:
        self.pairs, self.metric, self.seed = pairs, metric, seed
        self._moments: dict[bool, Moments] = {}
        self._fitted: dict[Any, tuple[Stitch, dict[str, Any]]] = {}

    def map(self, candidate: Candidate) -> EmbeddingMap:
        """Fit a candidate."""
        recipe = {"samples": len(self.pairs.old), "seed": self.seed}
        if candidate.name == KEEP:
            return EmbeddingMap.old_model(self.pairs.old.shape[1], metric=self.metric, recipe=recipe)
        forward = candidate.direction != "query"
        key = (candidate.name, repr(sorted(candidate.options.items())), candidate.multiple, forward)
        if key not in self._fitted:
            self._fitted[key] = self._fit(candidate, forward)
        stitch, matcher = self._fitted[key]
        ends = dict(zip(("old", "new"), self._sides(forward)[:: 1 if forward else -1], strict=True))
        found_lengths = {side: lengths(each) for side, each in ends.items()}
        found = EmbeddingMap.of(
            stitch,
            direction="index" if forward else "query",
            metric=self.metric,
            recipe={**recipe, "matcher": matcher},
            input_normalized=are_normalized(self._sides(forward)[0]),
            lengths={side: [float(each.min()), float(each.max())] for side, each in found_lengths.items() if each.size},
        )
        return found.adjoint() if candidate.direction == "adjoint" else found

    def _sides(self, forward: bool) -> tuple[Vectors, Vectors]:
        return (self.pairs.old, self.pairs.new) if forward else self.pairs.as_queries[::-1]

    def _target(self, rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        return normalized(rows) if self.metric == "cosine" else rows

    def moments(self, forward: bool) -> Moments:
        """Return the moments of the pairs, from batches."""
        if forward not in self._moments:
            x, y = self._sides(forward)
            found = Moments(x.shape[1], y.shape[1])
            for some, other in zip(batches(x), batches(y), strict=True):
                found.update(torch.from_numpy(some.copy()), torch.from_numpy(self._target(other).copy()))
            self._moments[forward] = found
        return self._moments[forward]

    def _fit(self, candidate: Candidate, forward: bool) -> tuple[Stitch, dict[str, Any]]:
        kind = registries.matchers.get(candidate.name)
        options = dict(candidate.options)
        if "seed" in getattr(kind, "__dataclass_fields__", {}) and "seed" not in options:
            options["seed"] = self.seed
        matcher = registries.matchers.build(candidate.name, **options)
        if isinstance(matcher, RowsMatcher):
            count = len(self.pairs.old)
            some = np.unique(np.linspace(0, count - 1, min(ROWS, count)).astype(int))
            x, y = (np.array(side[some], dtype=np.float32) for side in self._sides(forward))
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
    """Return at which k recall is compared in a pool: a tenth of it, from 1 to 10."""
    return max(1, min(10, pool // POOL_SHARE))


def score(
    held_out: Sequence[tuple[EmbeddingMap, Pairs]], *, seed: int = 0, k: int | None = None
) -> tuple[Floats, float, float]:
    """Score maps by retrieval among held-out pairs: each is a query, and all others are the documents.

    In cross-validation, each fold (a map, held-out pairs) is a pool of its own: all rows of other folds have been used
    for its map. Returned are the recall of each query, and R² and mean cosine of mapped vectors and their targets.
    """
    k = pool_k(min(len(pairs.new) for _, pairs in held_out)) if k is None else k
    queries, mapped, targets = [], [], []
    for found, pairs in held_out:
        old, new = pairs.as_queries
        system, truth = served(found, pairs.old, old, new), System(new, pairs.new, found.metric)
        measured = measure({"map": system}, truth, [k], exclude=np.arange(len(pairs.new)), seed=seed, repeats=0)
        queries.append(measured.values["map"][f"recall@{k}"][0])
        forward = found.direction == "index"
        mapped.append(np.asarray(system.documents if forward else system.queries, np.float32))
        target = np.asarray(pairs.new if forward else old, np.float32)
        targets.append(normalized(target) if found.normalized else target)
    if held_out[0][0].keeps_old:
        return np.concatenate(queries), float("nan"), float("nan")
    x, y = np.concatenate(mapped), np.concatenate(targets)
    left, total = float(np.square(x - y).sum()), float(np.square(y - y.mean(0)).sum())
    cosine = float((normalized(x) * normalized(y)).sum(1).mean())
    return np.concatenate(queries), 1 - left / max(total, 1e-12), cosine


def choose(
    listed: Sequence[Candidate],
    parts: Sequence[tuple[Pairs, Pairs]],
    *,
    metric: Metric = "cosine",
    few: bool = False,
    seed: int = 0,
    resamples: int = 1000,
    progress: bool = False,
) -> tuple[Candidate, list[Scored], str]:
    """Choose the candidate that finds most, over held-out queries and documents.

    With few pairs, a candidate must find more than the old model, and a later (less safe) one more than an earlier one,
    by an interval over queries that excludes 0. Each of ``parts`` has the pairs to fit to and the held-out pairs;
    several are folds. Returned are the choice, all candidates with their scores, the best
    first, and a sentence with the reason.
    """
    from tqdm.auto import tqdm

    fits = [(Fits(fit, metric=metric, seed=seed), held) for fit, held in parts]
    scored, weights, failed = [], None, {}
    for candidate in tqdm(listed, desc="maps", disable=not progress):
        try:
            queries, r2, cosine = score([(fit.map(candidate), held) for fit, held in fits], seed=seed)
        except (ValueError, torch.linalg.LinAlgError) as error:
            failed[candidate.label] = str(error)
            continue
        weights = query_weights(len(queries), resamples, seed) if weights is None else weights
        found = interval(queries, weights)
        scored.append(Scored(candidate, found["value"], found["low"], found["high"], r2, cosine, queries))
    if not scored or weights is None:
        raise ValueError(f"no map could be fitted: {failed}")
    best = max(scored, key=lambda each: each.recall)  # the first, and therefore the simplest, of equals
    reason = f"most found on held-out pairs: {best.recall:.3f}"
    if few and scored[0].candidate.name == KEEP:
        winner = scored[0]
        for name in dict.fromkeys(each.candidate.name for each in scored):  # the safest first
            rival = max((each for each in scored if each.candidate.name == name), key=lambda each: each.recall)
            if interval(rival.queries - winner.queries, weights)["low"] > 0:
                winner = rival
        if winner is scored[0]:
            reason = f"few pairs, and no map finds more than the old model ({winner.recall:.3f}) beyond chance"
        else:
            reason = f"few pairs: the safest map that none beats beyond chance ({winner.recall:.3f})"
        best = winner
    if failed:
        reason += f"; not fitted: {', '.join(f'{label} ({why})' for label, why in failed.items())}"
    return best.candidate, sorted(scored, key=lambda each: -each.recall), reason
