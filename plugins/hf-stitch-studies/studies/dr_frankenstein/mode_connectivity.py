"""Experiment 6: linear paths between stitching layers from random starts (Csiszárik et al. 2021, section 8, A.8).

python -m dr_frankenstein.mode_connectivity --published PUBLISHED --networks NETWORKS --data-dir DATA
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import study
from dr_frankenstein import experiment, networks, stitching
from dr_frankenstein.experiment import PAPER, SHORT, TEST, Preset, scored
from hf_stitch_studies import mode_connectivity
from matplotlib.figure import Figure

import hf_stitch
from hf_stitch.plots import curves
from hf_stitch.registry import registries

PRESETS = {"small": Preset(4_000, 1_000, 3, (10_000, 6), batch=16, **SHORT), "test": TEST, "paper": PAPER}
LAYERS = {"small": networks.Tiny10.cuts, "test": ("bn8",), "paper": networks.Tiny10.cuts}
STARTS = {"small": 5, "test": 2, "paper": 10}
PAIRS = {"small": 3, "test": 1, "paper": 5}
THRESHOLD = {"small": 0.8, "test": 0.0, "paper": 0.8}
"""Relative accuracy that the ends of a path reach, as in the paper."""
FIRST = 3
"""Number of layers on which the paper found no connectivity."""
BARRIER = 0.05
"""Two maps are connected if the interval of their barrier ends below this."""


def main() -> None:
    """Run the experiment from the command line."""
    arguments = study.parser(__doc__, "data-dir", "published", "networks").parse_args()
    preset = PRESETS[arguments.preset]
    loaded = experiment.loaded("tiny10", arguments, preset)
    train, test = preset.samples("cifar10", arguments.data_dir)
    pairs = {
        f"{a} → {b}": {
            layer: paths(loaded[a], loaded[b], layer, arguments.preset, train, test)
            for layer in LAYERS[arguments.preset]
        }
        for a, b in experiment.disjoint(loaded, PAIRS[arguments.preset])
    }
    record = {
        "preset": preset, "setting": str(preset), "networks": experiment.origin(arguments, preset),
        "starts": STARTS[arguments.preset], "threshold": THRESHOLD[arguments.preset], "pairs": pairs,
    }  # fmt: skip
    study.leave("mode_connectivity", record, page, {"mode_connectivity": _picture(pairs)}, arguments.out)


def paths(
    source: hf_stitch.Adapter, target: hf_stitch.Adapter, layer: str, preset: str, train: hf_stitch.Samples,
    test: hf_stitch.Samples,
) -> dict[str, Any]:  # fmt: skip
    """Train from random starts and score the lines between the ends that reach the threshold."""
    matchers = [registries.matchers.build("random", seed=seed) for seed in range(STARTS[preset])]
    starts = stitching.direct(source, target, layer, matchers, train)
    ends = stitching.trained(PRESETS[preset].task_loss, starts, target, train, PRESETS[preset])
    try:
        found = mode_connectivity(
            starts[0], {str(seed): end for seed, end in enumerate(ends)}, test,
            min_relative_accuracy=THRESHOLD[preset], weights=[0.25, 0.5, 0.75], target=target,
            batch_size=stitching.BATCH,
        )  # fmt: skip
    except ValueError as error:  # fewer than two stitching layers reach the threshold
        return {"not joined": str(error), "paths": [], "barriers": []}
    by_weight = [[score.value for _, score in sorted(path.items())] for path in found.paths.values()]
    return {"paths": by_weight, "barriers": list(found.barriers.values())}


PAGE = """# Experiment 6: linear mode connectivity (Csiszárik et al., NeurIPS 2021, section 8 and appendix A.8)

Claim: straight lines between stitching layers that reach {threshold} from random starts keep the accuracy on most
layers of Tiny-10, but not on the first three.

Setting: {networks}, CIFAR-10, {pairs} pairs of which no network is in two; {starts} random starts for each pair and
layer; {setting}. Every pair of starts that reach the threshold is a path, scored at λ = 0, ¼, ½, ¾, 1. *Barrier*: the
greatest loss of relative accuracy below the line between its ends. Starts of one pair of networks are not independent;
*networks* counts the pairs of networks of which at least half of the paths are connected.

Rule, written before these figures were seen: a layer is connected if at least half of its paths have a barrier whose
95% interval over images ends below {barrier}; the claim is confirmed if none of the first three layers is connected
and at least half of the others, and in part if the share of connected paths is at least lower on the first three, or if
a layer has no paths (the latter was added when bn2 to bn5 had none, in a run with a third of these steps).

{table}

{findings}

