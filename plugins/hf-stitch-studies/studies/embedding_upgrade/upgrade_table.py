"""How much of a new encoder's retrieval do maps of an old index keep? Pairs of encoders × maps × directions × pairs.

Fitted cells are cached, so that an interrupted run resumes.
"""

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import study
import torch
from embedding_upgrade.encoders import STEPS, Corpus, Vectors, counts, parser, prepared
from hf_stitch_embeddings import Direction, EmbeddingMap, Retrieval, fit_embedding_map, normalized, verdict
from scipy.stats import spearmanr
from sklearn.metrics import roc_auc_score
from study import ranged
from torch import Tensor
from torch.nn import functional

from hf_stitch import Moments, metrics, registries
from hf_stitch.matchers import Matcher
from hf_stitch.matchers.base import ClosedFormMatcher, RowsMatcher
from hf_stitch.stitches import Stitch

NAME = "embedding_upgrade"
PAIRS = (
    ("hidden_3", "final"), ("hidden_5", "final"), ("hidden_0", "final"), ("hidden_3", "hidden_5"),
    ("student_128", "final"), ("student_256", "final"), ("final", "student_256"), ("student_128", "student_256"),
    ("tfidf_256", "final"), ("tfidf_256", "student_256"), ("final", "tuned_12"), ("final", "tuned_40"),
    ("tuned_12", "tuned_40"), ("hidden_5", "tuned_40"),
)  # fmt: skip
"""Old encoder, new encoder."""
LEAD = ("hidden_3", "final")
WITH_TRAINED = (LEAD, ("hidden_5", "final"), ("student_256", "final"), ("tfidf_256", "final"), ("final", "tuned_40"))
"""Pairs with additional maps that are trained by gradient descent."""
EPOCHS = 20
NEIGHBOURS: dict[str, Any] = {"temperature": 0.05, "rate": 0.003, "epochs": 30}
"""Options of :class:`Neighbours`, chosen on held-out pairs of hidden state 3 and the final state."""
CLOSED = ("procrustes", "ridge", "ridge_to_identity")
TRAINED = ("residual_mlp", "retrieval", "neighbours")
BASELINES = ("old model", "no map", "random map", "relative, both sides", "whitening, both sides", "CSLS on ridge")
FEW = 500  # Below this number of pairs, ``auto`` considers only identity, ridge to the identity and the old model
GO = 0.7  # verdict ``go``: recall@10 of at least this share of re-embedding, and above the old model
RESAMPLES = 500
K, DEPTH = 10, 100
Hits = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Part:
    """Vectors of a pair of encoders in one section: old and new unit vectors of the same texts."""

    old: Vectors
    new: Vectors

    def rows(self, chosen: Any) -> "Part":
        return Part(self.old[chosen], self.new[chosen])


def ranked(queries: Vectors, documents: Vectors, depth: int, without_self: bool = False) -> npt.NDArray[np.int64]:
    """Return the indices of the nearest documents by cosine, best first, ``(n, depth)``."""
    return best(normalized(queries) @ normalized(documents).T, depth, without_self)


def best(scores: Vectors, depth: int, without_self: bool = False) -> npt.NDArray[np.int64]:
    """Return the indices of the largest scores of each row, best first."""
    if without_self:
        np.fill_diagonal(scores, -np.inf)
    depth = min(depth, scores.shape[1] - without_self)
    top = np.argpartition(-scores, depth - 1, axis=1)[:, :depth]
    return np.take_along_axis(top, np.argsort(-np.take_along_axis(scores, top, 1), axis=1), 1)


def overlap(retrieved: npt.NDArray[np.int64], truth: npt.NDArray[np.int64]) -> Hits:
    """Return for each query the share of the true documents among the retrieved documents."""
    return np.array([len(set(a) & set(b)) / len(b) for a, b in zip(retrieved.tolist(), truth.tolist(), strict=True)])


def searched(
    embedding_map: EmbeddingMap, queries: Part, documents: Part, depth: int, loo: bool = False
) -> npt.NDArray[np.int64]:
    """Return the documents that a mapped system retrieves for new queries."""
    if embedding_map.direction == "index":
        return ranked(queries.new, embedding_map(documents.old), depth, loo)
    return ranked(embedding_map(queries.new), documents.old, depth, loo)


