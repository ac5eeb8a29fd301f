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
from hf_stitch_graphs import DeepGNN, Graph, read_planetoid
from matplotlib.figure import Figure
from numpy.typing import NDArray
from relative_representations.encoders import digest
from relative_representations.kept import Estimate
from safetensors.torch import load_file, save_file
from scipy.stats import rankdata
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm

from hf_stitch.registry import registries
from hf_stitch.storage.files import write_whole

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Preset:
    """Sizes of the experiment.

    Attributes:
        runs: Number of training runs, drawn from the grid.
        fresh: Number of further runs, on which what the first ones suggested is confirmed.
        seeds: Number of seeds in the grid.
        layers: Numbers of convolutions in the grid; the reference has the first.
        epochs: Epochs after which a run counts as a configuration.
        further: Further epochs at which similarity and accuracy are computed.
        reference: Epochs of the reference.
        anchors: Number of anchors.
        width: Width of the networks.
        nodes: Number of nodes, the first of the graph. ``None``: all.
        resamples: Number of bootstrap resamples.
    """

    runs: int
    fresh: int
    seeds: int
    layers: tuple[int, ...]
    epochs: tuple[int, ...]
    further: tuple[int, ...]
    reference: int
    anchors: int
    width: int
    nodes: int | None = None
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
HELD_OUT = 0.1
"""Share of held-out nodes."""


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


@dataclass(frozen=True)
class Task:
    """Nodes to classify.

    Attributes:
        graph: The graph, with features that sum to 1.
        train: Training nodes.
        test: Held-out nodes.
        anchors: Anchors, of the training nodes.
    """

    graph: Graph
    train: Tensor
    test: Tensor
    anchors: Tensor


def task_of(preset: Preset, data_dir: str | None) -> Task:
    """Read Cora, hold out a random tenth of the nodes, and draw the anchors from the others.

    Raises:
        SystemExit: If ``data_dir`` is ``None``, because the graph is not on the Hub.
    """
    if data_dir is None:
        raise SystemExit("Cora is not on the Hub: pass --data-dir, a folder with planetoid/cora.npz")
    graph = read_planetoid(Path(data_dir, "planetoid"), "cora").normalized()
    graph = graph if preset.nodes is None else graph.induced(torch.arange(preset.nodes))
    order = torch.randperm(len(graph), generator=torch.Generator().manual_seed(0))
    count = round(HELD_OUT * len(graph))
    test, train = order[:count], order[count:]
    return Task(graph, train, test, train[: preset.anchors])


# -- training ----------------------------------------------------------------------------------------------------------


def network_of(run: Run, preset: Preset, graph: Graph) -> DeepGNN:
    """Create the network of a run, untrained."""
    torch.manual_seed(run.seed)
    classes = int(graph.y.max()) + 1
    return DeepGNN(
        run.conv, graph.x.shape[1], preset.width, run.layers, classes, run.dropout, run.act, run.conv_act
    ).eval()  # fmt: skip


