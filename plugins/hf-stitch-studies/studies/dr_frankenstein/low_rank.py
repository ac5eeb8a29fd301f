"""Experiment 8: low-rank stitching layers by regression and by task loss (Csiszárik et al. 2021, section 7, figure 7).

Task-loss matching starts from the reduced-rank regression of the same rank.
"""

from typing import Any

import numpy as np
import study
from dr_frankenstein import experiment, frankenstein, stitching
from dr_frankenstein.experiment import SHORT, TASK, TITLES, Sizes
from hf_stitch_studies import rank_curve

from hf_stitch import Adapter, Samples, registries

SIZES = Sizes(3_000, 2_000, 2, batch=64, **SHORT)
PLACES = {"tiny10": (("bn3", "bn5", "bn7"), 3), "resnet20": (("layer1.1", "layer2.0", "layer3.0"), 2)}
"""Layers, and number of pairs."""
RANKS = (4, 8, 16)
DIRECT = frankenstein.START


def main() -> None:
    arguments = experiment.read(__doc__)
    record, samples = experiment.started(arguments, SIZES), SIZES.samples(arguments.data_dir)
    for architecture, (layers, count) in PLACES.items():
        networks = experiment.loaded(architecture, arguments)
        pairs = experiment.pairs_of(networks, count)
        record["architectures"][architecture] = {
            layer: {f"{a} → {b}": measured(networks[a], networks[b], layer, *samples) for a, b in pairs}
            for layer in layers
        }
    study.write_results("low_rank", record, page, arguments.out)


def measured(source: Adapter, target: Adapter, layer: str, train: Samples, test: Samples) -> dict[str, list[Any]]:
    """Fit and train a map of each rank; return the relative accuracies by method, in the order of the ranks."""
    matchers = [registries.matchers.build("low_rank", rank=rank) for rank in RANKS]
    starts = stitching.direct(source, target, layer, matchers, train)
    ends = stitching.trained(SIZES.task_loss, starts, target, train)
    stitches = {DIRECT: [model.stitch for model in starts], TASK: ends}
    families = {method: dict(zip(RANKS, some, strict=True)) for method, some in stitches.items()}
    curves = rank_curve(starts[0], test, families, target=target, batch_size=stitching.BATCH)
    return {method: [curves[method][rank] for rank in RANKS] for method in families}


(BETTER,) = study.stated(__file__)


def page(record: dict[str, Any]) -> str:
    sections = []
    for architecture, layers in record["architectures"].items():
        columns = {f"{layer}, {m}": [run[m] for run in runs.values()] for layer, runs in layers.items()
                   for m in (DIRECT, TASK)}  # fmt: skip
        rows = [
            (rank, *(study.spread([scores[i]["value"] for scores in some]) for some in columns.values()))
            for i, rank in enumerate(RANKS)
        ]
        n, _ = experiment.counted(next(iter(layers.values())))
        sections.append(f"## {TITLES[architecture]}, {n}\n\n{study.markdown(('rank', *columns), rows)}")
    return experiment.written(__file__, record, claims(record), architectures="\n\n".join(sections))


def claims(record: dict[str, Any]) -> list[dict[str, str]]:
    rows = []
    for architecture, layers in record["architectures"].items():
        gains = np.array([
            [[run[TASK][i]["value"] - run[DIRECT][i]["value"] for run in runs.values()] for i in range(len(RANKS))]
            for runs in layers.values()
        ])  # fmt: skip
        better = (gains.min(-1) > 0).ravel().tolist()
        n, units = experiment.counted(next(iter(layers.values())))
        span = study.span(gains.mean(-1).ravel(), "+.3f")
        ours = f"gain {span}; better at {sum(better)} of {len(better)} layers and ranks"
        n += f", {len(layers)} layers, ranks {', '.join(map(str, RANKS))}"
        rows.append(BETTER.of(TITLES[architecture]).row(ours, n, better, units))
    return rows
