"""Direct matching between networks of other seeds, at every layer (Csiszárik et al. 2021, section 4.2).

Least squares, Procrustes and least squares with the covariance of the target, with positions as rows, on training
images without augmentation. Scores are relative accuracies on the test images. For the first pair of Tiny-10, an
independent computation in float64 stands beside them.

    python -m dr_frankenstein.direct_matching --published PUBLISHED --networks NETWORKS --data-dir DATA
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import study
from dr_frankenstein import experiment, frankenstein
from dr_frankenstein.experiment import CUTS, TITLES, Preset, scored

import hf_stitch
from hf_stitch.registry import registries

PRESETS = {
    "small": Preset(5_000, 10_000, 0, (10_000, 6)),
    "test": Preset(150, 60, 0, (150, 1)),
    "paper": Preset(50_000, 10_000, 0, (50_000, 300), seeds=10),
}
LEAST_SQUARES, PROCRUSTES, RECOLOURED = frankenstein.START, "Procrustes", "recoloured"
REFERENCE = (1.000, 0.921, 0.787, 0.907, 0.834, 0.945, 0.965, 0.986)
"""Relative accuracy of network 1 with the front of network 0, computed independently in float64 (± .003)."""
COLLAPSED = 0.5
"""A layer has collapsed where least squares keeps less than this share of the accuracy."""
MARGIN = 0.02
"""Procrustes is as good as least squares if it is worse by less than this."""
METHODS = (LEAST_SQUARES, PROCRUSTES, RECOLOURED, *frankenstein.BASELINES)


def main() -> None:
    """Run the experiment from the command line."""
    arguments = study.parser(__doc__, "data-dir", "published", "networks").parse_args()
    preset = PRESETS[arguments.preset]
    train, test = preset.samples("cifar10", arguments.data_dir)
    record: dict[str, Any] = {"preset": preset, "networks": experiment.origin(arguments, preset), "architectures": {}}
    pictures = {}
    for architecture, layers in CUTS.items():
        networks = experiment.loaded(architecture, arguments, preset)
        record["architectures"][architecture] = found = measured(networks, layers, train, test)
        pictures[f"direct_matching_{architecture}"] = experiment.lines(
            {method: found["relative_accuracy"][method] for method in METHODS}, layers, "relative accuracy",
            f"{TITLES[architecture]}: direct matching, {len(found['pairs'])} pairs",
        )  # fmt: skip
    study.leave("direct_matching", record, page, pictures, arguments.out)


def measured(
    networks: Mapping[str, hf_stitch.Adapter], layers: Sequence[str], train: hf_stitch.Samples, test: hf_stitch.Samples
) -> dict[str, Any]:
    """Stitch each network to the next one and to the third next one, at every layer with every method."""
    names = list(networks)
    pairs = frankenstein.ring(names)
    if len(names) > 3:
        pairs += list(zip(names, names[3:] + names[:3], strict=True))
    direct = {each: registries.matchers.build(each.lower()) for each in (PROCRUSTES, RECOLOURED)}
    found = frankenstein.answers(networks, networks, pairs, layers, train, test, direct=direct, trained={})
    return {
        "pairs": [f"{a} → {b}" for a, b in pairs],
        "layers": list(layers),
        "target_accuracy": (found.targets.argmax(-1) == found.labels).double().mean(1).tolist(),
        "relative_accuracy": {m: [found.relative(layer, m) for layer in layers] for m in METHODS},
        "by_pair": {m: [found.by_pair(layer, m) for layer in layers] for m in (LEAST_SQUARES, PROCRUSTES, RECOLOURED)},
        "procrustes_less": [found.relative(layer, PROCRUSTES, LEAST_SQUARES) for layer in layers],
        "recoloured_less": [found.relative(layer, RECOLOURED, LEAST_SQUARES) for layer in layers],
        "cross_entropy": {m: [found.imitation(layer, m) for layer in layers] for m in ("identity", LEAST_SQUARES)},
    }


PAGE = """# Direct matching (Csiszárik et al., NeurIPS 2021, section 4.2)

