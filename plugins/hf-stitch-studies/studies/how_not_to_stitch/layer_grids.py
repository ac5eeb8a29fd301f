"""Direct matching between all layers of networks with different seeds (Balogh & Jelasity 2025, table 1).

Every layer of one network is stitched into every layer of another, for all pairs of networks. Functional: relative
accuracy. Structural: relative squared error of the activations. Baselines are two similarity metrics and the distance
of layers in depth, which ignores the activations. Each folder has networks of one architecture: Tiny-10, ResNet-20 or
the small ViT.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import study
from dr_frankenstein import networks
from how_not_to_stitch.experiment import NAMES, POORLY, WELL, between, cifar, filled, pairs_of, parser
from tqdm.auto import tqdm

import hf_stitch
from hf_stitch import Adapter, Samples
from hf_stitch.analysis import StitchGrid, identify_layers

MATCHERS = ("lstsq", "recoloured", "procrustes")
METRICS = ("linear_cka:debiased=True", "procrustes")
FIGURES = {"functional": "relative_accuracy", "structural": "structural_error"}
ACCURATE = 0.8
"""Minimum relative accuracy of functionally similar layers (Csiszárik et al. 2021, section 8)."""
TRAIN, TEST = 600, 1000
"""Images for the fits of stitches, and for the scores."""


def main() -> None:
    arguments = parser(__doc__).parse_args()
    train, test = cifar(arguments, TRAIN, TEST)
    record = {
        "preset": {"train": TRAIN, "test": TEST},
        "architectures": {
            folder.name.removeprefix("drfrankenstein_"): measured(*networks.read_folder(folder), train, test)
            for folder in arguments.networks
        },
    }
    study.write_results("layer_grids", record, page, arguments.out)


def measured(loaded: dict[str, Adapter], layers: Sequence[str], train: Samples, test: Samples) -> dict[str, Any]:
    pairs = list(itertools.combinations(loaded, 2))
    values: dict[str, dict[tuple[str, str], Any]] = {}
    itself: dict[str, dict[tuple[str, str], Any]] = {}
    accuracy: dict[str, float] = {}

    def stitched(a: str, b: str, matchers: Sequence[str], grids: dict[str, dict[tuple[str, str], Any]]) -> StitchGrid:
        grid = hf_stitch.stitch_grid(
            loaded[a], loaded[b], train, test_data=test, layers_a=layers, layers_b=layers, matchers=matchers,
            task="image-classification", batch_size=200, resamples=10, progress=False,
        )  # fmt: skip
        for matcher, (kind, figure) in itertools.product(matchers, FIGURES.items()):
            grids.setdefault(f"{matcher}, {kind}", {})[a, b] = grid.values(matcher, figure)
        return grid

    for a, b in tqdm(pairs, desc="pairs of networks"):
        grid = stitched(a, b, MATCHERS, values)
        accuracy |= {who: grid.baselines[side]["accuracy"][0] for who, side in ((a, "source"), (b, "target"))}
    for name in tqdm(loaded, desc="networks with themselves"):
        stitched(name, name, MATCHERS[:1], itself)
    atlas = hf_stitch.compare_all(loaded, test, layers=layers, metrics=METRICS, batch_size=200)
    for name, metric in zip(("linear CKA, debiased", "Procrustes"), METRICS, strict=True):
        values[name] = {(a, b): atlas.between(a, b)[metric] for a, b in pairs}
    depth = np.abs(np.subtract.outer(range(len(layers)), range(len(layers)))).astype(float)
    values["depth only"] = dict.fromkeys(pairs, depth)
    distant = ~np.eye(len(layers), dtype=bool)
    return {
        "networks": list(loaded), "layers": list(layers),
        "accuracy": {name: round(float(accuracy[name]), 4) for name in loaded},
        "identified": identified(values, layers), "itself": identified(itself, layers),
        "distant": {
            matcher: [int((v[distant] >= ACCURATE).sum()) for v in values[f"{matcher}, functional"].values()]
            for matcher in MATCHERS
        },
        "mean": {name: np.mean(list(of_pairs.values()), 0).round(4).tolist() for name, of_pairs in values.items()},
    }  # fmt: skip


def identified(values: dict[str, dict[tuple[str, str], Any]], layers: Sequence[str]) -> dict[str, Any]:
    """Return method -> axis -> share of identified layers with its interval."""
    distances = {"depth only", "Procrustes", *(f"{matcher}, structural" for matcher in MATCHERS)}
    return {
        name: identify_layers(of_pairs, higher_is_better=name not in distances, layers=layers).to_dict()["scores"]
        for name, of_pairs in values.items()
    }


FUNCTIONAL, STRUCTURAL, ROTATED = "lstsq, functional", "lstsq, structural", "procrustes, functional"
CKA = "linear CKA, debiased"
NEAR = 0.1
"""Maximum difference between the shares of comparable methods."""
WITHIN, VIT, *_BETWEEN = study.stated(__file__)
CLAIMS = dict(zip((STRUCTURAL, FUNCTIONAL, ROTATED), _BETWEEN, strict=True))
SECTION = study.text(__file__, "section") + "\n"


def page(record: dict[str, Any]) -> str:
    preset, architectures = record["preset"], record["architectures"]
    return filled(
        __file__, claims(record), architectures, train=preset["train"], test=preset["test"],
        sections="\n".join(_section(name, of) for name, of in architectures.items()),
    )  # fmt: skip


def _section(name: str, run: dict[str, Any]) -> str:
    vit, layers = name.startswith("vit"), run["layers"]
    published = {CKA: "linear CKA", "Procrustes": "Procrustes", FUNCTIONAL: FUNCTIONAL, STRUCTURAL: STRUCTURAL}
    identified = [
        [measure, between(published[measure], vit) if measure in published else "–", *map(study.shown, axes.values())]
        for measure, axes in run["identified"].items()
    ]
    distant = []
    for matcher, counts in run["distant"].items():
        corresponding = np.diag(run["mean"][f"{matcher}, functional"]).mean()
        distant.append([matcher, f"{np.mean(counts):.1f} ({min(counts)} to {max(counts)})", f"{corresponding:.3f}"])
    grid, accuracies = run["mean"][FUNCTIONAL], list(run["accuracy"].values())
    head = ["measure", f"paper, {'ViT-Ti' if vit else 'ResNet-18'}", "layers of a among b's", "layers of b among a's"]
    return SECTION.format(
        title=NAMES.get(name, name), pairs=pairs_of(len(run["networks"])),
        layers=len(layers), accuracy=f"{min(accuracies):.3f} to {max(accuracies):.3f}", chance=1 / len(layers),
        identified=study.markdown(head, identified), distant_pairs=len(layers) * (len(layers) - 1), accurate=ACCURATE,
        distant=study.markdown(["matcher", "distant pairs", "corresponding layers, mean relative accuracy"], distant),
        means=study.markdown(
            ["", *layers], [[layer, *(f"{v:.2f}" for v in row)] for layer, row in zip(layers, grid, strict=True)]
        ),
    )  # fmt: skip


def claims(record: dict[str, Any]) -> list[dict[str, str]]:
    runs, rows = record["architectures"], []
    plain = {name: of for name, of in runs.items() if not name.startswith("vit")}
    if plain:
        most = max(plain.values(), key=lambda of: len(of["networks"]))
        n, units = _count(most)
        parts = [study.above(score, WELL) for axes in most["itself"].values() for score in axes.values()]
        alone = len(most["networks"])
        counted = f"{alone} networks, {len(most['layers'])} layers"
        rows.append(WITHIN.row(_two(most["itself"]), counted, parts, alone))
        for method, asked in CLAIMS.items():
            rates = (f"{NAMES.get(title, title)} {_both(of['identified'], method)}" for title, of in plain.items())
            held = [_holds(most["identified"], method, axis) for axis in "ab"]
            rows.append(asked.row("; ".join(rates), n, held, units))
    for of in (runs[name] for name in runs if name not in plain):
        parts = [study.below(of["identified"][m][axis], POORLY) for m in (FUNCTIONAL, STRUCTURAL) for axis in "ab"]
        n, units = _count(of)
        rows.append(VIT.row(_two(of["identified"]), n, parts, units))
    return rows


def _count(run: dict[str, Any]) -> tuple[str, int]:
    count = len(run["networks"])
    return f"{pairs_of(count)}, {len(run['layers'])} layers", count * (count - 1) // 2


def _both(identified: dict[str, Any], method: str) -> str:
    return study.both(identified[method][axis] for axis in "ab")


def _two(identified: dict[str, Any]) -> str:
    return f"functional {_both(identified, FUNCTIONAL)}; structural {_both(identified, STRUCTURAL)}"


def _holds(scores: dict[str, Any], method: str, axis: str) -> bool | None:
    share, cka, functional = (scores[name][axis] for name in (method, CKA, FUNCTIONAL))
    if method == STRUCTURAL:
        return study.above(study.difference(share, cka), -NEAR)
    return study.above(share, POORLY) if method == FUNCTIONAL else study.below(study.difference(share, functional), 0)
