"""Layer identification between networks with different seeds (Balogh & Jelasity 2025, table 1, on Tiny-10).

For each BatchNorm layer of one network, the script checks whether the most similar layer of another network is the
corresponding one. Layers differ in their number of positions, so that all are compared by the mean over positions, with
one row per test image. ``--pooling mixed`` shows the effect of mixing poolings.

    python examples/how_not_to_stitch/layer_identification.py --data-dir DATA --networks NETWORKS
"""

import argparse
import itertools
import json
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import hf_stitch
from hf_stitch.analysis import identify_layers
from hf_stitch.data import read_data
from hf_stitch.registry import registries
from hf_stitch.statistics import DebiasedMoments

sys.path.insert(0, str(Path(__file__).parents[1] / "dr_frankenstein"))
import networks

LAYERS = [f"bn{i}" for i in range(1, len(networks.TINY10) + 1)]
METRICS = {
    "linear CKA": registries.metrics.build("linear_cka"),
    "linear CKA, debiased": registries.metrics.build("linear_cka", debiased=True),
    "Procrustes": registries.metrics.build("procrustes"),
    "PWCCA": registries.metrics.build("pwcca"),
    "CCA": registries.metrics.build("cca"),
}


def main() -> None:
    """Run the experiment from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--networks", type=Path, required=True, help="folder with safetensors files of trained Tiny-10 networks"
    )
    parser.add_argument("--data-dir", help="local folder with cifar10/test.parquet; default: the Hub")
    parser.add_argument("--images", type=int, default=10000, help="number of test images")
    parser.add_argument(
        "--pooling",
        choices=("mean", "mixed"),
        default="mean",
        help="mean over positions; or mixed, as in the authors' code: positions if two layers have equal grids, means "
        "otherwise, which makes the values of one layer with several others incomparable",
    )
    parser.add_argument("--out", type=Path, help="write the scores to this JSON file")
    arguments = parser.parse_args()

    samples = hf_stitch.Samples.of(read_data("uoft-cs/cifar10", data_dir=arguments.data_dir, split="test"))
    loaded = {path.stem: _load(path) for path in sorted(arguments.networks.glob("*.safetensors"))}
    values = similarities(loaded, samples.take(arguments.images), arguments.pooling)
    table = Table(
        "metric",
        "layers of a among b's",
        "layers of b among a's",
        "chance",
        title=f"Layer identification, {len(loaded)} networks, {arguments.images} images, pooling: {arguments.pooling}",
    )
    figures = {}
    for name, metric in METRICS.items():
        found = identify_layers(values[name], higher_is_better=metric.higher_is_better, layers=LAYERS)
        table.add_row(name, *(str(found[axis]).replace("[", "\\[") for axis in ("a", "b")), f"{found.chance:.3f}")
        figures[name] = found.to_dict()
    Console(width=120).print(table)
    if arguments.out:
        arguments.out.write_text(json.dumps(figures, indent=2) + "\n")


@torch.no_grad()
def similarities(loaded: dict[str, hf_stitch.Adapter], samples: hf_stitch.Samples, pooling: str) -> dict[str, dict]:
    """Compute all similarities in one pass over the images.

    Returns:
        Metric -> pair of networks (a, b) -> matrix of layers of a by layers of b.
    """
    kept = {}
    for batch in samples.batches(250, progress="comparing"):
        found = {name: adapter.encode(adapter.preprocess(batch.samples), LAYERS) for name, adapter in loaded.items()}
        for a, b in itertools.combinations(found, 2):
            for x, y in itertools.product(LAYERS, LAYERS):
                rows = _rows(found[a][x], found[b][y], pooling)
                key = (a, b, x, y)
                if key not in kept:
                    kept[key] = DebiasedMoments(*(side.shape[1] for side in rows))
                kept[key].update(*rows)
    return {
        name: {
            (a, b): [[_value(metric, kept[a, b, x, y]) for y in LAYERS] for x in LAYERS]
            for a, b in itertools.combinations(loaded, 2)
        }
        for name, metric in METRICS.items()
    }


def _rows(x: hf_stitch.Representation, y: hf_stitch.Representation, pooling: str) -> tuple[torch.Tensor, torch.Tensor]:
    chosen = "none" if pooling == "mixed" and x.grid == y.grid else "mean"
    return x.rows(chosen), y.rows(chosen)


def _value(metric: hf_stitch.metrics.Metric, kept: DebiasedMoments) -> float:
    return metric.from_debiased(kept) if metric.statistic == "debiased" else metric.from_moments(kept.moments)


def _load(path: Path) -> hf_stitch.Adapter:
    return networks.adapted(networks.Tiny10.from_file(path), networks.normalise)


if __name__ == "__main__":
    main()
