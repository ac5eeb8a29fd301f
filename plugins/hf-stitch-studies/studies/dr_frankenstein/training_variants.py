"""Networks with and without BatchNorm, trained with SGD and with Adam (Csiszárik et al. 2021, section 5.1).

The experiment asks whether some networks cannot be matched.

    python -m dr_frankenstein.training_variants --published PUBLISHED --networks NETWORKS --data-dir DATA
"""

from dataclasses import dataclass
from typing import Any

import study
from dr_frankenstein import base_training, experiment, frankenstein, images, networks
from dr_frankenstein.base_training import Base, adapted, recorded_accuracy
from dr_frankenstein.experiment import PAPER, TASK, TEST, TITLES, Kind, Preset, scored


@dataclass(frozen=True)
class Variant:
    """A kind of training.

    Attributes:
        architecture: ``tiny10`` or ``resnet20``.
        epochs: Training epochs.
        options: Options of :class:`base_training.Base`.
    """

    architecture: str
    epochs: int
    options: dict[str, Any]


PUBLISHED = "Tiny-10, BatchNorm, SGD, 300 epochs"
VARIANTS = {
    "Tiny-10, BatchNorm, Adam": Variant("tiny10", 6, {"optimizer": "adam"}),
    "Tiny-10, no BatchNorm, SGD": Variant("tiny10", 6, {"norm": False}),
    "ResNet-20 of width ¼, BatchNorm, SGD": Variant("resnet20", 12, {"width": 0.25}),
    "ResNet-20 of width ¼, BatchNorm, Adam": Variant("resnet20", 4, {"width": 0.25, "optimizer": "adam"}),
}
PRESETS = {
    "small": Preset(5_000, 3_000, 2, (50_000, 0), lr=3e-3, schedule="cosine", batch=64), "test": TEST, "paper": PAPER
}  # fmt: skip
LAYERS: dict[str, dict[str, tuple[str, ...]]] = {
    "small": {"tiny10": ("bn2", "bn4", "bn6", "bn8"), "resnet20": ("conv1", "layer1.1", "layer2.1", "layer3.1")},
    "test": {"tiny10": ("bn8",), "resnet20": ("layer3.2",)},
    "paper": {"tiny10": networks.Tiny10.cuts, "resnet20": networks.ResNet20.cuts},
}
MATCHED = 0.8
"""Relative accuracy from which on networks count as matched at a layer."""


def main() -> None:
    """Run the experiment from the command line."""
    arguments = study.parser(__doc__, "data-dir", "published", "networks").parse_args()
    preset, layers = PRESETS[arguments.preset], LAYERS[arguments.preset]
    train, test = preset.samples("cifar10", arguments.data_dir)
    kinds: dict[str, dict[str, Kind]] = {"tiny10": {}, "resnet20": {}}
    if arguments.published:
        tested = images.read("cifar10", "test", 10_000, arguments.data_dir)
        loaded = dict(list(experiment.loaded("tiny10", arguments, preset).items())[: preset.seeds])
        own = [base_training.accuracy(network.model, *tested) for network in loaded.values()]
        kinds["tiny10"][PUBLISHED] = Kind(loaded, own, layers["tiny10"])
    for name, variant in VARIANTS.items():
        epochs = {"small": variant.epochs, "test": 1, "paper": 300}[arguments.preset]
        bases = [
            Base(variant.architecture, epochs, preset.base[0], seed, **variant.options) for seed in range(preset.seeds)
        ]
        loaded = adapted(bases, arguments.networks, arguments.data_dir)
        own = [recorded_accuracy(base, arguments.networks) for base in bases]
        kinds[variant.architecture][f"{name}, {epochs} epochs"] = Kind(loaded, own, layers[variant.architecture])
    found = {architecture: experiment.by_kind(some, preset, train, test) for architecture, some in kinds.items()}
    pictures = {
        f"training_variants_{architecture}": experiment.lines(
            {name: kind["relative_accuracy"][TASK] for name, kind in some.items()}, layers[architecture],
            "relative accuracy", f"{TITLES[architecture]} by training: task loss",
        )
        for architecture, some in found.items()
    }  # fmt: skip
    record = {"preset": preset, "setting": str(preset), "architectures": found}
    study.leave("training_variants", record, page, pictures, arguments.out)


PAGE = """# Other training methods (Csiszárik et al., NeurIPS 2021, section 5.1)

Claim: networks with and without BatchNorm, trained with SGD and with Adam, can all be matched.

Setting: networks trained on {images:,} images of CIFAR-10 for the epochs stated, with a learning rate that is divided
by 10 after each third of them; {setting}; mean of both directions, 95% intervals over images. ResNet-20 without
BatchNorm was not trained: it needs another initialisation.

Rule, written before these figures were seen: a kind can be matched if task loss reaches a relative accuracy of at least
{matched} at every layer.

{tables}

{findings}

{footer}"""


def page(record: dict[str, Any]) -> str:
    """Return the page of the results from the record, as it is read from JSON."""
    least = _least(record)
    worst = _hardest(record)
    findings = [
        f"- **All can be matched: {study.decided(value >= MATCHED for value in least.values())}**, "
        f"{sum(value >= MATCHED for value in least.values())} of {len(least)} kinds.",
        f"- The hardest for least squares is {worst[0]}: {worst[1]:.3f} at {worst[2]}.",
    ]
    return PAGE.format(
        footer=experiment.footer("training_variants"),
        setting=record["setting"], images=record["preset"]["base"][0], matched=MATCHED, findings="\n".join(findings),
        tables="\n\n".join(experiment.table_of_kinds(some, "networks") for some in record["architectures"].values()),
    )  # fmt: skip


def _least(record: dict[str, Any]) -> dict[str, float]:
    """Return the least relative accuracy of task loss over the layers, by kind."""
    return {
        name: min(scored(each).value for each in kind["relative_accuracy"][TASK])
        for some in record["architectures"].values()
        for name, kind in some.items()
    }


def _hardest(record: dict[str, Any]) -> tuple[str, float, str]:
    """Return the kind and the layer at which least squares is worst."""
    return min(
        (
            (name, scored(score).value, layer)
            for some in record["architectures"].values()
            for name, kind in some.items()
            for layer, score in zip(kind["layers"], kind["relative_accuracy"][frankenstein.START], strict=True)
        ),
        key=lambda found: found[1],
    )


def claims(record: dict[str, Any]) -> list[dict[str, str]]:
    """Return the rows of the table of all experiments."""
    least = _least(record)
    worst = min(least, key=least.__getitem__)
    return [experiment.claim(
        "5.1", "with and without BatchNorm, with SGD and with Adam, networks can be matched", "–",
        f"task loss {min(least.values()):.3f} or more (least: {worst})", f"{len(least)} kinds, 2 networks each",
        study.decided(value >= MATCHED for value in least.values()),
    )]  # fmt: skip


if __name__ == "__main__":
    main()
