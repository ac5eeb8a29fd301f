"""Experiment 7: sparse stitching layers by least squares and by task loss (Csiszárik et al. 2021, section 8, figure 8).

Both methods use an L1 penalty with several weights, and entries below 1e-4 are set to zero afterwards. The penalty
weights of the lasso differ from the paper, because the lasso squares the norm and the paper's equation 3 does not.

    python examples/dr_frankenstein/sparsity.py --published TINY10 --networks NETWORKS
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

import experiment
import frankenstein
import tiny10
from experiment import PAPER, SHORT, TASK, TEST, Preset
from rich.table import Table
from rich.text import Text

from hf_stitch.analysis import Score, score_curves, sparsify, zero_share
from hf_stitch.plots import curves, matrices
from hf_stitch.registry import registries
from hf_stitch.stitches import StitchingLayer, as_linear

PRESETS = {"small": Preset(4_000, 2_000, 16, (10_000, 6), **SHORT), "test": TEST, "paper": PAPER}
LAYER = {"small": "bn3", "test": "bn8", "paper": "bn3"}
LASSO = {
    "small": (0.003, 0.01, 0.03, 0.1, 0.2, 0.3),
    "test": (0.1,),
    "paper": (0.001, 0.003, 0.01, 0.03, 0.06, 0.1, 0.15, 0.2, 0.3, 0.4),
}
L1 = {
    "small": (0.003, 0.01, 0.03, 0.1),
    "test": (0.01,),
    "paper": (0.0003, 0.001, 0.003, 0.006, 0.01, 0.02, 0.03, 0.06, 0.1),
}
DRAWN = 4
"""Number of matrices in the figure."""


def main() -> None:
    """Run the experiment from the command line."""
    parser = tiny10.parser(__doc__)
    parser.add_argument("--layer", help="layer to stitch at; default: that of the preset")
    arguments = parser.parse_args()
    preset, layer = PRESETS[arguments.preset], arguments.layer or LAYER[arguments.preset]
    source, target, *_ = tiny10.loaded(arguments, preset).values()
    train, test = preset.samples("cifar10", arguments.data_dir)
    alphas, weights = LASSO[arguments.preset], L1[arguments.preset]
    matchers = ["lstsq", *(registries.matchers.build("lasso", alpha=alpha) for alpha in alphas)]
    start, *sparse = tiny10.direct(source, target, layer, matchers, train)
    stitches = {
        frankenstein.START: {0.0: start.stitch, **{a: m.stitch for a, m in zip(alphas, sparse, strict=True)}}, TASK: {}
    }  # fmt: skip
    for weight in (0.0, *weights):
        matcher = replace(preset.task_loss, penalties={"l1": weight} if weight else {})
        [stitches[TASK][weight]] = tiny10.trained(matcher, [start], target, train, preset)
    stitches = {
        name: {w: sparsify(s) if w else s for w, s in by_weight.items()} for name, by_weight in stitches.items()
    }
    found = score_curves(start, test, "penalty", stitches, target=target, batch_size=tiny10.BATCH)
    points = {
        name: [(weight, zero_share(stitches[name][weight]), score) for weight, score in scores.items()]
        for name, scores in found.scores.items()
    }
    name = f"sparsity_{layer}"
    record = {
        "preset": asdict(preset), "layer": layer, "columns": ["penalty", "sparsity", "relative accuracy"], **points
    }  # fmt: skip
    series = {k: {share: (s.value, s.low, s.high) for _, share, s in v} for k, v in points.items()}
    pictures = {
        name: curves(series, axis="sparsity", label="relative accuracy", title=layer),
        f"{name}_matrices": matrices(_some(stitches[TASK])),
    }
    experiment.show(_table(points, layer, len(test)), name, record, pictures, arguments.out)


def _table(points: Mapping[str, Sequence[tuple[float, float, Score]]], layer: str, n: int) -> Table:
    table = Table(
        "method",
        "penalty",
        "sparsity",
        "relative accuracy",
        title=f"sparse stitching layers at {layer}, {n} test images",
    )
    for name, by_weight in points.items():
        for weight, share, score in by_weight:
            table.add_row(name, f"{weight:g}", f"{share:.3f}", Text(str(score)))
    return table


def _some(by_weight: Mapping[float, StitchingLayer]) -> dict[str, object]:
    """Select matrices from no penalty to the largest penalty."""
    weights = sorted(by_weight)
    chosen = dict.fromkeys(weights[round(i * (len(weights) - 1) / (DRAWN - 1))] for i in range(DRAWN))
    return {
        f"L1 {weight:g}: {zero_share(by_weight[weight]):.0%} zero": as_linear(by_weight[weight].body)
        .weight.detach()
        .numpy()
        for weight in chosen
    }


if __name__ == "__main__":
    main()
