"""Word vectors of two algorithms in one relative space (Moschella et al. 2023, section 4, table 1).

Skip-grams of word2vec and fastText are trained on English texts. Every word is searched in the space of the second
algorithm: by its unmodified vector, by its similarities to anchors, and by maps fitted on the same anchors.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import study
import torch
from hf_stitch_word_vectors import WordVectors, align, retrieval_scores, shared_vocabulary, word_samples
from matplotlib.figure import Figure
from relative_representations import texts
from relative_representations.exchange import Estimate, student
from relative_representations.word_training import WORDS, parts_of, trained, written
from torch import Tensor
from tqdm import tqdm

from hf_stitch import Moments, metrics, registries
from hf_stitch.relative import RelativeProjection, select_anchors

NAME = "word_vectors"
ABSOLUTE, RELATIVE, CENTRED, SHUFFLED = "absolute", "relative", "relative, centred", "relative, shuffled anchors"
WITH_CSLS = (RELATIVE, "procrustes")
"""Methods with an additional ranking by CSLS."""
PANELS = (ABSOLUTE, RELATIVE, CENTRED)
"""Methods of the figure."""
MAPS = ("lstsq", "ridge", "lasso", "low_rank", "recoloured", "procrustes", "inverse_relative", "permutation", "random")
"""Closed-form matchers except the identity, which is the absolute row."""
LASSO = 0.05
"""Penalty of the lasso, as a share of the smallest penalty that makes all weights 0."""
FEW = ("lstsq", "procrustes")
"""Matchers of the remaining pairs."""
MAIN, CEILING = "two algorithms", "two seeds"
APART, TEXTS = "two algorithms, other texts", "one algorithm, other texts"
PAIRS = {
    MAIN: (("word2vec", 0, "all"), ("fastText", 0, "all")),
    CEILING: (("word2vec", 0, "all"), ("word2vec", 1, "all")),
    APART: (("word2vec", 0, "even"), ("fastText", 0, "odd")),
    TEXTS: (("word2vec", 0, "even"), ("word2vec", 0, "odd")),
}
"""Name -> algorithm, seed and part of the texts, for both sides."""
K = (5, 10)
BANDS = 4
"""Number of equally large groups of words, by descending frequency."""
TWO = (MAIN, APART)
"""Pairs of two algorithms, the subject of the claims."""
DIRECTIONS = (("fastText", "word2vec"), ("word2vec", "fastText"))
ENOUGH_MRR, ENOUGH_JACCARD, CHANCE = 0.9, 0.3, 0.01
"""Minimum values of relative representations, and maximum of absolute vectors, at k = 10."""
HIGH, LOW = 0.8, 0.1
"""Minimum cosine of relative representations, and maximum of absolute vectors."""


TRAINED: dict[str, Any] = {"vector_size": 100, "epochs": 4, "min_count": 8}
OF_LANGUAGES: dict[str, Any] = {"vector_size": 50, "epochs": 20, "min_count": 3, "sample": 1e-3}
"""Training of word vectors, on many texts and on parallel sentences."""
WORDS_OF_BOTH, ANCHORS, SEEDS, QUERIES = 20_000, 300, 10, 2_000
"""Most frequent shared words of both sides; anchors; draws of anchors; searched words per draw."""


@dataclass(frozen=True)
class Draw:
    """One draw of anchors and of searched words."""

    words: list[str]  # shared words, most frequent first
    anchors: Tensor  # indices of words
    queries: list[Tensor]  # indices of words, in each frequency band
    order: Tensor  # a permutation of the anchors, for the control

    @classmethod
    def of(cls, words: list[str], seed: int) -> "Draw":
        """Draw anchors by the random selection of hf-stitch, and the words to search, equally many per band."""
        chosen = select_anchors(word_samples(words), ANCHORS, "random", seed=seed)
        places = {word: place for place, word in enumerate(words)}
        anchors = torch.tensor([places[str(word)] for word in chosen.ids])
        draws = torch.Generator().manual_seed(seed)
        queries = []
        for band in torch.arange(len(words)).tensor_split(BANDS):
            free = band[~torch.isin(band, anchors)]
            queries.append(free[torch.randperm(len(free), generator=draws)[: QUERIES // BANDS]])
        return cls(words, anchors, queries, torch.randperm(ANCHORS, generator=draws))


def spaces(x: Tensor, y: Tensor, draw: Draw, maps: Sequence[str]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the name of each method, and both sides in a common space; methods with too few anchors are left out."""
    a, b = x[draw.anchors], y[draw.anchors]
    yield ABSOLUTE, x, y
    for name, order, is_centred in ((RELATIVE, None, False), (CENTRED, None, True), (SHUFFLED, draw.order, False)):
        target_anchors = b if order is None else b[order]
        yield (
            name,
            *(RelativeProjection.of(part, center=is_centred)(side) for part, side in ((a, x), (target_anchors, y))),
        )
    moments = Moments(x.shape[1], y.shape[1]).update(a, b)
    options: dict[str, dict[str, Any]] = {
        "low_rank": {"rank": x.shape[1] // 2},
        "lasso": {"alpha": LASSO * float(moments.sxy.abs().max()) / len(a), "tolerance": 1e-6},
    }
    for name in maps:
        try:
            matcher: Any = registries.matchers.build(name, **options.get(name, {}))
            stitch = matcher.fit(moments)
        except ValueError:
            continue
        with torch.no_grad():
            yield name, stitch(x), y


def scored(source: Tensor, target: Tensor, draw: Draw, csls: bool = False) -> dict[str, float]:
    """Search the words of each band; return the mean scores and, without CSLS, the reciprocal rank by band."""
    searched = [torch.cat(draw.queries)] if csls else draw.queries
    left_out = [draw.words[place] for place in draw.anchors]
    results = [
        retrieval_scores(source, target, K, words=draw.words, exclude=left_out, queries=queries, csls=csls)
        for queries in searched
    ]
    weights = np.array([result.n for result in results]) / sum(result.n for result in results)
    parts = {
        f"{name} {k}": [getattr(result, name)[k] for result in results]
        for name in ("jaccard", "neighbours", "mrr")
        for k in K
    }
    parts["cosine"] = [result.cosine for result in results]
    bands = {} if csls else {f"mrr 10, band {place}": result.mrr[10] for place, result in enumerate(results)}
    return {**{name: float(weights @ np.array(values)) for name, values in parts.items()}, **bands}


def compared(name: str, sides: tuple[WordVectors, WordVectors], words: list[str]) -> pd.DataFrame:
    """Search every word in the second space, in both directions, with all methods and draws of anchors."""
    rows = []
    vectors = [side.rows(words) for side in sides]
    differ = {CEILING: 1, TEXTS: 2}.get(name)
    labels = [side[0] if differ is None else f"{side[0]} {side[differ]}" for side in PAIRS[name]]
    for seed in tqdm(range(SEEDS), name):
        draw = Draw.of(words, seed)
        for source, target in ((0, 1), (1, 0)):
            labelled = {"pair": name, "source": labels[source], "target": labels[target]}
            for method, x, y in spaces(vectors[source], vectors[target], draw, MAPS if name == MAIN else FEW):
                rows.append({**labelled, "method": method, "seed": seed, **scored(x, y, draw)})
                if name == MAIN and method in WITH_CSLS:
                    by_csls = scored(x, y, draw, csls=True)
                    rows.append({**labelled, "method": f"{method}, CSLS", "seed": seed, **by_csls})
            if name == MAIN:
                itself = {"pair": name, "source": labels[source], "target": labels[source]}
                for method, x, y in spaces(vectors[source], vectors[source], draw, ()):
                    if method in (ABSOLUTE, RELATIVE):
                        rows.append({**itself, "method": method, "seed": seed, **scored(x, y, draw)})
    return pd.DataFrame(rows)


def within(sides: tuple[WordVectors, WordVectors], words: list[str]) -> dict[str, float]:
    """Compare two unmodified spaces with metrics."""
    x, y = (side.rows(words) for side in sides)
    return {
        "linear CKA": metrics.linear_cka(x, y).item(),
        **{f"Jaccard {k}": metrics.jaccard(x, y, k=k).item() for k in K},
    }


def plane(sides: tuple[WordVectors, WordVectors], words: list[str]) -> dict[str, Any]:
    """Project words of four categories onto the two main axes of both sides together, absolute and relative."""
    shared = set(words)
    chosen = {
        name: [w for w in listed.split() if w in shared]
        for name, listed in study.listed(__file__)["categories"].items()
    }
    names = [word for listed in chosen.values() for word in listed]
    anchors = [str(word) for word in select_anchors(word_samples(words), ANCHORS, "random", seed=0).ids]
    word_rows = [side.rows(names) for side in sides]
    projected: dict[str, Any] = {"categories": chosen}
    for method in PANELS:
        both = word_rows
        if method != ABSOLUTE:
            is_centred = method == CENTRED
            both = [
                RelativeProjection.of(side.rows(anchors), center=is_centred)(rows)
                for side, rows in zip(sides, word_rows, strict=True)
            ]
        rows = torch.cat([torch.nn.functional.normalize(side_rows, dim=1) for side_rows in both])
        axes = torch.linalg.svd(rows - rows.mean(0), full_matrices=False).Vh[:2]
        projected[method] = [[[round(v, 3) for v in row] for row in side.tolist()] for side in (rows @ axes.T).chunk(2)]
    return projected


def derived(pairs: Sequence[tuple[list[str], list[str]]], least: int) -> list[tuple[str, str]]:
    """Derive a dictionary from parallel sentences: words that are each other's best match by the Dice coefficient.

    Both words of a pair occur together in at least ``least`` sentences. The most frequent pairs come first.
    """
    counts_a: Counter[str] = Counter()
    counts_b: Counter[str] = Counter()
    both: Counter[tuple[str, str]] = Counter()
    for a, b in pairs:
        counts_a.update(set(a))
        counts_b.update(set(b))
        both.update(product(set(a), set(b)))
    best: dict[tuple[int, str], tuple[float, str]] = {}
    for (x, y), count in both.items():
        if count >= least:
            dice = 2 * count / (counts_a[x] + counts_b[y])
            best[0, x] = max(best.get((0, x), (0.0, "")), (dice, y))
            best[1, y] = max(best.get((1, y), (0.0, "")), (dice, x))
    mutual = [(x, y) for (side, x), (dice, y) in best.items() if side == 0 and best[1, y][1] == x and dice >= 0.5]
    return sorted(mutual, key=lambda pair: -both[pair])


def languages(data_dir: str, cache: Path) -> dict[str, Any]:
    """Align English and Spanish with half of a dictionary from parallel sentences, and translate the second half."""
    table = pd.read_parquet(Path(data_dir) / texts.TATOEBA / "train.parquet")
    read = [[WORDS.findall(sentence.lower()) for sentence in table[side]] for side in ("en", "es")]
    pairs = list(zip(*read, strict=True))
    sides = [
        trained("word2vec", 0, written(iter(lines), cache)[0], cache, **OF_LANGUAGES)
        for lines in (table.en[::2], table.es[1::2])
    ]
    dictionary = [(a, b) for a, b in derived(pairs, 3) if a in sides[0] and b in sides[1] and a != b]
    fitted, held_out = dictionary[::2], dictionary[1::2]
    shuffled = [(a, b) for (a, _), (_, b) in zip(fitted, [*fitted[7:], *fitted[:7]], strict=True)]
    rows = []
    for method, train in (("procrustes", fitted), ("ridge", fitted), ("procrustes, shuffled dictionary", shuffled)):
        aligned = align(sides[0], sides[1], train, method.partition(",")[0])
        for csls in (False, True):
            precision = aligned.precision(held_out, csls=csls)
            rows.append({"method": method, "csls": csls, "p1": precision[1], "p5": precision[5]})
    return {
        "sentences": len(table), "vocabularies": [len(side) for side in sides], "fitted": len(fitted),
        "held_out": len(held_out), "examples": dictionary[:40:4], "rows": rows,
    }  # fmt: skip


class Scores:
    """Scores of a record by draw."""

    def __init__(self, record: Mapping[str, Any]) -> None:
        keys = ("pair", "source", "target", "method")
        self.rows = {tuple(row[key] for key in keys): row["scores"] for row in record["rows"]}
        self.methods = {method for *_, method in self.rows}

    def of(self, pair: str, direction: tuple[str, str], method: str, score: str, less: str | None = None) -> Estimate:
        """Estimate the score of a method, or its difference from method ``less``, with an interval over draws."""
        values = np.array(self.rows[pair, *direction, method][score])
        return student(values if less is None else values - self.rows[pair, *direction, less][score])

    def all(self, pairs: Sequence[str], method: str, score: str, less: str | None = None) -> list[Estimate]:
        """Estimate a score as in :meth:`of`, for several pairs of two algorithms and both directions."""
        return [self.of(pair, direction, method, score, less) for pair, direction in product(pairs, DIRECTIONS)]

    def mean(self, method: str, score: str, pair: str = MAIN) -> float:
        """Return the mean over directions, NaN without any."""
        means = [
            np.mean(scores[score])
            for (key, source, target, name), scores in self.rows.items()
            if (key, name) == (pair, method) and source != target
        ]
        return float(np.mean(means)) if means else float("nan")

    def better(self, pairs: Sequence[str]) -> list[str]:
        """Return the maps that find more words than relative representations in all pairs and both directions."""
        available = [name for name in MAPS if all((pair, *DIRECTIONS[0], name) in self.rows for pair in pairs)]
        return [name for name in available if all(gain.low > 0 for gain in self.all(pairs, name, "mrr 10", RELATIVE))]


def disagree(results: Scores) -> list[bool | None]:
    """Return whether absolute vectors disagree, in each pair and direction."""
    return [mean.below(CHANCE) for score in ("mrr 10", "jaccard 10") for mean in results.all(TWO, ABSOLUTE, score)]


def agree(results: Scores) -> list[bool | None]:
    """Return whether relative representations agree everywhere, and whether they beat the controls everywhere."""
    enough = [estimate.above(ENOUGH_MRR) for estimate in results.all(TWO, RELATIVE, "mrr 10")]
    enough += [estimate.above(ENOUGH_JACCARD) for estimate in results.all(TWO, RELATIVE, "jaccard 10")]
    more = [gain.above(0) for less in (ABSOLUTE, SHUFFLED) for gain in results.all(TWO, RELATIVE, "mrr 10", less)]
    return [study.every(enough), study.every(more)]


def near(results: Scores) -> list[bool | None]:
    """Return whether the cosine is high for relative representations and low for absolute vectors."""
    high = [estimate.above(HIGH) for estimate in results.all(TWO, RELATIVE, "cosine")]
    return [study.every(high), study.every([estimate.below(LOW) for estimate in results.all(TWO, ABSOLUTE, "cosine")])]


INCOMPATIBLE, AGREE, NEAR, NO_MAP = study.stated(__file__)


def claims(record: dict[str, Any]) -> list[dict[str, str]]:
    results, sizes = Scores(record), record["sizes"]
    n = (
        f"{len(TWO)} pairs of spaces, {sizes['queries']:,} of {record['shared'][MAIN]:,} words in {sizes['seeds']} "
        f"draws of {sizes['anchors']} anchors"
    )
    main, other_texts, maps = (
        {name: results.mean(name, "mrr 10", pair) for name in (ABSOLUTE, RELATIVE, *FEW)}
        for pair in (MAIN, APART, MAIN)
    )
    better = results.better(TWO)
    best = max(better, key=lambda name: maps[name], default=None)
    relative = f"relative {main[RELATIVE]:.2f}"
    cosines = ", ".join(f"{name} {results.mean(name, 'cosine'):.2f}" for name in (RELATIVE, ABSOLUTE, SHUFFLED))
    agreed = (
        f"{relative} (MRR), Jaccard {results.mean(RELATIVE, 'jaccard 10'):.2f}; other texts "
        f"{other_texts[RELATIVE]:.2f}; one algorithm: two seeds {results.mean(RELATIVE, 'mrr 10', CEILING):.2f}, other "
        f"texts {results.mean(RELATIVE, 'mrr 10', TEXTS):.2f}"
    )
    best_text = (
        f"{best} {maps[best]:.2f}, {relative} (MRR); other texts {other_texts[best]:.2f}, {other_texts[RELATIVE]:.2f}"
        if best
        else relative
    )
    return [
        INCOMPATIBLE.row(
            f"{main[ABSOLUTE]:.3f} (MRR); other texts {other_texts[ABSOLUTE]:.3f}", n, disagree(results), len(TWO)
        ),
        AGREE.row(agreed, n, agree(results), len(TWO)),
        NEAR.row(cosines, n, near(results), len(TWO)),
        NO_MAP.row(best_text, n, [not better], len(TWO)),
    ]


COLUMNS = ("jaccard 5", "jaccard 10", "neighbours 10", "mrr 5", "mrr 10", "cosine")
HEADER = ("Jaccard, k = 5", "Jaccard, k = 10", "other words, k = 10", "MRR, k = 5", "MRR, k = 10", "cosine")


def page(record: dict[str, Any]) -> str:
    results, sizes = Scores(record), record["sizes"]
    missing = [name for name in MAPS if name not in results.methods]
    return study.text(__file__).format(
        name=NAME, tokens=record["tokens"]["all"], ceiling=CEILING, apart=APART, apart_too=TEXTS, table=_table(results),
        verdicts=study.verdicts(claims(record)), findings=_findings(results), others=_others(results),
        within=_within(record),
        absent=f"Without a row, because they require more anchors: {', '.join(missing)}." if missing
        else "The identity is the absolute row.",
        bands=_bands(record), reading=_reading(results), languages=_languages(record["languages"]),
        **{key: sizes[key] for key in ("width", "epochs", "anchors", "seeds", "queries")},
        words=record["shared"][MAIN],
    )  # fmt: skip


def _shown(estimate: Estimate) -> str:
    return estimate.shown(3) if estimate.high - estimate.low >= 5e-4 else f"{estimate.value:.3f}"


def _table(results: Scores) -> str:
    rows = [
        (source, target, method, *(_shown(student(scores[column])) for column in COLUMNS))
        for (pair, source, target, method), scores in results.rows.items()
        if pair == MAIN
    ]
    return study.markdown(("source", "target", "method", *HEADER), sorted(rows, key=lambda row: row[:2]))


def _findings(results: Scores) -> str:
    shuffled, relative = (results.mean(method, "cosine") for method in (SHUFFLED, RELATIVE))
    sentences = [
        f"The cosine shows little: with shuffled anchors, where no word is found, it is {shuffled:.2f}, against\n"
        f"{relative:.2f}, because all cosines to anchors have a common mean."
        if shuffled > relative / 2
        else f"The cosine with shuffled anchors is {shuffled:.2f}, against {relative:.2f}."
    ]
    if better := results.better((MAIN,)):
        listed = ", ".join(f"{name} ({results.mean(name, 'mrr 10'):.3f})" for name in better)
        sentences.append(
            "These maps, fitted on the same anchors, find more words (MRR, k = 10, mean of both directions; the\n"
            f"interval of the difference by draw is above 0 in both): {listed}; relative\n"
            f"{results.mean(RELATIVE, 'mrr 10'):.3f}, centred {results.mean(CENTRED, 'mrr 10'):.3f}."
        )
    else:
        sentences.append("No map fitted on the same anchors finds more words in both directions.")
    gains = [
        f"{method} from {results.mean(method, 'mrr 10'):.3f} to {results.mean(f'{method}, CSLS', 'mrr 10'):.3f}"
        for method in WITH_CSLS
    ]
    sentences.append(f"Ranking by CSLS, against hub words, changes {' and '.join(gains)}.")
    return "\n\n".join(sentences)


def _others(results: Scores) -> str:
    columns = {f"{pair}: {title}": (score, pair) for pair in PAIRS for title, score in
               (("MRR", "mrr 10"), ("Jaccard", "jaccard 10"))}  # fmt: skip
    methods = [name for name in (ABSOLUTE, SHUFFLED, RELATIVE, CENTRED, *FEW) if name in results.methods]
    rows = [(method, *(f"{results.mean(method, *column):.3f}" for column in columns.values())) for method in methods]
    return study.markdown(("method", *columns), rows)


def _within(record: Mapping[str, Any]) -> str:
    rows = [
        (pair, f"{record['shared'][pair]:,}", *(f"{v:.3f}" for v in record["within"][pair].values())) for pair in PAIRS
    ]
    return study.markdown(("pair", "words", *record["within"][MAIN]), rows)


def _bands(record: Mapping[str, Any]) -> str:
    size, results = record["shared"][MAIN] // BANDS, Scores(record)
    header = [f"{low + 1:,} to {high:,}" for low, high in pairwise(range(0, size * BANDS + 1, size))]
    rows = [
        (pair, method, *(f"{results.mean(method, f'mrr 10, band {band}', pair):.3f}" for band in range(BANDS)))
        for pair, method in product(PAIRS, (RELATIVE, CENTRED, "procrustes"))
    ]
    return study.markdown(("pair", "method", *header), rows)


def _reading(results: Scores) -> str:
    seeds, main, texts_alone, both = (results.mean(RELATIVE, "mrr 10", pair) for pair in (CEILING, MAIN, TEXTS, APART))
    part = "texts_decide" if texts_alone < ENOUGH_MRR else "algorithms_decide"
    return study.text(__file__, part).format(seeds=seeds, main=main, texts=texts_alone, both=both, least=ENOUGH_MRR)


def _languages(figures: Mapping[str, Any]) -> str:
    rows = [
        (row["method"], "CSLS" if row["csls"] else "cosine", f"{row['p1']:.3f}", f"{row['p5']:.3f}")
        for row in figures["rows"]
    ]
    return study.text(__file__, "languages").format(
        **{key: figures[key] for key in ("sentences", "fitted", "held_out")},
        vocabularies=" and ".join(f"{size:,}" for size in figures["vocabularies"]),
        examples=", ".join(f"{a} – {b}" for a, b in figures["examples"]) or "none",
        table=study.markdown(("map", "ranked by", "precision at 1", "precision at 5"), rows),
    )


def picture(record: Mapping[str, Any]) -> Figure:
    """Plot the words of the categories, with absolute next to relative representations."""
    projection = record["plane"]
    figure = Figure(figsize=(13, 4.5), layout="constrained")
    for place, (method, axes) in enumerate(zip(PANELS, figure.subplots(1, len(PANELS)), strict=True)):
        first, second = (np.array(side) for side in projection[method])
        start = 0
        for number, (category, words) in enumerate(projection["categories"].items()):
            a, b = (side[start : start + len(words)] for side in (first, second))
            axes.plot(*np.stack([a, b], 1).transpose(2, 1, 0), color=f"C{number}", linewidth=0.4)
            axes.scatter(*a.T, color=f"C{number}", s=18, label=category)
            axes.scatter(*b.T, color=f"C{number}", s=24, marker="x")
            start += len(words)
        axes.set(title=method, xticks=[], yticks=[])
        if place == 0:
            axes.legend(fontsize=8)
    return figure


def measured(folder: Path, data_dir: str, cache: Path) -> dict[str, Any]:
    """Train the vectors, search the words, and return the record."""
    parts = parts_of(folder, cache)
    vectors: dict[tuple[str, int, str], WordVectors] = {}
    for side in tqdm(dict.fromkeys(side for pair in PAIRS.values() for side in pair), "training"):
        vectors[side] = trained(side[0], side[1], parts[side[2]][0], cache, **TRAINED)
    shared, inside, frames = {}, {}, []
    for name, pair in PAIRS.items():
        sides = vectors[pair[0]], vectors[pair[1]]
        words = shared_vocabulary(*sides, min_length=4, most_frequent=WORDS_OF_BOTH)
        shared[name], inside[name] = len(words), within(sides, words)
        frames.append(compared(name, sides, words))
        if name == MAIN:
            seen = plane(sides, words)
    rows = []
    for key, part in pd.concat(frames).groupby(["pair", "source", "target", "method"], sort=False):
        scores = {name: [round(v, 5) for v in part[name]] for name in part.columns[5:] if part[name].notna().all()}
        rows.append({**dict(zip(("pair", "source", "target", "method"), key, strict=True)), "scores": scores})
    sizes = {"width": TRAINED["vector_size"], "epochs": TRAINED["epochs"], "anchors": ANCHORS, "seeds": SEEDS}
    return {
        "sizes": sizes | {"queries": QUERIES}, "tokens": {name: count for name, (_, count) in parts.items()},
        "shared": shared, "within": inside,
        "languages": languages(data_dir, cache), "plane": seen, "rows": rows,
    }  # fmt: skip


def main() -> None:
    arguments = study.parser(__doc__, "data-dir", "cache", "texts", required={"data-dir", "texts"}).parse_args()
    record = measured(arguments.texts, arguments.data_dir, arguments.cache)
    study.write_results(NAME, record, page, arguments.out, {NAME: picture(record)})
