"""Similarity to a reference network as a proxy of accuracy on Cora (Moschella et al. 2023, section 4.2).

Deep graph networks of many configurations classify the nodes of Cora. Each is compared with a well trained network, by
the cosine between relative representations of held-out nodes. Does this similarity tell the accuracy, without labels?
Baselines are agreement of predictions with the reference, the reference before training, and how far the embeddings are
apart. Other metrics of hf-stitch are chosen on some networks and confirmed on others.

    python -m relative_representations.performance_proxy --data-dir DATA --cache CACHE --out OUT
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import study
import torch
from hf_stitch_graphs import DeepGNN
from matplotlib.figure import Figure
from numpy.typing import NDArray
from relative_representations.encoders import digest
from relative_representations.graph_stitching import Task, task_of
from relative_representations.kept import Array, Claim, Estimate, footer
from safetensors.torch import load_file, save_file
from scipy.stats import rankdata
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm

from hf_stitch.registry import registries
from hf_stitch.storage.files import write_whole

Runs = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Preset:
    """Sizes of the experiment."""

    runs: int  # drawn from the grid
    fresh: int  # further ones, on which what the first ones suggested is confirmed
    seeds: int  # in the grid
    layers: tuple[int, ...]  # numbers of convolutions in the grid; the references have the first
    epochs: tuple[int, ...]  # after which a run counts as a configuration
    further: tuple[int, ...]  # epochs at which similarity and accuracy are computed, too
    reference: int  # epochs of the references
    anchors: int
    width: int
    nodes: int | None = None  # the first of the graph; None: all
    resamples: int = 1_000

    @property
    def training(self) -> dict[str, Any]:
        """What decides the training of a run."""
        others = {name: value for name, value in asdict(self).items() if name not in ("fresh", "resamples")}
        return {**others, "runs": 0}


EPOCHS, FURTHER = (10, 30, 50), (1, 2, 3, 5, 7, 15, 20, 25, 35, 40, 45)
PRESETS = {
    "small": Preset(120, 60, 5, (32, 64), EPOCHS, FURTHER, 500, 300, 32),
    "paper": Preset(320, 320, 5, (32, 64), EPOCHS, FURTHER, 500, 300, 32),
    "test": Preset(12, 8, 2, (2, 3), (3, 6, 9), (1, 2, 5), 15, 20, 8, 200, 50),
}


@dataclass(frozen=True)
class Run:
    """Hyperparameters of a training run; its snapshots after several epochs are configurations."""

    conv: str
    layers: int
    dropout: float
    act: str
    conv_act: str
    optimizer: str
    lr: float
    seed: int


def grid(preset: Preset) -> list[Run]:
    """Return the runs of the preset and then the fresh ones, drawn from the grid without replacement."""
    runs = [
        Run(*values)
        for values in product(
            ("gcn2", "gin"), preset.layers, (0.1, 0.5), ("relu", "tanh"), ("relu", "tanh"), ("Adam", "SGD"),
            (0.01, 0.02), range(preset.seeds),
        )
    ]  # fmt: skip
    return random.Random(0).sample(runs, preset.runs + preset.fresh)


# -- training ----------------------------------------------------------------------------------------------------------


def trained(run: Run, preset: Preset, task: Task, epochs: tuple[int, ...]) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Train a network on all training nodes at once.

    Yields:
        After some epochs: their number, embeddings of all nodes (after the last convolution), and their logits.
    """
    graph, classes = task.graph, int(task.labels.max()) + 1
    torch.manual_seed(run.seed)
    network = DeepGNN(
        run.conv, graph.x.shape[1], preset.width, run.layers, classes, run.dropout, run.act, run.conv_act
    )  # fmt: skip
    optimizer = getattr(torch.optim, run.optimizer)(network.parameters(), lr=run.lr)
    for epoch in range(max(epochs) + 1):
        if epoch:
            network.train()
            loss = functional.cross_entropy(network(graph.x, graph.edge_index)[task.train], task.labels[task.train])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if epoch in epochs:
            network.eval()
            with torch.no_grad():
                embeddings = network.embed(graph.x, graph.edge_index)
                yield epoch, embeddings, network.last(embeddings)


RELU, TANH = "ReLU", "tanh"
REFERENCES = {
    RELU: Run("gcn2", 32, 0.5, "relu", "relu", "Adam", 0.01, seed=1000),
    TANH: Run("gcn2", 32, 0.5, "tanh", "tanh", "Adam", 0.01, seed=1000),
}
"""The references, with a seed that no other run has. The number of layers is the preset's first."""


