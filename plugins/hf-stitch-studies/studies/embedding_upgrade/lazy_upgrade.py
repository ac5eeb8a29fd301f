"""What embedding a part of an index again brings after a mapped upgrade, which rows come first, and lazy reranking."""

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
COMPARED = 0.2  # share at which orders of rows are compared


def recalls(queries: Vectors, documents: Vectors, truth: Vectors) -> Vectors:
    """Return, for each query, the share of its true documents among the ten that are found."""
    return overlap(exact_search(queries, documents, K)[0], truth)


def measured(vectors: dict[str, dict[str, Vectors]], old: str, new: str) -> dict[str, Any]:
    """Measure a pair of encoders.

    Half of the queries are those of the past: they choose rows, and are asked first of the lazy index. All figures are
    of the other half.
    """
    sides = [{part: normalized(rows) for part, rows in vectors[name].items()} for name in (old, new)]
    before, after = sides
    half = len(after["queries"]) // 2
    past, queries = after["queries"][:half], after["queries"][half:]
    exact = after["index"]
    truth = exact_search(queries, exact, K)[0]
    made = fit_embedding_map(before["pairs"], after["pairs"], map="ridge", direction="index", progress=False)
    mapped = made(before["index"])
    old_model = bootstrapped(recalls(before["queries"][half:], before["index"], truth))
    found: dict[str, Any] = {"pair": [old, new], "pairs": len(before["pairs"]), "old": old_model}
    found |= {"shares": {}, "gain": {}, "exact_rows": {}}
    at_compared = {}
    for first in FIRSTS:
        order = rows_first(mapped, len(mapped), first=first, queries=past if first == "asked" else None)
        found["shares"][first] = {}
        for share in SHARES:
            rows = order[: round(share * len(order))]
            mixed = mapped.copy()
            mixed[rows] = exact[rows]
            values = recalls(queries, mixed, truth)
            found["shares"][first][f"{share:g}"] = bootstrapped(values)
            if share == COMPARED:
                at_compared[first] = values
                there = np.isin(exact_search(queries, mixed, K)[0], rows).mean()
                found["exact_rows"][first] = [round(float(there), 4), round(float(np.isin(truth, rows).mean()), 4)]
    found["gain"] = {first: bootstrapped(at_compared[first] - at_compared["random"]) for first in FIRSTS[:-1]}
    found["pairs_from_index"] = refitted(before, after, queries, truth, made)
    found["lazy"] = lazily(mapped, exact, past, queries, truth)
    return found


def refitted(
    before: dict[str, Vectors], after: dict[str, Vectors], queries: Vectors, truth: Vectors, made: EmbeddingMap
) -> dict[str, Any]:
    """Measure a sixth of the index, at random, as pairs and in the place of mapped rows."""
    count = len(before["index"]) // 6
    rows = rows_first(before["index"], count, first="random")
    old, new = (np.concatenate([side["pairs"], side["index"][rows]]) for side in (before, after))
    both = fit_embedding_map(old, new, map="ridge", direction="index", progress=False)
    found = {"rows": count}
    for name, embedding_map in (("outside", made), ("with these", both)):
        mapped = embedding_map(before["index"])
        found[f"pairs {name}"] = bootstrapped(recalls(queries, mapped, truth))
        mapped[rows] = after["index"][rows]
        found[f"pairs {name}, rows replaced"] = bootstrapped(recalls(queries, mapped, truth))
    return found


