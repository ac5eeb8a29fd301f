"""Experiment 2: ResNet-20 at several widths (Csiszárik et al. 2021, section 5.2, figure 3).

Wider networks are also more accurate. Networks of width 1 that stopped training early are about as accurate as the
narrow networks; next to the published networks of width 1, they separate width from accuracy.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import study
from dr_frankenstein import base_training, experiment, frankenstein, images
from dr_frankenstein.base_training import Base
from dr_frankenstein.experiment import TASK, Networks, Sizes, scored

SIZES = Sizes(5_000, 3_000, 2, lr=3e-3, schedule="cosine", batch=64)
LAYERS = ("conv1", "layer1.1", "layer2.1", "layer3.1")
EARLY, FULL = "1, stopped early", "1, trained to the end"
KINDS = {"¼": (0.25, 12), "½": (0.5, 6), EARLY: (1, 3)}
"""Name -> width and training epochs."""
PAIRS = (("¼", EARLY), ("¼", "½"), ("½", FULL))
"""Narrow kind, wide kind."""
ALIKE = 0.05
"""Wider networks that are more accurate by more than this cannot separate width from accuracy."""


def main() -> None:
    arguments = experiment.read(__doc__)
    samples, kinds = SIZES.samples(arguments.data_dir), {}
    for name, (width, epochs) in KINDS.items():
        bases = [Base("resnet20", epochs, 50_000, seed, width=width) for seed in (0, 1)]
        networks = base_training.adapted(bases, arguments.networks, arguments.data_dir)
        accuracies = [base_training.recorded_accuracy(base, arguments.networks) for base in bases]
        kinds[name] = stitched(networks, accuracies, samples)
    if arguments.published:
        networks = experiment.loaded("resnet20", arguments)
        tested = images.read("cifar10", "test", 10_000, arguments.data_dir)
        kinds[FULL] = stitched(networks, [base_training.accuracy(n.model, *tested) for n in networks.values()], samples)
    record = {
        "preset": SIZES, "setting": str(SIZES), "epochs": {name: count for name, (_, count) in KINDS.items()},
        "pairs": [pair for pair in PAIRS if set(pair) <= set(kinds)], "kinds": kinds,
    }  # fmt: skip
    study.write_results("widths", record, page, arguments.out)


def stitched(networks: Networks, accuracies: Sequence[float], samples: Sequence[Any]) -> dict[str, Any]:
    """Stitch each network to the next one of its kind, by least squares and by task loss."""
    pairs = frankenstein.ring(networks)
    answers = frankenstein.answers(networks, pairs, LAYERS, *samples, direct={}, trained={TASK: SIZES.task_loss})
    methods = (TASK, frankenstein.START, *frankenstein.BASELINES)
    relative = {method: [answers.relative(layer, method) for layer in LAYERS] for method in methods}
    return {"accuracies": accuracies, "layers": LAYERS, "relative_accuracy": relative}


(GROWS,) = study.stated(__file__)


def page(record: dict[str, Any]) -> str:
    findings = [
        f"- {narrow} → {wide}: "
        + ", ".join(f"{layer} {study.shown(gain)}" for layer, gain in gains(record, narrow, wide).items())
        for narrow, wide in record["pairs"]
    ]
    rows = []
    for name, kind in record["kinds"].items():
        accuracies = ", ".join(f"{accuracy:.3f}" for accuracy in kind["accuracies"])
        for method in (TASK, frankenstein.START, "mean_only"):
            scores = map(scored, kind["relative_accuracy"][method])
            cells = [f"{s.value:.3f}" if method == "mean_only" else str(s) for s in scores]
            rows.append((name, accuracies, method.replace("_", " "), *cells))
    return experiment.written(
        __file__, record, claims(record), alike=ALIKE, findings="\n".join(findings),
        table=study.markdown(("width", "accuracy of the networks", "method", *LAYERS), rows),
        epochs="; ".join(f"{name}: {count} epochs" for name, count in record["epochs"].items()),
    )  # fmt: skip


def gains(record: dict[str, Any], narrow: str, wide: str) -> dict[str, dict[str, float]]:
    """Return the gain in relative accuracy of the wider networks, by layer."""
    kinds = [record["kinds"][name] for name in (wide, narrow)]
    scores = zip(*(kind["relative_accuracy"][TASK] for kind in kinds), strict=True)
    return {layer: study.difference(*pair) for layer, pair in zip(kinds[0]["layers"], scores, strict=True)}


def more_accurate(record: dict[str, Any], narrow: str, wide: str) -> float:
    """Return the difference in accuracy between the wider and the narrower networks."""
    return float(np.subtract(*(np.mean(record["kinds"][name]["accuracies"]) for name in (wide, narrow))))


def parts(record: dict[str, Any], narrow: str, wide: str) -> list[bool | None]:
    """Return whether the wider networks are better at half of the layers, and worse at no layer."""
    above = [study.above(gain, 0) for gain in gains(record, narrow, wide).values()]
    if more_accurate(record, narrow, wide) > ALIKE:
        return [None]
    return [study.at_least(-(-len(above) // 2), above), False not in above]


def claims(record: dict[str, Any]) -> list[dict[str, str]]:
    rows = []
    for narrow, wide in record["pairs"]:
        above = [study.above(gain, 0) for gain in gains(record, narrow, wide).values()]
        ours = (
            f"better at {above.count(True)} of {len(above)} layers, worse at {above.count(False)}; accuracy "
            f"{more_accurate(record, narrow, wide):+.3f}"
        )
        count = len(record["kinds"][narrow]["accuracies"])
        held, n = parts(record, narrow, wide), f"{count} networks of each kind"
        rows.append(GROWS.of(narrow, wide).row(ours, n, held, math.comb(count, 2)))
    return rows
