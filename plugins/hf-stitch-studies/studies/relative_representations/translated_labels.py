"""Swap in encoders of other languages where translations share the label (Moschella et al. 2023, section 5.2).

Short everyday sentences in four languages have the labels of their English translations: the topic, and whether the
sentence is negated, past, or about the first person. The encoder of each language is fitted to separate sentences,
without translations of another encoder's sentences. Heads are trained on English and receive the vectors of the
remaining languages through 500 parallel anchors. A ladder of encoders shows the required similarity of encoders.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import study
import torch
from numpy.typing import NDArray
from relative_representations import ngram_encoders, text_encoders, texts
from relative_representations.exchange import ABSOLUTE, RELATIVE, Array, filled, span
from relative_representations.ngram_encoders import Vectors, plain
from relative_representations.swapping import CENTRED, TRUNCATED, relative
from scipy.stats import rankdata, spearmanr
from sklearn.cluster import KMeans
from sklearn.linear_model import LogisticRegression
from torch import Tensor
from torch.nn import functional

from hf_stitch import Moments, Samples
from hf_stitch.matchers import ClosedFormMatcher
from hf_stitch.matchers.alignment import InverseRelative, Procrustes
from hf_stitch.matchers.regression import Ridge
from hf_stitch.metrics import relative_cosine
from hf_stitch.relative import nearest

SIZES = {"pool": 1_500, "shard": 1_946, "test": 2_000, "anchors": 500, "width": 128, "few": 200, "seeds": 5}
"""Parallel sentences for anchors, unseen by the fits of encoders; sentences for the encoder and the head of a language;
test sentences; anchors; width of the encoders, except students; translations for the weak student; draws of shards,
encoders and anchors."""
RESAMPLES = 2_000
LANGUAGES = ("en", "es", "fr", "ja")
OTHERS = LANGUAGES[1:]
TOPICS = 8
TOPIC, NEGATION, PAST, PERSON = TASKS = ("topic", "negation", "past", "first person")
RANDOM, SVD, TUNED = "random projection", "TF-IDF + SVD", "TF-IDF + SVD, tuned"
FEW, STUDENT = "student of few translations", "student"
LADDER = (RANDOM, SVD, TUNED, FEW, STUDENT)
MONOLINGUAL = (SVD, TUNED)
"""Encoders of the verdict, which learn from sentences of one language only."""
SAME, MINILM = "same kind", "MiniLM"
"""English encoder of the heads: of the same kind as the second encoder, or pretrained."""
PARALLEL, SHUFFLED, NEWS = "parallel", "shuffled", "news"
"""Anchors: sentences and their translations, sentences and translations of different sentences, and other texts."""
MAPS: dict[str, ClosedFormMatcher] = {
    TRUNCATED: InverseRelative(rcond=0.1), "ridge": Ridge(), "procrustes": Procrustes(scale=True)
}  # fmt: skip
CLAIMED = (RELATIVE, CENTRED)
"""As published, and centred on the mean of the anchors."""
METHODS = (ABSOLUTE, *CLAIMED, *MAPS)
CONTROLS = ("shuffled anchors", "absolute", "random projection")
ENOUGH, LITTLE = 0.6, 0.2
"""Fractions of the ceiling above chance: minimum of relative heads, maximum of absolute heads."""
LEARNABLE = 10.0
"""Minimum distance of the ceiling from chance for a meaningful task, in points of F1."""
ERROR = 0.05
"""Share of false differences over all tasks and encoders; intervals of differences are widened for it."""

Bridge = tuple[str, str]
"""Anchors and method."""
Cells = dict[tuple[str, ...], list[float]]
"""Keys -> figure and limits of its interval."""


LISTED = study.listed(__file__)
PATTERNS = {name: re.compile(pattern) for name, pattern in LISTED["patterns"].items()}


def by_rules(english: Iterable[str]) -> dict[str, Tensor]:
    """Label English sentences by the rules: task -> 0 or 1 ``(n,)``."""
    lowered = [text.lower().replace("’", "'") for text in english]
    labels_of = {
        NEGATION: [bool(PATTERNS[NEGATION].search(text)) for text in lowered],
        PAST: [bool(PATTERNS[PAST].search(PATTERNS["not past"].sub("", text))) for text in lowered],
        PERSON: [bool(PATTERNS[PERSON].search(text)) for text in lowered],
    }
    return {task: torch.tensor(labels, dtype=torch.int64) for task, labels in labels_of.items()}


def labelled(
    train: Sequence[str], test: Sequence[str], vectors: Tensor, test_vectors: Tensor
) -> list[dict[str, Tensor]]:
    """Label training and test sentences in all tasks; topics are clusters of MiniLM's vectors of training sentences."""
    topics = KMeans(TOPICS, n_init=10, random_state=0).fit(functional.normalize(vectors).numpy())
    return [
        {TOPIC: torch.tensor(topics.predict(functional.normalize(some).numpy())).long(), **by_rules(sentences)}
        for sentences, some in ((train, vectors), (test, test_vectors))
    ]


