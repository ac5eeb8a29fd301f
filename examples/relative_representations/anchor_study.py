"""Effect and cost of anchors: number, selection, and how often they are embedded (Moschella et al. 2023).

Number and selection are studied with heads on frozen encoders of three seeds, as in cross_seed.py. The frequency is
studied in end-to-end training on Fashion-MNIST, as in end_to_end.py. Cost is measured in processor time.

    python examples/relative_representations/anchor_study.py --data-dir DATA --cache CACHE --out OUT
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import cross_seed
import end_to_end
import experiment
import image_encoders
import images
import pandas as pd
import swapping
import torch
from experiment import CHECK, spread
from matplotlib.figure import Figure
from swapping import OTHER, OWN, RELATIVE, Encoded

import hf_stitch
from hf_stitch.plots import curves

TASK = "cifar100"


@dataclass(frozen=True)
class Preset:
    """Settings to compare.

    Attributes:
        numbers: Numbers of anchors.
        kinds: Number of anchors for comparing selections.
        every: Numbers of steps between embeddings of the anchors.
    """

    numbers: Sequence[int]
    kinds: int
    every: Sequence[int]


PRESETS = {
    "small": Preset((10, 50, 200, 800), 100, (1, 5, 25, 10**6)),
    "test": Preset((5, 20), 10, (1, 10**6)),
    "paper": Preset((10, 30, 100, 300, 768, 3000), 300, (1, 5, 25, 100, 10**6)),
}
KINDS = ("random", "stratified", "farthest_point", "kmeans")
OUT_OF_DOMAIN = "random, of Fashion-MNIST"


def main() -> None:
    """Run the experiment from the command line."""
    arguments = experiment.parser(__doc__).parse_args()
    preset = PRESETS[arguments.preset]
    by_number, by_kind = on_frozen(arguments, preset)
    by_frequency = in_training(arguments, preset)
    text = "\n\n".join(
        [f"**{CHECK}**", _table(by_number, "anchors"), _table(by_kind, "kind"), _table(by_frequency, "embedded every")]
    )
    record = {"number": by_number, "kind": by_kind, "frequency": by_frequency}
    pictures = {"anchors_number": _curve(by_number)}
    experiment.leave("anchor_study", text, {"preset": preset, **record}, pictures, arguments.out)


Found = dict[str, dict[str, Any]]
"""Setting -> scores: for ``OWN`` and ``OTHER`` a value for each seed, and ``seconds`` of processor time."""


def on_frozen(arguments: argparse.Namespace, preset: Preset) -> tuple[Found, Found]:
    """Compare numbers and selections of anchors for heads on three frozen encoders."""
    base = cross_seed.PRESETS[arguments.preset]
    encoders = cross_seed.encoders_of(arguments, base)
    train, test = (
        images.read(TASK, split, n, arguments.data_dir) for split, n in (("train", base.train), ("test", base.test))
    )
    sides = {each.name: swapping.encoded(each, train, test, arguments.cache) for each in encoders}
    numbers = {}
    for number in preset.numbers:
        chosen = swapping.choices(train, sides.values(), "random", replace(base, anchors=number))
        numbers[str(number)] = _scores(sides, chosen, base, train.num_classes)
    features = sides[encoders[0].name].train
    kinds = {}
    for kind in KINDS:
        needed = features if kind in ("farthest_point", "kmeans") else None
        chosen = swapping.choices(train, sides.values(), kind, replace(base, anchors=preset.kinds), needed)
        kinds[kind] = _scores(sides, chosen, base, train.num_classes)
    # Out of domain: grey clothes in a black frame.
    clothes = images.read("fashion_mnist", "train", 500, arguments.data_dir)
    others = hf_stitch.Samples.of(_framed(images.pixels(clothes)))
    foreign = {each.name: replace(sides[each.name], pool=each.vectors(others, arguments.cache)) for each in encoders}
    chosen = swapping.choices(others, foreign.values(), "random", replace(base, anchors=preset.kinds))
    kinds[OUT_OF_DOMAIN] = _scores(foreign, chosen, base, train.num_classes)
    return numbers, kinds


def _framed(pixels: torch.Tensor) -> torch.Tensor:
    """Pad grey images of 28 × 28 pixels to 32 × 32, and normalise them as RGB."""
    return image_encoders.normalised(torch.nn.functional.pad(pixels, (2, 2, 2, 2)).expand(-1, 3, -1, -1))


def _scores(
    sides: Mapping[str, Encoded], chosen: Sequence[Sequence[int]], base: experiment.Preset, classes: int
) -> dict[str, Any]:
    started = time.process_time()
    found = swapping.exchange(sides, chosen, base, classes, methods=(RELATIVE,), translations={})
    seconds = (time.process_time() - started) / (len(sides) * len(chosen))
    return {**swapping.summary(found)[RELATIVE], "seconds": seconds}


def in_training(arguments: argparse.Namespace, preset: Preset) -> Found:
    """Compare how often anchors are embedded in end-to-end training."""
    base = end_to_end.PRESETS[arguments.preset]
    task = end_to_end.of_images("fashion_mnist", base, arguments.data_dir)
    anchors = end_to_end.anchors_of(task, base.anchors)
    found = {}
    for every in (*preset.every, None):
        started = time.process_time()
        trained = [
            end_to_end.fit(task, None if every is None else anchors, seed, every or 1) for seed in range(base.seeds)
        ]
        seconds = (time.process_time() - started) / len(trained)
        scores = pd.DataFrame(
            {
                "own": source is target,
                "f1": swapping.scored(task.labels[task.test], target.answers(source, task.test))["f1"],
            }
            for source, target in product(trained, repeat=2)
        )
        name = "absolute" if every is None else "before training and after" if every >= 10**6 else f"{every} steps"
        parts = {kind: scores[scores.own == own].f1.tolist() for kind, own in ((OWN, True), (OTHER, False))}
        found[name] = {**parts, "seconds": seconds}
    return found


def _table(found: Found, what: str) -> str:
    columns = list(next(iter(found.values())))
    rows = [
        (name, *(spread(figures[c]) for c in columns[:-1]), f"{figures['seconds']:.1f}")
        for name, figures in found.items()
    ]
    return experiment.markdown(rows, (what, *columns[:-1], "seconds to train"))


def _curve(found: Found) -> Figure:
    series: dict[str, dict[float, tuple[float, float, float]]] = {}
    for number, figures in found.items():
        for name, values in figures.items():
            if name != "seconds":
                series.setdefault(name, {})[float(number)] = (sum(values) / len(values), min(values), max(values))
    figure = curves(series, axis="anchors", label="weighted F1, percent", title=f"Heads on {TASK} (20 coarse classes)")
    figure.axes[0].set_xscale("log")
    return figure


if __name__ == "__main__":
    main()
