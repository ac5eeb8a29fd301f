"""Experiment 2: ResNet-20 at several widths (Csiszárik et al. 2021, section 5.2, figure 3).

Wider networks are also more accurate. Beside the published networks of width 1 stand networks of width 1 of which
training stopped early, about as accurate as the narrow ones, so that width and accuracy can be told apart.

    python -m dr_frankenstein.widths --published PUBLISHED --networks NETWORKS --data-dir DATA --out OUT
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import study
from dr_frankenstein import base_training, experiment, frankenstein, images, networks
from dr_frankenstein.base_training import Base, adapted, recorded_accuracy
from dr_frankenstein.experiment import PAPER, TASK, TEST, Claim, Kind, Preset


@dataclass(frozen=True)
class Sizes:
    """Networks of a preset.

    Attributes:
        preset: Sizes of matching.
        kinds: Name -> width and training epochs.
        pairs: Names of a narrow kind and of a wide one that are compared.
        layers: Layers to stitch at.
    """

    preset: Preset
    kinds: dict[str, tuple[float, int]]
    pairs: tuple[tuple[str, str], ...]
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
    "test": Sizes(TEST, {"¼": (0.25, 1), EARLY: (0.5, 1)}, (("¼", EARLY),), ("layer3.1",)),
    "paper": Sizes(
        PAPER, {str(width): (width, 300) for width in (1, 2, 3, 4, 5)},
        (("1", "2"), ("2", "3"), ("3", "4"), ("4", "5")), networks.ResNet20.cuts,
    ),
}  # fmt: skip


def main() -> None:
    """Run the experiment from the command line."""
    arguments = study.parser(__doc__, "data-dir", "published", "networks").parse_args()
    sizes = PRESETS[arguments.preset]
    preset = sizes.preset
    train, test = preset.samples("cifar10", arguments.data_dir)
    kinds = {}
    for name, (width, epochs) in sizes.kinds.items():
        bases = [Base("resnet20", epochs, preset.base[0], seed, width=width) for seed in range(preset.seeds)]
        loaded = adapted(bases, arguments.networks, arguments.data_dir)
        accuracies = [recorded_accuracy(base, arguments.networks) for base in bases]
        kinds[name] = Kind(loaded, accuracies, sizes.layers)
    if arguments.published:
        loaded = experiment.loaded("resnet20", arguments, preset)
        tested = images.read("cifar10", "test", 10_000, arguments.data_dir)
        kinds[FULL] = Kind(loaded, [base_training.accuracy(n.model, *tested) for n in loaded.values()], sizes.layers)
    pairs = [pair for pair in sizes.pairs if set(pair) <= set(kinds)]
    found = experiment.by_kind(kinds, preset, train, test)
    epochs = {name: count for name, (_, count) in sizes.kinds.items()}
    record = {"preset": preset, "setting": str(preset), "epochs": epochs, "pairs": pairs, "kinds": found}
    pictures = {
        f"widths_{method.replace(' ', '_')}": experiment.lines(
            {
                layer: [kind["relative_accuracy"][method][i] for kind in found.values()]
                for i, layer in enumerate(sizes.layers)
            },
            list(kinds), "relative accuracy", f"ResNet-20 by width: {method}",
        )
        for method in (TASK, frankenstein.START)
    }  # fmt: skip
    study.leave("widths", record, page, pictures, arguments.out)


def grows(narrow: str, wide: str) -> study.Claim:
    """Return the claim on two widths."""
    return Claim(
        "5.2, figure 3", f"ResNet-20, width {narrow} → {wide}: relative accuracy grows with width",
        "plot, widths 1 to 5",
        "the difference of task loss is above 0 at half of the layers or more, by the interval, and below 0 at none. "
        "Not "
        f"known if the wider networks are more accurate by more than {ALIKE}. One pair of a kind decides nothing",
        stand_in=True,
    )  # fmt: skip


PAGE = """# Experiment 2: widths (Csiszárik et al., NeurIPS 2021, section 5.2, figure 3)

**What to do**: expect wider networks to be stitched more accurately, but do not rely on it: here, each width has one
pair of networks, and widths of the paper (1 to 5) are out of reach.

{verdicts}

The paper uses ResNet-20 with 1 to 5 times 16, 32 and 64 channels. Setting: ResNet-20 of the widths below, two networks
of each kind, CIFAR-10; trained on 50,000 images with a learning rate of .1 that is divided by 10 after each third of
the training ({epochs}); kinds that are not in this list are the authors' published networks. {setting}; mean of both
directions, 95% intervals over images. Widths 2 to 5 take 5 to 30 minutes of one processor core for each pass over the
training images.

Wider networks are also more accurate: kinds that stopped early tell width from accuracy. The bound {alike} was written
before these figures were seen (at first, accuracies had to differ by at most this much either way; wider networks that
are less accurate work against the claim). Until this version, intervals that do not overlap stood for the interval of
the difference, and one pair of each width decided.

{table}

{findings}

{footer}"""


def page(record: dict[str, Any]) -> str:
    """Return the page of the results from the record, as it is read from JSON."""
    epochs = "; ".join(f"{name}: {count} epochs" for name, count in record["epochs"].items())
    findings = [
        f"- {narrow} → {wide}: "
        + ", ".join(f"{layer} {study.shown(gain)}" for layer, gain in gains(record, narrow, wide).items())
        for narrow, wide in record["pairs"]
    ]
    return PAGE.format(
        footer=experiment.footer("widths"), verdicts=study.verdicts(claims(record)), alike=ALIKE,
        epochs=epochs, setting=record["setting"], findings="Differences of task loss:\n\n" + "\n".join(findings),
        table=experiment.table_of_kinds(record["kinds"], "width"),
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
    return [experiment.at_least(-(-len(above) // 2), above), False not in above]


def claims(record: dict[str, Any]) -> list[dict[str, str]]:
    """Return the rows of the table of all experiments."""
    rows = []
    for narrow, wide in record["pairs"]:
        above = [study.above(gain, 0) for gain in gains(record, narrow, wide).values()]
        ours = (
            f"better at {above.count(True)} of {len(above)} layers, worse at {above.count(False)}; accuracy "
            f"{more_accurate(record, narrow, wide):+.3f}"
        )
        count = len(record["kinds"][narrow]["accuracies"])
        n = f"{count} networks of each kind"
        rows.append(grows(narrow, wide).row(ours, n, parts(record, narrow, wide), math.comb(count, 2)))
    return rows


if __name__ == "__main__":
    main()
