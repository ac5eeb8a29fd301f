"""Shorter encoders, the block with the best features, and a probe that changes its encoder, on questions of TREC."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from hf_stitch_shorten import best_depth, shorten
from hf_stitch_transfer import transfer_probe
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression

import hf_stitch
from benchmarks.real import data
from benchmarks.real.places import QUIET, Places, closeness, interval, outputs, overlap, shown
from hf_stitch import Samples
from hf_stitch.adapters import untrained
from hf_stitch.analysis import extract_activations

FIT, PROBE, TEST = 1500, 1500, 1000


def split(places: Places) -> tuple[Samples, Samples, Samples]:
    """Return questions to fit on, to train probes on, and to test on; none is used twice."""
    questions = data.questions("train", places.data)
    ends = np.cumsum((FIT, PROBE, TEST))
    fit, probe, test = (
        questions.select(range(end - size, end)) for size, end in zip((FIT, PROBE, TEST), ends, strict=True)
    )
    return fit, probe, test


def correct(model: Any, train: Samples, test: Samples) -> NDArray[np.float64]:
    """Train a probe on the vectors of a network; return for each test sample whether its class is right."""
    x, y = outputs(model, train).numpy(), outputs(model, test).numpy()
    scale = x.std()
    probe = LogisticRegression(max_iter=3000).fit(x / scale, train.labels)
    return np.asarray(probe.predict(y / scale) == np.asarray(test.labels), float)


def shortened(places: Places, name: str, remove: int) -> dict[str, Any]:
    """Remove blocks in three ways; it holds if the refit keeps more neighbours than both others, with confidence."""
    network = places.network(name)
    fit, train, test = split(places)
    whole = outputs(network, test)
    scores: dict[str, dict[str, NDArray[np.float64]]] = {"whole": {"accuracy": correct(network, train, test)}}
    removed = {}
    for method in ("refit", "drop", "replaceme"):
        found = shorten(network, fit, remove=remove, matcher=method, **QUIET)
        assert found.model is not None
        vectors = outputs(found.model, test)
        scores[method] = {
            "overlap": overlap(vectors, whole), "cosine": closeness(vectors, whole, False),
            "accuracy": correct(found.model, train, test),
        }  # fmt: skip
        removed[method] = [block.rpartition(".")[2] for block in found.removed]
    gains = {
        other: {figure: interval(scores["refit"][figure] - scores[other][figure]) for figure in scores["refit"]}
        for other in ("drop", "replaceme")
    }
    figures = {who: {figure: interval(values) for figure, values in row.items()} for who, row in scores.items()}
    text = "; ".join(
        f"{who} (blocks {', '.join(removed[who])}): overlap {row['overlap'][0]:.3f}, cosine {row['cosine'][0]:.3f}, "
        f"accuracy {row['accuracy'][0]:.3f}" for who, row in figures.items() if who != "whole"
    )  # fmt: skip
    return {
        "outcome": f"{text}; whole: accuracy {figures['whole']['accuracy'][0]:.3f}. Gain in overlap over dropping "
        f"{shown(gains['drop']['overlap'])}, over ReplaceMe {shown(gains['replaceme']['overlap'])}",
        "holds": all(rows["overlap"][1] > 0 for rows in gains.values()), "scores": figures, "gains": gains,
        "removed": removed,
    }  # fmt: skip


def depth(places: Places, name: str) -> dict[str, Any]:
    """Find the block with the best features; it holds if the choice pays on folds that did not choose."""
    found = best_depth(places.network(name), split(places)[0].take(1000), **QUIET)
    return {"outcome": str(found.verdict), "holds": found.pays, "accuracies": dict(found.accuracies)}


def carried(places: Places, a: str, b: str) -> dict[str, Any]:
    """Carry a probe to another encoder; it must beat the most frequent class, and the same way to an untrained one."""
    first, second = places.network(a), places.network(b)
    fit, train, test = split(places)

    def rows(network: hf_stitch.Adapter, samples: Samples) -> Any:
        layer = network.layers[-1]
        found = extract_activations(network, samples, layers=[layer], pooling="mean", **QUIET)
        return torch.as_tensor(found.values[layer]).numpy()

    probe = LogisticRegression(max_iter=3000).fit(rows(first, train), train.labels)
    labels = np.asarray(test.labels)
    own = LogisticRegression(max_iter=3000).fit(rows(second, train), train.labels)
    accuracy = {
        "in its own encoder": interval(np.asarray(probe.predict(rows(first, test)) == labels, float)),
        "trained in the second": interval(np.asarray(own.predict(rows(second, test)) == labels, float)),
        "most frequent class": interval(np.asarray(labels == np.bincount(labels).argmax(), float)),
    }
    for label, network in (("carried", second), ("carried to an untrained encoder", untrained(second))):
        options = {"pooling": "mean", "task": None, "matcher": "ridge", "ridge": "gcv", **QUIET}
        forward, back = (
            hf_stitch.stitch(x, y, fit, source_layer=x.layers[-1], target_layer=y.layers[-1], **options)
            for x, y in ((first, network), (network, first))
        )
        moved = transfer_probe(probe, forward, reverse=back)
        accuracy[label] = interval(np.asarray(moved.predict(rows(network, test)) == labels, float))
    best = max(accuracy[who][2] for who in ("most frequent class", "carried to an untrained encoder"))
    return {
        "outcome": "; ".join(f"{who} {value[0]:.3f}" for who, value in accuracy.items()),
        "holds": accuracy["carried"][1] > best,
        "accuracy": accuracy,
    }


ROWS: dict[str, tuple[Any, ...]] = {
    **{
        f"shorten: {name} by {remove}": (partial(shortened, remove=remove), name)
        for name, counts in (("MiniLM", (1, 2, 3)), ("E5", (2, 3, 4, 5, 6)))
        for remove in counts
    },
    **{f"depth: {name}": (depth, name) for name in ("MiniLM", "E5")},
    "probe: MiniLM → E5": (carried, "MiniLM", "E5"), "probe: E5 → MiniLM": (carried, "E5", "MiniLM"),
}  # fmt: skip