def trained(run: Run, preset: Preset, task: Task, epochs: tuple[int, ...]) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Train a network on all training nodes at once.

    Args:
        run: Hyperparameters.
        preset: Sizes.
        task: The nodes.
        epochs: After how many epochs to yield.

    Yields:
        The number of epochs, embeddings of all nodes (after the last convolution), and their logits.
    """
    graph = task.graph
    network = network_of(run, preset, graph)
    optimizer = getattr(torch.optim, run.optimizer)(network.parameters(), lr=run.lr)
    for epoch in range(max(epochs) + 1):
        if epoch:
            network.train()
            loss = functional.cross_entropy(network(graph.x, graph.edge_index)[task.train], graph.y[task.train])
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


def reference_of(name: str, preset: Preset, task: Task, cache: Path) -> dict[str, Tensor]:
    """Train a reference, or read it from the cache.

    Returns:
        ``embeddings`` and ``logits`` of all nodes, and those of the untrained network, ``untrained``.
    """
    run = replace(REFERENCES[name], layers=preset.layers[0])
    path = cache / "performance_proxy" / f"reference_{digest(asdict(run), preset.training)}.safetensors"
    if not path.is_file():
        states = {epoch: held for epoch, *held in trained(run, preset, task, (0, preset.reference))}
        found = {"embeddings": states[preset.reference][0], "logits": states[preset.reference][1]}
        _save({**found, "untrained": states[0][0]}, path)
    return load_file(path)


def snapshots(run: Run, preset: Preset, task: Task, cache: Path) -> dict[str, Tensor]:
    """Train a network, or read its snapshots from the cache.

    Returns:
        ``epochs``, those of the preset and the further ones, ``embeddings`` (epochs, nodes, width) and ``logits``
        (epochs, nodes, classes) of the held-out nodes and then of the anchors.
    """
    path = cache / "performance_proxy" / f"{digest(asdict(run), preset.training)}.safetensors"
    if not path.is_file():
        epochs = tuple(sorted({*preset.epochs, *preset.further}))
        nodes = torch.cat([task.test, task.anchors])
        held: dict[str, list[Tensor]] = {"embeddings": [], "logits": []}
        for _, embeddings, logits in trained(run, preset, task, epochs):
            held["embeddings"].append(embeddings[nodes])
            held["logits"].append(logits[nodes])
        _save({"epochs": torch.tensor(epochs), **{name: torch.stack(each) for name, each in held.items()}}, path)
    return load_file(path)


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, lambda path: save_file({name: each.contiguous() for name, each in tensors.items()}, path))


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


def metric_values(x: Tensor, y: Tensor) -> list[float | None]:
    """Compute all metrics, as similarities: distances are negated. ``None``: undefined for these activations."""
    values: list[float | None] = []
    for name in METRICS:
        metric = registries.metrics.build(name)
        try:
            value = float(metric.update(x.double(), y.double()).compute())
        except (ValueError, ArithmeticError):
            value = float("nan")
        values.append(round(value if metric.higher_is_better else -value, 3) if np.isfinite(value) else None)
    return values


def scores_of(
    run: Run, states: Mapping[str, Tensor], references: Mapping[str, Mapping[str, Tensor]], task: Task, preset: Preset
) -> dict[str, Any]:
    """Score the snapshots of a run.

    Returns:
        ``path``: ``OF_PATH`` at all epochs; ``configurations``: ``ALL_COLUMNS`` at those of the preset. Snapshots with
        values that are not finite are left out.
    """
    count, truth = len(task.test), task.graph.y[task.test]
    path, configurations = [], []
    for epoch, embeddings, logits in zip(
        states["epochs"].tolist(), states["embeddings"], states["logits"], strict=True
    ):
        if not bool(embeddings.isfinite().all() and logits.isfinite().all()):
            continue
        nodes, anchors, answers = embeddings[:count], embeddings[count:], logits[:count].argmax(1)
        plain, centred = (relative(anchors, nodes, each) for each in (False, True))
        found: dict[str, Any] = {
            EPOCH: epoch,
            "accuracy": round(float((answers == truth).double().mean()), 4),
            SPREAD: round(1 - float(plain.mean()), 4),
        }
        for name, reference in references.items():
            others = reference["embeddings"][task.anchors], reference["embeddings"][task.test]
            untrained = reference["untrained"][task.anchors], reference["untrained"][task.test]
            expected = reference["logits"][task.test].argmax(1)
            values = (
                alike(plain, relative(*others)), alike(centred, relative(*others, True)),
                round(float((answers == expected).double().mean()), 4), alike(plain, relative(*untrained)),
            )  # fmt: skip
            found |= {of(each, name): value for each, value in zip(OF_REFERENCE, values, strict=True)}
            if epoch in preset.epochs:
                metrics = metric_values(nodes, others[1])
                found |= {of(each, name): value for each, value in zip(METRICS, metrics, strict=True)}
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
EVERYTHING = "all configurations"


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
    epoch: Array
    resamples: int

    def where(self, chosen: NDArray[np.bool_]) -> "Points":
        """Return some of the configurations."""
        values = {name: each[chosen] for name, each in self.values.items()}
        return Points(self.accuracy[chosen], values, self.run[chosen], self.epoch[chosen], self.resamples)

    def draws(self) -> Iterator[NDArray[np.int64]]:
        """Draw runs with replacement; a run takes all of its configurations with it."""
        random = np.random.default_rng(0)
        members = [np.flatnonzero(self.run == run) for run in np.unique(self.run)]
        for _ in range(self.resamples):
            yield np.concatenate([members[i] for i in random.integers(len(members), size=len(members))])

    def correlations(self, names: Sequence[str], kind: str, minus: str | None = None) -> dict[str, Estimate]:
        """Estimate the correlation of predictors with accuracy, or its difference from that of another one.

        Returns:
            Predictor -> estimate with a 95% interval over runs, by a bootstrap that is common to all predictors.
        """

        def found(rows: Any) -> list[float]:
            own = [correlation(self.values[name][rows], self.accuracy[rows], kind) for name in names]
            less = 0.0 if minus is None else correlation(self.values[minus][rows], self.accuracy[rows], kind)
            return [value - less for value in own]

        drawn = np.array([found(rows) for rows in self.draws()])
        low, high = np.nanquantile(drawn, [0.025, 0.975], axis=0)
        values = found(slice(None))
        return {name: Estimate(*map(float, each)) for name, *each in zip(names, values, low, high, strict=True)}


def points_of(runs: Sequence[Mapping[str, Any]], resamples: int = 1_000) -> Points:
    """Collect the configurations of runs. Metrics that are undefined count as least similar."""
    rows = [[number, *each] for number, run in enumerate(runs) for each in run["configurations"]]
    table = np.array(rows, dtype=float)
    values = dict(zip(ALL_COLUMNS, table[:, 1:].T, strict=False))
    accuracy = values.pop("accuracy")
    for name, own in values.items():
        values[name] = np.where(np.isnan(own), np.nanmin(own) if np.isfinite(own).any() else 0.0, own)
    return Points(accuracy, values, table[:, 0].astype(np.int64), values[EPOCH], resamples)


def within_runs(runs: Sequence[Mapping[str, Any]], predictor: str, kind: str) -> tuple[Estimate, int]:
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
    random = np.random.default_rng(0)
    means = values[random.integers(len(values), size=(1_000, len(values)))].mean(1)
    return Estimate(float(values.mean()), *map(float, np.quantile(means, [0.025, 0.975]))), len(values)


def populations(points: Points, epochs: Sequence[int]) -> dict[str, Points]:
    """Return the sets of configurations in which correlations are estimated."""
    return {
        EVERYTHING: points,
        f"accuracy above {GOOD}": points.where(points.accuracy > GOOD),
        **{f"after {epoch} epochs": points.where(points.epoch == epoch) for epoch in epochs},
    }


GROUPS = ("GCN2", "GIN", "Adam", "SGD")


def groups(runs: Sequence[Mapping[str, Any]], points: Points) -> dict[str, Points]:
    """Return the configurations by kind of convolution and by optimizer."""
    known = [Run(*run["run"]) for run in runs]
    own = [known[number] for number in points.run]
    return {
        "GCN2": points.where(np.array([run.conv == "gcn2" for run in own])),
        "GIN": points.where(np.array([run.conv == "gin" for run in own])),
        "Adam": points.where(np.array([run.optimizer == "Adam" for run in own])),
        "SGD": points.where(np.array([run.optimizer == "SGD" for run in own])),
    }


def stored(found: Any) -> Any:
    """Return estimates for a record: rounded, and ``None`` where a correlation is undefined."""
    if isinstance(found, Estimate):
        return None if np.isnan(found.value) else {name: round(value, 4) for name, value in asdict(found).items()}
    return {name: stored(each) for name, each in found.items()} if isinstance(found, dict) else found


def across(runs: Sequence[Mapping[str, Any]], points: Points, reference: str, epochs: Sequence[int]) -> dict[str, Any]:
    """Return the correlations of all predictors with accuracy in several sets of configurations."""
    found = {}
    for title, some in {**populations(points, epochs), **groups(runs, points)}.items():
        if len(np.unique(some.run)) < 3:
            continue
        names = [*(of(each, reference) for each in OF_REFERENCE), SPREAD, EPOCH]
        names = [name for name in names if name != EPOCH or len(np.unique(some.epoch)) > 1]
        found[title] = {
            "n": len(some.accuracy), "runs": len(np.unique(some.run)), "accuracy": float(some.accuracy.mean()),
            **{kind: some.correlations(names, kind) for kind in (PEARSON, SPEARMAN)},
        }  # fmt: skip
    return found


def within(runs: Sequence[Mapping[str, Any]], reference: str) -> dict[str, Any]:
    """Return the correlations within runs over epochs of similarity and spread."""
    found: dict[str, Any] = {}
    for name in (of(SIMILARITY, reference), SPREAD):
        for kind in (PEARSON, SPEARMAN):
            found[f"{name}: {kind}"], found["runs"] = within_runs(runs, name, kind)
    return found


def advantages(points: Points, reference: str) -> dict[str, Estimate]:
    """Return how much higher the rank correlation of similarity is than those of agreement and spread."""
    own = of(SIMILARITY, reference)
    return {name: points.correlations([own], SPEARMAN, name)[own] for name in (of(AGREEMENT, reference), SPREAD)}


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


def analysed(first: Sequence[Mapping[str, Any]], fresh: Sequence[Mapping[str, Any]], preset: Preset) -> dict[str, Any]:
    """Return all correlations of the first runs and of the fresh ones."""
    points, further = (points_of(runs, preset.resamples) for runs in (first, fresh))
    halves = [points.where(points.run % 2 == half) for half in (0, 1)]
    parts = {"first, ReLU": (first, points, RELU), "first, tanh": (first, points, TANH)}
    parts["fresh, tanh"] = fresh, further, TANH
    found: dict[str, Any] = {
        title: {
            "across": across(runs, some, reference, preset.epochs),
            "within": within(runs, reference),
            "advantage": advantages(some, reference),
        }
        for title, (runs, some, reference) in parts.items()
    }
    found["choice"] = {RELU: choice(*halves, RELU), TANH: choice(points, further, TANH)}
    return {name: stored(each) for name, each in found.items()}


def verdict(found: Sequence[Mapping[str, float] | None]) -> str:
    """Return whether correlations reach ``ENOUGH``, by the rule of the page."""
    estimates = [Estimate(**each) for each in found if each is not None]
    if not estimates:
        return "undecided"
    if all(each.low >= ENOUGH for each in estimates):
        return "confirmed"
    if all(each.high < ENOUGH for each in estimates):
        return "refuted"
    return "in part" if any(each.low >= ENOUGH for each in estimates) else "undecided"


def sign(found: Mapping[str, float] | None) -> str:
    """Return whether a difference is above 0, by the rule of the page."""
    if found is None or found["low"] <= 0 <= found["high"]:
        return "undecided"
    return "confirmed" if found["low"] > 0 else "refuted"


# -- results -----------------------------------------------------------------------------------------------------------


def main() -> None:
    """Run the experiment from the command line."""
    arguments = study.parser(__doc__, "data-dir", "cache").parse_args()
    preset = PRESETS[arguments.preset]
    task = task_of(preset, arguments.data_dir)
    references = {name: reference_of(name, preset, task, arguments.cache) for name in REFERENCES}
    truth = task.graph.y[task.test]
    runs = [
        scores_of(run, snapshots(run, preset, task, arguments.cache), references, task, preset)
        for run in tqdm(grid(preset), desc="networks", unit="network")
    ]
    first, fresh = runs[: preset.runs], runs[preset.runs :]
    record: dict[str, Any] = {
        "preset": arguments.preset,
        "sizes": asdict(preset),
        "nodes": {"train": len(task.train), "test": len(task.test), "anchors": len(task.anchors)},
        "references": {
            name: {
                "accuracy": round(float((each["logits"][task.test].argmax(1) == truth).double().mean()), 4),
                "floor": floor(each, task),
            }
            for name, each in references.items()
        },
        "largest class": round(float(torch.bincount(truth).max()) / len(truth), 4),
        "columns": COLUMNS,
        "first": [_kept(run) for run in first],
        "fresh": [_kept(run) for run in fresh],
        "analysis": analysed(first, fresh, preset),
    }
    study.leave("performance_proxy", record, page, {"performance_proxy": picture(record)}, arguments.out)


def _kept(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the record has of a run: no values of metrics, whose correlations it has."""
    return {"run": run["run"], "configurations": [each[: len(COLUMNS)] for each in run["configurations"]]}


