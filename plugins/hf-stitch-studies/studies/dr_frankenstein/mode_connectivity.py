"""Experiment 6: linear paths between stitching layers from random starts (Csiszárik et al. 2021, section 8, A.8).

python -m dr_frankenstein.mode_connectivity --published PUBLISHED --networks NETWORKS --data-dir DATA
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import study
from dr_frankenstein import experiment, networks, stitching
from dr_frankenstein.experiment import PAPER, SHORT, TEST, Claim, Preset, scored
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
    run = experiment.Run.of(__doc__, PRESETS)
    name, loaded, (train, test) = run.name, run.networks("tiny10"), run.samples()
    pairs = {
        f"{a} → {b}": {layer: paths(loaded[a], loaded[b], layer, name, train, test) for layer in LAYERS[name]}
        for a, b in experiment.disjoint(loaded, PAIRS[name])
    }
    record = run.record() | {"starts": STARTS[name], "threshold": THRESHOLD[name], "pairs": pairs}
    study.leave("mode_connectivity", record, page, {"mode_connectivity": _picture(pairs)}, run.arguments.out)


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


CONNECTIVITY = Claim(
    "8, A.8", "Tiny-10: linear mode connectivity holds on most layers, but not on the first three", "plot",
    "a pair of networks is connected at a layer if at least half of its paths have a barrier whose 95% interval ends "
    f"at {BARRIER} or below. Counted by pairs of networks: none is connected on the first three layers, and all are on "
    "at least half of the others. Pairs that disagree, or a single one, decide nothing at a layer",
)  # fmt: skip

PAGE = study.text(__file__)


def page(record: dict[str, Any]) -> str:
    """Return the page of the results from the record, as it is read from JSON."""
    rows, count = [], record["starts"] * (record["starts"] - 1) // 2 * len(record["pairs"])
    counted, missing = by_networks(record["pairs"]), []
    for layer, found in _by_layer(record["pairs"]).items():
        values, barriers = np.array(found["paths"]), [scored(each) for each in found["barriers"]]
        own = [layers[layer]["barriers"] for layers in record["pairs"].values()]
        missing += [f"{layer} ({pair})" for pair, some in zip(record["pairs"], own, strict=True) if not some]
        shares = ", ".join(f"{_connected(some)} of {len(some)}" if some else "–" for some in own)
        joined, of = counted[layer]
        figures = (f"{values[:, [0, -1]].mean():.3f}", f"{values[:, 2].mean():.3f}",
                   max(barriers, key=lambda each: each.value)) if barriers else "–––"  # fmt: skip
        rows.append((layer, f"{len(barriers)} of {count}", *figures, shares, f"{joined} of {of}"))
    of_pairs = f"connected paths of {', '.join(record['pairs'])}"
    header = ("layer", "paths", "ends", "middle", "greatest barrier", of_pairs, "connected pairs of networks")
    return experiment.written(
        PAGE, "mode_connectivity", record, claims(record), pairs=len(record["pairs"]), starts=record["starts"],
        threshold=record["threshold"], barrier=BARRIER, table=study.markdown(header, rows),
        missing=", ".join(missing) or "none",
    )  # fmt: skip


def _by_layer(pairs: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, list[Any]]]:
    """Join the paths of all pairs of networks."""

    def joined(layer: str, kind: str) -> list[Any]:
        return [each for layers in pairs.values() for each in layers[layer][kind]]

    return {
        layer: {kind: joined(layer, kind) for kind in ("paths", "barriers")} for layer in next(iter(pairs.values()))
    }


def _connected(barriers: Sequence[Mapping[str, float]]) -> int:
    return sum(barrier["high"] <= BARRIER for barrier in barriers)


def by_networks(pairs: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[int, int]]:
    """Count, by layer, the pairs of networks that are connected, and those that have paths."""
    found = {}
    for layer in next(iter(pairs.values())):
        some = [layers[layer]["barriers"] for layers in pairs.values() if layers[layer]["barriers"]]
        found[layer] = sum(2 * _connected(barriers) >= len(barriers) for barriers in some), len(some)
    return found


def parts(pairs: Mapping[str, Mapping[str, Any]]) -> list[bool | None]:
    """Return whether none of the first layers is connected, one by one, and whether most others are."""
    agreed = {
        layer: None if of < 2 or 0 < joined < of else joined == of for layer, (joined, of) in by_networks(pairs).items()
    }
    first = [agreed.pop(layer) for layer in list(agreed) if layer in networks.Tiny10.cuts[:FIRST]]
    others = study.at_least(-(-len(agreed) // 2), agreed.values())
    return [*(None if each is None else not each for each in first), others]


def claims(record: dict[str, Any]) -> list[dict[str, str]]:
    """Return the rows of the table of all experiments."""
    pairs = record["pairs"]
    ours = ", ".join(f"{layer} {joined} of {of}" for layer, (joined, of) in by_networks(pairs).items())
    paths = sum(len(found["paths"]) for layers in pairs.values() for found in layers.values())
    return [CONNECTIVITY.row(f"connected: {ours}", f"{len(pairs)} pairs, {paths} paths", parts(pairs), len(pairs))]


def _picture(pairs: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Plot the mean path of each layer, with a band from the worst path to the best one."""
    series = {}
    for layer, found in _by_layer(pairs).items():
        if found["paths"]:
            ends = [(float(some.mean()), float(some.min()), float(some.max())) for some in np.array(found["paths"]).T]
            series[layer] = dict(zip((0, 0.25, 0.5, 0.75, 1), ends, strict=True))
    title = "between stitching layers: mean, worst and best path"
    return curves(series, axis="λ", label="relative accuracy", title=title)


if __name__ == "__main__":
    main()
