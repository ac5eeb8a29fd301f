"""Experiment 8: low-rank stitching layers by regression and by task loss (Csiszárik et al. 2021, section 7, figure 7).

Task-loss matching starts from the reduced-rank regression of the same rank.

    python examples/dr_frankenstein/low_rank.py --published TINY10 --networks NETWORKS
"""

from dataclasses import asdict
from functools import reduce

import experiment
import frankenstein
import networks
import tiny10
from experiment import PAPER, SHORT, TASK, TEST, Preset

from hf_stitch.analysis import Curves, rank_curve
from hf_stitch.registry import registries

PRESETS = {"small": Preset(3_000, 2_000, 4, (10_000, 6), **SHORT), "test": TEST, "paper": PAPER}
LAYERS = {"small": ("bn3", "bn5"), "test": ("bn8",), "paper": networks.Tiny10.cuts}
RANKS = (4, 8, 16)


def main() -> None:
    """Run the experiment from the command line."""
    arguments = tiny10.parser(__doc__).parse_args()
    preset = PRESETS[arguments.preset]
    source, target, *_ = tiny10.loaded(arguments, preset).values()
    train, test = preset.samples("cifar10", arguments.data_dir)
    by_layer = []
    for layer in LAYERS[arguments.preset]:
        starts = tiny10.direct(
            source, target, layer, [registries.matchers.build("low_rank", rank=rank) for rank in RANKS], train
        )
        ends = tiny10.trained(preset.task_loss, starts, target, train, preset)
        families = {
            f"{layer}, {frankenstein.START}": {rank: m.stitch for rank, m in zip(RANKS, starts, strict=True)},
            f"{layer}, {TASK}": dict(zip(RANKS, ends, strict=True)),
        }
        by_layer.append(rank_curve(starts[0], test, families, target=target, batch_size=tiny10.BATCH))
    found = reduce(Curves.join, by_layer)
    record = {"preset": asdict(preset), "relative_accuracy": found.to_dict()}
    experiment.show(found.__rich__(), "low_rank", record, {"low_rank": found.plot()}, arguments.out)


if __name__ == "__main__":
    main()
