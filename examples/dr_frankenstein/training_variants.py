"""Tiny-10 with and without BatchNorm, trained with SGD and with Adam (Csiszárik et al. 2021, section 5.1).

The experiment asks whether some networks cannot be matched.

    python examples/dr_frankenstein/training_variants.py --networks NETWORKS --data-dir DATA --out OUT
"""

from itertools import product

import experiment
import networks
from base_training import Base
from experiment import PAPER, TASK, TEST, Preset

PRESETS = {"small": Preset(4_000, 3_000, 3, (10_000, 6)), "test": TEST, "paper": PAPER}
LAYERS = {"small": ("bn2", "bn4", "bn6", "bn8"), "test": ("bn8",), "paper": networks.Tiny10.cuts}


def main() -> None:
    """Run the experiment from the command line."""
    arguments = experiment.parser(__doc__).parse_args()
    preset, layers = PRESETS[arguments.preset], LAYERS[arguments.preset]
    count, epochs = preset.base
    kinds = {
        f"{'BatchNorm' if norm else 'no BatchNorm'}, {optimizer}": [
            Base("tiny10", epochs, count, seed, norm=norm, optimizer=optimizer) for seed in range(preset.seeds)
        ]
        for norm, optimizer in product((True, False), ("sgd", "adam"))
    }
    table, record = experiment.by_kind("Tiny-10 by training", kinds, layers, preset, arguments)
    series = {kind: methods[TASK] for kind, methods in record["relative_accuracy"].items()}
    picture = experiment.lines(series, layers, "relative accuracy", "Tiny-10 by training: task loss")
    experiment.show(table, "training_variants", record, {"training_variants": picture}, arguments.out)


if __name__ == "__main__":
    main()
