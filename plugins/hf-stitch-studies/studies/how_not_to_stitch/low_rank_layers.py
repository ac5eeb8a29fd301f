"""What of two layers do direct matches carry over (Balogh & Jelasity 2025, sections 3, 4.2 and 5.1)?

Three questions on Tiny-10, with rules that were fixed before the run.

*Low rank.* Source and target are replaced by low-rank approximations before they are matched, at corresponding layers:
the leading principal directions of each side, as many as the rank says, or as hold a share of the variance. Beside them
stand the mean alone (rank 0), all directions, random directions of the same rank, and the target's own approximation
without any stitch.

*Cutting out and repeating layers.* Every layer into every layer of the same network, beside the same layers of another
network into the same target.

*Lack of similarity.* Layers of another network, and of its untrained twin, into the layers of a target by task loss.

    python -m how_not_to_stitch.low_rank_layers --data-dir DATA --networks NETWORKS --out OUT
"""

import copy
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial, reduce
from typing import Any, ClassVar

import numpy as np
import study
import torch
from dr_frankenstein import networks
from how_not_to_stitch.experiment import cifar, claim, footer, question
from how_not_to_stitch.strange_activations import ACCURATE
from numpy.typing import NDArray
from scipy.stats import kendalltau
from torch import Tensor

import hf_stitch
from hf_stitch.analysis import StitchGrid
from hf_stitch.matchers import ClosedFormMatcher
from hf_stitch.matchers.regression import Lstsq
from hf_stitch.papers import BALOGH_2025, Paper
from hf_stitch.statistics import Moments
from hf_stitch.stitches import LinearStitch
from hf_stitch.training import TaskLoss

Array = NDArray[np.float64]
ORDERED, LEADING, NEAR, LIMITED = 0.8, 0.95, 0.1, 0.8
SAME, RISING = 0.05, 0.02
"""Thresholds of the rules, see :data:`RULES`."""
CLOSED = ("lstsq", "recoloured")
RANK = "rank"
TASK = "image-classification"


@dataclass(frozen=True)
class LowRankParts(ClosedFormMatcher):
    """Least squares between low-rank approximations of both sides.

    Both sides keep their mean. As least squares uses only directions in which the source varies, the stitch also
    approximates the source when it runs. Unlike in ``low_rank``, the directions do not depend on the other side.
    """

    name: ClassVar[str] = "low_rank_parts"
    title: ClassVar[str] = "least squares between low-rank approximations"
    papers: ClassVar[tuple[Paper, ...]] = (BALOGH_2025,)

    rank: int = 0  # number of directions of each side
    variance: float = 0.0  # share of the variance that they hold, instead of their number
    random: bool = False  # whether they are drawn at random, of each side apart, instead of the principal ones
    seed: int = 0

    def fit(self, moments: Moments, dtype: torch.dtype = torch.float32) -> LinearStitch:
        """Compute the map; ``fitted`` has the ranks of both sides, and ``r2`` is that of the target's approximation."""
        x, y = self.directions(moments.sxx, 2 * self.seed), self.directions(moments.syy, 2 * self.seed + 1)
        p, q = x @ x.T, y @ y.T
        approximated = Moments.of(
            moments.n, moments.mean_x, moments.mean_y, p @ moments.sxx @ p, q @ moments.syy @ q, p @ moments.sxy @ q
        )
        stitch = Lstsq().fit(approximated, dtype)
        stitch.fitted |= {"rank_x": x.shape[1], "rank_y": y.shape[1]}
        return stitch

    def directions(self, scatter: Tensor, seed: int) -> Tensor:
        """Return ``(d, rank)`` orthonormal directions of a side from its scatter ``(d, d)``."""
        if self.random:
            drawn = torch.randn(len(scatter), self.rank, generator=torch.Generator().manual_seed(seed))
            return torch.linalg.qr(drawn.double()).Q
        values, vectors = torch.linalg.eigh(scatter)
        held = values.flip(0).clamp(min=0).cumsum(0) / scatter.trace()
        rank = self.rank or int((held < self.variance).sum()) + 1
        return vectors.flip(1)[:, :rank]


