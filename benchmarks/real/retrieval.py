"""An index of one sentence encoder, searched with another: maps of hf-stitch-embeddings and of isotrieve."""

from __future__ import annotations

from typing import Any

import numpy as np
from hf_stitch_embeddings import exact_search, fit_embedding_map
from numpy.typing import NDArray

from benchmarks.real import data
from benchmarks.real.places import QUIET, Places, interval, outputs, shown
from hf_stitch import Samples

DOCUMENTS, QUERIES, PAIRS, K = 4500, 500, (200, 700, 2000, 5000), 10
PREFIX = {"E5": "query: "}
"""What an encoder expects in front of a text; E5 uses this prefix on both sides of symmetric tasks."""


def vectors(places: Places, name: str, texts: list[str]) -> NDArray[np.float32]:
    """Return normalised mean-pooled vectors."""
    network = places.network(name)
    found = outputs(network, Samples.of([PREFIX.get(name, "") + text for text in texts])).numpy()
    return np.asarray(found / np.linalg.norm(found, axis=1, keepdims=True), np.float32)


def upgraded(places: Places, a: str, b: str) -> dict[str, Any]:
    """Search documents of the old encoder with queries of the new one, by maps of ever more pairs.

    The recall is the share of the ten documents that exact re-embedding finds. A row holds if ``auto`` is at least as
    good as both maps of isotrieve at every number of pairs, up to its paired interval.
    """
    texts = list(dict.fromkeys(data.sentences(places.data)))[: DOCUMENTS + QUERIES + max(PAIRS)]
    ends = np.cumsum((max(PAIRS), QUERIES, DOCUMENTS))
    if len(texts) < ends[-1]:
        raise ValueError(f"{len(texts):,} sentences are fewer than the {ends[-1]:,} that are needed")
    old, new = (vectors(places, name, texts) for name in (a, b))
    queries, documents = slice(ends[0], ends[1]), slice(ends[1], ends[2])
    exact, _ = exact_search(new[queries], new[documents], K)

    def recall(questions: Any, answers: Any) -> NDArray[np.float64]:
        found, _ = exact_search(questions, answers, K)
        return np.array([len({*x} & {*y}) / K for x, y in zip(found, exact, strict=True)])

    by_old = recall(old[queries], old[documents])
    table: dict[str, dict[str, Any]] = {"old model": {"recall": interval(by_old)}}
    holds = True
    for count in PAIRS:
        rows: dict[str, NDArray[np.float64]] = {}
        fitted = fit_embedding_map(
            old[:count], new[:count], direction="index", index_size=DOCUMENTS, texts=texts[:count], **QUIET
        )
        moved = by_old if fitted.keeps_old else recall(new[queries], fitted(old[documents]))
        rows["auto"] = moved
        for name, fit in isotrieve().items():
            rows[name] = recall(new[queries], fit(old[:count], new[:count])(old[documents]))
        gain = {name: interval(rows["auto"] - rows[name]) for name in rows if name != "auto"}
        holds = holds and all(score[2] >= 0 for score in gain.values())
        table[str(count)] = {
            "map": str(fitted), "recall": {name: interval(values) for name, values in rows.items()}, "gain": gain,
        }  # fmt: skip
    return {
        "outcome": f"recall@10 of the old model {shown(table['old model']['recall'])}; " + "; ".join(
            f"{count} pairs: " + ", ".join(f"{name} {score[0]:.3f}" for name, score in row["recall"].items())
            for count, row in table.items() if count != "old model"
        ),
        "holds": holds, "table": table,
    }  # fmt: skip


def isotrieve() -> dict[str, Any]:
    """Return the linear maps of isotrieve with their defaults: name -> function of pairs that returns a map."""
    from isotrieve import OrthogonalProcrustesMapping, RidgeMapping

    kinds = {"isotrieve ridge": RidgeMapping, "isotrieve procrustes": OrthogonalProcrustesMapping}
    return {name: lambda x, y, kind=kind: kind().fit(x, y).transform for name, kind in kinds.items()}


ROWS: dict[str, tuple[Any, ...]] = {
    f"upgrade: {a} → {b}": (upgraded, a, b) for a, b in (("MiniLM", "E5"), ("E5", "MiniLM"))
}