**What to do**: fit least squares before anything else, and Procrustes at the last layers if the map must be a
rotation; look at every layer, since some keep far less than others.

{claims}

Claim (sections 4.2 and 5.1, figure 2): maps that minimise a distance between activations, without the task, stitch
networks of other seeds, but significantly worse than task loss, and collapse on several layers of ResNet-20. On later
layers, Procrustes is as good as least squares. The paper shows these results as plots.

Setting: {networks}, CIFAR-10; maps of positions fitted on the first {train:,} training images without augmentation,
scored on {test:,} test images. Relative accuracy: accuracy over that of the target alone; mean over the pairs, 95%
intervals over images and networks, and the standard deviation over pairs. With two networks, intervals reflect the
images alone. *Recoloured*: least squares with the covariance of the target's activations. *Identity*: no map.

Rules, written before these figures were seen: a layer has collapsed where least squares keeps less than {collapsed};
Procrustes is as good where the lower end of its paired difference is above -{margin}. The cross-entropy without a map
agrees with the paper's if it lies within the paper's deviation.

{architectures}

{footer}"""


def page(record: dict[str, Any]) -> str:
    """Return the page of the results from the record, as it is read from JSON."""
    return PAGE.format(
        claims=study.verdicts(claims(record)), footer=experiment.footer("direct_matching"),
        networks=record["networks"], train=record["preset"]["train"], test=record["preset"]["test"],
        collapsed=COLLAPSED, margin=MARGIN,
        architectures="\n\n".join(_section(*each, record) for each in record["architectures"].items()),
    )  # fmt: skip


def _section(architecture: str, found: dict[str, Any], record: dict[str, Any]) -> str:
    header = ["layer", LEAST_SQUARES, "sd over pairs", PROCRUSTES, "less least squares", RECOLOURED,
              "less least squares", "identity", "mean only"]  # fmt: skip
    published = _has_reference(architecture, found, record)
    rows = []
    for i, layer in enumerate(found["layers"]):
        scores = {method: scored(found["relative_accuracy"][method][i]) for method in METHODS}
        by_pair = found["by_pair"][LEAST_SQUARES][i]
        rows.append([
            layer, scores[LEAST_SQUARES], f"{np.std(by_pair, ddof=1):.3f}", f"{scores[PROCRUSTES].value:.3f}",
            scored(found["procrustes_less"][i]), f"{scores[RECOLOURED].value:.3f}",
            scored(found["recoloured_less"][i]), *(f"{scores[m].value:.3f}" for m in frankenstein.BASELINES),
        ])  # fmt: skip
        if published:
            rows[-1] += [f"{by_pair[0]:.3f}", f"{REFERENCE[i]:.3f}"]
    if published:
        header += ["0 → 1 alone", "the same, computed independently"]
    accuracies = found["target_accuracy"]
    lines = [
        f"## {TITLES[architecture]}",
        f"{len(found['pairs'])} ordered pairs ({', '.join(found['pairs'])}); accuracy of the targets "
        f"{min(accuracies):.4f} to {max(accuracies):.4f}.",
        study.markdown(header, rows),
        "\n".join(f"- {line}" for line in _findings(architecture, found, record)),
    ]
    return "\n\n".join(lines)


def _has_reference(architecture: str, found: dict[str, Any], record: dict[str, Any]) -> bool:
    return architecture == "tiny10" and record["networks"].startswith("the authors") and found["pairs"][0] == "0 → 1"


def _findings(architecture: str, found: dict[str, Any], record: dict[str, Any]) -> list[str]:
    layers, direct = found["layers"], [scored(each) for each in found["relative_accuracy"][LEAST_SQUARES]]
    worst = min(range(len(layers)), key=lambda i: direct[i].value)
    fallen = [layer for layer, score in zip(layers, direct, strict=True) if score.value < COLLAPSED]
    good = _as_good(found)
    untouched = [scored(each).value for each in found["cross_entropy"]["identity"]]
    said = [
        f"**Least squares collapses at {', '.join(fallen) if fallen else 'no layer'}**; the worst is {layers[worst]}, "
        f"{direct[worst]}, and the mean over layers {np.mean([score.value for score in direct]):.3f}.",
        f"**Procrustes is as good as least squares at {', '.join(good) if good else 'no layer'}.**",
        f"Without a map, the cross-entropy with the target's outputs is {np.mean(untouched):.2f} ± "
        f"{np.std(untouched, ddof=1):.2f} over the layers (the paper: "
        f"{'6.99 ± 1.96' if architecture == 'tiny10' else '4.69 ± 2.91'}, over runs and layers); with least squares "
        f"{np.mean([scored(each).value for each in found['cross_entropy'][LEAST_SQUARES]]):.2f}.",
        f"Recoloured maps keep {np.mean([scored(s).value for s in found['relative_accuracy'][RECOLOURED]]):.3f}, as "
        "the mean over layers.",
    ]
    if len(found["pairs"]) > 2:
        gains = np.array(found["by_pair"][RECOLOURED]) - np.array(found["by_pair"][LEAST_SQUARES])
        better = int((gains.mean(0) > 0).sum())
        said[-1] += (
            f" They are better than least squares in {better} of {gains.shape[1]} pairs, as the mean over layers."
        )
    if _has_reference(architecture, found, record):
        apart = max(abs(each[0] - r) for each, r in zip(found["by_pair"][LEAST_SQUARES], REFERENCE, strict=True))
        said.append(f"The pair 0 → 1 differs from the independent computation by at most {apart:.4f}.")
    return said


def _as_good(found: dict[str, Any]) -> list[str]:
    return [
        layer
        for layer, less in zip(found["layers"], found["procrustes_less"], strict=True)
        if scored(less).low > -MARGIN
    ]


def claims(record: dict[str, Any]) -> list[dict[str, str]]:
    """Return the rows of the table of all experiments."""
    rows = []
    for architecture, found in record["architectures"].items():
        title, layers = TITLES[architecture], found["layers"]
        direct = [scored(each).value for each in found["relative_accuracy"][LEAST_SQUARES]]
        n, units = experiment.counted(found["pairs"])
        n += f", {len(layers)} layers"
        ours = f"{min(direct):.3f} to {max(direct):.3f}, worst at {layers[int(np.argmin(direct))]}"
        fallen = [value < COLLAPSED for value in direct]
        if architecture == "resnet20":
            decided = "confirmed" if sum(fallen) > 1 else "in part" if any(fallen) else "refuted"
            rows.append(experiment.claim(
                "4.2, figure 2", f"{title}: least squares collapses on several layers", "plot", ours, n, decided,
                units=units,
            ))  # fmt: skip
        else:
            rows.append(experiment.claim(
                "4.2, figure 2", f"{title}: least squares works on almost every layer", "plot", ours, n,
                "confirmed" if sum(fallen) <= 1 else "refuted", units=units,
            ))  # fmt: skip
        late = layers[-3:]
        good = [layer in _as_good(found) for layer in late]
        rows.append(experiment.claim(
            "5.1", f"{title}: Procrustes is as good as least squares on the last three layers", "–",
            f"at {', '.join(layer for layer, one in zip(late, good, strict=True) if one) or 'none of them'}", n,
            study.decided(good), units=units,
        ))  # fmt: skip
        untouched = [scored(each).value for each in found["cross_entropy"]["identity"]]
        rows.append(experiment.claim(
            "figure 2", f"{title}: cross-entropy with the target without a map",
            "6.99 ± 1.96" if architecture == "tiny10" else "4.69 ± 2.91",
            f"{np.mean(untouched):.2f} ± {np.std(untouched, ddof=1):.2f}", n,
            "confirmed" if abs(np.mean(untouched) - (6.99 if architecture == "tiny10" else 4.69))
            < (1.96 if architecture == "tiny10" else 2.91) else "refuted", units=units,
        ))  # fmt: skip
    return rows


if __name__ == "__main__":
    main()
