"""Direct matching between all layers of networks with different seeds (Balogh & Jelasity 2025, table 1).

Every layer of one network is stitched into every layer of another, for all pairs of networks. Functional: relative
accuracy. Structural: relative squared error of the activations. Beside them stand two similarity metrics and the
distance of layers in depth, which ignores the activations. Each folder has networks of one architecture: Tiny-10,
ResNet-20 or the small ViT.

    python -m how_not_to_stitch.layer_grids --data-dir DATA --networks TINY10 RESNET20 VITS --out OUT
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import study
from dr_frankenstein import images, networks
from tqdm.auto import tqdm

import hf_stitch
from hf_stitch.analysis import Score, identify_layers

MATCHERS = ("lstsq", "recoloured", "procrustes")
METRICS = ("linear_cka:debiased=True", "procrustes")
FIGURES = {"functional": "relative_accuracy", "structural": "structural_error"}
ACCURATE = 0.8
"""Relative accuracy from which two layers count as functionally similar (Csiszárik et al. 2021, section 8)."""
PUBLISHED = {
    "convolutional": {
        "lstsq, functional": 0.6639,
        "lstsq, structural": 0.925,
        "linear CKA, debiased": 0.9611,
        "Procrustes": 0.1917,
    },
    "vit": {
        "lstsq, functional": 0.1185,
        "lstsq, structural": 0.2519,
        "linear CKA, debiased": 0.3481,
        "Procrustes": 0.1833,
    },
}
"""Share of layers that are identified in the paper's table 1, for ResNet-18 and ViT-Ti."""
TITLES = {"tiny10": "Tiny-10", "resnet20": "ResNet-20", "vits": "Small ViT"}
"""Title of the section of a folder."""
PRESETS = {"small": (600, 1000), "paper": (100, 10_000), "test": (150, 60)}
"""Images to which stitches are fitted, and images of the scores."""


def main() -> None:
    """Run the experiment from the command line."""
    parser = study.parser(__doc__, "data-dir", presets=PRESETS)
    parser.add_argument("--networks", type=Path, nargs="+", required=True, help="folders of trained networks")
    arguments = parser.parse_args()
    fitted, scored = PRESETS[arguments.preset]
    train, test = (
        images.samples("cifar10", split, count, arguments.data_dir)
        for split, count in (("train", fitted), ("test", scored))
    )
    record = {
        "preset": {"name": arguments.preset, "train": fitted, "test": scored},
        "architectures": {
            folder.name.removeprefix("drfrankenstein_"): measured(*networks.read_folder(folder), train, test)
            for folder in arguments.networks
        },
    }
    study.leave("layer_grids", record, page, {}, arguments.out)


def measured(
    loaded: dict[str, hf_stitch.Adapter], layers: Sequence[str], train: hf_stitch.Samples, test: hf_stitch.Samples
) -> dict[str, Any]:
    """Stitch and compare all pairs of networks.

    Returns:
        ``networks``, ``layers``; ``accuracy``: of each network; ``identified``: method -> axis -> share of identified
        layers with its interval; ``distant``: matcher -> pairs of networks -> number of distant pairs of layers that
        are accurate; ``mean``: matcher -> figure -> mean over the pairs of networks, (layers of a, layers of b).
    """
    pairs = list(itertools.combinations(loaded, 2))
    values: dict[str, dict[tuple[str, str], Any]] = {}
    accuracy: dict[str, float] = {}
    for a, b in tqdm(pairs, desc="pairs of networks"):
        grid = hf_stitch.stitch_grid(
            loaded[a], loaded[b], train, test_data=test, layers_a=layers, layers_b=layers, matchers=MATCHERS,
            task="image-classification", batch_size=200, resamples=10, progress=False,
        )  # fmt: skip
        for matcher, (kind, figure) in itertools.product(MATCHERS, FIGURES.items()):
            values.setdefault(f"{matcher}, {kind}", {})[a, b] = grid.values(matcher, figure)
        accuracy |= {who: grid.baselines[side]["accuracy"][0] for who, side in ((a, "source"), (b, "target"))}
    atlas = hf_stitch.compare_all(loaded, test, layers=layers, metrics=METRICS, batch_size=200)
    for name, metric in zip(("linear CKA, debiased", "Procrustes"), METRICS, strict=True):
        values[name] = {(a, b): atlas.between(a, b)[metric] for a, b in pairs}
    depth = np.abs(np.subtract.outer(range(len(layers)), range(len(layers)))).astype(float)
    values["depth only"] = dict.fromkeys(pairs, depth)
    distances = {"depth only", "Procrustes", *(f"{matcher}, structural" for matcher in MATCHERS)}
    identified = {
        name: identify_layers(of_pairs, higher_is_better=name not in distances, layers=layers).to_dict()["scores"]
        for name, of_pairs in values.items()
    }
    distant = ~np.eye(len(layers), dtype=bool)
    return {
        "networks": list(loaded),
        "layers": list(layers),
        "accuracy": {name: round(float(accuracy[name]), 4) for name in loaded},
        "identified": identified,
        "distant": {
            matcher: [int((v[distant] >= ACCURATE).sum()) for v in values[f"{matcher}, functional"].values()]
            for matcher in MATCHERS
        },
        "mean": {name: np.mean(list(of_pairs.values()), 0).round(4).tolist() for name, of_pairs in values.items()},
    }  # fmt: skip


