"""Direct matching of two Tiny-10 networks at every BatchNorm (Csiszárik et al. 2021, section 4.2).

An affine least-squares stitching layer is fitted at each layer, with positions as rows, on training images without
augmentation. All layers are fitted in one pass over the data. Scores are relative accuracies on the test images.

    python examples/dr_frankenstein/direct_matching.py --data-dir DATA --networks NETWORKS
"""

import argparse
import json
from pathlib import Path

import networks
from rich.console import Console
from rich.table import Table

import hf_stitch
from hf_stitch.data import read_data
from hf_stitch.matchers.fitting import collect, fit_layer
from hf_stitch.registry import registries
from hf_stitch.workflows._stitch import join


def main() -> None:
    """Run the experiment from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--networks", type=Path, required=True, help="folder with safetensors files of trained Tiny-10 networks"
    )
    parser.add_argument("--data-dir", help="local folder with cifar10/{train,test}.parquet; default: the Hub")
    parser.add_argument(
        "--pair", nargs=2, type=int, default=(0, 1), help="source and target: indices of two files, sorted by name"
    )
    parser.add_argument("--matcher", default="lstsq")
    parser.add_argument("--train", type=int, default=5000, help="number of training images to fit on")
    parser.add_argument("--test", type=int, default=10000, help="number of test images to score on")
    parser.add_argument("--out", type=Path, help="write the scores to this JSON file")
    arguments = parser.parse_args()

    files = sorted(arguments.networks.glob("*.safetensors"))
    source, target = (_load(files[i]) for i in arguments.pair)
    train, test = (
        hf_stitch.Samples.of(read_data("uoft-cs/cifar10", data_dir=arguments.data_dir, split=split)).take(n)
        for split, n in (("train", arguments.train), ("test", arguments.test))
    )
    layers = [f"bn{i}" for i in range(1, len(networks.TINY10) + 1)]
    matcher = registries.matchers.build(arguments.matcher)
    found = collect(source, target, [(layer, layer) for layer in layers], train, batch_size=500)
    table = Table(
        "layer",
        "relative accuracy",
        "identity",
        "mean only",
        "accuracy",
        "R²",
        title=f"{files[arguments.pair[0]].stem} → "
        f"{files[arguments.pair[1]].stem}, {matcher.name}, {len(train)} training and {len(test)} test images",
    )
    figures = {}
    for layer in layers:
        stitch = fit_layer(matcher, found[layer, layer], source.spec(layer), target.spec(layer))
        stitched = join(source, layer, stitch, target, layer, task=target.task)
        scores = hf_stitch.evaluate(stitched, test, target=target, batch_size=500).scores
        relative = {who: scores[who]["relative_accuracy"] for who in ("stitched", "identity", "mean_only")}
        figures[layer] = {who: score.value for who, score in relative.items()}
        table.add_row(
            layer,
            str(relative["stitched"]).replace("[", "\\["),
            *(f"{relative[w].value:.3f}" for w in ("identity", "mean_only")),
            f"{scores['stitched']['accuracy'].value:.4f} of {scores['target']['accuracy'].value:.4f}",
            f"{stitch.body.fitted.get('r2', float('nan')):.3f}",
        )
    Console().print(table)
    if arguments.out:
        arguments.out.write_text(json.dumps(figures, indent=2) + "\n")


def _load(path: Path) -> hf_stitch.Adapter:
    return networks.adapted(networks.Tiny10.from_file(path), networks.normalise)


if __name__ == "__main__":
    main()
