"""Several stitches in one network: chains of Tiny-10 networks of different seeds.

An input runs through the first network up to bn2, the second from there up to bn4, the third up to bn6 and the rest of
the fourth. Each chain is compared with its last network, and with the product of the relative accuracies of its single
stitches, which it would reach if their errors were independent. A stitch is fitted only to the networks on both sides,
or to the activations of the preceding chain, so that it can correct errors of the chain.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import exp, hypot, log, prod
from typing import Any

import study
import torch
from dr_frankenstein import experiment, stitching
from dr_frankenstein.experiment import Sizes
from dr_frankenstein.frankenstein import Answers
from torch import Tensor

import hf_stitch
from hf_stitch import Adapter, Samples, registries
from hf_stitch.analysis.evaluation import Score
from hf_stitch.artefacts.joining import join
from hf_stitch.stitches import StitchingLayer

SIZES = Sizes(2_000, 2_500)
ORDERS = 5
"""Number of chains; each begins two networks after the previous one."""
LAYERS = ("bn2", "bn4", "bn6")
"""Layers of the stitches; networks between two stitches are cut at both layers."""
PARTS = ((0, 1), (1, 2), (2, 3), (0, 2), (1, 3), (0, 3))
"""First and last stitch (exclusive) of each chain: one stitch, two, and three."""
MATCHERS: dict[str, Any] = {
    "least squares": "lstsq",
    "Procrustes": {"name": "procrustes", "scale": True},
    "relative": "inverse_relative",
    "identity": "identity",
}
IN_CHAIN = ", fitted in the chain"


def chains(networks: Sequence[Adapter], train: Samples) -> Iterator[tuple[str, str, Adapter]]:
    """Build all chains of four networks in a given order: layers of the stitches, method, and chain."""
    alone = {
        (method, place): stitch
        for place, layer in enumerate(LAYERS)
        for method, stitch in _fitted(MATCHERS, *networks[place : place + 2], (layer, layer), train).items()
    }
    for begin, end in PARTS:
        name = "+".join(LAYERS[begin:end])
        for method in MATCHERS:
            for in_chain in (False, True) if end - begin > 1 and method != "identity" else (False,):
                chain = networks[begin]
                for place in range(begin, end):
                    stitch, target, cut = alone[method, place], networks[place + 1], LAYERS[place]
                    last = cut if place == begin else f"target.{cut}"  # the cut of the chain, by its name in the chain
                    if in_chain and place > begin:
                        stitch = _fitted([method], chain, target, (last, cut), train)[method]
                    chain = hf_stitch.load(join(chain, last, stitch, target, cut, task=target.task))
                yield name, method + IN_CHAIN * in_chain, chain


def _fitted(methods: Iterable[str], *pair: Any) -> dict[str, StitchingLayer]:
    """Fit the stitches between two networks at two cuts, by method."""
    source, target, cuts, train = pair
    statistics = stitching.collected(source, target, [cuts], train)
    return {method: registries.matchers.build(MATCHERS[method]).match(statistics).only for method in methods}


def measured(
    networks: dict[str, Adapter], orders: Sequence[Sequence[str]], train: Samples, test: Samples
) -> dict[str, dict[str, Score]]:
    """Return layers of the stitches -> method -> accuracy relative to the last network, as the mean over orders."""
    whole = {name: stitching.logits(network, test) for name, network in networks.items()}
    chain_logits: dict[str, dict[str, list[Tensor]]] = {}
    for number, order in enumerate(orders):
        print(f"order {number + 1} of {len(orders)}: {' → '.join(order)}", flush=True)
        for layers, method, chain in chains([networks[name] for name in order], train):
            chain_logits.setdefault(layers, {}).setdefault(method, []).append(stitching.logits(chain, test))
    scores = {}
    for begin, end in PARTS:
        layers = "+".join(LAYERS[begin:end])
        stitched = {layers: {method: torch.stack(outputs) for method, outputs in chain_logits[layers].items()}}
        pairs = tuple((order[begin], order[end]) for order in orders)
        answers = Answers(pairs, torch.tensor(test.labels), torch.stack([whole[b] for _, b in pairs]), stitched)
        scores[layers] = {method: answers.relative(layers, method) for method in chain_logits[layers]}
    return scores


def products(scores: dict[str, dict[str, Score]]) -> dict[str, dict[str, float]]:
    """Return the product of the relative accuracies of the single stitches, for chains of several stitches."""
    methods = [method for method in MATCHERS if method != "identity"]
    return {
        layers: {method: prod(scores[layer][method].value for layer in layers.split("+")) for method in methods}
        for layers in scores if "+" in layers
    }  # fmt: skip


def table(scores: dict[str, dict[str, Score]]) -> str:
    expected, rows, header = products(scores), [], ["stitches at", "number"]
    for method in MATCHERS:
        header += [method, *(["product of its stitches", "fitted in the chain"] if method != "identity" else [])]
    for layers, methods in scores.items():
        cells = [layers, str(layers.count("+") + 1)]
        for method in MATCHERS:
            cells.append(str(methods[method]))
            if method != "identity":
                cells.append(f"{expected[layers][method]:.3f}" if layers in expected else "–")
                cells.append(str(methods.get(method + IN_CHAIN, "–")))
        rows.append(cells)
    return study.markdown(header, rows)


def main() -> None:
    arguments = experiment.read(__doc__)
    networks = experiment.loaded("tiny10", arguments, seeds=len(LAYERS) + 1)
    names = list(networks)
    step = max(1, len(names) // ORDERS)
    orders = [[names[(first * step + i) % len(names)] for i in range(len(LAYERS) + 1)] for first in range(ORDERS)]
    scores = measured(networks, orders, *SIZES.samples(arguments.data_dir))
    record = {"preset": SIZES, "orders": orders, "relative_accuracy": scores, "products": products(scores)}
    study.write_results("several_stitches", record, page, arguments.out)


(INDEPENDENT,) = study.stated(__file__)


def page(record: dict[str, Any]) -> str:
    scores = {
        layers: {method: Score(**score) for method, score in methods.items()}
        for layers, methods in record["relative_accuracy"].items()
    }
    return experiment.written(
        __file__, record, claims(record), orders=len(record["orders"]), train=record["preset"]["train"],
        test=record["preset"]["test"], table=table(scores), findings="\n".join(_findings(scores)),
        names="; ".join(" → ".join(order) for order in record["orders"]),
    )  # fmt: skip


def _findings(scores: dict[str, dict[str, Score]]) -> Iterator[str]:
    """Yield one sentence per method for the longest chain."""
    whole, expected = "+".join(LAYERS), products(scores)
    for method in MATCHERS:
        chain = scores[whole][method]
        if method == "identity":
            yield f"- Without maps ({method}), {chain.value:.3f} of the accuracy remains after three stitches."
            continue
        alone = ", ".join(f"{scores[layer][method].value:.3f}" for layer in LAYERS)
        product, chained = expected[whole][method], scores[whole][method + IN_CHAIN]
        where = "within the interval" if chain.low <= product <= chain.high else "outside the interval"
        than = "above" if chain.value > product else "below"
        yield study.text(__file__, "method").format(
            method=method, alone=alone, at=", ".join(LAYERS), own=chain, than=than, product=product, where=where,
            gain="raises" if chained.value > chain.value else "lowers", chained=chained,
        )  # fmt: skip


def claims(record: dict[str, Any]) -> list[dict[str, str]]:
    scores = record["relative_accuracy"]
    chain = scores["+".join(LAYERS)]["least squares"]
    product = multiplied([scores[layer]["least squares"] for layer in LAYERS])
    gap, count = study.difference(chain, product), len(record["orders"])
    ours = f"{study.shown(chain)}; product of the stitches {study.shown(product)}; difference {study.shown(gap)}"
    held = None if gap["low"] <= 0 <= gap["high"] else False
    return [INDEPENDENT.row(ours, f"{count} chains", [held], count)]


def multiplied(scores: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the product of scores, with an interval computed from their intervals, like :func:`study.difference`."""
    value = prod(score["value"] for score in scores)
    return {"value": value} | {
        end: value * exp(sign * hypot(*(log(score[end] / score["value"]) for score in scores)))
        for end, sign in {"low": -1, "high": 1}.items()
    }