def _stored(path: Path, tensors: Mapping[str, Tensor]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, lambda path: save_file({name: each.contiguous() for name, each in tensors.items()}, path))


def reference_of(name: str, preset: Preset, task: Task, cache: Path) -> dict[str, Tensor]:
    """Train a reference, or read it from the cache: ``embeddings`` and ``logits`` of all nodes, and ``untrained``."""
    run = replace(REFERENCES[name], layers=preset.layers[0])
    path = cache / "performance_proxy" / f"reference_{digest(asdict(run), preset.training)}.safetensors"
    if not path.is_file():
        states = {epoch: held for epoch, *held in trained(run, preset, task, (0, preset.reference))}
        embeddings, logits = states[preset.reference]
        _stored(path, {"embeddings": embeddings, "logits": logits, "untrained": states[0][0]})
    return load_file(path)


def snapshots(run: Run, preset: Preset, task: Task, cache: Path) -> dict[str, Tensor]:
    """Train a network, or read its snapshots from the cache.

    Returns:
        ``epochs``, those of the preset and the further ones, ``embeddings`` (epochs, nodes, width) and ``logits``
        (epochs, nodes, classes) of the held-out nodes and then of the anchors.
    """
    path = cache / "performance_proxy" / f"{digest(asdict(run), preset.training)}.safetensors"
    if not path.is_file():
        epochs, nodes = tuple(sorted({*preset.epochs, *preset.further})), torch.cat([task.test, task.anchors])
        held = [[each[nodes] for each in found[1:]] for found in trained(run, preset, task, epochs)]
        embeddings, logits = (torch.stack(each) for each in zip(*held, strict=True))
        _stored(path, {"epochs": torch.tensor(epochs), "embeddings": embeddings, "logits": logits})
    return load_file(path)


# -- scores ------------------------------------------------------------------------------------------------------------

METRICS = (
    "cca", "correlation_matching", "direct_matching", "distance_correlation", "frechet", "jaccard", "linear_cka",
    "linear_regression", "mrr", "mutual_knn", "paired_cosine", "procrustes", "pwcca", "rank_similarity", "rbf_cka",
    "relative_cosine", "rsa", "second_order_cosine", "shape_distance", "soft_matching", "svcca",
)  # fmt: skip
"""Metrics of hf-stitch that compare activations of samples, on the embeddings of held-out nodes."""
SIMILARITY, CENTRED, AGREEMENT, UNTRAINED = "similarity", "similarity, centred", "agreement", "untrained reference"
OF_REFERENCE = (SIMILARITY, CENTRED, AGREEMENT, UNTRAINED)
SPREAD, EPOCH = "spread alone", "epochs alone"


def of(predictor: str, reference: str) -> str:
    """Name a predictor that compares networks with a reference."""
    return f"{predictor} ({reference})"


COLUMNS = (EPOCH, "accuracy", SPREAD, *(of(each, reference) for reference in REFERENCES for each in OF_REFERENCE))
"""What the record has of each configuration."""
ALL_COLUMNS = (*COLUMNS, *(of(each, reference) for reference in REFERENCES for each in METRICS))
"""What is computed of each configuration."""
OF_PATH = (EPOCH, "accuracy", SPREAD, *(of(SIMILARITY, reference) for reference in REFERENCES))
"""What is computed of all epochs of a run."""


def relative(anchors: Tensor, vectors: Tensor, centred: bool = False) -> Tensor:
    """Compute cosines to anchors ``(n, anchors)``, in float64; those of a vector 0 are 0, as in the authors' code."""
    anchors, vectors = anchors.double(), vectors.double()
    if centred:
        anchors, vectors = anchors - anchors.mean(0), vectors - anchors.mean(0)
    return functional.normalize(vectors) @ functional.normalize(anchors).T


def alike(own: Tensor, other: Tensor) -> float:
    """Return the mean over nodes of the cosine between two relative representations ``(n, anchors)``."""
    return round(float(functional.cosine_similarity(own, other).mean()), 4)


def share(first: Tensor, second: Tensor) -> float:
    """Return the share of nodes at which two predictions agree."""
    return round(float((first == second).double().mean()), 4)


def metric_values(x: Tensor, y: Tensor) -> dict[str, float | None]:
    """Compute all metrics, as similarities: distances are negated. ``None``: undefined for these activations."""
    values: dict[str, float | None] = {}
    for name in METRICS:
        metric = registries.metrics.build(name)
        try:
            value = float(metric.update(x.double(), y.double()).compute())
        except (ValueError, ArithmeticError):
            value = float("nan")
        values[name] = round(value if metric.higher_is_better else -value, 3) if np.isfinite(value) else None
    return values


