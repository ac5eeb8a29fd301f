"""Experiment 9: front and back half from networks of different data sets (Csiszárik et al. 2021, appendix C.2).

Tiny-10 networks for CIFAR-10 and Fashion-MNIST. Images and classes are those of the back half. Baselines are a front
half from another seed on the same data set, and an untrained front half.

    python -m dr_frankenstein.across_data_sets --published PUBLISHED --networks NETWORKS --data-dir DATA
"""

from collections.abc import Sequence
from typing import Any

import study
from dr_frankenstein import experiment, frankenstein, networks
from dr_frankenstein.base_training import Base, adapted
from dr_frankenstein.experiment import TASK, TEST, Preset, scored

import hf_stitch

PRESETS = {
    "small": Preset(5_000, 3_000, 2, (20_000, 30), lr=3e-3, schedule="cosine", batch=64), "test": TEST,
    "paper": Preset(20_000, 10_000, 30, (20_000, 300), 4, True),
}  # fmt: skip
LAYERS = {"small": ("bn2", "bn4", "bn6", "bn8"), "test": ("bn8",), "paper": networks.Tiny10.cuts}
NAMES = {"cifar10": "CIFAR-10", "fashion_mnist": "Fashion-MNIST"}
UNTRAINED = "untrained"
METHODS = (TASK, frankenstein.START)
LOW = 0.1
"""A drop of at most this much is surprisingly low."""


def main() -> None:
    """Run the experiment from the command line."""
    arguments = study.parser(__doc__, "data-dir", "published", "networks").parse_args()
    preset, layers = PRESETS[arguments.preset], LAYERS[arguments.preset]
    cifar = experiment.loaded("tiny10", arguments, preset)
    count, epochs = preset.base
    clothes = [Base("tiny10", epochs, count, seed, "fashion_mnist") for seed in range(preset.seeds)]
    loaded = {
        "cifar10": list(cifar.values())[: preset.seeds],
        "fashion_mnist": list(adapted(clothes, arguments.networks, arguments.data_dir).values()),
        UNTRAINED: [networks.adapted(base.build()) for base in clothes],
    }
    record: dict[str, Any] = {
        "preset": preset, "setting": str(preset), "networks": experiment.origin(arguments, preset),
        "layers": layers, "accuracy": {}, "relative_accuracy": {},
    }  # fmt: skip
    pictures = {}
    for data, other in (tuple(NAMES), tuple(NAMES)[::-1]):
        fronts = {"same": loaded[data], "other": loaded[other], UNTRAINED: loaded[UNTRAINED]}
        backs = {f"back {i}": network for i, network in enumerate(loaded[data])}
        train, test = preset.samples(data, arguments.data_dir)
        found = {
            front: frankenstein.answers(
                named(front, some),
                backs,
                list(zip(named(front, some), reversed(backs), strict=True)),
                layers,
                train,
                test,
                direct={},
                trained={TASK: preset.task_loss},
                augment=preset.augmentation,
            )
            for front, some in fronts.items()
        }
        one = found["same"]
        record["accuracy"][data] = (one.targets.argmax(-1) == one.labels).double().mean(1).tolist()
        record["relative_accuracy"][data] = scores = {
            front: {method: [each.relative(layer, method) for layer in layers] for method in (*METHODS, "mean_only")}
            for front, each in found.items()
        }
        pictures[f"across_data_sets_{data}"] = experiment.lines(
            {f"front: {front}, {method}": scores[front][method] for front in fronts for method in METHODS}, layers,
            "relative accuracy", f"Backs trained on {NAMES[data]}",
        )  # fmt: skip
    study.leave("across_data_sets", record, page, pictures, arguments.out)


def named(front: str, some: Sequence[hf_stitch.Adapter]) -> dict[str, hf_stitch.Adapter]:
    """Name the networks of the front halves: those of the same data set are the backs, others are networks apart."""
    return {f"{'back' if front == 'same' else front} {i}": network for i, network in enumerate(some)}


PAGE = """# Experiment 9: across data sets (Csiszárik et al., NeurIPS 2021, section 5.1, appendix C.2)

Claim: the accuracy drop can be surprisingly low even if networks of different data sets are stitched. The paper
stitches networks of ImageNet and of CelebA, and for figure 2 Inception on CelebA; neither data set is at hand. Here
stand CIFAR-10 and Fashion-MNIST (as RGB with a black frame of 32 × 32), which are smaller and less alike.

Setting: Tiny-10; for CIFAR-10 {networks}, for Fashion-MNIST two networks trained for {epochs} epochs on {images:,}
images. Images and classes are those of the back half. {setting}; mean of {pairs} pairs, 95% intervals over images and
networks. *Same*: a front half of another seed from the same data set. *Untrained*: a random front half.

Rule, written before these figures were seen: the drop of task loss at a layer is surprisingly low if it is at most
{low} and the interval lies above that of an untrained front half. The claim ("can be") is confirmed for a direction if
this holds at a layer, and refuted otherwise.

{table}

{findings}

{footer}"""


def page(record: dict[str, Any]) -> str:
    """Return the page of the results from the record, as it is read from JSON."""
    rows, findings = [], []
    for data, fronts in record["relative_accuracy"].items():
        for front, methods in fronts.items():
            for method in METHODS:
                chance = scored(methods["mean_only"][0]).value
                rows.append((NAMES[data], front, method, *map(scored, methods[method]), f"{chance:.3f}"))
        low, drops = _low(record, data)
        of_layers = ", ".join(f"{layer} {drop:+.3f}" for layer, drop in drops.items())
        own = " and ".join(f"{accuracy:.3f}" for accuracy in record["accuracy"][data])
        findings.append(
            f"- **{NAMES[data]} with a front half from the other data set: {'confirmed' if low else 'refuted'}** "
            f"({'low at ' + ', '.join(low) if low else 'low at no layer'}). Drops by layer: {of_layers}. Accuracy of "
            f"the whole networks: {own}."
        )
    preset = record["preset"]
    return PAGE.format(
        footer=experiment.footer("across_data_sets"),
        networks=record["networks"], epochs=preset["base"][1], images=preset["base"][0], setting=record["setting"],
        low=LOW, pairs=len(record["accuracy"]["cifar10"]), findings="\n".join(findings),
        table=study.markdown(("back and images", "front", "method", *record["layers"], "mean only"), rows),
    )  # fmt: skip


def _low(record: dict[str, Any], data: str) -> tuple[list[str], dict[str, float]]:
    """Return the layers of a surprisingly low drop, and the drop at every layer."""
    other, random = (
        list(map(scored, record["relative_accuracy"][data][front][TASK])) for front in ("other", UNTRAINED)
    )
    drops = {layer: 1 - score.value for layer, score in zip(record["layers"], other, strict=True)}
    low = [
        layer for layer, one, two in zip(record["layers"], other, random, strict=True)
        if 1 - one.value <= LOW and one.low > two.high
    ]  # fmt: skip
    return low, drops


def claims(record: dict[str, Any]) -> list[dict[str, str]]:
    """Return the rows of the table of all experiments."""
    rows = []
    for data in record["relative_accuracy"]:
        low, drops = _low(record, data)
        rows.append(experiment.claim(
            "C.2", f"a front half from another data set costs {NAMES[data]} surprisingly little", "plot",
            f"drop {min(drops.values()):.3f} to {max(drops.values()):.3f}; low at {', '.join(low) or 'no layer'}",
            f"{len(record['accuracy'][data])} pairs, {len(drops)} layers",
            f"stand-in {'confirmed' if low else 'refuted'}",
        ))  # fmt: skip
    return rows


if __name__ == "__main__":
    main()
