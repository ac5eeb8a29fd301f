"""Which detectors work at which layers? A precondition for figure 1 of Balogh & Jelasity (2025).

Before any stitch is scored, each detector must separate the target's own activations from the same activations with
equally large noise, and from the activations of another dataset, and must not call test images strange.
"""

import dataclasses
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import study
from dr_frankenstein import images, networks
from hf_stitch_studies import Energy
from how_not_to_stitch.experiment import NAMES, cifar, filled, kinds, parser

import hf_stitch
from hf_stitch import Adapter, Samples
from hf_stitch.analysis.detection.result import FAR, MIN_AUROC, OWN

DETECTORS = ("mahalanobis", "knn", "likelihood_ratio", "classifier")
SIDES = ("noise", "far", "train")


TRAIN, TEST, TARGETS = 1500, 400, 2
"""Images, and target networks."""
ENERGY, ENERGY_LAYERS = Energy.preset("small", epochs=6, fine_tune_epochs=6), 3
"""Energy detector, and its number of layers."""


def main() -> None:
    arguments = parser(__doc__, required={"out"}).parse_args()
    train, test = cifar(arguments, TRAIN, TEST)
    far = images.samples("fashion_mnist", "test", TEST, arguments.data_dir)
    outliers = {
        "Fashion-MNIST": images.samples("fashion_mnist", "train", TRAIN, arguments.data_dir),
        "superposed images": superposed(arguments.data_dir),
    }
    record: dict[str, Any] = {"preset": {"train": TRAIN, "test": TEST, "energy": ENERGY}, "families": {}}
    for kind, loaded, layers in kinds(arguments):
        names, by_target = list(loaded), dict[str, Any]()
        for number in range(TARGETS):
            a, b = names[number], names[(number + 1) % len(names)]
            tries: dict[str, tuple[Any, Any, list[str]]] = {name: (name, None, list(layers)) for name in DETECTORS}
            if kind == "Tiny10" and not number:  # minutes for each layer
                places = np.linspace(0, len(layers) - 1, ENERGY_LAYERS + 2).round().astype(int)[1:-1]
                deep = [layers[place] for place in places]
                tries |= {f"energy, {name}": (ENERGY, of, deep) for name, of in outliers.items()}
            by_target[b] = {
                name: study.cached(
                    arguments.out / "parts" / f"{kind} {b} {name}.json",
                    partial(tried, loaded[a], loaded[b], (train, test, far), detector, auxiliary, layers[0], at),
                )
                for name, (detector, auxiliary, at) in tries.items()
            }
        record["families"][kind] = {"layers": list(layers), "targets": by_target}
    study.write_results("detector_gate", record, page, arguments.out)


def superposed(data_dir: Any) -> Samples:
    """Return held-out images with the deviation of another image from the mean image on top."""
    pixels = networks.normalised(images.read("cifar10", "train", 2 * TRAIN, data_dir)[0][TRAIN:])
    return Samples.of(pixels + pixels.roll(1, 0) - pixels.mean(0))


def tried(
    a: Adapter, b: Adapter, data: tuple[Samples, ...], detector: Any, outliers: Any, source: str, layers: list[str]
) -> dict[str, dict[str, Any]]:
    """Return layer -> AUROCs with intervals on noise, far and training images, and the reason if the detector fails."""
    train, test, far = data
    grid = hf_stitch.stitch_grid(
        a, b, train, test_data=test, layers_a=[source], layers_b=layers, detectors=[detector], far_data=far,
        auxiliary_data=outliers, min_auroc=0, task="image-classification", batch_size=100, resamples=2, progress=False,
    )  # fmt: skip
    (detection,) = grid.detections.values()
    values = {"noise": detection.doses["coloured"][:, -1]} | {name: detection.controls[name] for name in SIDES[1:]}
    blind = dataclasses.replace(detection, min_auroc=MIN_AUROC).blind
    return {
        layer: {**{side: values[side][place] for side in SIDES}, "why": blind.get(layer, "")}
        for place, layer in enumerate(layers)
    }


(WORKS,) = study.stated(__file__)


def passing(targets: Iterable[dict[str, Any]], name: str) -> list[tuple[int, int]]:
    """Count the layers of each target where a detector passes, and all tested layers."""
    return [(sum(not layer["why"] for layer in of[name].values()), len(of[name])) for of in targets if name in of]


def _of(counts: Iterable[tuple[int, int]]) -> str:
    return "{} of {}".format(*map(sum, zip(*counts, strict=True)))


def page(record: dict[str, Any]) -> str:
    preset, families = record["preset"], record["families"]
    energy = preset["energy"]
    sentences = []
    for kind, one in families.items():
        names = list(next(iter(one["targets"].values())))
        counts = (f"`{name}` {_of(passing(one['targets'].values(), name))}" for name in names)
        sentences.append(f"- **{NAMES[kind]}**, layers where the detector passes: {', '.join(counts)}.")
    return filled(
        __file__, claims(record), families, verdict="\n".join(sentences), least=MIN_AUROC, far=FAR, own=OWN,
        train=preset["train"], test=preset["test"],
        sections="\n".join(_family(kind, one) for kind, one in families.items()),
        energy=f"width {energy['width']}, {energy['epochs']} epochs and {energy['fine_tune_epochs']} of fine-tuning",
    )  # fmt: skip


def claims(record: dict[str, Any]) -> list[dict[str, str]]:
    rows = []
    targets = [of for one in record["families"].values() for of in one["targets"].values()]
    for name in dict.fromkeys(name for of in targets for name in of):
        counts = passing(targets, name)
        held, n = [2 * good >= of for good, of in counts], study.counted(len(counts), "target network")
        rows.append(WORKS.of(f"`{name}`").row(f"passes at {_of(counts)} layers", n, held, len(counts)))
    return rows


def _family(kind: str, one: dict[str, Any]) -> str:
    lines = [
        [
            target, name, side, *(f"{of[layer][side][0]:.2f}" if layer in of else "" for layer in one["layers"]),
            sum(not layer_scores["why"] for layer_scores in of.values()) if side == SIDES[0] else "",
        ]
        for target, detectors in one["targets"].items() for name, of in detectors.items() for side in SIDES
    ]  # fmt: skip
    head = ["target", "detector", "AUROC on", *one["layers"], "passes"]
    return f"## {NAMES[kind]}\n\n{study.markdown(head, lines)}\n"