def read(split: str, data_dir: str) -> dict[str, list[str]]:
    """Read the everyday sentences of a split in all languages, with punctuation."""
    return {
        language: texts.plain(texts.read(texts.TATOEBA, split, 100_000, data_dir, text=language, id="id"))
        for language in LANGUAGES
    }


def distinct_rows(
    sentences: Mapping[str, Sequence[str]], others: Mapping[str, Sequence[str]] | None = None
) -> list[int]:
    """Return the rows without empty or repeated sentences in any language, also compared with ``others``."""
    rows = set(range(len(sentences[LANGUAGES[0]])))
    for language in LANGUAGES:
        seen = {"", *(others or {}).get(language, ())}
        for row, sentence in enumerate(sentences[language]):
            if sentence in seen:
                rows.discard(row)
            seen.add(sentence)
    return sorted(rows)


def shards(rows: Sequence[int], seed: int) -> tuple[list[int], dict[str, list[int]]]:
    """Divide rows at random into the pool of anchors and one shard for each language, all disjoint."""
    order = np.random.default_rng(seed).permutation(np.asarray(rows)).tolist()
    total = SIZES["pool"] + len(LANGUAGES) * SIZES["shard"]
    if len(order) < total:
        raise ValueError(f"shards require {total} sentences, got {len(order)}")
    begins = range(SIZES["pool"], total, SIZES["shard"])
    shard_of = {code: order[begin : begin + SIZES["shard"]] for code, begin in zip(LANGUAGES, begins, strict=True)}
    return order[: SIZES["pool"]], shard_of


def distinct(pools: Iterable[Tensor], count: int) -> Tensor:
    """Return the first ``count`` rows where no vector of any pool repeats an earlier vector."""
    rows: set[int] | None = None
    for pool in pools:
        _, firsts = np.unique(pool.numpy(), axis=0, return_index=True)
        rows = set(firsts.tolist()) if rows is None else rows & set(firsts.tolist())
    assert rows is not None
    return torch.tensor(sorted(rows)[:count])


@dataclass(frozen=True)
class Rung:
    """Encoders of one kind by language, with their tasks: all tasks, or the task of their fine-tuning."""

    encoder: str
    tasks: tuple[str, ...]
    sides: dict[str, Vectors]

    @property
    def name(self) -> str:
        return name_of(self.encoder, self.tasks[0])


def name_of(encoder: str, task: str) -> str:
    """Return the name of the encoders of a kind for a task."""
    return f"{encoder}: {task}" if encoder == TUNED else encoder


def ladder(
    sentences: Mapping[str, Mapping[str, Sequence[str]]], teacher: Mapping[str, Tensor],
    labels: Mapping[str, Mapping[str, Tensor]], seed: int,
) -> list[Rung]:  # fmt: skip
    """Fit all encoders of a draw and encode all sentences: language -> set (train, pool, news, test) -> sentences.

    The teacher provides MiniLM's vectors of the English translations of each language's training sentences.
    """
    sides_of: dict[tuple[str, tuple[str, ...]], dict[str, Vectors]] = {}
    for number, language in enumerate(LANGUAGES):
        language_seed = 1_000 * seed + 100 * number
        features = ngram_encoders.tfidf(sentences[language])
        vectors = ngram_encoders.reduced(features, SIZES["width"], language_seed)
        encoded = {
            (RANDOM, TASKS): ngram_encoders.projected(sentences[language], SIZES["width"], language_seed),
            (SVD, TASKS): vectors,
            (FEW, TASKS): ngram_encoders.student(features, teacher[language][: SIZES["few"]], language_seed),
            (STUDENT, TASKS): ngram_encoders.student(features, teacher[language], language_seed + 1),
        }
        for place, task in enumerate(TASKS):
            encoded[TUNED, (task,)] = ngram_encoders.tuned(vectors, labels[language][task], language_seed + 2 + place)
        for key, side in encoded.items():
            sides_of.setdefault(key, {})[language] = side
    return [Rung(encoder, tasks, sides) for (encoder, tasks), sides in sides_of.items()]


