"""Layer identification between networks with different seeds (Balogh & Jelasity 2025, table 1).

For each layer of one network, is the most similar layer of another network the corresponding one? All networks of an
architecture are compared at once, with one row per image (the mean over positions). Baselines are untrained networks,
independent noise and depth alone. The rows of the paper's code are also tested: positions if two layers have equal
grids, means otherwise.
"""

import itertools
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import study
import torch
from dr_frankenstein import images, networks
from how_not_to_stitch.experiment import NAMES, POORLY, between, kinds, pairs_of, parser
from timm.models.vision_transformer import VisionTransformer

import hf_stitch
from hf_stitch import Adapter, Samples
from hf_stitch.analysis import Activations, Identification, NetworkAtlas, Score, identify_layers

METRICS = {
    "linear CKA": "linear_cka", "linear CKA, debiased": "linear_cka:debiased=True", "Procrustes": "procrustes",
    "PWCCA": "pwcca", "PWCCA, all directions": "pwcca:directions=all", "CCA": "cca",
}  # fmt: skip
MIXED = ("linear CKA", "Procrustes", "PWCCA", "PWCCA, all directions", "CCA")
"""Metrics on mixed rows, without debiased CKA: it assumes independent rows, unlike the positions of one image."""
IMAGES, RESAMPLES = 2000, 20
"""Test images, and groups of images of the jackknife for ties."""


def main() -> None:
    arguments = parser(__doc__).parse_args()
    samples = images.samples("cifar10", "test", IMAGES, arguments.data_dir)
    record: dict[str, Any] = {"preset": {"images": IMAGES, "resamples": RESAMPLES}, "families": {}}
    for kind, loaded, layers in kinds(arguments):
        record["families"][kind] = measured(loaded, layers, samples)
    study.write_results("layer_identification", record, page, arguments.out)


def measured(loaded: dict[str, Adapter], layers: tuple[str, ...], samples: Samples) -> dict[str, Any]:
    """Identify the layers of all pairs of networks of one architecture."""
    metrics, options = list(METRICS.values()), {"layers": layers, "batch_size": 200}
    trained = hf_stitch.compare_all(loaded, samples, metrics=metrics, resamples=RESAMPLES, **options)
    first = next(iter(loaded.values()))
    (batch,) = samples.take(2).batches(2)
    probe = first.encode(first.preprocess(batch.samples), layers)
    widths = {layer: probe[layer].rows("mean").shape[1] for layer in layers}
    atlases = {
        "trained": trained,
        "untrained": hf_stitch.compare_all(untrained(loaded), samples, metrics=metrics, **options),
        "noise": hf_stitch.compare_all(noise(loaded, widths, len(samples)), metrics=metrics),
    }
    grids = {layer: probe[layer].grid for layer in layers}
    pairs = list(itertools.combinations(loaded, 2))
    places = np.arange(len(layers))
    depth = np.abs(np.subtract.outer(places, places)).astype(float)
    by_depth = identify_layers(dict.fromkeys(pairs, depth), higher_is_better=False, layers=layers)
    return {
        "networks": list(loaded), "widths": widths, "grids": grids,
        "identified": {
            **{
                name: {title: summary(atlas.identify(metric)) for title, metric in METRICS.items()}
                for name, atlas in atlases.items()
            },
            "mixed": mixed(trained, loaded, grids, samples),
            "depth": {"depth only": summary(by_depth)},
        },
        "pwcca": {
            name: np.mean([np.diag(atlas.between(a, b)["pwcca"]) for a, b in pairs], 0).round(4).tolist()
            for name, atlas in atlases.items()
        },
    }  # fmt: skip


def untrained(loaded: dict[str, Adapter]) -> dict[str, Adapter]:
    """Create networks of the same architecture with initial weights, each with a different seed."""
    initial = {}
    for seed, (name, adapter) in enumerate(loaded.items()):
        torch.manual_seed(seed)
        kind = type(adapter.model)
        initial[name] = networks.adapted(networks.small_vit() if kind is VisionTransformer else kind())
    return initial


def noise(loaded: dict[str, Adapter], widths: dict[str, int], count: int) -> dict[str, Activations]:
    """Draw independent normal activations of the same widths for each network."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: Activations(
            {layer: torch.randn(count, width, generator=generator) for layer, width in widths.items()}, range(count)
        )
        for name in loaded
    }


def mixed(trained: NetworkAtlas, loaded: dict[str, Adapter], grids: dict[str, Any], samples: Samples) -> dict[str, Any]:
    """Identify layers on the rows of the paper's code: positions if two layers have equal grids, means otherwise."""
    metrics, layers, identified = [METRICS[title] for title in MIXED], list(grids), {}
    atlas = hf_stitch.compare_all(loaded, samples, layers=layers, metrics=metrics, rows="positions", batch_size=200)
    for title, metric in zip(MIXED, metrics, strict=True):
        values = {}
        for pair in itertools.combinations(loaded, 2):
            mean, equal = (of.between(*pair)[metric] for of in (trained, atlas))
            values[pair] = np.where(np.isnan(equal), mean, equal)
        identified[title] = summary(identify_layers(values, higher_is_better=title != "Procrustes", layers=layers))
    return identified


