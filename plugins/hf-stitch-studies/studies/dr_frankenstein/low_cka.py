"""Experiment 4: accuracy without CKA, and CKA without accuracy (Csiszárik et al. 2021, sections 6.3 and 6.4, figure 5).

A network is stitched to itself. Starting from the identity, the map is trained on cross-entropy + β · CKA between its
output and the original activations. It is compared with random rotations, which leave CKA at 1 but change the network,
and with the CKA between a network and a second network mapped onto it by least squares.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import study
import torch
from dr_frankenstein import experiment, stitching
from dr_frankenstein.experiment import CUTS, SHORT, TITLES, Networks, Sizes, scored
from hf_stitch_studies import TrajectoryRecorder, score_curves

from hf_stitch import Adapter, Samples, StitchedModel, registries
from hf_stitch.metrics import linear_cka
from hf_stitch.stitches import LinearStitch, StitchingLayer

SIZES = Sizes(3_000, 2_000, 5, batch=64, **SHORT)
PLACES: dict[str, tuple[tuple[str, ...], int]] = {"tiny10": (("bn3", "bn5"), 3), "resnet20": (("layer2.0",), 2)}
"""Architecture -> layers, number of networks."""
PENALTIES = (0.3, 1.0)
ROTATIONS = 5
PAIRS, BETWEEN = 3, {"tiny10": (3_000, 1_000), "resnet20": (1_500, 500)}
"""Maximum number of pairs for the baseline; training images, and test images for CKA."""
POSITIONS, IMAGES = "positions", "images"
"""Kinds of rows: positions, or images with all positions concatenated."""
PROBE = 1_000
"""Number of test images for CKA."""
LOW, KEPT = 0.7, 0.99
"""CKA that counts as low, and relative accuracy that counts as unchanged."""
SAME, DESTROYED = 0.99, 0.3
"""CKA that counts as 1, and relative accuracy that counts as destroyed."""
PUBLISHED = {"tiny10": (0.883, 0.050), "resnet20": (0.922, 0.098)}
"""The paper's CKA between transformed Model 1 and Model 2: mean and deviation over ten pairs and all layers."""


def main() -> None:
    arguments = experiment.read(__doc__)
    record, (train, test) = experiment.started(arguments, SIZES), SIZES.samples(arguments.data_dir)
    for architecture, (layers, count) in PLACES.items():
        networks = experiment.loaded(architecture, arguments)
        some = [data.take(size) for data, size in zip((train, test), BETWEEN[architecture], strict=True)]
        record["architectures"][architecture] = {
            "networks": {
                name: {layer: self_stitched(networks[name], layer, train, test) for layer in layers}
                for name in list(networks)[:count]
            },
            "between": between_networks(networks, experiment.disjoint(networks, PAIRS), CUTS[architecture], *some),
        }
    study.write_results("low_cka", record, page, arguments.out)


def self_stitched(network: Adapter, layer: str, train: Samples, test: Samples) -> dict[str, list[dict[str, Any]]]:
    """Stitch a network to itself with penalised and rotated maps; return CKA and accuracy of each map."""
    [start] = stitching.direct(network, network, layer, ["identity"], train)
    maps: dict[str, dict[float, StitchingLayer]] = {"rotated": {}, "penalised": {0.0: start.stitch}}
    for seed in range(ROTATIONS):
        maps["rotated"][seed] = start.stitch.with_maps(_rotation(start.stitch.widths[0], seed), None)
    for penalty in PENALTIES:
        matcher = replace(SIZES.task_loss, penalties={"linear_cka": penalty})
        [maps["penalised"][penalty]] = stitching.trained(matcher, [start], network, train)
    scores = score_curves(start, test, "β or seed", maps, target=network, batch_size=stitching.BATCH)
    return {
        kind: [
            {"x": x, "cka": cka(start, test.take(PROBE), network, stitch), "score": score}
            for (x, stitch), score in zip(by_x.items(), scores[kind].values(), strict=True)
        ]
        for kind, by_x in maps.items()
    }