def scores_of(
    run: Run, states: Mapping[str, Tensor], references: Mapping[str, Mapping[str, Tensor]], task: Task, preset: Preset
) -> dict[str, Any]:
    """Score the snapshots of a run.

    Returns:
        ``path``: ``OF_PATH`` at all epochs; ``configurations``: ``ALL_COLUMNS`` at those of the preset. Snapshots with
        values that are not finite are left out.
    """
    count, path, configurations = len(task.test), [], []
    for epoch, embeddings, logits in zip(
        states["epochs"].tolist(), states["embeddings"], states["logits"], strict=True
    ):
        if not bool(embeddings.isfinite().all() and logits.isfinite().all()):
            continue
        nodes, anchors, answers = embeddings[:count], embeddings[count:], logits[:count].argmax(1)
        plain, centred = (relative(anchors, nodes, each) for each in (False, True))
        accuracy = share(answers, task.labels[task.test])
        found: dict[str, Any] = {EPOCH: epoch, "accuracy": accuracy, SPREAD: round(1 - float(plain.mean()), 4)}
        for name, reference in references.items():
            others, untrained = (
                (reference[state][task.anchors], reference[state][task.test]) for state in ("embeddings", "untrained")
            )
            values: dict[str, Any] = {
                SIMILARITY: alike(plain, relative(*others)), CENTRED: alike(centred, relative(*others, True)),
                AGREEMENT: share(answers, reference["logits"][task.test].argmax(1)),
                UNTRAINED: alike(plain, relative(*untrained)),
            }  # fmt: skip
            if epoch in preset.epochs:
                values |= metric_values(nodes, others[1])
            found |= {of(each, name): value for each, value in values.items()}
        path.append([found[name] for name in OF_PATH])
        if epoch in preset.epochs:
            configurations.append([found[name] for name in ALL_COLUMNS])
    return {"run": list(asdict(run).values()), "path": path, "configurations": configurations}


def floor(reference: Mapping[str, Tensor], task: Task) -> float:
    """Return the similarity of a network whose embeddings all point in one direction to a reference."""
    own = relative(reference["embeddings"][task.anchors], reference["embeddings"][task.test])
    return alike(torch.ones_like(own), own)


# -- correlations ------------------------------------------------------------------------------------------------------

GOOD, MODERATE = 0.6, 0.5
"""Accuracies: of the networks of the second table, and of the runs in which epochs are compared (as the authors do)."""
ONE = 0.9
"""Mean cosine from which embeddings count as pointing in one direction."""
ENOUGH = 0.8
"""Correlation from which similarity tells accuracy."""
PEARSON, SPEARMAN = "Pearson", "Spearman"
EVERYTHING, ACCURATE = "all configurations", f"accuracy above {GOOD}"


def correlation(x: Array, y: Array, kind: str) -> float:
    """Return the correlation of two series; NaN if one is constant."""
    if kind == SPEARMAN:
        x, y = rankdata(x), rankdata(y)
    x, y = x - x.mean(), y - y.mean()
    norm = np.sqrt((x @ x) * (y @ y))
    return float(x @ y / norm) if norm > 1e-12 else float("nan")


@dataclass(frozen=True)
class Points:
    """Configurations: accuracies, values of predictors, and the run of each."""

    accuracy: Array
    values: Mapping[str, Array]
    run: NDArray[np.int64]
    resamples: int

    def where(self, chosen: NDArray[np.bool_]) -> "Points":
        """Return some of the configurations."""
        values = {name: each[chosen] for name, each in self.values.items()}
        return Points(self.accuracy[chosen], values, self.run[chosen], self.resamples)

    def correlations(self, names: Sequence[str], kind: str, minus: str | None = None) -> dict[str, Estimate]:
        """Estimate the correlation of predictors with accuracy, or its difference from that of another one.

        Intervals are over runs, by a bootstrap that is common to all predictors: a run takes its configurations along.
        """

        def found(rows: Any) -> list[float]:
            own = [correlation(self.values[name][rows], self.accuracy[rows], kind) for name in names]
            less = 0.0 if minus is None else correlation(self.values[minus][rows], self.accuracy[rows], kind)
            return [value - less for value in own]

        draws, members = np.random.default_rng(0), [np.flatnonzero(self.run == run) for run in np.unique(self.run)]
        drawn = [
            found(np.concatenate([members[i] for i in draws.integers(len(members), size=len(members))]))
            for _ in range(self.resamples)
        ]
        low, high = np.nanquantile(np.array(drawn), [0.025, 0.975], axis=0)
        values = found(slice(None))
        return {name: Estimate(*map(float, each)) for name, *each in zip(names, values, low, high, strict=True)}


