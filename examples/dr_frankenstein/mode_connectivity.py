"""Experiment 6: linear paths between stitching layers from random starts (Csiszárik et al. 2021, section 8).

python examples/dr_frankenstein/mode_connectivity.py --published TINY10 --networks NETWORKS
"""

from collections.abc import Mapping
from dataclasses import asdict

import experiment
import networks
import numpy as np
import tiny10
from experiment import PAPER, SHORT, TEST, Preset
from matplotlib.figure import Figure
from rich.table import Table
from rich.text import Text

from hf_stitch.analysis import ModeConnectivity, mode_connectivity
from hf_stitch.plots import curves
from hf_stitch.registry import registries

PRESETS = {"small": Preset(3_000, 1_000, 12, (10_000, 6), **SHORT), "test": TEST, "paper": PAPER}
LAYERS = {"small": ("bn1", "bn2", "bn3", "bn5", "bn7"), "test": ("bn8",), "paper": networks.Tiny10.cuts}
STARTS = {"small": 3, "test": 2, "paper": 10}
THRESHOLD = {"small": 0.8, "test": 0.0, "paper": 0.8}


def main() -> None:
    """Run the experiment from the command line."""
    parser = tiny10.parser(__doc__)
    parser.add_argument("--layers", nargs="+", help="layers to stitch at; default: those of the preset")
    arguments = parser.parse_args()
    preset, min_relative_accuracy = PRESETS[arguments.preset], THRESHOLD[arguments.preset]
    source, target, *_ = tiny10.loaded(arguments, preset).values()
    train, test = preset.samples("cifar10", arguments.data_dir)
    matchers = [registries.matchers.build("random", seed=seed) for seed in range(STARTS[arguments.preset])]
    found: dict[str, ModeConnectivity] = {}
    apart: dict[str, str] = {}
    for layer in arguments.layers or LAYERS[arguments.preset]:
        starts = tiny10.direct(source, target, layer, matchers, train)
        ends = tiny10.trained(preset.task_loss, starts, target, train, preset)
        named = {str(seed): end for seed, end in enumerate(ends)}
        try:
            found[layer] = mode_connectivity(
                starts[0], named, test, min_relative_accuracy=min_relative_accuracy, weights=[0.25, 0.5, 0.75],
                target=target, batch_size=tiny10.BATCH,
            )  # fmt: skip
        except ValueError as error:  # fewer than two stitching layers reach the threshold
            apart[layer] = str(error)
    record = {"preset": asdict(preset), "layers": {k: v.to_dict() for k, v in found.items()}, "not joined": apart}
    pictures = {"mode_connectivity": _picture(found)} if found else {}
    experiment.show(_table(found, apart, len(test)), "mode_connectivity", record, pictures, arguments.out)


def _table(found: Mapping[str, ModeConnectivity], apart: Mapping[str, str], n: int) -> Table:
    table = Table(
        "layer", "paths", "ends", "middle", "largest barrier, 95% interval", "barriers with interval above 0.02",
        title=f"linear paths between stitching layers from random starts, relative accuracy on {n} test images",
        caption="\n".join(f"{layer}: {why}" for layer, why in apart.items()) or None,
    )  # fmt: skip
    for layer, connectivity in found.items():
        paths, barriers = list(connectivity.paths.values()), list(connectivity.barriers.values())
        ends = np.mean([(path[0.0].value + path[1.0].value) / 2 for path in paths])
        middle = np.mean([path[0.5].value for path in paths])
        greatest = Text(str(max(barriers, key=lambda barrier: barrier.value)))
        clear = f"{sum(barrier.low > 0.02 for barrier in barriers)} of {len(barriers)}"
        table.add_row(layer, str(len(paths)), f"{ends:.3f}", f"{middle:.3f}", greatest, clear)
    return table


def _picture(found: Mapping[str, ModeConnectivity]) -> Figure:
    """Plot the mean path of each layer, with a band from the worst path to the best one."""
    series = {}
    for layer, connectivity in found.items():
        by_weight: dict[float, list[float]] = {}
        for path in connectivity.paths.values():
            for weight, score in path.items():
                by_weight.setdefault(weight, []).append(score.value)
        series[layer] = {weight: (float(np.mean(v)), min(v), max(v)) for weight, v in by_weight.items()}
    return curves(
        series, axis="λ", label="relative accuracy", title="between stitching layers: mean, worst and best path"
    )


if __name__ == "__main__":
    main()
