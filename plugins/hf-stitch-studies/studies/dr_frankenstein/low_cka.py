"""Experiment 4: accuracy without CKA, and CKA without accuracy (Csiszárik et al. 2021, sections 6.3 and 6.4, figure 5).

A network is stitched to itself. Starting from the identity, the map is trained on cross-entropy + β · CKA between its
output and the original activations. It is compared with random rotations, which leave CKA at 1 but change the network,
and with the CKA between a network and another one that is mapped onto it by least squares.

    python -m dr_frankenstein.low_cka --published PUBLISHED --networks NETWORKS --data-dir DATA --out OUT
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import study
import torch
from dr_frankenstein import experiment, stitching
from dr_frankenstein.experiment import CUTS, SHORT, TEST, TITLES, Claim, Preset, scored
from hf_stitch_studies import TrajectoryRecorder, score_curves
from matplotlib.figure import Figure

import hf_stitch
from hf_stitch.data import PairedSamples
from hf_stitch.metrics import linear_cka
from hf_stitch.pairs import CollectedPair, Pair
from hf_stitch.registry import registries
from hf_stitch.running import Run
from hf_stitch.stitches import LinearStitch, StitchingLayer

PRESETS = {
    "small": Preset(3_000, 2_000, 5, (10_000, 6), batch=64, **SHORT),
    "test": TEST,
    "paper": Preset(50_000, 10_000, 30, (50_000, 300), 5, True),
}
PLACES: dict[str, dict[str, tuple[tuple[str, ...], int]]] = {
    "small": {"tiny10": (("bn3", "bn5"), 3), "resnet20": (("layer2.0",), 2)},
    "test": {"tiny10": (("bn8",), 1), "resnet20": (("layer3.2",), 1)},
    "paper": {"tiny10": (("bn2", "bn3", "bn5", "bn7"), 5), "resnet20": (("layer1.1", "layer2.0", "layer3.0"), 2)},
}
"""Layers, and number of networks."""
PENALTIES = {"small": (0.3, 1.0), "test": (1.0,), "paper": (0.1, 0.3, 1.0, 3.0)}
ROTATIONS = 5
PAIRS, BETWEEN = 3, {"tiny10": (3_000, 1_000), "resnet20": (1_500, 500)}
"""Number of pairs of networks for the baseline, at most; training images, and test images on which CKA is measured."""
POSITIONS, IMAGES = "positions", "images"
"""What rows are: positions, or images with all their positions side by side."""
PROBE = 1_000
"""Number of test images on which CKA is measured."""
LOW, KEPT = 0.7, 0.99
"""CKA that counts as low, and relative accuracy that counts as unchanged."""
SAME, DESTROYED = 0.99, 0.3
"""CKA that counts as 1, and relative accuracy that counts as destroyed."""
PUBLISHED = {"tiny10": (0.883, 0.050), "resnet20": (0.922, 0.098)}
"""The paper's CKA between transformed Model 1 and Model 2: mean and deviation over ten pairs and all layers."""


def main() -> None:
    """Run the experiment from the command line."""
    arguments = study.parser(__doc__, "data-dir", "published", "networks").parse_args()
    preset = PRESETS[arguments.preset]
    train, test = preset.samples("cifar10", arguments.data_dir)
    probe = test.take(min(PROBE, len(test)))
    record: dict[str, Any] = {"preset": preset, "setting": str(preset), "architectures": {}}
    for architecture, (layers, count) in PLACES[arguments.preset].items():
        networks = experiment.loaded(architecture, arguments, preset)
        found: dict[str, Any] = {"networks": {}}
        for name in list(networks)[:count]:
            found["networks"][name] = {
                layer: self_stitched(networks[name], layer, PENALTIES[arguments.preset], preset, train, test, probe)
                for layer in layers
            }
        sizes = BETWEEN[architecture] if arguments.preset != "test" else (len(train), len(probe))
        layers = CUTS[architecture] if arguments.preset != "test" else layers
        pairs = experiment.disjoint(networks, PAIRS)
        found["between"] = between_networks(networks, pairs, layers, train.take(sizes[0]), test.take(sizes[1]))
        record["architectures"][architecture] = found
    record["networks"] = experiment.origin(arguments, preset)
    study.leave("low_cka", record, page, {"low_cka": _picture(record)}, arguments.out)


def self_stitched(
    network: hf_stitch.Adapter, layer: str, penalties: Sequence[float], preset: Preset, train: hf_stitch.Samples,
    test: hf_stitch.Samples, probe: hf_stitch.Samples,
) -> dict[str, list[dict[str, Any]]]:  # fmt: skip
    """Stitch a network to itself with penalised and with rotated maps; return CKA and accuracy of each."""
    [start] = stitching.direct(network, network, layer, ["identity"], train)
    maps: dict[str, dict[float, StitchingLayer]] = {"rotated": {}, "penalised": {0.0: start.stitch}}
    for seed in range(ROTATIONS):
        maps["rotated"][seed] = start.stitch.with_maps(_rotation(start.stitch.widths[0], seed), None)
    for penalty in penalties:
        matcher = replace(preset.task_loss, penalties={"linear_cka": penalty})
        [maps["penalised"][penalty]] = stitching.trained(matcher, [start], network, train, preset)
    scores = score_curves(start, test, "β or seed", maps, target=network, batch_size=stitching.BATCH)
    return {
        kind: [
            {"x": x, "cka": cka(start, probe, network, stitch), "score": score}
            for (x, stitch), score in zip(by_x.items(), scores[kind].values(), strict=True)
        ]
        for kind, by_x in maps.items()
    }