def summary(identification: Identification, along: Sequence[Literal["a", "b"]] = ("a", "b")) -> dict[str, Any]:
    """Return axis -> accuracy, numbers of hits, ties and misses, and the most frequently found layer."""
    axes: dict[str, Any] = {}
    for axis in along:
        verdicts = identification.verdicts(axis)
        layer, share = identification.favourite(axis)
        axes[axis] = {
            "score": identification.to_dict()["scores"][axis],
            **{name: int((verdicts == name).sum()) for name in ("hit", "tie", "miss", "undefined")},
            "favourite": layer, "share": round(share, 4),
        }  # fmt: skip
    return axes


METRICS_OF_PAPER = ("linear CKA", "Procrustes", "PWCCA")
(VIT,) = study.stated(__file__)
FAMILY = study.text(__file__, "family")
OTHERS = {"untrained": "untrained networks", "noise": "independent noise"}
AXIS = ["accuracy", "hit/tie/miss", "found most often"]
HEAD = [f"{axis}: {title}" for axis in "ab" for title in AXIS]


def page(record: dict[str, Any]) -> str:
    families = record["families"]
    return study.text(__file__).format(
        verdicts=study.verdicts(claims(record)), images=record["preset"]["images"],
        resamples=record["preset"]["resamples"],
        families="\n".join(_family(kind, one) for kind, one in families.items()), rows=_mixed(families),
        floor=_floor(families), folders=" ".join(kind.upper() for kind in families),
    )  # fmt: skip


def _family(kind: str, one: dict[str, Any]) -> str:
    vit = kind == "VisionTransformer"
    lines = []
    for title, axes in {**one["identified"]["trained"], **one["identified"]["depth"]}.items():
        lines.append([title, between(title, vit), *_cells(axes["a"]), *_cells(axes["b"])])
    count, layers = len(one["networks"]), len(one["widths"])
    pairs = count * (count - 1) // 2
    return FAMILY.format(
        name=NAMES[kind], count=count, pairs=f"{pairs} pair{'s' * (pairs > 1)}", layers=layers, chance=1 / layers,
        identified=study.markdown(["metric", f"paper, {'ViT-Ti' if vit else 'ResNet-18'}", *HEAD], lines),
    )  # fmt: skip


def _cells(axis: dict[str, Any]) -> list[str]:
    share = "always" if axis["share"] == 1 else f"{axis['share']:.0%}"
    counts = "/".join(str(axis[name]) for name in ("hit", "tie", "miss"))
    counts += f" ({axis['undefined']} undefined)" if axis["undefined"] else ""
    return [str(Score(**axis["score"])), counts, f"{axis['favourite']}, {share}"]


def claims(record: dict[str, Any]) -> list[dict[str, str]]:
    one = record["families"]["VisionTransformer"]
    rates = {
        title: [
            one["identified"]["trained" if title == "linear CKA" else "mixed"][title][axis]["score"] for axis in "ab"
        ]
        for title in METRICS_OF_PAPER
    }
    ours = "; ".join(f"{title} {' and '.join(map(study.shown, both))}" for title, both in rates.items())
    parts = [study.below(rate, POORLY) for both in rates.values() for rate in both]
    count = len(one["networks"])
    return [VIT.row(ours, f"{pairs_of(count)}, {len(one['widths'])} layers", parts, count * (count - 1) // 2)]


def _mixed(families: dict[str, Any]) -> str:
    lines = []
    for kind, one in families.items():
        identified, grids = one["identified"], len({tuple(grid) for grid in one["grids"].values()})
        for title, axes in identified["mixed"].items():
            cells = []
            for axis in "ab":
                accuracy, _, favourite = _cells(axes[axis])
                cells += [f"{identified['trained'][title][axis]['score']['value']:.3f}", accuracy, favourite]
            lines.append([NAMES[kind], str(grids), title, *cells])
    head = [f"{axis}: {title}" for axis in "ab" for title in ("means", "mixed", "found most often")]
    table = study.markdown(["networks", "grids", "metric", *head], lines)
    return study.text(__file__, "mixing").format(lines=table)


def _floor(families: dict[str, Any]) -> str:
    tables, lines = [], []
    for kind, one in families.items():
        rows = [[name, *(f"{value:.3f}" for value in values)] for name, values in one["pwcca"].items()]
        widths = ["width", *map(str, one["widths"].values())]
        tables.append(study.markdown([NAMES[kind], *one["widths"]], [widths, *rows]))
        for name in ("untrained", "noise"):
            for title in ("linear CKA, debiased", "Procrustes", "PWCCA"):
                axes = one["identified"][name][title]
                lines.append([NAMES[kind], OTHERS[name], title, *_cells(axes["a"]), *_cells(axes["b"])])
    table = study.markdown(["networks", "activations", "metric", *HEAD], lines)
    return study.text(__file__, "floor").format(tables="\n\n".join(tables), lines=table)
