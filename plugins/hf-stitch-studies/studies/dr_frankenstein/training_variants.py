"""Networks with and without BatchNorm, trained with SGD and with Adam (Csiszárik et al. 2021, section 5.1).

The experiment asks whether some networks cannot be matched.

    python -m dr_frankenstein.training_variants --published PUBLISHED --networks NETWORKS --data-dir DATA
"""

from typing import Any

import study
from dr_frankenstein import experiment, frankenstein, networks
from dr_frankenstein.base_training import Base
from dr_frankenstein.experiment import PAPER, TASK, TEST, TITLES, Claim, Kind, Preset

PUBLISHED = "Tiny-10, BatchNorm, SGD, 300 epochs"
VARIANTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "Tiny-10, BatchNorm, Adam": ("tiny10", 6, {"optimizer": "adam"}),
    "Tiny-10, no BatchNorm, SGD": ("tiny10", 6, {"norm": False}),
    "ResNet-20 of width ¼, BatchNorm, SGD": ("resnet20", 12, {"width": 0.25}),
    "ResNet-20 of width ¼, BatchNorm, Adam": ("resnet20", 4, {"width": 0.25, "optimizer": "adam"}),
}
"""Name -> architecture, training epochs and options of :class:`base_training.Base`."""
PRESETS = {
    "small": Preset(5_000, 3_000, 2, (50_000, 0), lr=3e-3, schedule="cosine", batch=64), "test": TEST, "paper": PAPER
}  # fmt: skip
LAYERS: dict[str, dict[str, tuple[str, ...]]] = {
    "small": {"tiny10": ("bn2", "bn4", "bn6", "bn8"), "resnet20": ("conv1", "layer1.1", "layer2.1", "layer3.1")},
    "test": {"tiny10": ("bn8",), "resnet20": ("layer3.2",)},
    "paper": {"tiny10": networks.Tiny10.cuts, "resnet20": networks.ResNet20.cuts},
}
MATCHED = 0.8
"""Relative accuracy from which on networks count as matched at a layer: that of the paper's worst stitching."""


def main() -> None:
    """Run the experiment from the command line."""
    run = experiment.Run.of(__doc__, PRESETS)
    preset, layers = run.preset, LAYERS[run.name]
    kinds: dict[str, dict[str, Kind]] = {"tiny10": {}, "resnet20": {}}
    if run.arguments.published:
        kinds["tiny10"][PUBLISHED] = run.published("tiny10", preset.seeds, layers["tiny10"])
    for name, (architecture, small, options) in VARIANTS.items():
        epochs = {"small": small, "test": 1, "paper": 300}[run.name]
        bases = [Base(architecture, epochs, preset.base[0], seed, **options) for seed in range(preset.seeds)]
        kinds[architecture][f"{name}, {epochs} epochs"] = run.kind(bases, layers[architecture])
    samples, found, pictures = run.samples(), {}, {}
    for architecture, some in kinds.items():
        found[architecture] = experiment.by_kind(some, preset, *samples)
        series = {name: kind["relative_accuracy"][TASK] for name, kind in found[architecture].items()}
        title = f"{TITLES[architecture]} by training: task loss"
        pictures[f"training_variants_{architecture}"] = experiment.lines(series, layers[architecture], title)
    record = {"preset": preset, "setting": str(preset), "architectures": found}
    study.leave("training_variants", record, page, pictures, run.arguments.out)


MATCHABLE = Claim(
    "5.1", "With and without BatchNorm, with SGD and with Adam, no networks are unmatchable", "80% or more",
    f"task loss keeps {MATCHED} or more at every layer of every kind, by the interval", stand_in=True,
)  # fmt: skip
WORST = Claim(
    "5.1", "Of all variants, the worst stitchings are after the first convolution of ResNet-20", "80%",
    "in every kind of ResNet-20, conv1 keeps less than each other layer, by the interval; one pair of a kind decides "
    "nothing", stand_in=True,
)  # fmt: skip

PAGE = study.text(__file__)


def page(record: dict[str, Any]) -> str:
    """Return the page of the results from the record, as it is read from JSON."""
    name, value, layer = min(_scores(record, frankenstein.START), key=lambda found: found[1]["value"])
    tables = (experiment.table_of_kinds(some, "networks") for some in record["architectures"].values())
    return experiment.written(
        PAGE, "training_variants", record, claims(record), images=record["preset"]["base"][0], matched=MATCHED,
        hardest=f"{name}: {value['value']:.3f} at {layer}", tables="\n\n".join(tables),
    )  # fmt: skip


def _scores(record: dict[str, Any], method: str) -> list[tuple[str, dict[str, float], str]]:
    """Return kind, relative accuracy and layer of every stitch of a method."""
    return [
        (name, score, layer)
        for some in record["architectures"].values()
        for name, kind in some.items()
        for layer, score in zip(kind["layers"], kind["relative_accuracy"][method], strict=True)
    ]


def claims(record: dict[str, Any]) -> list[dict[str, str]]:
    """Return the rows of the table of all experiments."""
    task = _scores(record, TASK)
    kinds = list(dict.fromkeys(name for name, _, _ in task))
    name, least, layer = min(task, key=lambda found: found[1]["value"])
    matched = [study.above(score, MATCHED) for _, score, _ in task]
    failed = {kind for (kind, _, _), one in zip(task, matched, strict=True) if one is False}
    ours = f"{study.shown(least)} or more; {len(kinds) - len(failed)} of {len(kinds)} kinds (least: {name}, {layer})"
    rows = [MATCHABLE.row(ours, f"{len(kinds)} kinds, 1 pair each", matched, len(kinds))]
    shown, parts = [], []
    for kind in record["architectures"]["resnet20"].values():
        first, *others = kind["relative_accuracy"][TASK]
        worst = min(others, key=lambda score: score["value"], default=first)
        shown.append(f"{first['value']:.3f} there, {worst['value']:.3f} at the worst other layer")
        parts += [study.below(study.difference(first, other), 0) for other in others]
    return [*rows, WORST.row("; ".join(shown), f"{len(shown)} kinds, 1 pair each", parts, 1)]


if __name__ == "__main__":
    main()
