"""Re-embed a part of an index after a mapped upgrade: gain, order of the rows, and lazy reranking."""

import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import study
from embedding_upgrade.encoders import Vectors, counts, parser, prepared
from embedding_upgrade.upgrade_table import overlap
from hf_stitch_embeddings import EmbeddingMap, LazyUpgrade, exact_search, fit_embedding_map, normalized, rows_first
from hf_stitch_embeddings.lazy import First
from hf_stitch_embeddings.stores import ArrayStore
from matplotlib.figure import Figure
from rich.console import Console
from study import bootstrapped, ranged, table

NAME = "embedding_lazy"
PAIRS = (("hidden_3", "final"), ("hidden_5", "final"), ("student_256", "final"), ("tfidf_256", "final"))
SHARES = (0.0, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0)
FIRSTS: tuple[First, ...] = ("asked", "hubs", "random")
K, RERANK = 10, 100
PAST = (10, 50, 250)  # numbers of past queries
COMPARED = 0.2  # share for the comparison of orders of rows


def recalls(queries: Vectors, documents: Vectors, truth: Vectors) -> Vectors:
    """Return for each query the share of its true documents among the ten retrieved documents."""
    return overlap(exact_search(queries, documents, K)[0], truth)


def measured(vectors: dict[str, dict[str, Vectors]], old: str, new: str) -> dict[str, Any]:
    """Measure a pair of encoders.

    Half of the queries are past queries: they choose rows, and the lazy index answers them first. All figures are
    measured on the second half.
    """
    before, after = [{part: normalized(rows) for part, rows in vectors[name].items()} for name in (old, new)]
    half = len(after["queries"]) // 2
    past, queries = after["queries"][:half], after["queries"][half:]
    exact = after["index"]
    truth = exact_search(queries, exact, K)[0]
    embedding_map = fit_embedding_map(before["pairs"], after["pairs"], map="ridge", direction="index", progress=False)
    mapped = embedding_map(before["index"])
    old_model = bootstrapped(recalls(before["queries"][half:], before["index"], truth))
    figures: dict[str, Any] = {"pair": [old, new], "pairs": len(before["pairs"]), "old": old_model}
    figures |= {"shares": {}, "gain": {}, "exact_rows": {}}
    at_compared = {}
    for first in FIRSTS:
        order = rows_first(mapped, len(mapped), first=first, queries=past if first == "asked" else None)
        figures["shares"][first] = {}
        for share in SHARES:
            rows = order[: round(share * len(order))]
            mixed = mapped.copy()
            mixed[rows] = exact[rows]
            values = recalls(queries, mixed, truth)
            figures["shares"][first][f"{share:g}"] = bootstrapped(values)
            if share == COMPARED:
                at_compared[first] = values
                there = np.isin(exact_search(queries, mixed, K)[0], rows).mean()
                figures["exact_rows"][first] = [round(float(there), 4), round(float(np.isin(truth, rows).mean()), 4)]
    figures["gain"] = {first: bootstrapped(at_compared[first] - at_compared["random"]) for first in FIRSTS[:-1]}
    figures["pairs_from_index"] = refitted(before, after, queries, truth, embedding_map)
    figures["lazy"] = lazily(mapped, exact, past, queries, truth)
    return figures


def refitted(
    before: dict[str, Vectors], after: dict[str, Vectors], queries: Vectors, truth: Vectors, first_map: EmbeddingMap
) -> dict[str, Any]:
    """Measure a random sixth of the index as additional pairs and as replacements of mapped rows."""
    count = len(before["index"]) // 6
    rows = rows_first(before["index"], count, first="random")
    old, new = (np.concatenate([side["pairs"], side["index"][rows]]) for side in (before, after))
    both = fit_embedding_map(old, new, map="ridge", direction="index", progress=False)
    recall_of = {"rows": count}
    for name, embedding_map in (("outside", first_map), ("with these", both)):
        mapped = embedding_map(before["index"])
        recall_of[f"pairs {name}"] = bootstrapped(recalls(queries, mapped, truth))
        mapped[rows] = after["index"][rows]
        recall_of[f"pairs {name}, rows replaced"] = bootstrapped(recalls(queries, mapped, truth))
    return recall_of