def points_of(runs: Runs, resamples: int = 1_000) -> Points:
    """Collect the configurations of runs. Metrics that are undefined count as least similar."""
    table = np.array(
        [[number, *each] for number, run in enumerate(runs) for each in run["configurations"]], dtype=float
    )
    values = dict(zip(ALL_COLUMNS, table[:, 1:].T, strict=False))
    accuracy = values.pop("accuracy")
    for name, own in values.items():
        values[name] = np.where(np.isnan(own), np.nanmin(own) if np.isfinite(own).any() else 0.0, own)
    return Points(accuracy, values, table[:, 0].astype(np.int64), resamples)


def within_runs(runs: Runs, predictor: str, kind: str) -> tuple[Estimate, int]:
    """Estimate the mean over runs of the correlation of a predictor with accuracy over epochs.

    Only runs count that reach an accuracy of more than ``MODERATE``, and in which neither is constant.

    Returns:
        The estimate, and the number of runs.
    """
    place, found = OF_PATH.index(predictor), []
    for run in runs:
        series = np.array(run["path"])
        if len(series) > 2 and series[:, 1].max() > MODERATE:
            found.append(correlation(series[:, place], series[:, 1], kind))
    values = np.array([value for value in found if np.isfinite(value)])
    if not len(values):
        return Estimate(float("nan"), float("nan"), float("nan")), 0
    means = values[np.random.default_rng(0).integers(len(values), size=(1_000, len(values)))].mean(1)
    return Estimate(float(values.mean()), *map(float, np.quantile(means, [0.025, 0.975]))), len(values)


GROUPS = {"GCN2": ("conv", "gcn2"), "GIN": ("conv", "gin"), "Adam": ("optimizer", "Adam"), "SGD": ("optimizer", "SGD")}
"""Kind of networks -> a hyperparameter and its value."""


def groups(runs: Runs, points: Points) -> dict[str, Points]:
    """Return the configurations by kind of convolution and by optimizer."""
    known = [Run(*run["run"]) for run in runs]
    return {
        title: points.where(np.array([getattr(known[number], name) == value for number in points.run]))
        for title, (name, value) in GROUPS.items()
    }


def stored(found: Any) -> Any:
    """Return estimates for a record: rounded, and ``None`` where a correlation is undefined."""
    if isinstance(found, Estimate):
        return None if np.isnan(found.value) else {name: round(value, 4) for name, value in asdict(found).items()}
    return {name: stored(each) for name, each in found.items()} if isinstance(found, dict) else found


def across(runs: Runs, points: Points, reference: str, epochs: Sequence[int]) -> dict[str, Any]:
    """Return the correlations of all predictors with accuracy in several sets of configurations."""
    sets = {EVERYTHING: points, ACCURATE: points.where(points.accuracy > GOOD)}
    sets |= {f"after {epoch} epochs": points.where(points.values[EPOCH] == epoch) for epoch in epochs}
    found = {}
    for title, some in {**sets, **groups(runs, points)}.items():
        if (count := len(np.unique(some.run))) < 3:
            continue
        names = [*(of(each, reference) for each in OF_REFERENCE), SPREAD]
        names += [EPOCH] if len(np.unique(some.values[EPOCH])) > 1 else []
        found[title] = {
            "n": len(some.accuracy), "runs": count, "accuracy": float(some.accuracy.mean()),
            **{kind: some.correlations(names, kind) for kind in (PEARSON, SPEARMAN)},
        }  # fmt: skip
    return found


def choice(first: Points, second: Points, reference: str) -> dict[str, Any]:
    """Choose the metric of the highest rank correlation in a set of configurations, and score it in another one."""
    metrics = [of(name, reference) for name in METRICS]
    ranks = first.correlations(metrics, SPEARMAN)
    chosen = max(metrics, key=lambda name: np.nan_to_num(ranks[name].value, nan=-1.0))
    others = [of(name, reference) for name in (SIMILARITY, AGREEMENT)]
    return {
        "n": [len(part.accuracy) for part in (first, second)],
        "chosen": chosen,
        "first": ranks,
        "second": second.correlations([*metrics, *others, SPREAD], SPEARMAN),
        "more": {name: second.correlations([chosen], SPEARMAN, name)[chosen] for name in others},
    }


