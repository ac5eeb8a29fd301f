"""Experiment 2: ResNet-20 at several widths (Csiszárik et al. 2021, figure 3).

The small preset uses narrower networks than the paper.

    python examples/dr_frankenstein/widths.py --networks NETWORKS --data-dir DATA --out OUT
"""

import experiment
import frankenstein
import networks
from base_training import Base
from experiment import PAPER, TASK, TEST, Preset

PRESETS = {"small": Preset(3_000, 2_000, 3, (10_000, 6)), "test": TEST, "paper": PAPER}
WIDTHS = {"small": (0.25, 0.5, 1.0), "test": (0.25, 0.5), "paper": (1.0, 2.0, 3.0, 4.0, 5.0)}
LAYERS = {
    "small": ("conv1", "layer1.1", "layer2.1", "layer3.1"), "test": ("layer3.1",), "paper": networks.ResNet20.cuts
}  # fmt: skip


def main() -> None:
    """Run the experiment from the command line."""
    parser = experiment.parser(__doc__)
    parser.add_argument("--widths", type=float, nargs="+", help="multiples of 16, 32 and 64 channels")
    arguments = parser.parse_args()
    preset, layers = PRESETS[arguments.preset], LAYERS[arguments.preset]
    count, epochs = preset.base
    kinds = {
        f"{width:g}": [Base("resnet20", epochs, count, seed, width=width) for seed in range(preset.seeds)]
        for width in arguments.widths or WIDTHS[arguments.preset]
    }
    table, record = experiment.by_kind("ResNet-20 by width", kinds, layers, preset, arguments)
    pictures = {
        f"widths_{method.replace(' ', '_')}": experiment.lines(
            {
                layer: [methods[method][i] for methods in record["relative_accuracy"].values()]
                for i, layer in enumerate(layers)
            },
            list(kinds), "relative accuracy", f"ResNet-20 by width: {method}",
        )
        for method in (TASK, frankenstein.START)
    }  # fmt: skip
    experiment.show(table, "widths", record, pictures, arguments.out)


if __name__ == "__main__":
    main()