def representations(
    english: Vectors, encoder: Vectors, part: str, places: Tensor, kinds: Sequence[str]
) -> Iterator[tuple[Bridge, Tensor]]:
    """Represent sentences of an encoder as inputs of the heads of an English encoder, by anchors and method.

    Absolute vectors do not use anchors and are listed with the parallel anchors; they are left out for unequal widths.
    """
    if english["pool"].shape[1] == encoder["pool"].shape[1]:
        yield (PARALLEL, ABSOLUTE), encoder[part]
    for kind in kinds:
        target, source = (side["news"] if kind == NEWS else side["pool"][places] for side in (english, encoder))
        if kind == SHUFFLED:
            source = source.roll(1, 0)  # anchors are in random order
        for method in CLAIMED:
            yield (kind, method), relative(source, encoder[part], center=method == CENTRED)
        if kind != SHUFFLED:
            moments = Moments(source.shape[1], target.shape[1]).update(source, target)
            for method in MAPS:
                with torch.no_grad():
                    yield (kind, method), MAPS[method].fit(moments)(encoder[part])


class English:
    """English encoder with its heads for each task, on absolute vectors and relative to each kind of anchors.

    Heads are logistic regressions on normalised vectors, like the LayerNorm at the entry of the paper's head.
    """

    def __init__(self, vectors: Vectors, labels: Mapping[str, Tensor], places: Tensor) -> None:
        self.vectors, self._places = vectors, places
        self._heads = {
            (task, bridge): head(inputs, labels[task])
            for bridge, inputs in representations(vectors, vectors, "train", places, (PARALLEL, NEWS))
            if bridge[1] in (ABSOLUTE, *CLAIMED)
            for task in labels
        }
        self._rows = dict(representations(vectors, vectors, "test", places, (PARALLEL,)))
        self._mean = vectors["pool"][places].mean(0)

    def received(self, encoder: Vectors) -> Iterator[tuple[Bridge, Tensor]]:
        """Yield anchors and method, and the test sentences of an encoder as inputs of the heads."""
        return representations(self.vectors, encoder, "test", self._places, (PARALLEL, SHUFFLED, NEWS))

    def predictions(self, task: str, bridge: Bridge, received: Tensor) -> NDArray[np.int64]:
        """Predict the classes of received sentences ``(m,)``."""
        anchors, method = bridge
        space = (NEWS if anchors == NEWS else PARALLEL, method) if method in CLAIMED else (PARALLEL, ABSOLUTE)
        return predicted(self._heads[task, space], received)

    def retrieved(self, bridge: Bridge, received: Tensor) -> NDArray[np.bool_]:
        """Return the mask of sentences with their translation as nearest English sentence ``(m,)``.

        Absolute and translated vectors are centred on the mean of the English anchors.
        """
        _, method = bridge
        rows = self._rows[PARALLEL, method] if method in CLAIMED else self.vectors["test"] - self._mean
        queries = received if method in CLAIMED else received - self._mean
        return (nearest(queries, [rows], k=1)[1][:, 0] == torch.arange(len(rows))).numpy()


def head(vectors: Tensor, labels: Tensor) -> LogisticRegression:
    """Fit a logistic regression to normalised vectors ``(n, d)``, with classes of equal weight."""
    return LogisticRegression(C=0.01, class_weight="balanced", max_iter=500).fit(_normalised(vectors), labels.numpy())


def predicted(fitted: LogisticRegression, vectors: Tensor) -> NDArray[np.int64]:
    """Predict classes ``(m,)``."""
    return fitted.predict(_normalised(vectors))


def _normalised(vectors: Tensor) -> NDArray[np.float32]:
    return functional.layer_norm(vectors.float(), vectors.shape[1:]).numpy()