PAGE = """# Direct matching between all layers (Balogh & Jelasity, AAAI 2025, table 1)

Claim (table 1): between networks that differ only in their seed, the structural error of direct matching finds
the corresponding layer almost as often as CKA does, its accuracy less often. The paper reports ResNet-18 and ViT-Ti
(10 networks, 45 pairs, CIFAR-10). Here: published Tiny-10 and ResNet-20, and small ViTs trained for this page
(`base_training.py --architecture vit --optimizer adamw`); CIFAR-10; stitches fitted to {train} training images, all
scores on {test} test images. A layer of one network is identified if its best stitch, or its most similar layer, is the
corresponding layer. 95% intervals, clustered by network. "depth only" is the distance of the layers' numbers, which is
right by construction: on networks with corresponding layers, this test alone does not show that a measure sees more
than depth. `recoloured` is least squares whose outputs keep the covariance of the target.

{sections}
This page and [its figures as JSON](layer_grids.json) are written by the command (preset {preset}, 2 CPU cores):

```
python -m how_not_to_stitch.layer_grids --data-dir DATA --networks TINY10 RESNET20 VITS --out OUT
```
"""

SECTION = """## {title}

{count} networks, {pairs}, {layers} layers, accuracy {accuracy}. Chance: {chance:.3f}.

| measure | paper, {published} | layers of a among b's | layers of b among a's |
|---|---|---|---|
{identified}

{verdict}

How many of the {distant_pairs} distant pairs of layers of two networks are accurate, at least {accurate:.0%} of the
target's accuracy (mean over the pairs of networks, smallest to largest)?

| matcher | distant pairs | corresponding layers, mean relative accuracy |
|---|---|---|
{distant}

Means over all pairs of networks, relative accuracy from row to column:

{means}
"""


def page(record: dict[str, Any]) -> str:
    """Return the page of the results from the record, as it is read from JSON."""
    preset = record["preset"]
    return PAGE.format(
        train=preset["train"], test=preset["test"], preset=preset["name"],
        sections="".join(_section(name, found) for name, found in record["architectures"].items()),
    )  # fmt: skip


def _section(name: str, found: dict[str, Any]) -> str:
    published = PUBLISHED["vit" if name.startswith("vit") else "convolutional"]
    identified = [
        [measure, f"{published[measure]:.3f}" if measure in published else "–"]
        + [str(Score(**axes[axis])) for axis in "ab"]
        for measure, axes in found["identified"].items()
    ]
    distant = []
    for matcher, counts in found["distant"].items():
        own = np.diag(found["mean"][f"{matcher}, functional"]).mean()
        distant.append([matcher, f"{np.mean(counts):.1f} ({min(counts)} to {max(counts)})", f"{own:.3f}"])
    layers, means = found["layers"], []
    for matcher in found["distant"]:
        grid = found["mean"][f"{matcher}, functional"]
        lines = [[f"**{layer}**", *(f"{value:.2f}" for value in row)] for layer, row in zip(layers, grid, strict=True)]
        means.append(f"| {matcher} | {' | '.join(layers)} |\n|{'---|' * (len(layers) + 1)}\n{_rows(lines)}\n")
    networks_, accuracies = len(found["networks"]), list(found["accuracy"].values())
    pairs = networks_ * (networks_ - 1) // 2
    return SECTION.format(
        title=TITLES.get(name, name), count=networks_, pairs="1 pair" if pairs == 1 else f"{pairs} pairs",
        layers=len(layers), accuracy=f"{min(accuracies):.3f} to {max(accuracies):.3f}", chance=1 / len(layers),
        published="ViT-Ti" if name.startswith("vit") else "ResNet-18", identified=_rows(identified),
        verdict=_verdict(found["identified"], published), distant_pairs=len(layers) * (len(layers) - 1),
        accurate=ACCURATE, distant=_rows(distant), means="\n".join(means),
    )  # fmt: skip


def _verdict(identified: dict[str, Any], published: dict[str, float]) -> str:
    """Return whether the order of the paper is found: confirmed only along both axes, with intervals that are apart."""
    names = ("lstsq, structural", "lstsq, functional")
    structural, functional = ([identified[name][axis]["value"] for axis in "ab"] for name in names)
    higher = [s > f for s, f in zip(structural, functional, strict=True)]
    apart = all(identified[names[0]][axis]["low"] > identified[names[1]][axis]["high"] for axis in "ab")
    found = (
        "Confirmed" if all(higher) and apart
        else "In the order of the paper, with intervals that overlap" if all(higher)
        else "In part" if any(higher)
        else "Not confirmed on these networks"
    )  # fmt: skip
    return (
        f"**{found}**: the structural error of least squares identifies {structural[0]:.3f} and {structural[1]:.3f} of "
        f"the layers along the two axes, its accuracy {functional[0]:.3f} and {functional[1]:.3f}. The paper has "
        f"{published[names[0]]:.3f} and {published[names[1]]:.3f}, for another network and 100 images."
    )


def _rows(lines: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    main()