def picture(record: Mapping[str, Any]) -> Figure:
    """Draw accuracy over similarity to each reference, and over agreement, of all runs."""
    runs = [*record["first"], *record["fresh"]]
    points = points_of(runs)
    kinds = np.array([Run(*runs[number]["run"]).conv for number in points.run])
    figure = Figure(figsize=(11.0, 4.0), layout="constrained")
    titles = {
        of(SIMILARITY, RELU): "similarity to the ReLU reference",
        of(SIMILARITY, TANH): "similarity to the tanh reference",
        of(AGREEMENT, TANH): "agreement with the tanh reference",
    }  # fmt: skip
    for axes, (name, title) in zip(figure.subplots(1, 3, sharey=True), titles.items(), strict=True):
        for kind, label in (("gcn2", "GCN2"), ("gin", "GIN")):
            chosen = kinds == kind
            axes.scatter(points.values[name][chosen], points.accuracy[chosen], s=9, alpha=0.5, label=label)
        axes.set_xlabel(title)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    for axes, name in zip(figure.axes, REFERENCES, strict=False):
        axes.axvline(record["references"][name]["floor"], color="grey", linewidth=0.8, linestyle="--")
    figure.axes[0].set_ylabel("accuracy on held-out nodes")
    figure.axes[0].legend(frameon=False)
    return figure


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