def _rotation(width: int, seed: int) -> LinearStitch:
    """Draw a Haar-random orthogonal matrix from the QR decomposition of a Gaussian matrix, with the signs of R."""
    gaussian = torch.randn(width, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    q, r = torch.linalg.qr(gaussian)
    return LinearStitch.of(weight=(q * r.diagonal().sign()).float(), bias=None)


def cka(
    stitched: hf_stitch.StitchedModel, probe: hf_stitch.Samples, target: hf_stitch.Adapter,
    stitch: StitchingLayer | None = None,
) -> float:  # fmt: skip
    """Return the linear CKA between mapped activations and those of the target, with positions as rows."""
    recorder = TrajectoryRecorder(stitched, probe, ["linear_cka"], target=target)
    recorder(0, [stitch or stitched.stitch])
    return recorder.trajectory["linear_cka"][0]


@torch.no_grad()
def between_networks(
    networks: Mapping[str, hf_stitch.Adapter], pairs: Sequence[tuple[str, str]], layers: Sequence[str],
    train: hf_stitch.Samples, probe: hf_stitch.Samples,
) -> dict[str, dict[str, list[float]]]:  # fmt: skip
    """Return the CKA between networks mapped by least squares and their targets: rows -> layer -> one for each pair.

    Rows are positions, or images with all their positions, as in the authors' code.
    """
    found: dict[str, dict[str, list[float]]] = {rows: {layer: [] for layer in layers} for rows in (POSITIONS, IMAGES)}
    for source, target in ((networks[a], networks[b]) for a, b in pairs):
        collected = CollectedPair(
            Pair(source, target).at([(layer, layer) for layer in layers]), PairedSamples.of(train), Run(stitching.BATCH)
        )
        maps = registries.matchers.build("lstsq").match(collected).layers
        sides: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {layer: [] for layer in layers}
        for batch in probe.batches(stitching.BATCH):
            a, b = (side.encode(side.preprocess(batch.samples), list(layers)) for side in (source, target))
            for layer in layers:
                sides[layer].append((maps[layer, layer](a[layer]).values, b[layer].values))
        for layer, parts in sides.items():
            one, other = (torch.cat(side).double() for side in zip(*parts, strict=True))
            found[POSITIONS][layer].append(
                float(linear_cka(*(each.movedim(1, -1).flatten(0, -2) for each in (one, other))))
            )
            found[IMAGES][layer].append(float(linear_cka(one.flatten(1), other.flatten(1))))
    return found


UNCHANGED = {
    architecture: Claim(
        "6.3, figure 5", f"{title}: CKA falls below {LOW} with essentially unchanged accuracy",
        "below .7, accuracy unchanged (ResNet of width 3)",
        f"in every network and layer, for some β, CKA is at most {LOW} and relative accuracy {KEPT} or more, by the "
        "interval",
    )
    for architecture, title in TITLES.items()
}  # fmt: skip
ROTATED = {
    architecture: Claim(
        "6.4", f"{title}: CKA does not change under rotations, for which trained networks are unsuitable", "–",
        f"after every rotation, CKA is at least {SAME}, and relative accuracy below {DESTROYED}, by the interval",
    )
    for architecture, title in TITLES.items()
}  # fmt: skip
BETWEEN_NETWORKS = {
    architecture: Claim(
        "6.3", f"{title}: CKA of a transformed network with the target",
        "{:.3f} ± {:.3f}".format(*PUBLISHED[architecture]),
        "with the authors' rows (images, flattened), the mean lies within the paper's deviation",
    )
    for architecture, title in TITLES.items()
}  # fmt: skip

PAGE = """# Experiment 4 and section 6.4: CKA independent of performance (Csiszárik et al., NeurIPS 2021, figure 5)

**What to do**: do not conclude from a CKA that a stitch works, nor that it does not: a rotation leaves it at 1 and
destroys accuracy, and training on a penalty lowers it to .7 at a cost of 0 to 2 points.

{verdicts}

Setting: {networks}, CIFAR-10; task loss + β · CKA from the identity; {setting}; CKA with positions as rows, but
between networks, on up to {probe:,} test images. 95% intervals over images. Between networks: after least squares, on
3,000 training and 1,000 test images (ResNet-20: one pair, 1,500 and 500), pairs that share no network.

The bounds {low}, {kept}, {same} and {destroyed} were written before these figures were seen; that intervals decide,
when they were known: those of {test:,} images are wider than the point that the claim is about. The paper computes CKA
on other rows: [which rows?](which_rows.md)

{architectures}

{footer}"""


def page(record: dict[str, Any]) -> str:
    """Return the page of the results from the record, as it is read from JSON."""
    sections = []
    for architecture, found in record["architectures"].items():
        rows: list[tuple[object, ...]] = []
        for name, layers in found["networks"].items():
            for layer, kinds in layers.items():
                for point in kinds["penalised"]:
                    rows.append((name, layer, f"β {point['x']:g}", f"{point['cka']:.3f}", scored(point["score"])))
                turned = kinds["rotated"]
                most = max(point["score"]["value"] for point in turned)
                least = min(point["cka"] for point in turned)
                rows.append((name, layer, f"{len(turned)} rotations", f"{least:.3f} or more", f"at most {most:.3f}"))
        sections += [
            f"## {TITLES[architecture]}",
            study.markdown(("network", "layer", "map", "linear CKA", "relative accuracy"), rows),
            *(
                f"Between networks, CKA after least squares with {rows} as rows: {_between(found, rows)}."
                for rows in found["between"]
            ),
        ]
    return PAGE.format(
        footer=experiment.footer("low_cka"), verdicts=study.verdicts(claims(record)),
        networks=record["networks"], setting=record["setting"], low=LOW, kept=KEPT, probe=PROBE, same=SAME,
        destroyed=DESTROYED, test=record["preset"]["test"], architectures="\n\n".join(sections),
    )  # fmt: skip


def unchanged(points: Sequence[dict[str, Any]]) -> bool | None:
    """Return whether, for some penalty, CKA is low and accuracy unchanged."""
    return experiment.at_least(1, (study.above(point["score"], KEPT) for point in points if point["cka"] <= LOW))


def _between(found: dict[str, Any], rows: str) -> str:
    """Return the CKA of transformed networks with their targets, over all layers and by layer."""
    by_layer = ", ".join(f"{layer} {np.mean(some):.3f}" for layer, some in found["between"][rows].items())
    return f"{_over_layers(found, rows)} ({by_layer})"


def _over_layers(found: dict[str, Any], rows: str) -> str:
    values = np.array(list(found["between"][rows].values()))
    return f"{values.mean():.3f} ± {values.std(ddof=1):.3f}"


def claims(record: dict[str, Any]) -> list[dict[str, str]]:
    """Return the rows of the table of all experiments."""
    rows = []
    for architecture, found in record["architectures"].items():
        kinds = [kinds for layers in found["networks"].values() for kinds in layers.values()]
        count = len(found["networks"])
        units = math.comb(count, 2)
        low = [point for some in kinds for point in some["penalised"] if point["cka"] <= LOW]
        best = max(low, key=lambda point: point["score"]["value"], default=None)
        ours = f"CKA {best['cka']:.3f}, relative accuracy {study.shown(best['score'])}" if best else "none"
        held = [unchanged(some["penalised"]) for some in kinds]
        rows.append(UNCHANGED[architecture].row(ours, f"{count} networks, {len(kinds)} layers of them", held, units))
        rotated = [point for some in kinds for point in some["rotated"]]
        held = [
            experiment.at_least(2, (point["cka"] >= SAME, study.below(point["score"], DESTROYED))) for point in rotated
        ]
        ours = f"relative accuracy at most {max(point['score']['value'] for point in rotated):.3f}"
        rows.append(ROTATED[architecture].row(ours, f"{count} networks, {len(rotated)} rotations", held, units))
        values = np.array(list(found["between"][IMAGES].values()))
        mean, deviation = PUBLISHED[architecture]
        ours = f"{_over_layers(found, IMAGES)}; with positions as rows {_over_layers(found, POSITIONS)}"
        n = f"{values.shape[1]} pair{'s' * (values.shape[1] > 1)}, {len(values)} layers"
        near = bool(abs(values.mean() - mean) <= deviation)
        rows.append(BETWEEN_NETWORKS[architecture].row(ours, n, [near], len(values.T)))
    return rows


def _picture(record: Mapping[str, Any]) -> Figure:
    """Plot relative accuracy over CKA: a line along β and the rotations, a colour for each layer."""
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.add_subplot()
    colours: dict[str, str] = {}
    for found in record["architectures"].values():
        for layers in found["networks"].values():
            for layer, kinds in layers.items():
                new = layer not in colours
                colour = colours.setdefault(layer, f"C{len(colours)}")
                for kind, style in (("penalised", "o-"), ("rotated", "x")):
                    points = kinds[kind]
                    axes.plot(
                        [point["cka"] for point in points], [point["score"].value for point in points], style,
                        color=colour, linewidth=1, markersize=5, label=f"{layer}, {kind}" if new else None,
                    )  # fmt: skip
    axes.set_xlabel("linear CKA with the original activations")
    axes.set_ylabel("relative accuracy")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize="small")
    return figure


if __name__ == "__main__":
    main()