class Bootstrap:
    """Resamples of the test sentences and of the seeds, shared by all figures to pair them."""

    def __init__(self, sentences: int, seeds: int, resamples: int) -> None:
        draws = np.random.default_rng(0)
        counts = draws.multinomial(sentences, np.full(sentences, 1 / sentences), size=resamples)
        self._weights = np.vstack([np.ones(sentences), counts]).astype(np.float32)
        shares = draws.multinomial(seeds, np.full(seeds, 1 / seeds), size=resamples)
        self._seeds = np.vstack([np.ones(seeds), shares]) / seeds

    def f1(self, truth: NDArray[np.int64], predictions: Sequence[NDArray[np.int64]]) -> Array:
        """Return macro F1 in percent, averaged over seeds: the value, then the resamples ``(1 + resamples,)``."""
        classes = np.arange(truth.max() + 1)
        true = (truth[:, None] == classes).astype(np.float32)
        weighted = self._weights @ true
        scores = []
        for guesses in predictions:
            hits = (guesses[:, None] == classes).astype(np.float32)
            shared, both = self._weights @ (true * hits), weighted + self._weights @ hits
            scores.append(100 * (2 * shared / np.maximum(both, 1)).mean(1))
        return self._over_seeds(scores)

    def share(self, hits: Sequence[NDArray[np.bool_]]) -> Array:
        """Return the share of hits in percent, averaged over seeds ``(1 + resamples,)``."""
        return self._over_seeds([100 * (self._weights @ mask) / len(mask) for mask in hits])

    def _over_seeds(self, values: Sequence[NDArray[np.floating[Any]]]) -> Array:
        return (self._seeds * np.stack(values, 1)).sum(1)


def interval(values: Array, digits: int, error: float = 0.05) -> list[float]:
    """Return the value, and the limits of its percentile interval."""
    low, high = np.quantile(values[1:], [error / 2, 1 - error / 2])
    return [round(float(value), digits) for value in (values[0], low, high)]


ACCEPTED, FAILS, OUTSIDE, CENTRES = study.stated(__file__)


def evidence(record: Mapping[str, Any], task: str, encoder: str, method: str) -> dict[str, dict[str, Any]]:
    """Return language -> figures behind the verdict of a task, an encoder and a method."""
    return {
        language: {
            "margin": record["ceilings"][task][encoder][language][0] - record["chance"][task][0],
            "fraction": record["figures"][task][encoder][SAME][language][PARALLEL][method][3],
            "over": record["differences"][task][encoder][method][language],
        }
        for language in OTHERS
    }


def accepted(figures: Mapping[str, Any]) -> bool | None:
    """Return whether an English head accepts the encoder of a language; ``None`` if its task cannot be learnt."""
    if figures["margin"] < LEARNABLE:
        return None
    return all(low > 0 for _, low, _ in figures["over"].values()) and figures["fraction"] >= ENOUGH


def claims(record: dict[str, Any]) -> list[dict[str, str]]:
    sizes, places = record["sizes"], list(product(TASKS, MONOLINGUAL, OTHERS))
    n = f"{sizes['seeds']} seeds, {len(TASKS)} tasks, 2 encoders, 3 languages, {sizes['test']:,} sentences"

    def figure(place: tuple[str, str, str], anchors: str, method: str, of: int) -> dict[str, float]:
        task, encoder, language = place  # ``of``: 0 for F1, 3 for the fraction
        values = record["figures"][task][encoder][SAME][language][anchors][method][of : of + 3]
        return dict(zip(("value", "low", "high"), values, strict=True))

    def row(claim: study.Claim, anchors: str, method: str, parts: Iterable[bool | None]) -> dict[str, str]:
        spans = [
            f"{name} {span(figure(place, anchors, method, 3)['value'] for place in places if place[1] == name)}"
            for name in MONOLINGUAL
        ]
        return claim.row(f"fraction of the ceiling above chance: {'; '.join(spans)}", n, parts, sizes["seeds"])

    by_method = {
        method: [accepted(evidence(record, task, encoder, method)[language]) for task, encoder, language in places]
        for method in CLAIMED
    }
    fails = [study.above(figure(place, PARALLEL, ABSOLUTE, 3), LITTLE) for place in places]
    outside = [
        part
        for place in places
        for part in (
            study.above(figure(place, NEWS, RELATIVE, 3), ENOUGH),
            study.above(study.difference(figure(place, NEWS, RELATIVE, 0), figure(place, PARALLEL, ABSOLUTE, 0)), 0),
        )
    ]
    return [
        row(ACCEPTED, PARALLEL, RELATIVE, by_method[RELATIVE]),
        row(FAILS, PARALLEL, ABSOLUTE, [None if above is None else not above for above in fails]),
        row(OUTSIDE, NEWS, RELATIVE, outside),
        row(CENTRES, PARALLEL, CENTRED, by_method[CENTRED]),
    ]