def _rotation(width: int, seed: int) -> LinearStitch:
    """Draw a Haar-random orthogonal matrix from the QR decomposition of a Gaussian matrix, with the signs of R."""
    gaussian = torch.randn(width, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    q, r = torch.linalg.qr(gaussian)
    return LinearStitch.of(weight=(q * r.diagonal().sign()).float(), bias=None)


def cka(stitched: StitchedModel, probe: Samples, target: Adapter, stitch: StitchingLayer) -> float:
    """Return the linear CKA between mapped activations and the target's activations, with positions as rows."""
    recorder = TrajectoryRecorder(stitched, probe, ["linear_cka"], target=target)
    recorder(0, [stitch])
    return recorder.trajectory["linear_cka"][0]


@torch.no_grad()
def between_networks(
    networks: Networks, pairs: Sequence[tuple[str, str]], layers: Sequence[str], train: Samples, probe: Samples
) -> dict[str, dict[str, list[float]]]:
    """Return the CKA between networks mapped by least squares and their targets: rows -> layer -> value of each pair.

    Rows are positions, or images with all positions concatenated, as in the authors' code.
    """
    ckas: dict[str, dict[str, list[float]]] = {rows: {layer: [] for layer in layers} for rows in (POSITIONS, IMAGES)}
    for source, target in ((networks[a], networks[b]) for a, b in pairs):
        statistics = stitching.collected(source, target, [(layer, layer) for layer in layers], train)
        maps = registries.matchers.build("lstsq").match(statistics).layers
        sides: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {layer: [] for layer in layers}
        for batch in probe.batches(stitching.BATCH):
            a, b = (side.encode(side.preprocess(batch.samples), list(layers)) for side in (source, target))
            for layer in layers:
                sides[layer].append((maps[layer, layer](a[layer]).values, b[layer].values))
        for layer, parts in sides.items():
            mapped, target_values = (torch.cat(side).double() for side in zip(*parts, strict=True))
            positions = (activations.movedim(1, -1).flatten(0, -2) for activations in (mapped, target_values))
            ckas[POSITIONS][layer].append(float(linear_cka(*positions)))
            ckas[IMAGES][layer].append(float(linear_cka(mapped.flatten(1), target_values.flatten(1))))
    return ckas


UNCHANGED, ROTATED, BETWEEN_NETWORKS = study.stated(__file__)


def page(record: dict[str, Any]) -> str:
    sections = []
    for architecture, run in record["architectures"].items():
        rows: list[tuple[object, ...]] = []
        for name, layer, kinds in _networks(run):
            for point in kinds["penalised"]:
                rows.append((name, layer, f"β {point['x']:g}", f"{point['cka']:.3f}", scored(point["score"])))
            turned = kinds["rotated"]
            most, least = max(p["score"]["value"] for p in turned), min(p["cka"] for p in turned)
            rows.append((name, layer, f"{len(turned)} rotations", f"{least:.3f} or more", f"at most {most:.3f}"))
        sections += [
            f"## {TITLES[architecture]}",
            study.markdown(("network", "layer", "map", "linear CKA", "relative accuracy"), rows),
        ]
        for kind, layers in run["between"].items():
            by_layer = ", ".join(f"{layer} {np.mean(some):.3f}" for layer, some in layers.items())
            means = f"{_over_layers(run, kind)} ({by_layer})"
            sections.append(f"Between networks, CKA after least squares with {kind} as rows: {means}.")
    return experiment.written(
        __file__, record, claims(record), low=LOW, kept=KEPT, probe=PROBE, same=SAME, destroyed=DESTROYED,
        test=record["preset"]["test"], architectures="\n\n".join(sections),
    )  # fmt: skip


def _networks(run: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for name, layers in run["networks"].items():
        for layer, kinds in layers.items():
            yield name, layer, kinds


def unchanged(points: Sequence[dict[str, Any]]) -> bool | None:
    """Return whether, for some penalty, CKA is low and accuracy unchanged."""
    low = [study.adjusted(point["score"], len(points) - 1) for point in points if point["cka"] <= LOW]
    return study.at_least(1, (study.above(score, KEPT) for score in low))


def _over_layers(run: dict[str, Any], rows: str) -> str:
    values = np.array(list(run["between"][rows].values()))
    return f"{values.mean():.3f} ± {values.std(ddof=1):.3f}"


def claims(record: dict[str, Any]) -> list[dict[str, str]]:
    rows = []
    for architecture, run in record["architectures"].items():
        title, kinds, count = TITLES[architecture], [maps for *_, maps in _networks(run)], len(run["networks"])
        units = math.comb(count, 2)
        low = [point for some in kinds for point in some["penalised"] if point["cka"] <= LOW]
        best = max(low, key=lambda point: point["score"]["value"], default=None)
        ours = f"CKA {best['cka']:.3f}, relative accuracy {study.shown(best['score'])}" if best else "none"
        held = [unchanged(some["penalised"]) for some in kinds]
        rows.append(UNCHANGED.of(title).row(ours, f"{count} networks, {len(kinds)} layers of them", held, units))
        turned = [point for some in kinds for point in some["rotated"]]
        held = [study.at_least(2, (p["cka"] >= SAME, study.below(p["score"], DESTROYED))) for p in turned]
        ours = f"relative accuracy at most {max(point['score']['value'] for point in turned):.3f}"
        rows.append(ROTATED.of(title).row(ours, f"{count} networks, {len(turned)} rotations", held, units))
        values = np.array(list(run["between"][IMAGES].values()))
        mean, deviation = PUBLISHED[architecture]
        ours = f"{_over_layers(run, IMAGES)}; with positions as rows {_over_layers(run, POSITIONS)}"
        n = f"{study.counted(values.shape[1], 'pair')}, {len(values)} layers"
        near = bool(abs(values.mean() - mean) <= deviation)
        rows.append(BETWEEN_NETWORKS.of(title, mean, deviation).row(ours, n, [near], values.shape[1]))
    return rows
