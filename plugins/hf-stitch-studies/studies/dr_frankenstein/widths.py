"""Experiment 2: ResNet-20 at several widths (Csiszárik et al. 2021, section 5.2, figure 3).

Wider networks are also more accurate. Beside the published networks of width 1 stand networks of width 1 of which
training stopped early, about as accurate as the narrow ones, so that width and accuracy can be told apart.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import study
from dr_frankenstein import experiment, networks
from dr_frankenstein.base_training import Base
from dr_frankenstein.experiment import PAPER, TASK, Preset


@dataclass(frozen=True)
class Sizes:
    """Sizes of matching, and the networks of a preset."""

    preset: Preset
    kinds: dict[str, tuple[float, int]]  # name -> width and training epochs
    pairs: tuple[tuple[str, str], ...]  # a narrow kind and a wide one
    layers: tuple[str, ...]


ALIKE = 0.05
"""Wider networks that are more accurate by more than this do not tell width from accuracy."""
EARLY, FULL = "1, stopped early", "1, trained to the end"
PRESETS = {
    "small": Sizes(
        Preset(5_000, 3_000, 2, (50_000, 0), lr=3e-3, schedule="cosine", batch=64),
        {"¼": (0.25, 12), "½": (0.5, 6), EARLY: (1, 3)},
        (("¼", EARLY), ("¼", "½"), ("½", FULL)),
        ("conv1", "layer1.1", "layer2.1", "layer3.1"),
    ),
    "paper": Sizes(
        PAPER, {str(width): (width, 300) for width in (1, 2, 3, 4, 5)},
        (("1", "2"), ("2", "3"), ("3", "4"), ("4", "5")), networks.ResNet20.cuts,
    ),
}  # fmt: skip


def main() -> None:
    run = experiment.Run.of(__doc__, {name: sizes.preset for name, sizes in PRESETS.items()})
    sizes, preset, kinds = PRESETS[run.name], run.preset, {}
    for name, (width, epochs) in sizes.kinds.items():
        bases = [Base("resnet20", epochs, preset.base[0], seed, width=width) for seed in range(preset.seeds)]
        kinds[name] = run.kind(bases, sizes.layers)
    if run.arguments.published:
        kinds[FULL] = run.published("resnet20", preset.seeds, sizes.layers)
    found = experiment.by_kind(kinds, preset, *run.samples())
    record = {
        "preset": preset, "setting": str(preset), "epochs": {name: count for name, (_, count) in sizes.kinds.items()},
        "pairs": [pair for pair in sizes.pairs if set(pair) <= set(kinds)], "kinds": found,
    }  # fmt: skip
    study.leave("widths", record, page, run.arguments.out)


(GROWS,) = study.stated(__file__)

PAGE = study.text(__file__)


def page(record: dict[str, Any]) -> str:
    findings = [
        f"- {narrow} → {wide}: "
        + ", ".join(f"{layer} {study.shown(gain)}" for layer, gain in gains(record, narrow, wide).items())
        for narrow, wide in record["pairs"]
    ]
    return experiment.written(
        PAGE, "widths", record, claims(record), alike=ALIKE, table=experiment.table_of_kinds(record["kinds"], "width"),
        epochs="; ".join(f"{name}: {count} epochs" for name, count in record["epochs"].items()),
        findings="\n".join(findings),
    )  # fmt: skip


def gains(record: dict[str, Any], narrow: str, wide: str) -> dict[str, dict[str, float]]:
    """Return by how much the wider networks keep more, by layer."""
    kinds = [record["kinds"][name] for name in (wide, narrow)]
    scores = zip(*(kind["relative_accuracy"][TASK] for kind in kinds), strict=True)
    return {layer: study.difference(*pair) for layer, pair in zip(kinds[0]["layers"], scores, strict=True)}


def more_accurate(record: dict[str, Any], narrow: str, wide: str) -> float:
    """Return how much more accurate the wider networks are themselves."""
    return float(np.subtract(*(np.mean(record["kinds"][name]["accuracies"]) for name in (wide, narrow))))


def parts(record: dict[str, Any], narrow: str, wide: str) -> list[bool | None]:
    """Return whether the wider networks are better at half of the layers, and worse at none."""
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