@dataclass(frozen=True)
class Preset:
    """Sizes of the experiment."""

    train: int  # images to which stitches are fitted
    trained: int  # images of task-loss matching
    test: int
    pairs: int  # without a network in common
    ranks: tuple[int, ...]  # of the approximations, as far as they are below the width of a layer
    shares: tuple[float, ...]  # of the variance
    draws: int  # of random directions
    steps: tuple[int, ...]  # of task-loss matching
    places: tuple[int, ...]  # of the layers that are matched by task loss

    @property
    def task_loss(self) -> dict[int, TaskLoss]:
        """Task-loss matching by number of steps: hard labels, from least squares, batches of 32."""
        options: dict[str, Any] = {"labels": "hard", "batch_size": 32, "lr": 3e-3, "schedule": "constant"}
        return {n: TaskLoss(max_steps=n, **options) for n in self.steps}


RANKS = (1, 2, 4, 8, 16, 32)
PRESETS = {
    "small": Preset(1500, 5000, 500, 3, RANKS, (0.5, 0.9, 0.99), 2, (300, 1000), (0, 3, 7)),
    "paper": Preset(50_000, 50_000, 10_000, 5, RANKS, (0.5, 0.8, 0.9, 0.95, 0.99), 10, (3900, 11_700), tuple(range(8))),
    "test": Preset(150, 150, 60, 1, (1, 8), (0.9,), 1, (2, 3), (0, 7)),
}


def main() -> None:
    """Run the experiment from the command line."""
    arguments = study.parser(__doc__, "data-dir", "networks", presets=PRESETS).parse_args()
    preset, start = PRESETS[arguments.preset], time.perf_counter()
    loaded, layers = networks.read_folder(arguments.networks)
    longer, test = cifar(arguments, preset.trained, preset.test)
    train = longer.take(preset.train)
    names = list(loaded)
    pairs = [(names[i], names[i + 1]) for i in range(0, 2 * preset.pairs, 2)]
    experiment = Experiment(train, test, preset)
    record: dict[str, Any] = {
        "preset": {"name": arguments.preset, **asdict(preset)}, "networks": arguments.networks.name,
        "layers": list(layers), "pairs": {},
    }  # fmt: skip
    for a, b in pairs:
        record["pairs"][f"{a} -> {b}"] = {
            "parts": {layer: experiment.parts(loaded[a], loaded[b], layer) for layer in layers},
            "across": experiment.all_layers(loaded[a], loaded[b], layers),
            "itself": experiment.all_layers(loaded[b], loaded[b], layers),
        }
    a, b = (loaded[name] for name in pairs[0])
    record["lack"] = Experiment(longer, test, preset).lack(a, b, [layers[place] for place in preset.places])
    record["seconds"] = round(time.perf_counter() - start)
    study.leave("low_rank_layers", record, page, {}, arguments.out)