def measured(data_dir: str, cache: Path) -> dict[str, Any]:
    """Run the experiment and return the record."""
    minilm = text_encoders.installed()

    def encoded(sentences: Sequence[str]) -> Tensor:
        return minilm.vectors(Samples.of(list(sentences)), cache)

    raw = read("train", data_dir)
    raw_test = {name: some[: SIZES["test"]] for name, some in read("test", data_dir).items()}
    train, test = ({name: list(map(plain, some)) for name, some in part.items()} for part in (raw, raw_test))
    everything = {language: list(map(plain, read("test", data_dir)[language])) for language in LANGUAGES}
    rows = distinct_rows(train, everything)
    news = {language: list(map(plain, texts.plain(texts.ntrex(language, data_dir)))) for language in LANGUAGES}
    news_rows = distinct_rows(news)
    # Vectors of all English sentences; row i of a tensor is row i of the data.
    english, english_test, english_news = encoded(train["en"]), encoded(test["en"]), encoded(news["en"])
    row_index = torch.tensor(rows)
    labels, truth = labelled([raw["en"][row] for row in rows], raw_test["en"], english[row_index], english_test)
    label_of = {task: dict(zip(rows, classes.tolist(), strict=True)) for task, classes in labels.items()}

    results = Results()
    for seed in range(SIZES["seeds"]):
        print(f"seed {seed + 1}", flush=True)
        pool, parts = shards(rows, seed)
        chosen = np.random.default_rng(seed).permutation(news_rows)[: SIZES["anchors"]].tolist()
        own_labels = {
            language: {task: torch.tensor([classes[row] for row in part]) for task, classes in label_of.items()}
            for language, part in parts.items()
        }
        sentences = {
            language: {
                "train": [train[language][row] for row in parts[language]],
                "pool": [train[language][row] for row in pool],
                "news": [news[language][row] for row in chosen],
                "test": test[language],
            }
            for language in LANGUAGES
        }
        rungs = ladder(sentences, {lang: english[part] for lang, part in parts.items()}, own_labels, seed)
        pretrained = {
            "train": english[parts["en"]], "pool": english[pool], "news": english_news[chosen], "test": english_test,
        }  # fmt: skip
        results.add(rungs, pretrained, own_labels, seed)
    bootstrap = Bootstrap(len(test["en"]), SIZES["seeds"], RESAMPLES)
    f1 = {key: bootstrap.f1(truth[key[0]].numpy(), by_seed) for key, by_seed in results.answers.items()}
    return {
        "sizes": {**SIZES, "resamples": RESAMPLES},
        "sentences": {"kept": len(rows), "of": len(train["en"]), "news_kept": len(news_rows)},
        "classes": {
            task: [round(float(share), 3) for share in torch.bincount(classes).double() / len(classes)]
            for task, classes in truth.items()
        },
        **summary(f1),
        "retrieval": _nested({key: interval(bootstrap.share(by_seed), 1) for key, by_seed in results.hits.items()}),
        "likeness": _nested({
            key: [round(float(np.mean(by_seed)), 3), round(float(np.std(by_seed, ddof=1)), 3)]
            for key, by_seed in results.likeness.items()
        }),
    }  # fmt: skip


CEILING, CHANCE = "own head", "chance"