class Neighbours(Retrieval):
    """Map trained on retrieval, without each row as its own neighbour.

    A row has a cosine of 1 with its own vector, which dominates the true neighbours at a low temperature.
    """

    def _divergence(self, mapped: Tensor, y: Tensor) -> Tensor:
        y, mapped = functional.normalize(y, dim=1), functional.normalize(mapped, dim=1)
        diagonal = torch.eye(len(y), dtype=torch.bool)
        goal, got = ((y @ rows.T / self.temperature).masked_fill(diagonal, -1e4).log_softmax(1) for rows in (y, mapped))
        return functional.kl_div(got, goal, reduction="batchmean", log_target=True)


def stitch_of(matcher: Matcher, source: Vectors, target: Vectors) -> Stitch:
    x, y = torch.from_numpy(normalized(source)), torch.from_numpy(normalized(target))
    if isinstance(matcher, RowsMatcher):
        return matcher.fit(x, y)
    if isinstance(matcher, ClosedFormMatcher):
        return matcher.fit(Moments(x.shape[1], y.shape[1]).update(x.double(), y.double()))
    raise TypeError(f"stitch_of requires a matcher of row pairs, got {matcher.name}")


def fitted(name: str, part: Part, seed: int) -> Iterator[tuple[str, EmbeddingMap]]:
    """Fit a map in both directions, and the adjoint of the index map if it is affine."""
    if name in ("identity", "ridge_to_identity") and part.old.shape[1] != part.new.shape[1]:
        return
    options: dict[str, Any] = {}
    if name == "low_rank":
        options = {"rank": min(64, *(side.shape[1] for side in (part.old, part.new)))}
    elif name in TRAINED:
        options = {"seed": seed, "epochs": EPOCHS}
    matcher = (
        Neighbours(seed=seed, **NEIGHBOURS) if name == "neighbours" else registries.matchers.build(name, **options)
    )
    directions: tuple[Direction, ...] = ("index", "query")
    for direction in directions:
        source, target = (part.old, part.new) if direction == "index" else (part.new, part.old)
        if name in TRAINED and direction == "query":
            continue
        embedding_map = EmbeddingMap.of(stitch_of(matcher, source, target), direction=direction)
        yield f"{name}, {direction}", embedding_map
        if name == "identity":
            return
        if direction == "index" and embedding_map.affine() is not None:
            yield f"{name}, adjoint", embedding_map.adjoint()


def named(pair: tuple[str, str], count: int, seed: int) -> list[str]:
    names = ["identity", *CLOSED]
    if count > FEW:
        names.append("low_rank")
    if (seed == 0 or pair == LEAD) and count > FEW:
        names.append("piecewise")
    if count > FEW and pair in WITH_TRAINED and (pair == LEAD or (seed == 0 and count > 1000)):
        names += TRAINED
    return names


def agreement(embedding_map: EmbeddingMap, part: Part) -> dict[str, float]:
    """Return R² and mean cosine between mapped vectors and their targets."""
    source, target = (part.old, part.new) if embedding_map.direction == "index" else (part.new, part.old)
    mapped, target = embedding_map(normalized(source)), normalized(target)
    return {
        "r2": float(1 - np.square(mapped - target).sum() / np.square(target - target.mean(0)).sum()),
        "cosine": float((mapped * target).sum(1).mean()),
    }


def baselines(part: Part, queries: Part, documents: Part, seed: int) -> dict[str, npt.NDArray[np.int64]]:
    """Return the documents that baselines retrieve: name -> ``(n, depth)``."""
    retrieved = {"old model": ranked(queries.old, documents.old, DEPTH)}
    if part.old.shape[1] == part.new.shape[1]:
        retrieved["no map"] = ranked(queries.new, documents.old, DEPTH)
        retrieved["whitening, both sides"] = ranked(
            whitened(queries.new, part.new), whitened(documents.old, part.old), DEPTH
        )
    drawn = np.random.default_rng(seed).normal(size=(part.old.shape[1], part.new.shape[1])).astype(np.float32)
    retrieved["random map"] = ranked(queries.new, documents.old @ drawn, DEPTH)
    anchors = part.rows(slice(1000))
    retrieved["relative, both sides"] = ranked(
        normalized(queries.new) @ normalized(anchors.new).T,
        normalized(documents.old) @ normalized(anchors.old).T,
        DEPTH,
    )
    mapped = dict(fitted("ridge", part, seed))["ridge, index"](documents.old)
    near = np.sort(mapped @ normalized(part.new).T, axis=1)[:, -K:].mean(1)
    retrieved["CSLS on ridge"] = best(2 * normalized(queries.new) @ mapped.T - near, DEPTH)
    return retrieved