@dataclass(frozen=True)
class Experiment:
    """Stitches and their figures."""

    train: hf_stitch.Samples
    test: hf_stitch.Samples
    preset: Preset

    def parts(self, source: hf_stitch.Adapter, target: hf_stitch.Adapter, layer: str) -> dict[str, Any]:
        """Match low-rank approximations of a layer of two networks.

        Returns:
            ``mean`` (rank 0) and ``full``; ``principal``, ``random`` (mean over draws) and ``variance``: rank or share
            -> figures; ``own``: the same names -> relative accuracy of the target's own approximation.
        """
        ranks = [rank for rank in self.preset.ranks if rank < target.spec(layer).width]
        principal = {f"{rank}": LowRankParts(rank=rank) for rank in ranks}
        variance = {f"{share:g}": LowRankParts(variance=share) for share in self.preset.shares}
        random = {
            f"{rank}": [LowRankParts(rank=rank, random=True, seed=seed) for seed in range(self.preset.draws)]
            for rank in ranks
        }
        kept = [*principal.values(), *variance.values()]
        drawn = [one for draws in random.values() for one in draws]
        grid = self._grid(source, target, [layer], ["lstsq", *kept, *drawn])
        own = self._grid(target, target, [layer], kept)
        by_rank = {rank: [_figures(grid, one.label, layer) for one in draws] for rank, draws in random.items()}
        return {
            "width": target.spec(layer).width,
            "mean": round(float(grid.baselines["mean_only"]["relative_accuracy"][0, 0]), 4),
            "full": _figures(grid, "lstsq", layer),
            "principal": {rank: _figures(grid, one.label, layer) for rank, one in principal.items()},
            "variance": {share: _figures(grid, one.label, layer) for share, one in variance.items()},
            "random": {
                rank: {name: round(float(np.mean([one[name] for one in draws])), 4) for name in ("accuracy", "error")}
                for rank, draws in by_rank.items()
            },
            "own": {
                name: round(float(own.values(one.label)[0, 0]), 4) for name, one in (principal | variance).items()
            },
        }  # fmt: skip

    def all_layers(self, source: hf_stitch.Adapter, target: hf_stitch.Adapter, layers: Sequence[str]) -> dict[str, Any]:
        """Return the relative accuracy of every layer into every layer: matcher -> (layers, layers)."""
        grid = self._grid(source, target, layers, CLOSED)
        return {matcher: grid.values(matcher, "relative_accuracy").round(4).tolist() for matcher in CLOSED}

    def lack(self, source: hf_stitch.Adapter, target: hf_stitch.Adapter, layers: Sequence[str]) -> dict[str, Any]:
        """Match layers of a network, and of its untrained twin, to those of a target by task loss."""
        steps = self.preset.steps
        return {
            "layers": list(layers), "trained": self.task_loss(source, target, layers, steps),
            "untrained": self.task_loss(self.untrained(source), target, layers, steps[-1:]),
        }  # fmt: skip

    def task_loss(
        self, source: hf_stitch.Adapter, target: hf_stitch.Adapter, layers: Sequence[str], steps: Sequence[int]
    ) -> dict[str, Any]:
        """Return relative accuracies with intervals: number of steps (0: least squares) -> (layers, layers, 3)."""
        matchers = {str(n): self.preset.task_loss[n] for n in steps}
        grid = self._grid(source, target, layers, ["lstsq", *matchers.values()], resamples=300)
        labels = {"0": "lstsq", **{n: matcher.label for n, matcher in matchers.items()}}
        return {n: grid.scores[label]["relative_accuracy"].round(4).tolist() for n, label in labels.items()}

    @torch.no_grad()
    def untrained(self, network: hf_stitch.Adapter) -> hf_stitch.Adapter:
        """Return a network with new random weights, and the statistics of its BatchNorms on the training images."""
        twin = copy.deepcopy(network.model)
        torch.manual_seed(0)
        for module in twin.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
            if isinstance(module, torch.nn.BatchNorm2d):
                module.momentum = None  # the mean over all batches
        twin.train()
        for batch in self.train.batches(100):
            twin(torch.stack(batch.samples))
        return networks.adapted(twin)

    def _grid(
        self, source: hf_stitch.Adapter, target: hf_stitch.Adapter, layers: Sequence[str], matchers: Sequence[Any],
        resamples: int = 2,
    ) -> StitchGrid:  # fmt: skip
        return hf_stitch.stitch_grid(
            source, target, self.train, test_data=self.test, layers_a=layers, layers_b=layers, matchers=matchers,
            task=TASK, batch_size=100, resamples=resamples, progress=False,
        )  # fmt: skip


def _figures(grid: StitchGrid, label: str, layer: str) -> dict[str, Any]:
    """Return relative accuracy, structural error, and of approximations the ranks and the r² of the target's part."""
    fitted = (grid.stitches or {})[label, layer, layer].body.fitted
    found = {"accuracy": grid.values(label)[0, 0], "error": grid.values(label, "structural_error")[0, 0]}
    found |= {"r2": fitted["r2"], "rank_x": fitted.get("rank_x", 0), "rank_y": fitted.get("rank_y", 0)}
    return {name: round(float(value), 4) for name, value in found.items()}


RULES = {
    "ordered": question(
        "after paper 4, section 5.1", "Relative accuracy follows the rank of the approximations", "–",
        f"Kendall's τ of rank and relative accuracy, from the mean alone to all directions, at least {ORDERED} as the "
        "mean over layers, by the interval over pairs",
    ),
    "leading": question(
        "after paper 4, section 5.1", "Principal directions carry over more accuracy than random ones", "–",
        f"more accurate than random ones of the same rank at {LEADING:.0%} of layers and ranks or more, by the "
        "interval over pairs",
    ),
    "limit": question(
        "after paper 4, section 5.1", "The rank limits direct matches, not the match", "–",
        f"at least {LIMITED:.0%} of the stitches within {NEAR} of the target's own approximation, by the interval over "
        "pairs",
    ),
    "depth": question(
        "after paper 4, section 3", "Cutting out or repeating layers depends on depth, not on the network", "–",
        f"between different layers, the mean difference of relative accuracy, itself less another network, lies within "
        f"{SAME} of 0 for both matchers, by the interval over pairs",
    ),
}  # fmt: skip
LACK = claim(
    "4.2", "Task loss is still suitable to provide evidence for the lack of functional similarity", "–",
    f"after the longest training, the whole interval of some pair of different layers is below {ACCURATE}, and the "
    f"last training added less than {RISING}; all corresponding layers reach {ACCURATE}",
)  # fmt: skip
PAGE = study.text(__file__)