FIRST, SECOND, FRESH = "first, ReLU", "first, tanh", "fresh, tanh"
"""Sets of runs and the reference that they are compared with."""


def analysed(first: Runs, fresh: Runs, preset: Preset) -> dict[str, Any]:
    """Return all correlations of the first runs and of the fresh ones."""
    points, further = (points_of(runs, preset.resamples) for runs in (first, fresh))
    parts = {FIRST: (first, points, RELU), SECOND: (first, points, TANH), FRESH: (fresh, further, TANH)}
    found: dict[str, Any] = {}
    for title, (runs, some, reference) in parts.items():
        own, within = of(SIMILARITY, reference), {}
        for name, kind in product((own, SPREAD), (PEARSON, SPEARMAN)):
            within[f"{name}: {kind}"], within["runs"] = within_runs(runs, name, kind)
        others = (of(AGREEMENT, reference), SPREAD)
        advantage = {name: some.correlations([own], SPEARMAN, name)[own] for name in others}
        found[title] = {
            "across": across(runs, some, reference, preset.epochs), "within": within, "advantage": advantage
        }  # fmt: skip
    halves = [points.where(points.run % 2 == half) for half in (0, 1)]
    found["choice"] = {RELU: choice(*halves, RELU), TANH: choice(points, further, TANH)}
    return {name: stored(each) for name, each in found.items()}


# -- results -----------------------------------------------------------------------------------------------------------


def main() -> None:
    """Run the experiment from the command line."""
    arguments = study.parser(__doc__, "data-dir", "cache").parse_args()
    preset = PRESETS[arguments.preset]
    task = task_of("cora", arguments.data_dir, preset.anchors, preset.nodes, valid=False)
    references = {name: reference_of(name, preset, task, arguments.cache) for name in REFERENCES}
    truth = task.labels[task.test]
    runs = [
        scores_of(run, snapshots(run, preset, task, arguments.cache), references, task, preset)
        for run in tqdm(grid(preset), desc="networks", unit="network")
    ]
    first, fresh = runs[: preset.runs], runs[preset.runs :]

    def kept(run: Mapping[str, Any]) -> dict[str, Any]:  # no values of metrics, whose correlations the record has
        return {"run": run["run"], "configurations": [each[: len(COLUMNS)] for each in run["configurations"]]}

    record: dict[str, Any] = {
        "preset": arguments.preset, "sizes": asdict(preset),
        "nodes": {"train": len(task.train), "test": len(task.test), "anchors": len(task.anchors)},
        "references": {
            name: {"accuracy": share(each["logits"][task.test].argmax(1), truth), "floor": floor(each, task)}
            for name, each in references.items()
        },
        "largest class": round(float(torch.bincount(truth).max()) / len(truth), 4),
        "columns": COLUMNS, "first": [kept(run) for run in first], "fresh": [kept(run) for run in fresh],
        "analysis": analysed(first, fresh, preset),
    }  # fmt: skip
    study.leave("performance_proxy", record, page, {"performance_proxy": picture(record)}, arguments.out)


def picture(record: Mapping[str, Any]) -> Figure:
    """Draw accuracy over similarity to each reference, and over agreement, of all runs."""
    runs = [*record["first"], *record["fresh"]]
    points = groups(runs, points_of(runs))
    figure = Figure(figsize=(11.0, 4.0), layout="constrained")
    titles = {
        of(SIMILARITY, RELU): "similarity to the ReLU reference",
        of(SIMILARITY, TANH): "similarity to the tanh reference",
        of(AGREEMENT, TANH): "agreement with the tanh reference",
    }
    for axes, (name, title) in zip(figure.subplots(1, 3, sharey=True), titles.items(), strict=True):
        for label in ("GCN2", "GIN"):
            axes.scatter(points[label].values[name], points[label].accuracy, s=9, alpha=0.5, label=label)
        axes.set_xlabel(title)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    for axes, name in zip(figure.axes, REFERENCES, strict=False):
        axes.axvline(record["references"][name]["floor"], color="grey", linewidth=0.8, linestyle="--")
    figure.axes[0].set_ylabel("accuracy on held-out nodes")
    figure.axes[0].legend(frameon=False)
    return figure


