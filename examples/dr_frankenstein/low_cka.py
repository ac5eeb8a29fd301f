"""Experiment 4: accuracy without CKA, and CKA without accuracy (Csiszárik et al. 2021, sections 6.3 and 6.4, figure 5).

A network is stitched to itself. Starting from the identity, the map is trained on cross-entropy + β · CKA between its
output and the original activations. It is compared with random rotations, which leave CKA at 1 but change the network.

    python examples/dr_frankenstein/low_cka.py --published TINY10 --networks NETWORKS
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import experiment
import numpy as np
import tiny10
import torch
from experiment import PAPER, SHORT, TEST, Preset
from matplotlib.figure import Figure
from rich.table import Table
from rich.text import Text

import hf_stitch
from hf_stitch.analysis import Score, TrajectoryRecorder, score_curves
from hf_stitch.stitches import LinearStitch, StitchingLayer

PRESETS = {"small": Preset(3_000, 2_000, 10, (10_000, 6), **SHORT), "test": TEST, "paper": PAPER}
LAYERS = {"small": ("bn3", "bn5"), "test": ("bn8",), "paper": ("bn2", "bn3", "bn5", "bn7")}
PENALTIES = {"small": (0.3, 0.5, 0.7, 1.0), "test": (1.0,), "paper": (0.1, 0.3, 1.0, 3.0)}
ROTATIONS = 5
PROBE = 1_000
"""Number of test images on which CKA is measured."""


def main() -> None:
    """Run the experiment from the command line."""
    arguments = tiny10.parser(__doc__).parse_args()
    preset = PRESETS[arguments.preset]
    network = next(iter(tiny10.loaded(arguments, preset).values()))
    train, test = preset.samples("cifar10", arguments.data_dir)
    found = {}
    for layer in LAYERS[arguments.preset]:
        [start] = tiny10.direct(network, network, layer, ["identity"], train)
        maps: dict[str, dict[float, StitchingLayer]] = {"rotated": {}, "penalised": {0.0: start.stitch}}
        for seed in range(ROTATIONS):
            maps["rotated"][seed] = start.stitch.with_maps(_rotation(start.stitch.widths[0], seed), None)
        for penalty in PENALTIES[arguments.preset]:
            matcher = replace(preset.task_loss, penalties={"linear_cka": penalty})
            [maps["penalised"][penalty]] = tiny10.trained(matcher, [start], network, train, preset)
        scores = score_curves(start, test, "β or seed", maps, target=network, batch_size=tiny10.BATCH)
        probe = test.take(min(PROBE, len(test)))
        found[layer] = {
            kind: [
                {"β" if kind == "penalised" else "seed": x, "cka": _cka(start, probe, network, stitch), "score": score}
                for (x, stitch), score in zip(by_x.items(), scores[kind].values(), strict=True)
            ]
            for kind, by_x in maps.items()
        }
    record = {"preset": asdict(preset), "layers": found}
    experiment.show(_table(found, len(test)), "low_cka", record, {"low_cka": _picture(found)}, arguments.out)


def _rotation(width: int, seed: int) -> LinearStitch:
    """Draw a Haar-random orthogonal matrix from the QR decomposition of a Gaussian matrix, with the signs of R."""
    gaussian = torch.randn(width, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    q, r = torch.linalg.qr(gaussian)
    return LinearStitch.of(weight=(q * r.diagonal().sign()).float(), bias=None)


def _cka(
    start: hf_stitch.StitchedModel, probe: hf_stitch.Samples, network: hf_stitch.Adapter, stitch: StitchingLayer
) -> float:
    recorder = TrajectoryRecorder(start, probe, ["linear_cka"], target=network)
    recorder(0, [stitch])
    return recorder.trajectory["linear_cka"][0]


def _table(found: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]], n: int) -> Table:
    table = Table(
        "layer", "map", "linear CKA", "relative accuracy",
        title=f"a network stitched to itself, {n} test images, 95% intervals",
    )  # fmt: skip
    for layer, kinds in found.items():
        for kind, points in kinds.items():
            for point in points:
                name = f"β {point['β']:g}" if kind == "penalised" else f"rotation {point['seed']}"
                table.add_row(layer, name, f"{point['cka']:.3f}", Text(str(point["score"])))
    return table


def _picture(found: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]) -> Figure:
    """Plot relative accuracy over CKA: a line along β and the rotations for each layer."""
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.add_subplot()
    for number, (layer, kinds) in enumerate(found.items()):
        for kind, style in (("penalised", "o-"), ("rotated", "x")):
            points = kinds[kind]
            scores: list[Score] = [point["score"] for point in points]
            ends = np.abs([[s.value - s.low, s.high - s.value] for s in scores]).T
            axes.errorbar(
                [point["cka"] for point in points], [score.value for score in scores], ends, fmt=style,
                color=f"C{number}", linewidth=1, markersize=5, label=f"{layer}, {kind}",
            )  # fmt: skip
            if kind == "penalised":
                for point in points:
                    axes.annotate(  # labels of the two layers on opposite sides of the lines
                        f"β {point['β']:g}", (point["cka"], point["score"].value), (0, 7 if number else -13),
                        fontsize=7, ha="center", color=f"C{number}", textcoords="offset points",
                    )  # fmt: skip
    axes.set_xlabel("linear CKA with the original activations")
    axes.set_ylabel("relative accuracy")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize="small")
    return figure


if __name__ == "__main__":
    main()