class Results:
    """Predictions, retrieved sentences and similarities of encoders, as lists over seeds."""

    def __init__(self) -> None:
        # Task, encoder, English encoder, language, anchors and method; or task, CEILING, encoder and language; or task
        # and CHANCE -> predicted classes.
        self.answers: dict[tuple[str, ...], list[NDArray[np.int64]]] = defaultdict(list)
        # Encoder, English encoder, language, anchors and method -> whether the translation was found.
        self.hits: dict[tuple[str, ...], list[NDArray[np.bool_]]] = defaultdict(list)
        # Encoder, English encoder and language -> centred relative cosine on the pool.
        self.likeness: dict[tuple[str, ...], list[float]] = defaultdict(list)

    def add(
        self, rungs: Sequence[Rung], pretrained: Vectors, labels: Mapping[str, Mapping[str, Tensor]], seed: int
    ) -> None:
        """Add the results of a seed, with MiniLM's vectors of the English sentences."""
        places = distinct((side["pool"] for rung in rungs for side in rung.sides.values()), SIZES["anchors"])
        minilm = English(pretrained, labels["en"], places)
        for rung in rungs:
            own_kind = English(rung.sides["en"], {task: labels["en"][task] for task in rung.tasks}, places)
            for language, side in rung.sides.items():
                self._exchange(rung, SAME, own_kind, language, side)
                if language in OTHERS:
                    self._exchange(rung, MINILM, minilm, language, side)
                for task in rung.tasks:
                    fitted = head(side["train"], labels[language][task])
                    self.answers[task, CEILING, rung.encoder, language].append(predicted(fitted, side["test"]))
        draws = np.random.default_rng(seed)
        for task in TASKS:
            shares = np.bincount(labels["en"][task].numpy()) / len(labels["en"][task])
            self.answers[task, CHANCE].append(draws.choice(len(shares), size=len(pretrained["test"]), p=shares))

    def _exchange(self, rung: Rung, decoder: str, english: English, language: str, side: Vectors) -> None:
        """Score an encoder under the heads of an English encoder."""
        key = rung.name, decoder, language
        if language in OTHERS:
            self.likeness[key].append(float(relative_cosine(english.vectors["pool"], side["pool"])))
        for bridge, received in english.received(side):
            for task in rung.tasks:
                answers = english.predictions(task, bridge, received)
                self.answers[task, rung.encoder, decoder, language, *bridge].append(answers)
            if language in OTHERS and bridge[0] != NEWS:
                self.hits[*key, *bridge].append(english.retrieved(bridge, received))


def summary(f1: Mapping[tuple[str, ...], Array]) -> dict[str, Any]:
    """Compute the intervals, fractions and differences of the record from macro F1 and its resamples."""
    chance: dict[str, list[float]] = {}
    ceilings, figures, differences = Cells(), Cells(), Cells()
    for key, values in f1.items():
        match key:
            case (task, "chance"):
                chance[task] = interval(values, 1)
            case (task, "own head", encoder, language):
                ceilings[task, encoder, language] = interval(values, 1)
            case (task, encoder, _, language, _, _):
                floor, ceiling = f1[task, CHANCE], f1[task, CEILING, encoder, language]
                fraction = (values - floor) / np.maximum(ceiling - floor, 1.0)
                figures[key] = [*interval(values, 1), *interval(fraction, 2)]
    for task, encoder, method, language in product(TASKS, MONOLINGUAL, CLAIMED, OTHERS):
        others = (
            (encoder, SAME, language, SHUFFLED, method),
            (encoder, SAME, language, PARALLEL, ABSOLUTE),
            (RANDOM, SAME, language, PARALLEL, method),
        )
        claimed = f1[task, encoder, SAME, language, PARALLEL, method]
        for control, control_key in zip(CONTROLS, others, strict=True):
            differences[task, encoder, method, language, control] = interval(
                claimed - f1[(task, *control_key)], 1, ERROR / (len(TASKS) * len(MONOLINGUAL))
            )
    return {
        "chance": chance, "ceilings": _nested(ceilings), "figures": _nested(figures),
        "differences": _nested(differences),
    }  # fmt: skip


def _nested(values: Cells) -> dict[str, Any]:
    """Nest a dict, with one level for each part of the keys."""
    nested: dict[str, Any] = {}
    for key, value in values.items():
        inner = nested
        for part in key[:-1]:
            inner = inner.setdefault(part, {})
        inner[key[-1]] = value
    return nested