TELLS = f"the Pearson correlation is {ENOUGH:g} or more, by the interval over runs"
HIGHER = "the rank correlation with accuracy is higher, by the interval of the difference over runs"
CLAIMS = {
    (part, where): Claim(
        f"section 4.2{place}", f"Cora: similarity to a reference with {reference} tells accuracy {text}",
        "Pearson .955", TELLS, stand_in=False,
    )
    for part, reference in ((FIRST, RELU), (FRESH, f"{TANH} (which the figures with ReLU suggested, on new runs)"))
    for where, place, text in (
        ("across", "", "over all configurations"), ("within", ", public code", "within runs, over epochs"),
    )
}  # fmt: skip
OWN = [
    study.Claim(study.OWN, "after paper 2", f"Cora: {text}", "–", rule, stand_in=False)
    for text, rule in (
        (f"similarity to a reference with tanh tells accuracy among networks of an accuracy above {GOOD}", TELLS),
        ("similarity tells accuracy better than agreement of predictions", HIGHER),
        ("the best other metric, chosen on other runs, tells accuracy better than similarity", HIGHER),
    )
]
REFERENCE_OF = {FIRST: RELU, SECOND: TANH, FRESH: TANH}


def similarity(part: Mapping[str, Any], title: str, where: str, population: str = EVERYTHING) -> Any:
    """Return the Pearson correlation of similarity and accuracy in a set of runs, across configurations or within."""
    name = of(SIMILARITY, REFERENCE_OF[title])
    if where == "within":
        return part["within"][f"{name}: {PEARSON}"]
    return part["across"].get(population, {PEARSON: {name: None}})[PEARSON][name]


def claims(record: dict[str, Any]) -> list[dict[str, str]]:
    """Return the rows of the table of all experiments."""
    analysis, rows = record["analysis"], []

    def row(claim: study.Claim, value: Mapping[str, float] | None, ours: str, n: str, runs: int, bound: float) -> None:
        part = None if value is None else study.above(value, bound)
        rows.append(claim.row(ours.format(_shown(value)), n, [part], runs))

    for (title, where), claim in CLAIMS.items():
        part = analysis[title]
        everything, runs = part["across"][EVERYTHING], part["within"]["runs"]
        n = f"{everything['n']} configurations, {everything['runs']} runs" if where == "across" else f"{runs} runs"
        counted = everything["runs"] if where == "across" else runs
        row(claim, similarity(part, title, where), "Pearson {}", f"{n}, one reference", counted, ENOUGH)
    fresh, chosen = analysis[FRESH], analysis["choice"][TANH]
    everything, accurate = fresh["across"][EVERYTHING], fresh["across"].get(ACCURATE, {"n": 0, "runs": 0})
    n = "{n} configurations, {runs} runs"
    ranks = [_shown(everything[SPEARMAN][of(name, TANH)]) for name in (SIMILARITY, AGREEMENT)]
    among, better, other = OWN
    row(
        among,
        similarity(fresh, FRESH, "across", ACCURATE),
        "Pearson {}",
        n.format(**accurate),
        accurate["runs"],
        ENOUGH,
    )
    row(
        better,
        fresh["advantage"][of(AGREEMENT, TANH)],
        f"Spearman {ranks[0]}, agreement {ranks[1]}; difference {{}}",
        n.format(**everything),
        everything["runs"],
        0,
    )
    row(
        other,
        chosen["more"][of(SIMILARITY, TANH)],
        f"{_short(chosen['chosen'])}: Spearman {{}} more",
        n.format(**everything),
        everything["runs"],
        0,
    )
    return rows


