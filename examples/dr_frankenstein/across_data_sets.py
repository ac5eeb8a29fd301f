"""Experiment 9: front and back half from networks of different data sets (Csiszárik et al. 2021, appendix C.2).

Tiny-10 networks for CIFAR-10 and Fashion-MNIST. Images and classes are those of the back half. Baselines are a front
half from another seed on the same data set, and an untrained front half.

    python examples/dr_frankenstein/across_data_sets.py --networks NETWORKS --data-dir DATA --out OUT
"""

from dataclasses import asdict

import experiment
import frankenstein
import networks
from base_training import Base, adapted
from experiment import TASK, TEST, Preset
from rich.table import Table
from rich.text import Text

PRESETS = {
    "small": Preset(4_000, 3_000, 3, (10_000, 6)), "test": TEST,
    "paper": Preset(20_000, 10_000, 30, (20_000, 300), 4, True),
}  # fmt: skip
LAYERS = {"small": ("bn2", "bn4", "bn6", "bn8"), "test": ("bn8",), "paper": networks.Tiny10.cuts}
SETS = ("cifar10", "fashion_mnist")


def main() -> None:
    """Run the experiment from the command line."""
    arguments = experiment.parser(__doc__).parse_args()
    preset, layers = PRESETS[arguments.preset], LAYERS[arguments.preset]
    count, epochs = preset.base
    bases = {data: [Base("tiny10", epochs, count, seed, data) for seed in range(preset.seeds)] for data in SETS}
    loaded = {data: adapted(some, arguments.networks, arguments.data_dir) for data, some in bases.items()}
    untrained = {str(base.seed): networks.adapted(base.build()) for base in bases["cifar10"]}
    pairs = frankenstein.ring(untrained)
    table = Table("back and images", "front", "method", *layers, "mean only", title=f"Tiny-10, relative accuracy on "
                  f"{preset.test} test images, 95% intervals")  # fmt: skip
    record, pictures = {}, {}
    for data, other in (SETS, SETS[::-1]):
        samples = preset.samples(data, arguments.data_dir)
        found = {}
        for front, sources in {data: loaded[data], other: loaded[other], "untrained": untrained}.items():
            found[front] = frankenstein.answers(
                {f"{front} {seed}": network for seed, network in sources.items()},
                {f"{data} {seed}": network for seed, network in loaded[data].items()},
                [(f"{front} {a}", f"{data} {b}") for a, b in pairs],
                layers, *samples, direct={}, trained={TASK: preset.task_loss}, augment=preset.augmentation,
            )  # fmt: skip
        record[data] = {
            front: {
                method: [one.relative(layer, method) for layer in layers]
                for method in (TASK, frankenstein.START, "mean_only")
            }
            for front, one in found.items()
        }
        for front, methods in record[data].items():
            for method in (TASK, frankenstein.START):
                chance = f"{methods['mean_only'][0].value:.3f}"
                table.add_row(data, front, method, *(Text(str(score)) for score in methods[method]), chance)
        pictures[f"across_data_sets_{data}"] = experiment.lines(
            {
                f"front {front}, {method}": record[data][front][method]
                for front in found
                for method in (TASK, frankenstein.START)
            },
            layers, "relative accuracy", f"Backs trained on {data}",
        )  # fmt: skip
    everything = {"preset": asdict(preset), "layers": layers, "relative_accuracy": record}
    experiment.show(table, "across_data_sets", everything, pictures, arguments.out)


if __name__ == "__main__":
    main()