def page(record: dict[str, Any]) -> str:
    sizes, rules = record["sizes"], ";\n".join(f"  *{task}*: {rule}" for task, rule in LISTED["rules"].items())
    shares = "; ".join(
        f"{task} {', '.join(f'{100 * share:.1f}%' for share in some)}" for task, some in record["classes"].items()
    )
    methods = "\n\n".join(_methods_table(record, task) for task in TASKS)
    return filled(
        __file__, claims(record), record=record, sizes=sizes, rules=rules, shares=shares,
        methods=methods, evidence=_evidence_table(record), summary=_summary_table(record), cautions=_cautions(record),
        minilm=_minilm_table(record), news=_news_table(record), alike=_alike_table(record),
        sentences=_curve_sentences(record), chance=100 / sizes["test"],
        ERROR=ERROR, FEW=FEW, RANDOM=RANDOM, STUDENT=STUDENT, SVD=SVD, TOPICS=TOPICS, TUNED=TUNED,
    )  # fmt: skip


def _f1(values: Sequence[float]) -> str:
    return f"{values[0]:.1f} [{values[1]:.1f}, {values[2]:.1f}]"


def _values(
    record: Mapping[str, Any], task: str, encoder: str, bridge: Bridge, decoder: str = SAME, of: int = 3
) -> list[float]:
    """Return F1 (``of=0``) or fractions (``of=3``) of the languages with a defined method."""
    by_language, (anchors, method) = record["figures"][task][encoder][decoder], bridge
    return [by_language[lang][anchors][method][of] for lang in OTHERS if method in by_language[lang][anchors]]


def _joined(values: Sequence[float], digits: int) -> str:
    return " / ".join(f"{value:.{digits}f}" for value in values) or "–"


PARALLELS = {method: (PARALLEL, method) for method in METHODS}
SHUFFLES = {f"shuffled, {method}": (SHUFFLED, method) for method in CLAIMED}
"""Title -> anchors and method."""


def _evidence_table(record: Mapping[str, Any]) -> str:
    rows = []
    for cell in product(TASKS, MONOLINGUAL, CLAIMED):
        by_language = evidence(record, *cell)
        fractions = [f"{figures['fraction']:.2f}" for figures in by_language.values()]
        least = [_f1(min(figures["over"][control] for figures in by_language.values())) for control in CONTROLS]
        rows.append((*cell, *fractions, *least, study.decided(map(accepted, by_language.values()))))
    over = [f"least difference to {control}" for control in CONTROLS]
    return study.markdown(("task", "encoder", "method", *OTHERS, *over, "verdict"), rows)


def _mean(record: Mapping[str, Any], encoder: str, *bridge: str) -> float:
    """Return the mean fraction over tasks and languages, with heads of the same kind."""
    return float(np.mean([_values(record, task, encoder, (bridge[0], bridge[1])) for task in TASKS]))


def _summary_table(record: Mapping[str, Any]) -> str:
    bridges = {**PARALLELS, **SHUFFLES, **{f"news, {method}": (NEWS, method) for method in METHODS[1:]}}
    rows = [(encoder, *(f"{_mean(record, encoder, *bridge):.2f}" for bridge in bridges.values())) for encoder in LADDER]
    return study.markdown(("encoder", *bridges), rows)


def _cautions(record: Mapping[str, Any]) -> str:
    untrained, learnt = ([_mean(record, encoder, PARALLEL, method) for method in CLAIMED] for encoder in (RANDOM, SVD))
    maps = {method: _mean(record, SVD, PARALLEL, method) for method in MAPS}
    best = max(maps, key=lambda method: maps[method])
    student, published = (_mean(record, STUDENT, PARALLEL, method) for method in ("procrustes", RELATIVE))
    return study.text(__file__, "cautions").format(
        untrained=untrained, learnt=learnt, SVD=SVD, STUDENT=STUDENT, best=best, most=maps[best], student=student,
        published=published, news=_mean(record, SVD, NEWS, RELATIVE),
    )  # fmt: skip


def _methods_table(record: Mapping[str, Any], task: str) -> str:
    bridges, rows = {**PARALLELS, **SHUFFLES}, []
    for encoder in LADDER:
        english = [record["figures"][task][encoder][SAME]["en"][PARALLEL][method][0] for method in (ABSOLUTE, *CLAIMED)]
        ceilings = [record["ceilings"][task][encoder][language][0] for language in OTHERS]
        columns = [english, ceilings, *(_values(record, task, encoder, bridge, of=0) for bridge in bridges.values())]
        rows.append((encoder, *(_joined(column, 1) for column in columns)))
    table = study.markdown(("encoder", "en on en", "ceiling", *bridges), rows)
    return f"**{task.capitalize()}** (chance {_f1(record['chance'][task])})\n\n{table}"