The rules, fixed before any similarity was seen: the claim is confirmed if the Pearson correlation is at least
{enough:g} (lower end of the interval) over all configurations and within runs over epochs, refuted if it is less (upper
end) in both, in part if it holds in one, else undecided. A predictor is better than another one if the difference of
their rank correlations is above 0 (interval), worse if below. All intervals are 95% over runs: a run takes its
configurations with it.

**{first_verdict}, with a reference with ReLU**: Pearson {first_all} over all configurations, {first_within} within runs
over epochs ({first_runs} runs that reach an accuracy above {moderate:g}).

**{fresh_verdict}, with a reference with tanh**, which these figures suggested (below), on {fresh} other runs of the
grid: Pearson {fresh_all} over {fresh_n} configurations, {fresh_within} within {fresh_runs} runs.

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

This page and [its figures as JSON](performance_proxy.json) are written by the command (preset {preset}, one core):

```
python -m relative_representations.performance_proxy --data-dir DATA --cache CACHE --out OUT
```
"""


def page(record: dict[str, Any]) -> str:
    """Return the page of the results from the record, as it is read from JSON."""
    analysis, sizes, references = record["analysis"], record["sizes"], record["references"]
    first, second, fresh = (analysis[title] for title in ("first, ReLU", "first, tanh", "fresh, tanh"))
    path, points = sorted({*sizes["epochs"], *sizes["further"]}), points_of(record["first"])
    return PAGE.format(
        **record["nodes"],
        claims=study.verdicts(claims(record)),
        **{name: sizes[name] for name in ("runs", "fresh", "seeds", "width")},
        total=128 * sizes["seeds"],
        layers=" and ".join(map(str, sizes["layers"])),
        epochs=", ".join(map(str, sizes["epochs"])),
        n=first["across"][EVERYTHING]["n"],
        possible=sizes["runs"] * len(sizes["epochs"]),
        reference_layers=sizes["layers"][0],
        reference_epochs=sizes["reference"],
        relu_accuracy=references[RELU]["accuracy"],
        tanh_accuracy=references[TANH]["accuracy"],
        relu_floor=references[RELU]["floor"],
        tanh_floor=references[TANH]["floor"],
        largest=record["largest class"],
        enough=ENOUGH,
        moderate=MODERATE,
        first_verdict=_verdict(first, RELU).capitalize(),
        first_all=_shown(first["across"][EVERYTHING][PEARSON][of(SIMILARITY, RELU)]),
        first_within=_shown(first["within"][f"{of(SIMILARITY, RELU)}: {PEARSON}"]),
        first_runs=first["within"]["runs"],
        first_table=_table(first["across"]),
        first_said=_advantages(first),
        first_paths=_paths(first["within"], RELU),
        fresh_verdict=_verdict(fresh, TANH).capitalize(),
        fresh_all=_shown(fresh["across"][EVERYTHING][PEARSON][of(SIMILARITY, TANH)]),
        fresh_n=fresh["across"][EVERYTHING]["n"],
        fresh_within=_shown(fresh["within"][f"{of(SIMILARITY, TANH)}: {PEARSON}"]),
        fresh_runs=fresh["within"]["runs"],
        fresh_table=_table(fresh["across"]),
        fresh_said=_advantages(fresh),
        fresh_paths=_paths(fresh["within"], TANH),
        second_table=_table({title: each for title, each in second["across"].items() if title not in GROUPS}),
        second_paths=_paths(second["within"], TANH),
        path=len(path),
        from_epoch=path[0],
        to_epoch=path[-1],
        why=_why(record),
        spread_within=_shown(first["within"][f"{SPREAD}: {PEARSON}"]),
        bad=int((points.accuracy <= GOOD).sum()),
        narrow=int(((points.accuracy <= GOOD) & (points.values[SPREAD] < 1 - ONE)).sum()),
        good=GOOD,
        one=ONE,
        metrics=len(METRICS),
        choices=_choices(analysis["choice"]),
        choice_said="\n".join(_chosen(analysis["choice"][name], name) for name in REFERENCES),
        preset=record["preset"],
    )


def _shown(estimate: Mapping[str, float] | None) -> str:
    return "–" if estimate is None else Estimate(**estimate).shown(3)


def _verdict(part: Mapping[str, Any], reference: str) -> str:
    name = of(SIMILARITY, reference)
    return verdict([part["across"][EVERYTHING][PEARSON][name], part["within"][f"{name}: {PEARSON}"]])


def _short(name: str) -> str:
    """Return the name of a predictor without that of its reference."""
    return name.partition(" (")[0]


def _compared(difference: Mapping[str, float] | None, first: str, second: str) -> str:
    """Say which predictor has the higher rank correlation, by the rule of the page."""
    words = {"confirmed": "tells accuracy better than", "refuted": "tells accuracy worse than"}
    said = words.get(sign(difference), "cannot be told from")
    return f"**{_short(first)} {said} {_short(second)}** (rank correlation {_shown(difference)} more)."


def _advantages(part: Mapping[str, Any]) -> str:
    return " ".join(_compared(each, "Similarity", name) for name, each in part["advantage"].items())


def _paths(part: Mapping[str, Any], reference: str) -> str:
    rows = [
        (_short(name), part["runs"], *(_shown(part[f"{name}: {kind}"]) for kind in (PEARSON, SPEARMAN)))
        for name in (of(SIMILARITY, reference), SPREAD)
    ]
    return study.markdown(("within runs", "runs", PEARSON, SPEARMAN), rows)


def _table(found: Mapping[str, Any]) -> str:
    """Return a row for each set of configurations and predictor."""
    rows = []
    for title, each in found.items():
        for place, name in enumerate(each[PEARSON]):
            sizes = ("", "", "", "") if place else (title, each["n"], each["runs"], f"{each['accuracy']:.3f}")
            rows.append((*sizes, _short(name), _shown(each[PEARSON][name]), _shown(each[SPEARMAN][name])))
    return study.markdown(("configurations", "n", "runs", "accuracy", "predictor", PEARSON, SPEARMAN), rows)


def _why(record: Mapping[str, Any]) -> str:
    """Return how similar inaccurate and accurate networks are to both references."""
    lines = []
    for title, some in groups(record["first"], points_of(record["first"])).items():
        parts = some.where(some.accuracy <= GOOD), some.where(some.accuracy > GOOD)
        cells: list[Any] = []
        for part in parts:
            means = [part.values[of(SIMILARITY, name)] for name in REFERENCES]
            cells += [len(part.accuracy), *(f"{each.mean():.3f}" if len(each) else "–" for each in means)]
        lines.append((title, *cells))
    header = (
        f"n of accuracy at most {GOOD}",
        "to ReLU",
        "to tanh",
        f"n of accuracy above {GOOD}",
        "to ReLU",
        "to tanh",
    )
    return study.markdown(("networks", *header), lines)


def _choices(found: Mapping[str, Any]) -> str:
    """Return the rank correlations of all metrics, best first with the tanh reference."""
    names = sorted(METRICS, key=lambda name: -(found[TANH]["first"][of(name, TANH)] or {"value": -1.0})["value"])
    rows = [
        (name, *(_shown(found[each][part][of(name, each)]) for each in REFERENCES for part in ("first", "second")))
        for name in names
    ]
    for name in (SIMILARITY, AGREEMENT):
        seconds = [_shown(found[each]["second"][of(name, each)]) for each in REFERENCES]
        rows.append((f"*{name}*", "–", seconds[0], "–", seconds[1]))
    seconds = [_shown(found[each]["second"][SPREAD]) for each in REFERENCES]
    rows.append((f"*{SPREAD}*", "–", seconds[0], "–", seconds[1]))
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


def claims(record: dict[str, Any]) -> list[dict[str, str]]:
    """Return the rows of the table of all experiments."""
    analysis = record["analysis"]
    first, fresh, chosen = analysis["first, ReLU"], analysis["fresh, tanh"], analysis["choice"][TANH]
    everything, good = fresh["across"][EVERYTHING], fresh["across"].get(f"accuracy above {GOOD}")

    def ours(part: Mapping[str, Any], reference: str) -> str:
        name = of(SIMILARITY, reference)
        over = _shown(part["across"][EVERYTHING][PEARSON][name])
        return f"Pearson {over}; within runs {_shown(part['within'][f'{name}: {PEARSON}'])}"

    def n(part: Mapping[str, Any]) -> str:
        return f"{part['across'][EVERYTHING]['n']} configurations, {part['across'][EVERYTHING]['runs']} runs"

    ranks = [_shown(everything[SPEARMAN][of(name, TANH)]) for name in (SIMILARITY, AGREEMENT)]
    rows = [
        (
            "2", "section 4.2", "Cora: similarity to a reference (with ReLU) tells accuracy", "Pearson .955",
            ours(first, RELU), n(first), _verdict(first, RELU),
        ),
        (
            "2", "section 4.2", "Cora: the same, a reference with tanh, which these figures suggested, and new runs",
            "Pearson .955", ours(fresh, TANH), n(fresh), _verdict(fresh, TANH),
        ),
        (
            study.OWN, "after paper 2", "Cora: similarity tells accuracy better than agreement of predictions", "–",
            f"Spearman {ranks[0]}, agreement {ranks[1]}", n(fresh), sign(fresh["advantage"][of(AGREEMENT, TANH)]),
        ),
        (
            study.OWN, "after paper 2",
            f"Cora: {_short(chosen['chosen'])}, chosen on other runs, tells accuracy better", "–",
            f"Spearman {_shown(chosen['more'][of(SIMILARITY, TANH)])} more", f"{chosen['n'][1]} configurations",
            sign(chosen["more"][of(SIMILARITY, TANH)]),
        ),
    ]  # fmt: skip
    if good is not None:
        value = good[PEARSON][of(SIMILARITY, TANH)]
        row = (
            "2", "section 4.2", f"Cora: the same among networks of an accuracy above {GOOD}", "–",
            f"Pearson {_shown(value)}", f"{good['n']} configurations, {good['runs']} runs", verdict([value]),
        )  # fmt: skip
        rows.insert(2, row)
    keys = ("paper", "place", "claim", "published", "ours", "n", "verdict")
    return [dict(zip(keys, row, strict=True)) for row in rows]


if __name__ == "__main__":
    main()
