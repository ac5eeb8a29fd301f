"""Stitches of trained networks: all pairs of cuts, the choice of the matcher, an audit, and another encoder."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np
from numpy.typing import NDArray

import hf_stitch
from benchmarks.real import data, sameness
from benchmarks.real.places import QUIET, Places, closeness, interval, outputs, shown
from hf_stitch.adapters import untrained

LEARNED = ("MiniLM", "E5")
PAIRS = [*permutations(("lite0", "lite1", "lite2"), 2), *permutations(LEARNED), ("Tiny-10 0", "ResNet-20 0"),
         ("ResNet-20 0", "Tiny-10 0")]  # fmt: skip
MATCHERS: dict[str, dict[str, Any]] = {
    "lstsq": {}, "ridge": {"ridge": "gcv"}, "procrustes": {"scale": True}, "low_rank": {"rank": 12},
    "recoloured": {},
}  # fmt: skip
"""Matchers to choose from, the default first, with their options."""


def options_of(a: str) -> dict[str, Any]:
    """Return the options of a stitch: encoders with different tokenizers share one vector per text."""
    return {**QUIET, **({"pooling": "mean", "task": None} if a in LEARNED else {})}


def parts(places: Places, name: str, *sizes: int) -> list[hf_stitch.Samples]:
    """Return disjoint sets of samples for a network."""
    samples = hf_stitch.Samples.of(data.samples(places.kind(name), places.data, sum(sizes)))
    ends = np.cumsum(sizes)
    return [samples.select(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)]


def matcher(places: Places, a: str, b: str) -> dict[str, Any]:
    """Choose a matcher on a third split and score it on a fourth; it holds if it gains beyond its interval."""
    source, target = places.network(a), places.network(b)
    fit, layers, choose, test = parts(places, a, 800, 200, 400, 600)
    atlas = hf_stitch.compare(
        source, target, layers, layers_a=source.layers, layers_b=target.layers, metrics=["linear_cka:debiased=True"],
        **QUIET,
    )  # fmt: skip
    source_layer, target_layer = atlas.best_pair()
    whole = {name: outputs(target, samples) for name, samples in (("choose", choose), ("test", test))}
    scores: dict[str, dict[str, NDArray[np.float64]]] = {}
    for name, options in MATCHERS.items():
        model = hf_stitch.stitch(
            source, target, fit, source_layer=source_layer, target_layer=target_layer, matcher=name,
            test_data=choose.take(50), **options, **options_of(a),
        )  # fmt: skip
        scores[name] = {
            part: closeness(outputs(model, samples), whole[part], a not in LEARNED)
            for part, samples in (("choose", choose), ("test", test))
        }
    chosen = max(scores, key=lambda name: scores[name]["choose"].mean())
    gain = interval(scores[chosen]["test"] - scores["lstsq"]["test"])
    test_means = {name: float(row["test"].mean()) for name, row in scores.items()}
    return {
        "outcome": f"{source_layer} → {target_layer}: chosen {chosen}, {test_means[chosen]:.3f} against "
        f"{test_means['lstsq']:.3f} with lstsq, gain {shown(gain)}; "
        + ", ".join(f"{name} {value:.3f}" for name, value in test_means.items()),
        "holds": gain[1] > 0, "scores": test_means, "gain": gain, "chosen": chosen,
    }  # fmt: skip


def grid(places: Places, a: str, b: str) -> dict[str, Any]:
    """Stitch all cuts; the best stitch must beat the mean of the target's activations and an untrained source."""
    source, target = places.network(a), places.network(b)
    fit, choose, test = parts(places, a, 800, 200, 400)
    found = hf_stitch.stitch_grid(
        source, target, fit, test_data=choose, matchers=["ridge:ridge=gcv"], resamples=100,
        **{key: value for key, value in options_of(a).items() if key != "task"},
    )  # fmt: skip
    figure = "agreement" if "agreement" in found.figures else "cosine"
    values = np.asarray(found.values(None, figure))
    i, j = np.unravel_index(np.nanargmax(values), values.shape)
    layers = {"source_layer": found.layers_a[i], "target_layer": found.layers_b[j]}
    options = {"matcher": "ridge", "ridge": "gcv", "test_data": test, **layers, **options_of(a)}
    models = {who: hf_stitch.stitch(each, target, fit, **options) for who, each in
              (("trained", source), ("untrained", untrained(source)))}  # fmt: skip
    score = {who: model.evaluation[figure] for who, model in models.items()}
    mean = models["trained"].evaluation.scores["mean_only"][figure]
    best = max(mean.value, score["untrained"].value)
    return {
        "outcome": f"{layers['source_layer']} → {layers['target_layer']}, the best of {values.size}: {figure} "
        f"{score['trained']} (mean only {mean.value:.3f}, untrained source {score['untrained'].value:.3f})",
        "holds": score["trained"].low > best, "values": values.tolist(), "layers": layers,
    }  # fmt: skip


def audited(places: Places, a: str, b: str) -> dict[str, Any]:
    """Audit a stitch at half of the depth of both networks."""
    source, target = places.network(a), places.network(b)
    fit, test = parts(places, a, 800, 600)
    model = hf_stitch.stitch(
        source, target, fit, source_layer=source.layers[len(source.layers) // 2],
        target_layer=target.layers[len(target.layers) // 2], matcher="ridge", ridge="gcv", test_data=test.take(200),
        **QUIET,
    )  # fmt: skip
    found = hf_stitch.audit(model, test, train_data=fit, **QUIET)
    assert isinstance(found, hf_stitch.analysis.Audit)
    doses = ", ".join(f"{name} {score.value:.2f}" for name, score in found.doses.items())
    sound = found.is_accurate and found.in_distribution
    return {"outcome": f"{found.verdict}; doses: {doses or 'none'}", "holds": sound}


def swapped(places: Places, a: str, b: str) -> dict[str, Any]:
    """Give a classifier of questions that was trained on b the encoder a; better than the mean of its activations."""
    encoder, model = places.network(a), sameness.classifier(places, b)
    anchors, test = (data.questions(*part) for part in (("train", places.data, 800, 1500), ("test", places.data)))
    found = hf_stitch.swap(
        model, encoder, anchors, encoder_layer=encoder.layers[-1], target_layer="bert.pooler", data=test, **QUIET
    )  # fmt: skip
    accuracy = {who: figures["accuracy"] for who, figures in found.evaluation.scores.items()}
    return {
        "outcome": f"accuracy {accuracy['stitched']} with {found.config.recipe['matcher']['name']} from 800 anchors "
        f"(own encoder {accuracy['target'].value:.3f}, mean only {accuracy['mean_only'].value:.3f})",
        "holds": accuracy["stitched"].low > accuracy["mean_only"].value,
    }  # fmt: skip


ROWS: dict[str, tuple[Any, ...]] = {
    **{f"grid: {a} → {b}": (grid, a, b) for a, b in (("lite0", "lite2"), LEARNED, ("Tiny-10 0", "ResNet-20 0"))},
    **{f"matcher: {a} → {b}": (matcher, a, b) for a, b in PAIRS},
    **{f"audit: {a} → {b}": (audited, a, b) for a, b in (("lite0", "lite2"), ("Tiny-10 0", "ResNet-20 0"))},
    **{f"swap: {a} → {b}": (swapped, a, b) for a, b in permutations(LEARNED)},
}
