"""Experiment 8: low-rank stitching layers by regression and by task loss (Csiszárik et al. 2021, section 7, figure 7).

Task-loss matching starts from the reduced-rank regression of the same rank.

    python -m dr_frankenstein.low_rank --published PUBLISHED --networks NETWORKS --data-dir DATA --out OUT
"""

from typing import Any

import numpy as np
import study
from dr_frankenstein import experiment, frankenstein, stitching
from dr_frankenstein.experiment import CUTS, PAPER, SHORT, TASK, TEST, TITLES, Claim, Preset, scored
from hf_stitch_studies import rank_curve

import hf_stitch
from hf_stitch.plots import curves
from hf_stitch.registry import registries

PRESETS = {"small": Preset(3_000, 2_000, 2, (10_000, 6), batch=64, **SHORT), "test": TEST, "paper": PAPER}
PLACES: dict[str, dict[str, tuple[tuple[str, ...], int]]] = {
    "small": {"tiny10": (("bn3", "bn5", "bn7"), 3), "resnet20": (("layer1.1", "layer2.0", "layer3.0"), 2)},
    "test": {"tiny10": (("bn8",), 1), "resnet20": (("layer3.2",), 1)},
    "paper": {"tiny10": (CUTS["tiny10"], 5), "resnet20": (CUTS["resnet20"], 2)},
}
"""Layers, and number of pairs."""
RANKS = (4, 8, 16)
DIRECT = frankenstein.START


def main() -> None:
    """Run the experiment from the command line."""
    arguments = study.parser(__doc__, "data-dir", "published", "networks").parse_args()
    preset = PRESETS[arguments.preset]
    train, test = preset.samples("cifar10", arguments.data_dir)
    record: dict[str, Any] = {"preset": preset, "setting": str(preset), "architectures": {}}
    pictures = {}
    for architecture, (layers, count) in PLACES[arguments.preset].items():
        networks = experiment.loaded(architecture, arguments, preset)
        pairs = experiment.disjoint(networks, count) if len(networks) > 2 else frankenstein.ring(networks)[:count]
        found = {
            layer: {f"{a} → {b}": measured(networks[a], networks[b], layer, preset, train, test) for a, b in pairs}
            for layer in layers
        }
        record["networks"] = experiment.origin(arguments, preset)
        record["architectures"][architecture] = found
        pictures[f"low_rank_{architecture}"] = curves(
            {
                f"{layer}, {method}": {
                    rank: _ends([runs[method][i].value for runs in found[layer].values()])
                    for i, rank in enumerate(RANKS)
                }
                for layer in layers for method in (DIRECT, TASK)
            },
            axis="rank", label="relative accuracy", title=f"{TITLES[architecture]}: mean, worst and best pair",
        )  # fmt: skip
    study.leave("low_rank", record, page, pictures, arguments.out)


def _ends(values: list[float]) -> tuple[float, float, float]:
    return float(np.mean(values)), min(values), max(values)


def measured(
    source: hf_stitch.Adapter, target: hf_stitch.Adapter, layer: str, preset: Preset, train: hf_stitch.Samples,
    test: hf_stitch.Samples,
) -> dict[str, list[Any]]:  # fmt: skip
    """Fit and train a map of each rank; return the relative accuracies by method, in the order of the ranks."""
    matchers = [registries.matchers.build("low_rank", rank=rank) for rank in RANKS]
    starts = stitching.direct(source, target, layer, matchers, train)
    ends = stitching.trained(preset.task_loss, starts, target, train, preset)
    families = {
        DIRECT: dict(zip(RANKS, (m.stitch for m in starts), strict=True)),
        TASK: dict(zip(RANKS, ends, strict=True)),
    }
    found = rank_curve(starts[0], test, families, target=target, batch_size=stitching.BATCH)
    return {method: [found[method][rank] for rank in RANKS] for method in families}


BETTER = {
    architecture: Claim(
        "7, figure 7", f"{title}: at equal rank, task loss outperforms reduced-rank regression", "plot",
        "at each layer and rank, task loss is better in every pair",
    )
    for architecture, title in TITLES.items()
}  # fmt: skip

PAGE = """# Experiment 8: bottlenecks (Csiszárik et al., NeurIPS 2021, section 7, figure 7)

**What to do**: if a stitch must have a low rank, train it on the task, from the reduced-rank regression of this rank. A
rank that explains the variance does not keep the accuracy.

{verdicts}

One pair decides nothing, so that ResNet-20, of which two networks are public, is undecided: its figures are below.

Setting: {networks}, CIFAR-10, task loss from the reduced-rank regression of the same rank; {setting}. Mean over the
pairs, in parentheses the worst and the best pair. ResNet-20 has 16 channels in its first stage: rank 16 is full there.
The rule was written before these figures were seen.

{architectures}

{footer}"""


def page(record: dict[str, Any]) -> str:
    """Return the page of the results from the record, as it is read from JSON."""
    sections = []
    for architecture, layers in record["architectures"].items():
        rows = [
            (rank, *(_cell(runs, method, i) for runs in layers.values() for method in (DIRECT, TASK)))
            for i, rank in enumerate(RANKS)
        ]
        header = ("rank", *(f"{layer}, {method}" for layer in layers for method in (DIRECT, TASK)))
        n, _ = experiment.counted(next(iter(layers.values())))
        sections.append(f"## {TITLES[architecture]}, {n}\n\n{study.markdown(header, rows)}")
    return PAGE.format(
        footer=experiment.footer("low_rank"), verdicts=study.verdicts(claims(record)), networks=record["networks"],
        setting=record["setting"], architectures="\n\n".join(sections),
    )  # fmt: skip


def _cell(runs: dict[str, Any], method: str, place: int) -> str:
    values = [scored(run[method][place]).value for run in runs.values()]
    return f"{np.mean(values):.3f} ({min(values):.3f}, {max(values):.3f})"


def claims(record: dict[str, Any]) -> list[dict[str, str]]:
    """Return the rows of the table of all experiments."""
    rows = []
    for architecture, layers in record["architectures"].items():
        gains = [
            [run[TASK][i]["value"] - run[DIRECT][i]["value"] for run in runs.values()]
            for runs in layers.values() for i in range(len(RANKS))
        ]  # fmt: skip
        means, better = [float(np.mean(some)) for some in gains], [min(some) > 0 for some in gains]
        n, units = experiment.counted(next(iter(layers.values())))
        ours = f"gain {min(means):+.3f} to {max(means):+.3f}; better at {sum(better)} of {len(better)} layers and ranks"
        n += f", {len(layers)} layers, ranks {', '.join(map(str, RANKS))}"
        rows.append(BETTER[architecture].row(ours, n, better, units))
    return rows


if __name__ == "__main__":
    main()