def page(record: Mapping[str, Any]) -> str:
    """Return the page of the results from the record, as it is read from JSON."""
    preset, layers, pairs = record["preset"], record["layers"], list(record["pairs"].values())
    parts = [pair["parts"] for pair in pairs]
    lags = range(-(len(layers) - 1), len(layers))
    return PAGE.format(
        claims=study.verdicts(claims(record)),
        networks=record["networks"], pairs=len(pairs), layers=len(layers), train=preset["train"],
        trained=preset["trained"], test=preset["test"], draws=preset["draws"],
        accuracies=_rank_table(layers, parts, preset["ranks"], "accuracy", ("principal", RANK, "accuracy"),
                               ("own", RANK), ("random", RANK, "accuracy")),
        errors=_rank_table(layers, parts, preset["ranks"], "error", ("principal", RANK, "error"),
                           ("random", RANK, "error")),
        variances=_variance_table(layers, parts, preset["shares"]),
        lags=study.markdown(["matcher", *map(_lag_name, lags)], _lag_lines(pairs, lags)),
        differences=study.markdown(
            ["matcher", "cutting out", "repeating", "both", "neighbours only"],
            [[matcher, *map(_spread, _depth(pairs, matcher))] for matcher in CLOSED],
        ),
        lack_layers=", ".join(record["lack"]["layers"]), lack=_lack_table(record["lack"], preset["steps"]),
        seconds=record["seconds"], footer=footer("low_rank_layers"),
    )  # fmt: skip


