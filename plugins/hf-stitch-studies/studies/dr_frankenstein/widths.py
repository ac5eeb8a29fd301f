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
from dr_frankenstein.experiment import PAPER, TASK, TEST, Kind, Preset, scored


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


PAGE = """# Experiment 2: widths (Csiszárik et al., NeurIPS 2021, section 5.2, figure 3)

**What to do**: expect wider networks to match better, not by how much: two networks of each width tell no more.

{claims}

Claim: relative accuracy grows with the width of the networks, with task loss and with least squares. The paper uses
ResNet-20 with 1 to 5 times 16, 32 and 64 channels.

Setting: ResNet-20 of the widths below, two networks of each kind, CIFAR-10; trained on 50,000 images with a learning
rate of .1 that is divided by 10 after each third of the training ({epochs}); kinds that are not in this list are the
authors' published networks. {setting}; mean of both directions, 95% intervals over images. Widths 2 to 5 take 5 to 30
minutes of one processor core for each pass over the training images.

Rule, written before these figures were seen: a kind is better than another at a layer if the intervals of task loss do
not overlap. A comparison confirms the claim if the wider kind is better at half of the layers or more and worse at
none, and refutes it if it is better at none. A comparison is about width alone if the wider networks are more accurate
by at most .05, and leaves the claim undecided otherwise. (At first, accuracies had to differ by at most .05 either way;
wider networks that are less accurate work against the claim.)

{table}

{findings}

{footer}"""


def page(record: dict[str, Any]) -> str:
    """Return the page of the results from the record, as it is read from JSON."""
    epochs = "; ".join(f"{name}: {count} epochs" for name, count in record["epochs"].items())
    findings = []
    for narrow, wide in record["pairs"]:
        _, better, worse, apart = _compared(record, narrow, wide)
        layers = len(record["kinds"][narrow]["layers"])
        about = "this is about width alone" if apart <= ALIKE else "accuracy differs, too"
        findings.append(
            f"- {narrow} → {wide}: the wider networks are better at {better} of {layers} layers, worse "
            f"at {worse}; their accuracy is {apart:+.3f}, so that {about}."
        )
    return PAGE.format(
        claims=study.verdicts(claims(record)), footer=experiment.footer("widths"),
        epochs=epochs, setting=record["setting"], findings="\n".join(findings),
        table=experiment.table_of_kinds(record["kinds"], "width"),
    )  # fmt: skip


def _compared(record: dict[str, Any], narrow: str, wide: str) -> tuple[str, int, int, float]:
    """Return the verdict, at how many layers the wider networks are better and worse, and how much more accurate."""
    sides = [[scored(each) for each in record["kinds"][k]["relative_accuracy"][TASK]] for k in (narrow, wide)]
    better = sum(w.low > n.high for n, w in zip(*sides, strict=True))
    worse = sum(w.high < n.low for n, w in zip(*sides, strict=True))
    own = [float(np.mean(record["kinds"][kind]["accuracies"])) for kind in (narrow, wide)]
    decided = "refuted" if not better else "confirmed" if 2 * better >= len(sides[0]) and not worse else "in part"
    if own[1] - own[0] > ALIKE:
        decided = "undecided"
    return decided, better, worse, own[1] - own[0]


def claims(record: dict[str, Any]) -> list[dict[str, str]]:
    """Return the rows of the table of all experiments."""
    rows = []
    for narrow, wide in record["pairs"]:
        decided, better, worse, apart = _compared(record, narrow, wide)
        rows.append(experiment.claim(
            "5.2, figure 3", f"ResNet-20, width {narrow} → {wide}: relative accuracy grows with width",
            "plot, widths 1 to 5", f"better at {better} layers, worse at {worse}; accuracy {apart:+.3f}",
            f"{len(record['kinds'][narrow]['accuracies'])} networks of each kind, "
            f"{len(record['kinds'][narrow]['layers'])} layers", f"stand-in {decided}",
            units=math.comb(len(record["kinds"][narrow]["accuracies"]), 2),
        ))  # fmt: skip
    return rows


if __name__ == "__main__":
    main()