PAGE = """# Similarity to a reference as a proxy of accuracy (after Moschella et al., ICLR 2023, section 4.2)

**What to do**: do not rank networks by their similarity to a reference. Agreement of their predictions with the
reference's needs no labels either, and tells accuracy nearly perfectly.

{claims}

Claim: on Cora, the similarity of a network's relative representations to those of a well trained one tells its accuracy
without labels (Pearson .955 over some 2,000 networks).

Setting: Cora with features that sum to 1; a random tenth of the nodes ({test}) is held out, all others ({train}) train.
{runs} training runs, drawn at random from the {total} of the paper's grid: GCN2 and GIN, {layers} layers, dropout .1
and .5, ReLU and tanh after the first layer and after convolutions, Adam and SGD, learning rates .01 and .02, {seeds}
seeds; width {width}, which page and public code leave open. Snapshots after {epochs} epochs are the configurations: {n}
of {possible}; in the others, values are not finite. Reference: GCN2, {reference_layers} layers, {reference_epochs}
epochs, ReLU, dropout .5, Adam, learning rate .01, of a seed that no run has, so that it is none of the configurations;
accuracy {relu_accuracy:.3f}. *Similarity*: the mean over held-out nodes of the cosine between both relative
representations (embeddings after the last convolution, {anchors} random training nodes as anchors, not centred).
Networks are trained on absolute representations. *Agreement*: the share of held-out nodes at which network and
reference predict the same class, which needs no labels either. *Untrained reference*: similarity to the reference
before its training. *Spread alone*: 1 minus the mean cosine between nodes and anchors, without any reference. *Epochs
alone*: the number of epochs. Accuracies are those of held-out nodes; the largest class has {largest:.3f} of them.

The bounds of the rules, a Pearson correlation of {enough:g} and a difference of 0, were fixed before any similarity was
seen. The paper's sentence is about all networks; its public code computes the mean of correlations within runs (over
epochs, of runs that reach an accuracy above {moderate:g}). Until this version one verdict covered both, *in part* if
one holds; that each has a row was written when these figures were known. So was the reference with tanh, which the
figures with ReLU suggested (below): it is tested on {fresh} other runs of the grid. All intervals are 95% over runs: a
run takes its configurations with it. Each reference is one network.

![Accuracy over similarity to both references, and over agreement](performance_proxy.png)

(All runs. Dashed: networks whose embeddings all point in one direction.)

## A reference with ReLU

{first_table}

*Accuracy*: mean. {first_said}

The public code's only correlation is the mean of those within runs over epochs, of runs that reach an accuracy above
{moderate:g}. Here, at {path} epochs from {from_epoch} to {to_epoch}:

{first_paths}

## Why

Poorly trained deep networks output embeddings that all point in one direction: of the {bad} configurations of an
accuracy of at most {good:g}, {narrow} have a mean cosine between nodes and anchors above {one:g}. With ReLU, the
cosines of the reference are positive too, so that a network whose cosines are all 1 has the similarity {relu_floor:.3f}
to it. With tanh, the cosines of the reference have both signs, and such a network has the similarity {tanh_floor:.3f}.
The paper leaves the activation of its reference open. Mean similarity of inaccurate and accurate networks:

{why}

Centring the embeddings on the mean of the anchors removes the common direction, too (*similarity, centred*, above).
Agreement is close to accuracy because the reference is accurate. Within runs, spread alone, which needs no reference,
has a Pearson correlation of {spread_within}: what rises with accuracy there is that embeddings part.

## A reference with tanh

The same with tanh in place of ReLU (accuracy {tanh_accuracy:.3f}). This was decided when the figures above, and these
of the first {runs} runs, were known:

{second_table}

{second_paths}

So {fresh} further runs of the grid were drawn, with the same rules:

{fresh_table}

{fresh_said}

{fresh_paths}

## Another metric

The {metrics} metrics of hf-stitch that compare activations, on the same embeddings of held-out nodes; distances are
negated; where a metric is undefined, a configuration counts as least similar. As fixed before, with the ReLU reference:
the metric of the highest rank correlation on one half of the first runs, scored on the other half. Then, with the tanh
reference: chosen on all first runs, scored on the further ones.

{choices}

{choice_said}

{footer}"""


def page(record: dict[str, Any]) -> str:
    """Return the page of the results from the record, as it is read from JSON."""
    analysis, sizes, references = record["analysis"], record["sizes"], record["references"]
    first, second, fresh = (analysis[title] for title in (FIRST, SECOND, FRESH))
    path, points = sorted({*sizes["epochs"], *sizes["further"]}), points_of(record["first"])
    bad = points.accuracy <= GOOD
    tables = {
        f"{name}_{kind}": text
        for name, part in (("first", first), ("second", second), ("fresh", fresh))
        for kind, text in (("table", _table(part["across"], name != "second")), ("paths", _paths(part["within"])),
                           ("said", " ".join(_compared(each, "Similarity", other)
                                             for other, each in part["advantage"].items())))
    }  # fmt: skip
    return PAGE.format(
        footer=footer("performance_proxy"),
        **record["nodes"], **{name: sizes[name] for name in ("runs", "fresh", "seeds", "width")}, **tables,
        **{f"{name.lower()}_{key}": value for name, each in references.items() for key, value in each.items()},
        claims=study.verdicts(claims(record)), total=128 * sizes["seeds"],
        layers=" and ".join(map(str, sizes["layers"])), epochs=", ".join(map(str, sizes["epochs"])),
        n=first["across"][EVERYTHING]["n"], possible=sizes["runs"] * len(sizes["epochs"]),
        reference_layers=sizes["layers"][0], reference_epochs=sizes["reference"], largest=record["largest class"],
        enough=ENOUGH, moderate=MODERATE, good=GOOD, one=ONE, path=len(path), from_epoch=path[0], to_epoch=path[-1],
        bad=int(bad.sum()), narrow=int((bad & (points.values[SPREAD] < 1 - ONE)).sum()), why=_why(record, points),
        spread_within=_shown(first["within"][f"{SPREAD}: {PEARSON}"]), metrics=len(METRICS),
        choices=_choices(analysis["choice"]),
        choice_said="\n".join(_chosen(analysis["choice"][name], name) for name in REFERENCES),
    )  # fmt: skip