def lazily(mapped: Vectors, exact: Vectors, past: Vectors, queries: Vectors, truth: Vectors) -> dict[str, Any]:
    """Ask a lazy index the queries of the past, then the others, with and without embedding again."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        np.save(folder / "new.npy", mapped)
        store = ArrayStore(folder / "old.npy", folder / "new.npy")

        def embedded(texts: list[str]) -> Vectors:
            return exact[[int(text) for text in texts]]

        def answered(asked: Vectors, lazy: LazyUpgrade) -> Vectors:
            return overlap(np.array(lazy.search(asked, K, rerank=min(RERANK, len(mapped)))), truth)

        with LazyUpgrade(store, embedded, lambda ids: [str(each) for each in ids], folder / "exact.sqlite") as lazy:
            fresh = bootstrapped(answered(queries, lazy))
            once = lazy.embedded
        warm = []
        for count in PAST:
            np.save(folder / "new.npy", mapped)
            kept = folder / f"exact_{count}.sqlite"
            with LazyUpgrade(store, embedded, lambda ids: [str(each) for each in ids], kept) as lazy:
                lazy.search(past[:count], K, rerank=min(RERANK, len(mapped)))
                touched = lazy.embedded
                lazy.update_store()
                without = bootstrapped(recalls(queries, np.load(folder / "new.npy"), truth))
                share = round(touched / len(mapped), 4)
                warm.append({"queries": min(count, len(past)), "share": share, "not reranked": without})
                warm[-1] |= {"reranked": bootstrapped(answered(queries, lazy)), "embedded": lazy.embedded - touched}
        return {"reranked": fresh, "embedded": once, "warm": warm}


def page(record: dict[str, Any]) -> str:
    found = record["measured"]
    better = {first: sum(each["gain"][first][1] > 0 for each in found) for first in FIRSTS[:-1]}
    most = [f"`{name}`" for name, count in better.items() if count >= 0.75 * len(found)]
    beats = f"{' and '.join(most)} {'beats' if len(most) == 1 else 'beat'} random rows"
    pair = {"old → new": "{pair[0]} → {pair[1]}"}
    ways = {"neither": "outside", "replaced": "outside, rows replaced", "as pairs": "with these",
            "both": "with these, rows replaced"}  # fmt: skip
    return study.text(__file__).format(
        index=record["index"], pairs=found[0]["pairs"], queries=record["queries"], compared=COMPARED, rerank=RERANK,
        verdict=beats if most else "No order of rows beats random ones",
        counts=", ".join(f"`{name}` in {count} of {len(found)}" for name, count in better.items()),
        shares=table(
            [(" → ".join(each["pair"]), first, each) for each in found for first in each["shares"]],
            {"old → new": "{0}", "rows first": "{1}"}
            | {f"{share:.0%}": lambda _, first, each, share=share: f"{each['shares'][first][f'{share:g}'][0]:.2f}"
               for share in SHARES}
            | {f"gain at {COMPARED:.0%}": lambda _, first, each: ranged(each["gain"][first])
               if first in each["gain"] else ""},
        ),
        crowding=table(found, pair | {
            first: f"{{exact_rows[{first}][0]:.0%}} (true {{exact_rows[{first}][1]:.0%}})" for first in FIRSTS
        }),
        rows=found[0]["pairs_from_index"]["rows"],
        as_pairs=table(found, pair | {
            title: lambda each, way=way: ranged(each["pairs_from_index"][f"pairs {way}"]) for title, way in ways.items()
        }),
        lazy=table(
            [(each, warm, not number) for each in found for number, warm in enumerate(each["lazy"]["warm"])],
            {
                "old → new": lambda each, _, first: " → ".join(each["pair"]) if first else "",
                "old model": lambda each, _, first: ranged(each["old"]) if first else "",
                "mapped": lambda each, _, first: ranged(each["shares"]["random"]["0"]) if first else "",
                "cold, reranked": lambda each, _, first: ranged(each["lazy"]["reranked"]) if first else "",
                "past queries": "{1[queries]}", "rows touched": "{1[share]:.0%}",
                "warm, not reranked": lambda _, warm, __: ranged(warm["not reranked"]),
                "warm, reranked": lambda _, warm, __: ranged(warm["reranked"]),
                "texts per query then": lambda _, warm, __: f"{warm['embedded'] / record['queries']:.1f}",
            },
        ),
    )  # fmt: skip


def picture(record: dict[str, Any]) -> Figure:
    """Draw recall by share for each pair of encoders and order of rows."""
    found = record["measured"]
    figure = Figure(figsize=(3 * len(found), 2.8), layout="constrained")
    for axes, each in zip(np.atleast_1d(figure.subplots(1, len(found), sharey=True)), found, strict=True):
        for first, shares in each["shares"].items():
            axes.plot([float(share) for share in shares], [values[0] for values in shares.values()], label=first)
        axes.axhline(each["lazy"]["reranked"][0], color="gray", linestyle=":", label="lazy, cold")
        axes.set(title=" → ".join(each["pair"]), xlabel="share embedded again", ylim=(0, 1))
    figure.axes[0].set_ylabel("recall@10")
    figure.axes[0].legend(fontsize=7)
    return figure


def main() -> None:
    given = parser(__doc__).parse_args()
    warnings.filterwarnings("ignore", message=".*IProgress.*")
    texts, vectors = prepared(given)
    found = []
    for pair in PAIRS:
        found.append(measured(vectors, *pair))
        Console(stderr=True).print(" → ".join(pair))
    sizes = counts(texts)
    record = {"texts": sizes, "index": len(texts.parts["index"]),
              "queries": len(texts.parts["queries"]) - len(texts.parts["queries"]) // 2, "measured": found}  # fmt: skip
    study.leave(NAME, record, page, given.out, {NAME: picture(record)})