def claims(record: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the rows of the table of all experiments."""
    pairs = list(record["pairs"].values())
    n = f"{len(pairs)} pairs, {len(record['layers'])} layers"
    by_pair = {name: [_figures_of(pair, name) for pair in pairs] for name in MEANS}
    rows = [_lack(record["lack"])]
    for name, bound in MEANS.items():
        found = study.over([float(np.mean(values)) for values in by_pair[name]])
        least = min(min(values) for values in by_pair[name])
        ours = study.shown(found) + (f", smallest τ {least:.2f}" if name == "ordered" else "")
        rows.append(RULES[name].row(ours, n, [study.above(found, bound)], len(pairs)))
    apart = {matcher: study.over(_depth(pairs, matcher)[2]) for matcher in CLOSED}
    same = [study.at_least(2, (study.above(d, -SAME), study.below(d, SAME))) for d in apart.values()]
    ours = "; ".join(f"{matcher} {study.shown(found)}" for matcher, found in apart.items())
    return [*rows, RULES["depth"].row(ours, n, same, len(pairs))]


MEANS = {"ordered": ORDERED, "leading": LEADING, "limit": LIMITED}
"""Rule on the mean over layers and ranks -> its bound."""


def _figures_of(pair: Mapping[str, Any], name: str) -> list[float]:
    """Return the figures of a rule, of all layers and ranks of a pair of networks."""
    found: list[float] = []
    for one in pair["parts"].values():
        principal = {rank: of["accuracy"] for rank, of in one["principal"].items()}
        if name == "ordered":
            line = [one["mean"], *principal.values(), one["full"]["accuracy"]]
            found.append(float(kendalltau(range(len(line)), line).statistic))
        elif name == "leading":
            found += [accuracy > one["random"][rank]["accuracy"] for rank, accuracy in principal.items()]
        else:
            found += [abs(accuracy - one["own"][rank]) <= NEAR for rank, accuracy in principal.items()]
    return found


def _mean(parts: Sequence[Mapping[str, Any]], layer: str, *path: str, digits: int = 2) -> str:
    """Return a figure of a layer, mean over the pairs of networks."""
    return f"{np.mean([reduce(lambda found, key: found[key], path, pair[layer]) for pair in parts]):.{digits}f}"


def _rank_table(
    layers: Sequence[str], parts: Sequence[Mapping[str, Any]], ranks: Sequence[int], figure: str, *paths: Sequence[str]
) -> str:
    """Return the table of a figure by layer and rank, with the figures at some paths, where RANK is the rank."""
    mean = figure == "accuracy"
    lines = []
    for layer in layers:
        known = parts[0][layer]["principal"]
        cells = (
            " / ".join(_mean(parts, layer, *(str(r) if key == RANK else key for key in path)) for path in paths)
            if str(r) in known else "" for r in ranks
        )  # fmt: skip
        alone = [_mean(parts, layer, "mean")] if mean else []
        lines.append([layer, parts[0][layer]["width"], *alone, *cells, _mean(parts, layer, "full", figure)])
    return study.markdown(["layer", "width", *(["mean alone"] if mean else []), *ranks, "all"], lines)


def _variance_table(layers: Sequence[str], parts: Sequence[Mapping[str, Any]], shares: Sequence[float]) -> str:
    lines = []
    for layer in layers:
        line = [layer]
        for share in (f"{share:g}" for share in shares):
            of = partial(_mean, parts, layer, "variance", share)
            ranks = " and ".join(of(f"rank_{side}", digits=1) for side in "xy")
            line += [ranks, f"{of('accuracy')} / {_mean(parts, layer, 'own', share)}", of("r2")]
        lines.append(line)
    head = ["layer", *(name for share in shares for name in (f"{share:g}: ranks", "relative accuracy", "r²"))]
    return study.markdown(head, lines)


def _lag_name(lag: int) -> str:
    return "same" if lag == 0 else f"repeats {-lag}" if lag < 0 else f"cuts out {lag}"


def _grids(pairs: Sequence[Mapping[str, Any]], kind: str, matcher: str) -> Array:
    """Return relative accuracies ``(pairs, layers, layers)``."""
    return np.array([pair[kind][matcher] for pair in pairs])


def _lag_lines(pairs: Sequence[Mapping[str, Any]], lags: Sequence[int]) -> list[list[str]]:
    lines = []
    for matcher in CLOSED:
        for kind in ("itself", "across"):
            means = _grids(pairs, kind, matcher).mean(0)
            lines.append([f"{matcher}, {kind}", *(f"{np.diagonal(means, lag).mean():.2f}" for lag in lags)])
    return lines


def _depth(pairs: Sequence[Mapping[str, Any]], matcher: str) -> list[Array]:
    """Return the mean differences itself − across of each pair: cutting out, repeating, both, and neighbours only."""
    difference = _grids(pairs, "itself", matcher) - _grids(pairs, "across", matcher)
    places = np.subtract.outer(*[np.arange(difference.shape[1])] * 2)
    return [difference[:, of].mean(1) for of in (places < 0, places > 0, places != 0, np.abs(places) == 1)]


def _spread(values: Array) -> str:
    return f"{values.mean():+.3f} ({values.min():+.3f} to {values.max():+.3f})"


def _lack_answer(found: Mapping[str, Any], i: int, j: int) -> str:
    """Return whether a pair of layers lacks functional similarity."""
    *_, before, last = (np.array(cells)[i, j] for cells in found.values())
    if last[0] >= ACCURATE:
        return "accurate"
    if last[2] >= ACCURATE:
        return "undecided"
    return "lacks similarity" if last[0] - before[0] < RISING else "inaccurate, still rising"


def _lack(lack: Mapping[str, Any]) -> dict[str, str]:
    """Return the row on the lack of similarity."""
    layers, size = lack["layers"], range(len(lack["layers"]))
    answers = {(i, j): _lack_answer(lack["trained"], i, j) for i in size for j in size}
    sound = all(answers[i, i] == "accurate" for i in size)
    lacking = [f"{layers[i]} → {layers[j]}" for (i, j), answer in answers.items() if answer == "lacks similarity"]
    ours = (f"{', '.join(lacking)} lack it" if lacking else "none lacks it") + (
        "" if sound else "; corresponding layers are not all accurate"
    )
    n = f"{len(layers) * (len(layers) - 1)} pairs of different layers, 1 pair of networks"
    return LACK.row(ours, n, [bool(lacking) if sound else None], 1)


def _lack_table(lack: Mapping[str, Any], steps: Sequence[int]) -> str:
    layers, lines = lack["layers"], []
    for (i, a), (j, b) in itertools.product(enumerate(layers), repeat=2):
        own, twin = (
            ["{:.2f} [{:.2f}, {:.2f}]".format(*cells[i][j]) for cells in lack[kind].values()]
            for kind in ("trained", "untrained")
        )
        lines.append([a, b, *own, _lack_answer(lack["trained"], i, j), *twin])
    head = ["from", "to", "least squares", *(f"{n} steps" for n in steps), "", "untrained twin, least squares"]
    return study.markdown([*head, f"untrained twin, {steps[-1]} steps"], lines)


if __name__ == "__main__":
    main()