{footer}"""


def page(record: dict[str, Any]) -> str:
    """Return the page of the results from the record, as it is read from JSON."""
    rows, count = [], record["starts"] * (record["starts"] - 1) // 2 * len(record["pairs"])
    for layer, found in _by_layer(record["pairs"]).items():
        values, barriers = np.array(found["paths"]), [scored(each) for each in found["barriers"]]
        if not barriers:
            rows.append((layer, f"0 of {count}", *"–––––"))
            continue
        own = [
            _share([scored(each) for each in layers[layer]["barriers"]])
            for layers in record["pairs"].values()
            if layers[layer]["barriers"]
        ]
        rows.append((
            layer, f"{len(barriers)} of {count}", f"{values[:, [0, -1]].mean():.3f}", f"{values[:, 2].mean():.3f}",
            max(barriers, key=lambda each: each.value), f"{_connected(barriers)} of {len(barriers)}",
            f"{sum(share >= 0.5 for share in own)} of {len(own)}",
        ))  # fmt: skip
    header = ("layer", "paths", "ends", "middle", "greatest barrier", "connected paths", "connected networks")
    decided, early, late = _decided(record["pairs"])
    missing = [layer for layer, found in _by_layer(record["pairs"]).items() if not found["paths"]]
    findings = (
        f"- **No connectivity on the first three layers, connectivity on most others: {decided}.** Connected are "
        f"{early} of the first {FIRST} layers, and {late[0]} of the {late[1]} later ones with paths. Without paths, "
        f"for lack of starts that reach {record['threshold']}: {', '.join(missing) if missing else 'none'}."
    )
    return PAGE.format(
        footer=experiment.footer("mode_connectivity"),
        networks=record["networks"], setting=record["setting"], pairs=len(record["pairs"]), starts=record["starts"],
        threshold=record["threshold"], barrier=BARRIER, table=study.markdown(header, rows), findings=findings,
    )  # fmt: skip


def _by_layer(pairs: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, list[Any]]]:
    """Join the paths of all pairs of networks."""
    return {
        layer: {
            kind: [each for layers in pairs.values() for each in layers[layer][kind]] for kind in ("paths", "barriers")
        }
        for layer in next(iter(pairs.values()))
    }


def _connected(barriers: Sequence[Any]) -> int:
    return sum(barrier.high <= BARRIER for barrier in barriers)


def _share(barriers: Sequence[Any]) -> float:
    return _connected(barriers) / len(barriers)


def _decided(pairs: Mapping[str, Mapping[str, Any]]) -> tuple[str, int, tuple[int, int]]:
    """Return the verdict, and how many layers are connected, of the first ones and of the later ones."""
    shares = {}
    for layer, found in _by_layer(pairs).items():
        barriers = [scored(each) for each in found["barriers"]]
        if barriers:
            shares[layer] = _share(barriers)
    first = [share for layer, share in shares.items() if layer in networks.Tiny10.cuts[:FIRST]]
    later = [share for layer, share in shares.items() if layer not in networks.Tiny10.cuts[:FIRST]]
    early, late = (sum(share >= 0.5 for share in some) for some in (first, later))
    counts = (early, (late, len(later)))
    if not first or not later:
        return "undecided", *counts
    if early == 0 and late >= len(later) / 2:
        return ("confirmed" if len(shares) == len(_by_layer(pairs)) else "in part"), *counts
    return ("in part" if np.mean(first) < np.mean(later) else "refuted"), *counts


def claims(record: dict[str, Any]) -> list[dict[str, str]]:
    """Return the rows of the table of all experiments."""
    decided, early, late = _decided(record["pairs"])
    paths = sum(len(found["paths"]) for layers in record["pairs"].values() for found in layers.values())
    return [experiment.claim(
        "8, A.8", "Tiny-10: linear mode connectivity on most layers, but not on the first three", "plot",
        f"connected: {early} of the first {FIRST}, {late[0]} of {late[1]} others",
        f"{len(record['pairs'])} pairs, {paths} paths", decided,
    )]  # fmt: skip


def _picture(pairs: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Plot the mean path of each layer, with a band from the worst path to the best one."""
    series = {}
    for layer, found in _by_layer(pairs).items():
        if found["paths"]:
            columns = np.array(found["paths"]).T
            series[layer] = {
                weight: (float(some.mean()), float(some.min()), float(some.max()))
                for weight, some in zip((0, 0.25, 0.5, 0.75, 1), columns, strict=True)
            }
    return curves(
        series, axis="λ", label="relative accuracy", title="between stitching layers: mean, worst and best path"
    )


if __name__ == "__main__":
    main()
