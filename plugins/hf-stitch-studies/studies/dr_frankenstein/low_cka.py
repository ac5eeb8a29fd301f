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
from dr_frankenstein import experiment, frankenstein, stitching
from dr_frankenstein.experiment import CUTS, SHORT, TEST, TITLES, Preset, scored
from hf_stitch_studies import TrajectoryRecorder, score_curves
from matplotlib.figure import Figure

import hf_stitch
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
BETWEEN = 3
"""Number of pairs of Tiny-10 for the baseline."""
PROBE = 1_000
"""Number of test images on which CKA is measured."""
LOW, KEPT = 0.7, 0.99
"""CKA that counts as low, and relative accuracy that counts as unchanged."""
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
        pairs = experiment.disjoint(networks, BETWEEN) if len(networks) > 2 else frankenstein.ring(networks)
        found["between"] = {
            layer: [
                cka(stitching.direct(networks[a], networks[b], layer, ["lstsq"], train)[0], probe, networks[b])
                for a, b in pairs
            ]
            for layer in (CUTS[architecture] if arguments.preset != "test" else layers)
        }
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


PAGE = """# Experiment 4 and section 6.4: CKA independent of performance (Csiszárik et al., NeurIPS 2021, figure 5)

**What to do**: do not read function off CKA: it can be 1 where accuracy is destroyed. How low it can be where
accuracy is kept depends on network and layer.

{claims}

Claims: the accuracy of a network stitched to itself remains essentially unchanged while CKA is reduced below {low} (the
paper: a ResNet of width 3 at layer2.0). A rotation leaves CKA at 1 and destroys accuracy. Baseline of the paper: the
CKA between transformed Model 1 and Model 2.

Setting: {networks}, CIFAR-10; task loss + β · CKA from the identity; {setting}; CKA with positions as rows, on up to
{probe:,} test images. 95% intervals over images.

Rule, written before these figures were seen: confirmed for a network and a layer if, for some β, CKA is at most {low}
and relative accuracy at least {kept}; a rotation destroys accuracy if relative accuracy is at most .3 and CKA at least
.99. The baseline agrees with the paper's if its mean lies within the paper's deviation.

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
                rows.append((
                    name, layer, f"{len(turned)} rotations", f"{min(point['cka'] for point in turned):.3f} or more",
        f"at most {max(point['score']['value'] for point in turned):.3f}",
                ))  # fmt: skip
        sections += [
            f"## {TITLES[architecture]}",
            study.markdown(("network", "layer", "map", "linear CKA", "relative accuracy"), rows),
            f"Between networks, {_between(architecture, found)}",
        ]
    return PAGE.format(
        claims=study.verdicts(claims(record)), footer=experiment.footer("low_cka"),
        networks=record["networks"], setting=record["setting"], low=LOW, kept=KEPT, probe=PROBE,
        architectures="\n\n".join(sections),
    )  # fmt: skip


def _decided(found: dict[str, Any]) -> tuple[dict[str, bool], list[bool]]:
    """Whether CKA falls with unchanged accuracy by network and layer, and whether each rotation destroys accuracy."""
    low, turned = {}, []
    for name, layers in found["networks"].items():
        for layer, kinds in layers.items():
            low[f"{name}, {layer}"] = any(p["cka"] <= LOW and p["score"]["value"] >= KEPT for p in kinds["penalised"])
            turned += [p["score"]["value"] <= 0.3 and p["cka"] >= 0.99 for p in kinds["rotated"]]
    return low, turned


def _between(architecture: str, found: dict[str, Any]) -> str:
    values = np.array(list(found["between"].values()))
    published, spread = PUBLISHED[architecture]
    by_layer = ", ".join(f"{layer} {np.mean(some):.3f}" for layer, some in found["between"].items())
    return (
        f"CKA after least squares is {values.mean():.3f} ± {values.std(ddof=1):.3f} over {values.shape[1]} pairs and "
        f"{len(values)} layers (the paper: {published:.3f} ± {spread:.3f}): {by_layer}."
    )


def claims(record: dict[str, Any]) -> list[dict[str, str]]:
    """Return the rows of the table of all experiments."""
    rows = []
    for architecture, found in record["architectures"].items():
        title, (low, turned) = TITLES[architecture], _decided(found)
        units = math.comb(len(found["networks"]), 2)
        points = [p for layers in found["networks"].values() for kinds in layers.values() for p in kinds["penalised"]]
        rotated = [p for layers in found["networks"].values() for kinds in layers.values() for p in kinds["rotated"]]
        best = max((p for p in points if p["cka"] <= LOW), key=lambda p: p["score"]["value"], default=None)
        rows.append(experiment.claim(
            "6.3, figure 5", f"{title}: CKA below {LOW} with unchanged accuracy", "below .7, accuracy unchanged",
            f"CKA {best['cka']:.3f}, relative accuracy {study.shown(best['score'])}; {sum(low.values())} of {len(low)} "
            "networks and layers" if best else "none", f"{len(low)} networks and layers", study.decided(low.values()),
            units=units,
        ))  # fmt: skip
        rows.append(experiment.claim(
            "6.4", f"{title}: a rotation keeps CKA at 1 and destroys accuracy", "–",
            f"at most {max(point['score']['value'] for point in rotated):.3f}",
            f"{len(turned)} rotations", study.decided(turned), units=units,
        ))  # fmt: skip
        values = np.array(list(found["between"].values()))
        published, spread = PUBLISHED[architecture]
        rows.append(experiment.claim(
            "6.3", f"{title}: CKA of a transformed network with the target", f"{published:.3f} ± {spread:.3f}",
            f"{values.mean():.3f} ± {values.std(ddof=1):.3f}", f"{values.shape[1]} pairs, {len(values)} layers",
            "confirmed" if abs(values.mean() - published) <= spread else "refuted", units=units,
        ))  # fmt: skip
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
