"""Experiment 9: stitching across data sets (Csiszárik et al. 2021, appendix C.2).

Tiny-10 networks for CIFAR-10 and Fashion-MNIST. Images and classes are those of the back half. Baselines are a front
half from another seed on the same data set, and an untrained front half.

    python -m dr_frankenstein.across_data_sets --published PUBLISHED --networks NETWORKS --data-dir DATA
"""

from typing import Any

import study
from dr_frankenstein import experiment, frankenstein, networks
from dr_frankenstein.base_training import Base, adapted
from dr_frankenstein.experiment import TASK, TEST, Claim, Preset, scored

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
    run = experiment.Run.of(__doc__, PRESETS)
    preset, layers = run.preset, LAYERS[run.name]
    count, epochs = preset.base
    clothes = [Base("tiny10", epochs, count, seed, "fashion_mnist") for seed in range(preset.seeds)]
    loaded = {
        "cifar10": list(run.networks("tiny10").values())[: preset.seeds],
        "fashion_mnist": list(adapted(clothes, run.arguments.networks, run.arguments.data_dir).values()),
        UNTRAINED: [networks.adapted(base.build()) for base in clothes],
    }
    record, pictures = run.record() | {"layers": layers, "accuracy": {}, "relative_accuracy": {}}, {}
    for data, other in (tuple(NAMES), tuple(NAMES)[::-1]):
        fronts = {"same": loaded[data], "other": loaded[other], UNTRAINED: loaded[UNTRAINED]}
        backs = {f"back {i}": network for i, network in enumerate(loaded[data])}
        train, test = run.samples(data)
        scores = record["relative_accuracy"][data] = {}
        for front, some in fronts.items():
            names = {f"{'back' if front == 'same' else front} {i}": network for i, network in enumerate(some)}
            found = frankenstein.answers(
                names, backs, list(zip(names, reversed(backs), strict=True)), layers, train, test, direct={},
                trained={TASK: preset.task_loss}, augment=preset.augmentation,
            )  # fmt: skip
            scores[front] = {m: [found.relative(layer, m) for layer in layers] for m in (*METHODS, "mean_only")}
            if front == "same":
                record["accuracy"][data] = (found.targets.argmax(-1) == found.labels).double().mean(1).tolist()
        series = {f"front: {front}, {method}": scores[front][method] for front in fronts for method in METHODS}
        pictures[f"across_data_sets_{data}"] = experiment.lines(series, layers, f"Backs trained on {NAMES[data]}")
    study.leave("across_data_sets", record, page, pictures, run.arguments.out)


CAN_BE_LOW = Claim(
    "5.1, C.2", "The accuracy drop can be surprisingly low even if networks of different data sets are stitched",
    "plot (ImageNet, CelebA)",
    f"at some layer, in one direction, the drop of task loss is at most {LOW}, and the relative accuracy is above that "
    "with an untrained front half, both by intervals that allow for the choice among layers and directions "
    "(Bonferroni)", stand_in=True,
)  # fmt: skip
PAGE = study.text(__file__)


def page(record: dict[str, Any]) -> str:
    """Return the page of the results from the record, as it is read from JSON."""
    rows, findings = [], []
    for data, fronts in record["relative_accuracy"].items():
        for front, methods in fronts.items():
            chance = f"{methods['mean_only'][0]['value']:.3f}"
            rows += [(NAMES[data], front, method, *map(scored, methods[method]), chance) for method in METHODS]
        of_layers = ", ".join(f"{layer} {drop:.3f}" for layer, drop in drops(record, data).items())
        own = " and ".join(f"{accuracy:.3f}" for accuracy in record["accuracy"][data])
        findings.append(
            f"- **{NAMES[data]} with a front half from the other data set**: low at {_places(record, data)}. Drops by "
            f"layer: {of_layers}. Accuracy of the whole networks: {own}."
        )
    count, epochs = record["preset"]["base"]
    return experiment.written(
        PAGE, "across_data_sets", record, claims(record), epochs=epochs, images=count, low=LOW,
        pairs=len(record["accuracy"]["cifar10"]), findings="\n".join(findings),
        table=study.markdown(("back and images", "front", "method", *record["layers"], "mean only"), rows),
    )  # fmt: skip


def drops(record: dict[str, Any], data: str) -> dict[str, float]:
    """Return the drop of task loss with a front half of the other data set, by layer."""
    scores = record["relative_accuracy"][data]["other"][TASK]
    return {layer: 1 - score["value"] for layer, score in zip(record["layers"], scores, strict=True)}


def low_at(record: dict[str, Any], data: str) -> dict[str, bool | None]:
    """Return whether the drop at a layer is low and less than with an untrained front half."""
    other, random = (record["relative_accuracy"][data][front][TASK] for front in ("other", UNTRAINED))
    choices = len(NAMES) * len(record["layers"])
    found = {}
    for layer, score, less in zip(record["layers"], other, random, strict=True):
        gain = study.adjusted(study.difference(score, less), choices)
        low = study.above(study.adjusted(score, choices), 1 - LOW)
        found[layer] = study.at_least(2, (low, study.above(gain, 0)))
    return found


def _places(record: dict[str, Any], data: str) -> str:
    return ", ".join(layer for layer, low in low_at(record, data).items() if low) or "no layer"


def claims(record: dict[str, Any]) -> list[dict[str, str]]:
    """Return the rows of the table of all experiments."""
    held = [low for data in NAMES for low in low_at(record, data).values()]
    ours = "; ".join(
        f"back of {NAMES[data]}: drop {study.span(drops(record, data).values())}, low at {_places(record, data)}"
        for data in NAMES
    )
    pairs = len(record["accuracy"]["cifar10"])
    n = f"{pairs} pairs in both directions, {len(record['layers'])} layers"
    return [CAN_BE_LOW.row(ours, n, [study.at_least(1, held)], pairs)]


if __name__ == "__main__":
    main()