def whitened(rows: Vectors, reference: Vectors) -> Vectors:
    """Centre and whiten rows by the moments of a reference; directions below 1e-3 of the variance stay small."""
    rows, reference = normalized(rows), normalized(reference)
    mean = reference.mean(0)
    values, vectors = np.linalg.eigh(np.cov((reference - mean).T))
    scale = 1 / np.sqrt(np.maximum(values, values.max() * 1e-3))
    return ((rows - mean) @ (vectors * scale) @ vectors.T).astype(np.float32)


def cell(pair: tuple[str, str], count: int, seed: int, parts: dict[str, Part]) -> dict[str, Any]:
    """Fit all maps to ``count`` pairs, and measure them.

    A fifth of the pairs is held out for the choice; the measured map is fitted to all pairs.
    """
    chosen = parts["pairs"].rows(np.random.default_rng(seed).permutation(len(parts["pairs"].old))[:count])
    cut = max(20, len(chosen.old) // 5)
    rest, held = chosen.rows(slice(cut, None)), chosen.rows(slice(cut))
    depth = min(K, max(1, cut // 10))
    queries, documents = parts["queries"], parts["index"]
    truth = ranked(queries.new, documents.new, K)
    held_truth = ranked(held.new, held.new, depth, True)
    scores: dict[str, dict[str, float]] = {
        "old model": {"retrieval": float(overlap(ranked(held.old, held.old, depth, True), held_truth).mean())}
    }
    retrieved = baselines(chosen, queries, documents, seed)
    for name in named(pair, count, seed):
        for key, embedding_map in fitted(name, rest, seed):
            scores[key] = agreement(embedding_map, held)
            scores[key]["retrieval"] = float(
                overlap(searched(embedding_map, held, held, depth, True), held_truth).mean()
            )
        retrieved |= {
            key: searched(embedding_map, queries, documents, DEPTH) for key, embedding_map in fitted(name, chosen, seed)
        }
    return {
        "recall": {key: overlap(rows[:, :K], truth).tolist() for key, rows in retrieved.items()},
        "inside": {key: overlap(rows, truth).tolist() for key, rows in retrieved.items()},
        "held": scores,
    }


def relevance_and_domains(
    pair: tuple[str, str], parts: dict[str, Part], texts: Corpus, choice: str, count: int
) -> dict[str, Any]:
    """Measure relevance labels and another domain, with maps fitted to all pairs or to pairs of one kind."""
    name = choice.split(",")[0]
    chosen = parts["pairs"].rows(np.random.default_rng(0).permutation(len(parts["pairs"].old))[:count])
    questions, documents = parts["questions"], parts["documents"]
    truth = ranked(questions.new, documents.new, K)
    systems = {
        "old model": ranked(questions.old, documents.old, DEPTH),
        "re-embedding": ranked(questions.new, documents.new, DEPTH),
    }
    for method in dict.fromkeys(("ridge", *(() if choice == "old model" else (name,)))):
        for key, embedding_map in fitted(method, chosen, 0):
            if key in ("ridge, index", choice):
                systems[key] = searched(embedding_map, questions, documents, DEPTH)
    relevance = {key: {**graded(rows, texts.relevant), "fidelity": float(overlap(rows[:, :K], truth).mean())}
                 for key, rows in systems.items()}  # fmt: skip
    domains = {}
    of = {part: np.array([kind in ("question", "news") for kind in texts.kinds[part]]) for part in texts.kinds}
    inside, outside = (parts["pairs"].rows(np.flatnonzero(side)) for side in (of["pairs"], ~of["pairs"]))
    queries, documents = parts["queries"].rows(of["queries"]), parts["index"].rows(of["index"])
    truth = ranked(queries.new, documents.new, K)
    same = min(len(inside.old), len(outside.old), 1000)
    for label, part in (("same", inside), ("other", outside)):
        embedding_map = dict(fitted("ridge", part.rows(slice(same)), 0))["ridge, index"]
        domains[label] = float(overlap(searched(embedding_map, queries, documents, K), truth).mean())
    domains["old model"] = float(overlap(ranked(queries.old, documents.old, K), truth).mean())
    some = parts["pairs"].rows(slice(1000))
    old, new = torch.from_numpy(normalized(some.old)).double(), torch.from_numpy(normalized(some.new)).double()
    similarity = {name: float(getattr(metrics, name)(old, new)) for name in ("linear_cka", "mutual_knn")}
    return {"similarity": similarity, "relevance": relevance, "domains": domains | {"pairs": same}}


def product(parts: dict[str, Part], counts_of: Sequence[int]) -> list[dict[str, Any]]:
    """Run ``fit_embedding_map`` like a user, and measure its choice and its prediction."""
    queries, documents = parts["queries"], parts["index"]
    truth = ranked(queries.new, documents.new, K)
    outcomes = []
    for count in counts_of:
        order = np.random.default_rng(0).permutation(len(parts["pairs"].old))[:count]
        old, new = (normalized(side) for side in (parts["pairs"].rows(order).old, parts["pairs"].rows(order).new))
        embedding_map = fit_embedding_map(old, new, index_size=len(documents.old), progress=False)
        if embedding_map.keeps_old:
            rows = ranked(queries.old, documents.old, K)
        else:
            asked, there = (Part(normalized(part.old), normalized(part.new)) for part in (queries, documents))
            rows = searched(embedding_map, asked, there, K)
        said = verdict(embedding_map, threshold=GO)
        outcomes.append({
            "pairs": count, "map": embedding_map.name, "recall": float(overlap(rows, truth).mean()),
            "go": bool(said.go), "figure": said.figure,
            "predicted": [float(said.predicted[key]) for key in ("value", "low", "high")],
        })  # fmt: skip
    return outcomes


def graded(retrieved: npt.NDArray[np.int64], relevant: Sequence[Sequence[int]]) -> dict[str, float]:
    """Return nDCG@10 and the mean reciprocal rank within the first hundred documents."""
    gains, ranks = [], []
    for rows, relevant_rows in zip(retrieved.tolist(), relevant, strict=True):
        places = [place for place, row in enumerate(rows) if row in set(relevant_rows)]
        ideal = sum(1 / math.log2(place + 2) for place in range(min(K, len(relevant_rows))))
        gains.append(sum(1 / math.log2(place + 2) for place in places if place < K) / ideal)
        ranks.append(1 / (places[0] + 1) if places else 0.0)
    return {"ndcg": float(np.mean(gains)), "mrr": float(np.mean(ranks))}


def interval(values: Hits, seed: int = 0) -> list[float]:
    """Return mean and 95% bootstrap interval over queries and seeds of values ``(seeds, queries)``."""
    random = np.random.default_rng(seed)
    drawn = []
    for _ in range(RESAMPLES):
        rows = random.integers(len(values), size=len(values))
        drawn.append(values[rows].mean(0)[random.integers(values.shape[1], size=values.shape[1])].mean())
    return [round(float(end), 4) for end in (values.mean(), *np.percentile(drawn, (2.5, 97.5)))]


def choices(held: dict[str, dict[str, float]], count: int) -> dict[str, str]:
    maps = [key for key in held if "r2" in held[key]]
    safe = ("old model", "identity", "ridge_to_identity")
    allowed = [key for key in held if count >= FEW or key.split(",")[0] in safe]
    return {
        "auto": max(allowed, key=lambda key: held[key]["retrieval"]),
        "held-out retrieval": max(held, key=lambda key: held[key]["retrieval"]),
        "R²": max(maps, key=lambda key: held[key]["r2"]),
        "cosine": max(maps, key=lambda key: held[key]["cosine"]),
    }


def summary(cells: dict[tuple[str, str], dict[tuple[int, int], dict[str, Any]]]) -> dict[str, Any]:
    """Return the table, the choices with their regret, and the comparison for the leading pair."""
    table, chosen = [], []
    for pair, runs in cells.items():
        for count in sorted({count for count, _ in runs}):
            group = {seed: runs[number, seed] for number, seed in runs if number == count}
            for name in dict.fromkeys(name for run in group.values() for name in run["recall"]):
                seeds = [seed for seed, run in group.items() if name in run["recall"]]
                recall = np.array([group[seed]["recall"][name] for seed in seeds])
                inside = np.array([group[seed]["inside"][name] for seed in seeds])
                table.append([*pair, count, name, len(seeds), *interval(recall), round(float(inside.mean()), 4)])
            for seed, run in group.items():
                means = {key: float(np.mean(run["recall"][key])) for key in run["held"]}
                top = max(means, key=lambda key: means[key])
                rules = {rule: {"map": key, "recall": round(means[key], 4), "regret": round(means[top] - means[key], 4)}
                        for rule, key in choices(run["held"], count).items()}  # fmt: skip
                auto = rules["auto"]["map"]
                chosen.append({
                    "pair": list(pair), "pairs": count, "seed": seed, "rules": rules, "best": top,
                    "best_recall": round(means[top], 4), "old": round(means["old model"], 4),
                    "predicted": round(run["held"][auto]["retrieval"], 4),
                    "inside": round(float(np.mean(run["inside"][auto])), 4),
                })  # fmt: skip
    return {"table": table, "choices": chosen, "lead": lead(cells[LEAD])}


def lead(runs: dict[tuple[int, int], dict[str, Any]]) -> dict[str, Any]:
    """Compare the choice of ``auto`` with the best variant of plain ridge, from hidden state 3 to the final state."""
    most = max(count for count, _ in runs)
    group = [runs[key] for key in sorted(runs) if key[0] == most]
    plain = [f"ridge, {direction}" for direction in ("index", "query", "adjoint")]
    means = {key: float(np.mean([run["recall"][key] for run in group])) for key in (*plain, "old model")}
    best_plain = max(means, key=lambda key: means[key])
    taken = [choices(run["held"], most)["auto"] for run in group]
    ours = np.array([run["recall"][key] for run, key in zip(group, taken, strict=True)])
    theirs = np.array([run["recall"][best_plain] for run in group])
    return {"pairs": most, "plain": {key: round(value, 4) for key, value in means.items()}, "best_plain": best_plain,
            "auto": taken, "recall": interval(ours), "gain": interval(ours - theirs), "seeds": len(group)}  # fmt: skip


def verdicts(chosen: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Predict ``go`` from the held-out recall with a threshold set on all other pairs of encoders.

    Predictions and truth come from ``auto`` with at least 1,000 pairs. The threshold is the midpoint between two
    neighbouring predictions with the largest balanced accuracy on the remaining pairs.
    """
    rows = [choice for choice in chosen if choice["pairs"] > FEW] or list(chosen)
    truth = np.array([row["rules"]["auto"]["recall"] >= GO and row["rules"]["auto"]["recall"] > row["old"] - 1e-9
                      for row in rows])  # fmt: skip
    guess = np.array([row["predicted"] for row in rows])
    owner = np.array(["→".join(row["pair"]) for row in rows])
    if truth.all() or not truth.any():
        return {"cells": len(rows), "go": int(truth.sum()), "auc": None}
    said = np.zeros(len(rows), dtype=bool)
    for left_out in np.unique(owner):
        others = owner != left_out
        steps = np.unique(guess[others])
        cuts = [*((steps[1:] + steps[:-1]) / 2), GO]
        said[~others] = guess[~others] >= max(cuts, key=lambda cut: balanced(truth[others], guess[others] >= cut))
    random, names, drawn = np.random.default_rng(0), np.unique(owner), []
    for _ in range(RESAMPLES):
        rows_of = np.concatenate([np.flatnonzero(owner == name) for name in random.choice(names, len(names))])
        if 0 < truth[rows_of].sum() < len(rows_of):
            drawn.append(roc_auc_score(truth[rows_of], guess[rows_of]))
    low, high = np.percentile(drawn, (2.5, 97.5))
    return {
        "cells": len(rows), "encoder_pairs": len(names), "go": int(truth.sum()),
        "auc": [round(float(end), 3) for end in (roc_auc_score(truth, guess), low, high)],
        "of": sorted(set(owner[truth].tolist())), "hits": int((said & truth).sum()),
        "false_go": int((said & ~truth).sum()),
        "balanced_accuracy": round(balanced(truth, said), 3),
    }  # fmt: skip


def balanced(truth: npt.NDArray[np.bool_], said: npt.NDArray[np.bool_]) -> float:
    """Return the mean of the accuracies on both classes, without absent classes."""
    return float(np.mean([np.mean(said[truth == label] == label) for label in (True, False) if (truth == label).any()]))


def predicted(chosen: Sequence[dict[str, Any]], similarity: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Correlate similarities with the recall of the best map over pairs of encoders (Spearman, with a bootstrap)."""
    most = max(choice["pairs"] for choice in chosen)
    recall: dict[str, float] = {}
    old: dict[str, float] = {}
    for choice in chosen:
        if choice["pairs"] == most and choice["seed"] == 0 and "→".join(choice["pair"]) in similarity:
            recall["→".join(choice["pair"])] = choice["best_recall"]
            old["→".join(choice["pair"])] = choice["old"]
    names = list(recall)
    signals = {name: [similarity[key][name] for key in names] for name in ("linear_cka", "mutual_knn")}
    signals["recall of the old model"] = [old[key] for key in names]
    y = np.array([recall[key] for key in names])
    random = np.random.default_rng(0)
    correlations = {}
    for name, x in signals.items():
        drawn = []
        for _ in range(RESAMPLES):
            rows = random.integers(len(names), size=len(names))
            if len(set(rows)) > 2:
                drawn.append(spearmanr(np.array(x)[rows], y[rows]).statistic)
        correlations[name] = [round(float(v), 3) for v in
                              (spearmanr(x, y).statistic, *np.nanpercentile(drawn, (2.5, 97.5)))]  # fmt: skip
    far = y < GO
    far_correlations = {
        name: round(float(spearmanr(np.array(x)[far], y[far]).statistic), 3) if far.sum() > 2 else None
        for name, x in signals.items()
    }
    return {"encoder_pairs": len(names), "pairs": most, "spearman": correlations, "far": int(far.sum()),
            "spearman_far": far_correlations, "recall": recall,
            "similarity": {key: similarity[key] for key in names}}  # fmt: skip


DIFFERS = 0.005  # minimum difference of nDCG@10 between different systems


def page(record: dict[str, Any]) -> str:
    chosen, sizes, beside = record["choices"], record["counts"], record["beside"]
    predicted, products = record["prediction"], record["product"]
    most = max(row["pairs"] for row in chosen)
    last = [row for row in chosen if row["pairs"] == most and row["seed"] == 0]
    numbers = [one["pairs"] for one in next(iter(products.values()))]
    above, helped, hurt = compared(beside)
    return study.text(__file__).format(
        **{name: sizes[name] for name in ("index", "queries", "pairs", "questions", "documents")},
        kinds="; ".join(
            f"{part}: " + ", ".join(f"{n:,} {kind}" for kind, n in kinds.items())
            for part, kinds in record["texts"].items()
        ),
        steps=record["sizes"]["steps"], epochs=EPOCHS, longer=NEIGHBOURS["epochs"], few=FEW,
        go=GO, lead=lead_text(record["lead"]), recall=recall_tables(record["table"]), most=most,
        rules=rules_table(chosen), gap=np.mean([row["predicted"] - row["rules"]["auto"]["recall"] for row in last]),
        chosen=study.table(last, {
            "old → new": "{pair[0]} → {pair[1]}", "chosen by auto": "{rules[auto][map]}",
            "recall@10": "{rules[auto][recall]:.2f}", "best": "{best} {best_recall:.2f}", "old model": "{old:.2f}",
            "held-out recall": "{predicted:.2f}", "true ten in mapped 100": "{inside:.2f}",
        }),
        product=product_table(products, chosen),
        products=study.table(products.items(), {"old → new": "{0}"} | {
            f"{count:,} pairs": f"{{1[{place}][map]}}: {{1[{place}][recall]:.2f}}"
            for place, count in enumerate(numbers)
        }),
        verdicts=verdicts_text(record["verdicts"]), encoder_pairs=predicted["encoder_pairs"],
        predicts=study.table(predicted["spearman"].items(), {
            "similarity": "{0}", "Spearman": lambda _, values: ranged(values),
            "predicts": lambda _, values: "yes" if values[1] > 0 else "no" if values[2] < 0 else "undecided",
            f"only the {predicted['far']} pairs with recall below {GO}": lambda name, _: (
                "–" if (correlation := predicted["spearman_far"][name]) is None else f"{correlation:.2f}"
            ),
        }),
        similarities=study.table(
            [(key, predicted["similarity"][key], recall) for key, recall in predicted["recall"].items()],
            {"old → new": "{0}", "CKA": "{1[linear_cka]:.2f}", "mutual k-NN": "{1[mutual_knn]:.2f}",
             "recall of the best map": "{2:.2f}"},
        ),
        relevance=study.table(
            [(key, *row) for key, measured in beside.items() for row in measured["relevance"].items()],
            {"old → new": "{0}", "system": "{1}", "nDCG@10": "{2[ndcg]:.2f}", "MRR": "{2[mrr]:.2f}",
             "fidelity": "{2[fidelity]:.2f}"},
        ),
        differs=DIFFERS, above=above, helped=helped, hurt=hurt, beside=len(beside),
        domains=study.table(
            [(key, measured["domains"]) for key, measured in beside.items()],
            {"old → new": "{0}", "pairs": "{1[pairs]:,}", "same kinds": "{1[same]:.2f}",
             "other kinds": "{1[other]:.2f}", "old model": "{1[old model]:.2f}"},
        ),
        drop=np.mean([pair["domains"]["same"] - pair["domains"]["other"] for pair in beside.values()]),
    )  # fmt: skip


def lead_text(comparison: dict[str, Any]) -> str:
    """Describe the comparison of ``auto`` with plain ridge."""
    _, low, high = comparison["gain"]
    said = "beats it" if low > 0 else "is worse" if high < 0 else "is undecided: the interval includes 0"
    plain = ", ".join(f"{key} {value:.2f}" for key, value in comparison["plain"].items())
    auto = ", ".join(dict.fromkeys(comparison["auto"]))
    recall, gain = ranged(comparison["recall"]), ranged(comparison["gain"])
    figures = {"plain": plain, "auto": auto, "recall": recall, "gain": gain, "said": said}
    return study.text(__file__, "lead").format(**{**comparison, **figures})


def recall_tables(rows: Sequence[Any]) -> str:
    """Tabulate the baselines and the maps of each pair of encoders, by number of pairs."""
    by_pair: dict[Any, dict[str, dict[int, Any]]] = {}
    for old, new, count, name, *row in rows:
        by_pair.setdefault((old, new), {}).setdefault(name, {})[count] = row
    sizes = sorted({row[2] for row in rows})
    texts = []
    for pair, names in by_pair.items():
        trained = " \\*" if "student_256" in pair else ""
        rows = [(name, names[name]) for name in dict.fromkeys((*BASELINES, *names)) if name in names]
        columns = {f"{n:,} pairs": lambda _, by, n=n: ranged(by[n][1:4]) if n in by else "–" for n in sizes}
        columns["true ten in mapped 100"] = lambda _, by: f"{by[sizes[-1]][4]:.2f}" if sizes[-1] in by else "–"
        lines = study.table(rows, {"map": "{0}", **columns})
        texts.append(f"### {' → '.join(pair)}{trained}\n\n{lines}")
    return "\n\n".join(texts)


def rules_table(chosen: Sequence[dict[str, Any]]) -> str:

    def cell(rule: str, count: int) -> str:
        regrets = [row["rules"][rule]["regret"] for row in chosen if row["pairs"] == count]
        return f"mean {np.mean(regrets):.3f}, max {max(regrets):.3f} (n = {len(regrets)})"

    sizes = sorted({row["pairs"] for row in chosen})
    columns = {f"{count:,} pairs": partial(cell, count=count) for count in sizes}
    return study.table(chosen[0]["rules"], {"rule": str} | columns)


def product_table(products: dict[str, Any], chosen: Sequence[dict[str, Any]]) -> str:
    """Tabulate the choices and predictions of ``fit_embedding_map``, by number of pairs."""
    best_of = {("→".join(row["pair"]), row["pairs"]): row["best_recall"] for row in chosen if row["seed"] == 0}
    rows = []
    for count in sorted({outcome["pairs"] for outcomes in products.values() for outcome in outcomes}):
        here = [(key, row) for key, rows in products.items() for row in rows if row["pairs"] == count]
        regrets = [best_of[key, count] - outcome["recall"] for key, outcome in here]
        forecasts = [outcome for _, outcome in here if outcome["figure"] == f"recall@{K}"]
        row = [f"{count:,}", f"{np.mean(regrets):.3f}", f"{max(regrets):.3f}"]
        if not forecasts:
            rows.append([*row, "–", "–", "–"])
            continue
        inside = sum(outcome["predicted"][1] <= outcome["recall"] <= outcome["predicted"][2] for outcome in forecasts)
        right = sum(outcome["go"] == (outcome["recall"] >= GO) for outcome in forecasts)
        rows.append([
            *row, f"{np.mean([outcome['predicted'][0] - outcome['recall'] for outcome in forecasts]):+.2f}",
            f"{inside} of {len(forecasts)}",
            f"{sum(outcome['go'] for outcome in forecasts)} go, {right} correct of {len(forecasts)}",
        ])  # fmt: skip
    header = ("pairs", "mean regret", "max", "predicted - true", "true value inside the interval",
              "go, correct of all")  # fmt: skip
    return study.markdown(header, rows)


def verdicts_text(outcome: dict[str, Any]) -> str:
    """Describe the prediction of ``go`` from the held-out recall."""
    if outcome["auc"] is None:
        return f"{outcome['go']} of {outcome['cells']} cells are go: the ROC is undefined."
    figures = {"of": ", ".join(outcome["of"]), "rate": outcome["go"] / outcome["cells"], "auc": ranged(outcome["auc"])}
    return study.text(__file__, "verdicts").format(**{**outcome, **figures}, others=outcome["cells"] - outcome["go"])


def compared(beside: dict[str, Any]) -> tuple[int, int, int]:
    """Count the pairs where re-embedding beats the old model, and where the better map then beats it or loses."""
    above, helped, hurt = 0, 0, 0
    for measured in beside.values():
        systems = {key: values["ndcg"] for key, values in measured["relevance"].items()}
        old, new = systems.pop("old model"), systems.pop("re-embedding")
        if new > old + DIFFERS:
            above += 1
            helped += max(systems.values()) > old + DIFFERS
            hurt += max(systems.values()) < old - DIFFERS
    return above, helped, hurt


def plan(available: int) -> list[tuple[tuple[str, str], int, int]]:
    """Return the cells in running order."""
    counts_of = [100, 1000, available]
    seeds = dict.fromkeys(counts_of[:-1], 3) | {available: 1}
    cells = [(pair, count, seed) for seed in range(3) for pair in PAIRS for count in counts_of if seed < seeds[count]]
    return cells + [(LEAD, available, seed) for seed in (1, 2)]


def main() -> None:
    arguments = parser(__doc__).parse_args()
    warnings.filterwarnings("ignore", message=".*IProgress.*")
    texts, vectors = prepared(arguments)
    folder = arguments.cache / "cells"

    def parts_of(pair: tuple[str, str]) -> dict[str, Part]:
        old, new = (vectors[name] for name in pair)
        return {name: Part(normalized(old[name]), normalized(new[name])) for name in old}

    cells: dict[tuple[str, str], dict[tuple[int, int], dict[str, Any]]] = {}
    for pair, count, seed in plan(len(texts.parts["pairs"])):
        compute = partial(cell, pair, count, seed, parts_of(pair))
        figures = study.cached(folder / f"{'-'.join(pair)}-{count}-{seed}.json", compute)
        cells.setdefault(pair, {})[count, seed] = figures
    record: dict[str, Any] = {"sizes": {"steps": STEPS}, "texts": counts(texts), **summary(cells)}
    record["counts"] = {name: len(part) for name, part in texts.sections.items()}
    extra = {}
    for pair in cells:
        rows = [row for row in record["choices"] if tuple(row["pair"]) == pair and row["seed"] == 0]
        last = max(rows, key=lambda row: row["pairs"])
        path = folder / f"{'-'.join(pair)}-beside.json"
        compute = partial(
            relevance_and_domains, pair, parts_of(pair), texts, last["rules"]["auto"]["map"], last["pairs"]
        )
        extra["→".join(pair)] = study.cached(path, compute)
    record["beside"] = extra
    record["product"] = {}
    for pair, found_cells in cells.items():
        path = folder / f"{'-'.join(pair)}-product.json"
        numbers = sorted({count for count, seed in found_cells if seed == 0})
        record["product"]["→".join(pair)] = study.cached(path, partial(product, parts_of(pair), numbers))
    record["verdicts"] = verdicts(record["choices"])
    record["prediction"] = predicted(record["choices"], {key: figures["similarity"] for key, figures in extra.items()})
    study.write_results(NAME, record, page, arguments.out)