def _shown(estimate: Mapping[str, float] | None) -> str:
    return "–" if estimate is None else study.shown(estimate)


def _short(name: str) -> str:
    """Return the name of a predictor without that of its reference."""
    return name.partition(" (")[0]


def _compared(difference: Mapping[str, float] | None, first: str, second: str) -> str:
    """Say which predictor has the higher rank correlation, by the rule of the page."""
    words = {True: "tells accuracy better than", False: "tells accuracy worse than", None: "cannot be told from"}
    said = words[None if difference is None else study.above(difference, 0)]
    return f"**{_short(first)} {said} {_short(second)}** (rank correlation {_shown(difference)} more)."


def _paths(within: Mapping[str, Any]) -> str:
    names = dict.fromkeys(key.rpartition(": ")[0] for key in within if key != "runs")
    rows = [
        (_short(name), within["runs"], *(_shown(within[f"{name}: {kind}"]) for kind in (PEARSON, SPEARMAN)))
        for name in names
    ]
    return study.markdown(("within runs", "runs", PEARSON, SPEARMAN), rows)


def _table(found: Mapping[str, Any], grouped: bool) -> str:
    """Return a row for each set of configurations and predictor."""
    rows = []
    for title, each in found.items():
        for place, name in enumerate(each[PEARSON] if grouped or title not in GROUPS else ()):
            sizes = ("", "", "", "") if place else (title, each["n"], each["runs"], f"{each['accuracy']:.3f}")
            rows.append((*sizes, _short(name), _shown(each[PEARSON][name]), _shown(each[SPEARMAN][name])))
    return study.markdown(("configurations", "n", "runs", "accuracy", "predictor", PEARSON, SPEARMAN), rows)


def _why(record: Mapping[str, Any], points: Points) -> str:
    """Return how similar inaccurate and accurate networks are to both references."""
    rows = []
    for title, some in groups(record["first"], points).items():
        row: list[object] = [title]
        for part in (some.where(some.accuracy <= GOOD), some.where(some.accuracy > GOOD)):
            means = [part.values[of(SIMILARITY, name)] for name in REFERENCES]
            row += [len(part.accuracy), *(f"{each.mean():.3f}" if len(each) else "–" for each in means)]
        rows.append(row)
    to = [f"to {name}" for name in REFERENCES]
    header = ("networks", f"n of accuracy at most {GOOD}", *to, f"n of accuracy above {GOOD}", *to)
    return study.markdown(header, rows)


def _choices(found: Mapping[str, Any]) -> str:
    """Return the rank correlations of all metrics, best first with the tanh reference."""
    names = sorted(METRICS, key=lambda name: -(found[TANH]["first"][of(name, TANH)] or {"value": -1.0})["value"])
    rows = [
        (name, *(_shown(found[each][part][of(name, each)]) for each in REFERENCES for part in ("first", "second")))
        for name in names
    ]
    for name in (SIMILARITY, AGREEMENT, SPREAD):
        seconds = [_shown(found[each]["second"][name if name == SPREAD else of(name, each)]) for each in REFERENCES]
        rows.append((f"*{name}*", "–", seconds[0], "–", seconds[1]))
    header = [
        f"{each}, {part} {n}"
        for each in REFERENCES
        for part, n in zip(("chosen on", "scored on"), found[each]["n"], strict=True)
    ]
    return study.markdown(("metric", *header), rows)


def _chosen(found: Mapping[str, Any], reference: str) -> str:
    """Say how the chosen metric compares with similarity and agreement."""
    said = " ".join(_compared(each, found["chosen"], name) for name, each in found["more"].items())
    return f"- With the {reference} reference, {_short(found['chosen'])} was chosen. {said}"


if __name__ == "__main__":
    main()