def _by_encoder(bridges: Mapping[str, Bridge], cell: Callable[[str, str, Bridge], str]) -> str:
    rows = [(*of, *(cell(*of, bridge) for bridge in bridges.values())) for of in product(TASKS, LADDER)]
    return study.markdown(("task", "encoder", *bridges), rows)


def _minilm_table(record: Mapping[str, Any]) -> str:
    bridges = {**PARALLELS, f"shuffled, {CENTRED}": (SHUFFLED, CENTRED)}
    return _by_encoder(bridges, lambda *cell: _joined(_values(record, *cell, MINILM), 2))


def _news_table(record: Mapping[str, Any]) -> str:
    bridges = {
        f"{method}{end}": (anchors, method)
        for method in (*CLAIMED, "ridge", "procrustes")
        for end, anchors in {"": PARALLEL, ", news": NEWS}.items()
    }
    return _by_encoder(bridges, lambda *cell: f"{np.mean(_values(record, *cell)):.2f}")


def _alike_table(record: Mapping[str, Any]) -> str:
    bridges = ((PARALLEL, RELATIVE), (PARALLEL, CENTRED), (PARALLEL, "procrustes"), (SHUFFLED, CENTRED))
    rows = []
    for encoder, decoder in product(LADDER, (SAME, MINILM)):
        likeness, retrieval = (
            [record[figure][name][decoder] for name in sorted({name_of(encoder, task) for task in TASKS})]
            for figure in ("likeness", "retrieval")
        )
        alike = [f"{np.mean([rung[language][0] for rung in likeness]):.3f}" for language in OTHERS]
        shares = [
            " / ".join(f"{np.mean([rung[lang][kind][method][0] for rung in retrieval]):.1f}" for lang in OTHERS)
            for kind, method in bridges
        ]
        rows.append((encoder, decoder, *alike, *shares))
    ends = [f"retrieval, {method}{', shuffled' if kind == SHUFFLED else ''}" for kind, method in bridges]
    header = ("encoder", "English encoder", *(f"likeness, {language}" for language in OTHERS), *ends)
    return study.markdown(header, rows) + "\n\nRetrieval: " + " / ".join(OTHERS) + ", percent."


def _curve_sentences(record: Mapping[str, Any]) -> str:
    """Report for each task the correlation of fraction and likeness, and the likeness of sufficient fractions."""
    lines = []
    for task in TASKS:
        points = [
            (record["likeness"][name_of(encoder, task)][decoder][language][0], fraction)
            for encoder, decoder in product(LADDER, (SAME, MINILM))
            for language, fraction in zip(
                OTHERS, _values(record, task, encoder, (PARALLEL, CENTRED), decoder), strict=True
            )
        ]
        likeness, fractions = np.array(points).T
        size = len(OTHERS)  # consecutive points with the same encoders are resampled together
        count = len(likeness) // size
        groups = np.random.default_rng(0).integers(count, size=(2_000, count, 1))
        draws = (groups * size + np.arange(size)).reshape(len(groups), -1)
        ranks = [rankdata(values[draws], axis=1) for values in (likeness, fractions)]
        first, second = ((rows - rows.mean(1, keepdims=True)) / rows.std(1, keepdims=True) for rows in ranks)
        low, high = np.quantile((first * second).mean(1), [0.025, 0.975])
        text = (
            f"- **{task}**: rank correlation of likeness and fraction {spearmanr(likeness, fractions).statistic:.2f} "
            f"[{low:.2f}, {high:.2f}] (n = {len(likeness)} points of {count} pairs of encoder kinds)"
        )
        enough = fractions >= ENOUGH
        if enough.any():
            text += f"; the smallest likeness with a fraction of at least {ENOUGH} is {likeness[enough].min():.2f}"
        if not enough.all():
            text += f"; the largest likeness with a smaller fraction is {likeness[~enough].max():.2f}"
        lines.append(f"{text}.")
    return "\n".join(lines)


def main() -> None:
    arguments = study.parser(__doc__, "data-dir", "cache", required={"data-dir"}).parse_args()
    study.write_results("translated_labels", measured(arguments.data_dir, arguments.cache), page, arguments.out)