def lazily(mapped: Vectors, exact: Vectors, past: Vectors, queries: Vectors, truth: Vectors) -> dict[str, Any]:
    """Search a lazy index with past queries, then with the remaining queries, with and without re-embedding."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        np.save(folder / "new.npy", mapped)
        store = ArrayStore(folder / "old.npy", folder / "new.npy")

        def embedded(texts: list[str]) -> Vectors:
            return exact[[int(text) for text in texts]]

        def answered(asked: Vectors, lazy: LazyUpgrade) -> Vectors:
            return overlap(np.array(lazy.search(asked, K, rerank=min(RERANK, len(mapped)))), truth)

        with LazyUpgrade(store, embedded, lambda ids: [str(row) for row in ids], folder / "exact.sqlite") as lazy:
            fresh = bootstrapped(answered(queries, lazy))
            once = lazy.embedded
        warm = []
        for count in PAST:
            np.save(folder / "new.npy", mapped)
            database = folder / f"exact_{count}.sqlite"
            with LazyUpgrade(store, embedded, lambda ids: [str(row) for row in ids], database) as lazy:
                lazy.search(past[:count], K, rerank=min(RERANK, len(mapped)))
                touched = lazy.embedded
                lazy.update_store()
                without = bootstrapped(recalls(queries, np.load(folder / "new.npy"), truth))
                share = round(touched / len(mapped), 4)
                warm.append({"queries": min(count, len(past)), "share": share, "not reranked": without})
                warm[-1] |= {"reranked": bootstrapped(answered(queries, lazy)), "embedded": lazy.embedded - touched}
        return {"reranked": fresh, "embedded": once, "warm": warm}


def page(record: dict[str, Any]) -> str:
    pairs = record["measured"]
    better = {first: sum(row["gain"][first][1] > 0 for row in pairs) for first in FIRSTS[:-1]}
    most = [f"`{name}`" for name, count in better.items() if count >= 0.75 * len(pairs)]
    beats = f"{' and '.join(most)} {'beats' if len(most) == 1 else 'beat'} random rows"
    pair = {"old → new": "{pair[0]} → {pair[1]}"}
    ways = {"neither": "outside", "replaced": "outside, rows replaced", "as pairs": "with these",
            "both": "with these, rows replaced"}  # fmt: skip
    return study.text(__file__).format(
        index=record["index"], pairs=pairs[0]["pairs"], queries=record["queries"], compared=COMPARED, rerank=RERANK,
        verdict=beats if most else "No order of rows beats random rows",
        counts=", ".join(f"`{name}` in {count} of {len(pairs)}" for name, count in better.items()),
        shares=table(
            [(" → ".join(row["pair"]), first, row) for row in pairs for first in row["shares"]],
            {"old → new": "{0}", "rows first": "{1}"}
            | {f"{share:.0%}": lambda _, first, row, share=share: f"{row['shares'][first][f'{share:g}'][0]:.2f}"
               for share in SHARES}
            | {f"gain at {COMPARED:.0%}": lambda _, first, row: ranged(row["gain"][first])
               if first in row["gain"] else ""},
        ),
        crowding=table(pairs, pair | {
            first: f"{{exact_rows[{first}][0]:.0%}} (true {{exact_rows[{first}][1]:.0%}})" for first in FIRSTS
        }),
        rows=pairs[0]["pairs_from_index"]["rows"],
        as_pairs=table(pairs, pair | {
            title: lambda row, way=way: ranged(row["pairs_from_index"][f"pairs {way}"]) for title, way in ways.items()
        }),
        lazy=table(
            [(row, warm, not number) for row in pairs for number, warm in enumerate(row["lazy"]["warm"])],
            {
                "old → new": lambda row, _, first: " → ".join(row["pair"]) if first else "",
                "old model": lambda row, _, first: ranged(row["old"]) if first else "",
                "mapped": lambda row, _, first: ranged(row["shares"]["random"]["0"]) if first else "",
                "cold, reranked": lambda row, _, first: ranged(row["lazy"]["reranked"]) if first else "",
                "past queries": "{1[queries]}", "rows touched": "{1[share]:.0%}",
                "warm, not reranked": lambda _, warm, __: ranged(warm["not reranked"]),
                "warm, reranked": lambda _, warm, __: ranged(warm["reranked"]),
                "texts per query then": lambda _, warm, __: f"{warm['embedded'] / record['queries']:.1f}",
            },
        ),
    )  # fmt: skip


def picture(record: dict[str, Any]) -> Figure:
    """Plot recall by share for each pair of encoders and order of rows."""
    pairs = record["measured"]
    figure = Figure(figsize=(3 * len(pairs), 2.8), layout="constrained")
    for axes, row in zip(np.atleast_1d(figure.subplots(1, len(pairs), sharey=True)), pairs, strict=True):
        for first, shares in row["shares"].items():
            axes.plot([float(share) for share in shares], [values[0] for values in shares.values()], label=first)
        axes.axhline(row["lazy"]["reranked"][0], color="gray", linestyle=":", label="lazy, cold")
        axes.set(title=" → ".join(row["pair"]), xlabel="share embedded again", ylim=(0, 1))
    figure.axes[0].set_ylabel("recall@10")
    figure.axes[0].legend(fontsize=7)
    return figure


def main() -> None:
    arguments = parser(__doc__).parse_args()
    warnings.filterwarnings("ignore", message=".*IProgress.*")
    texts, vectors = prepared(arguments)
    measurements = []
    for pair in PAIRS:
        measurements.append(measured(vectors, *pair))
        Console(stderr=True).print(" → ".join(pair))
    record = {"texts": counts(texts), "index": len(texts.parts["index"]),
              "queries": len(texts.parts["queries"]) - len(texts.parts["queries"]) // 2,
              "measured": measurements}  # fmt: skip
    study.write_results(NAME, record, page, arguments.out, {NAME: picture(record)})
