"""Direct matching between networks of other seeds, at every layer (Csiszárik et al. 2021, section 4.2).

Least squares, Procrustes and least squares with the covariance of the target, with positions as rows, on training
images without augmentation; and for some pairs of Tiny-10, permutations. Scores are relative accuracies on the test
images. For the first pair of Tiny-10, an independent computation in float64 stands beside them.

    python -m dr_frankenstein.direct_matching --published PUBLISHED --networks NETWORKS --data-dir DATA
"""

import argparse
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import study
from dr_frankenstein import experiment, frankenstein
from dr_frankenstein.experiment import CUTS, TITLES, Claim, Preset, scored

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
COLLAPSED, WELL = 0.5, 0.8
"""Relative accuracy below which least squares has collapsed, and from which on it performs well."""
MARGIN = 0.02
"""Procrustes is as good as least squares if it is worse by less than this."""
WELL_AT = ("layer1.0", "layer1.1", "layer1.2", "layer2.0", "layer2.1")
"""Layers of ResNet-20 where least squares performs well in the paper."""
PUBLISHED = {"tiny10": (6.99, 1.96), "resnet20": (4.69, 2.91)}
"""The paper's cross-entropy with the target without a map: mean and deviation over runs and layers."""
PERMUTATION, PERMUTED = "permutation", {"small": (4, 500, 1_000), "test": (1, 150, 60), "paper": (5, 50_000, 10_000)}
"""Pairs of Tiny-10, training and test images for permutations, which a small part of the images decides."""
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
    record["permutations"] = permuted(experiment.loaded("tiny10", arguments, preset), arguments)
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


def permuted(networks: Mapping[str, hf_stitch.Adapter], arguments: argparse.Namespace) -> dict[str, Any]:
    """Stitch disjoint pairs by permutations and by least squares."""
    count, *sizes = PERMUTED[arguments.preset]
    train, test = Preset(*sizes, 0, (0, 0)).samples("cifar10", arguments.data_dir)
    pairs, layers = experiment.disjoint(networks, count), CUTS["tiny10"]
    direct = {PERMUTATION: registries.matchers.build(PERMUTATION)}
    found = frankenstein.answers(networks, networks, pairs, layers, train, test, direct=direct, trained={})
    return {
        "pairs": [f"{a} → {b}" for a, b in pairs],
        "layers": layers,
        "by_pair": {m: [found.by_pair(layer, m) for layer in layers] for m in (PERMUTATION, LEAST_SQUARES)},
        "less": [found.relative(layer, PERMUTATION, LEAST_SQUARES) for layer in layers],
    }


COLLAPSES = Claim(
    "5.1, figure 2", "ResNet-20: direct matching collapses performance on several layers", "plot",
    f"at two layers or more, least squares keeps less than {COLLAPSED}, by the interval",
)  # fmt: skip
LAYERS_WELL = Claim(
    "5.1, figure 2", "ResNet-20: direct matching performs fairly well from layer1.0 to layer2.1", "plot",
    f"at each of these layers, least squares keeps {WELL} or more, by the interval",
)  # fmt: skip
ALMOST_ALL = Claim(
    "5.1, figure 2", "Tiny-10: direct matching performs fairly well in almost every case", "plot",
    f"at all layers but one at most, least squares keeps {WELL} or more, by the interval",
)  # fmt: skip
AS_GOOD = {
    architecture: Claim(
        "5.1", f"{title}: on later layers, Procrustes is as accurate as least squares", "–",
        f"at each of the last three layers, the paired difference is above -{MARGIN}, by the interval",
    )
    for architecture, title in TITLES.items()
}  # fmt: skip
UNMAPPED = {
    architecture: Claim(
        "figure 2", f"{title}: cross-entropy with the target without a map",
        "{:.2f} ± {:.2f}".format(*PUBLISHED[architecture]), "the mean lies within the paper's deviation",
    )
    for architecture, title in TITLES.items()
}  # fmt: skip
NOT_PERMUTATIONS = Claim(
    "4.2 (Wang et al. 2018)", "Tiny-10: matching cannot be achieved by permutations", "–",
    f"at every layer, permutations keep less than {WELL} and less than least squares, by the interval over pairs",
)  # fmt: skip

PAGE = """# Direct matching (Csiszárik et al., NeurIPS 2021, section 4.2)

**What to do**: match by least squares first. Where it loses much, as in the last stage of ResNet-20, take Procrustes or
`recoloured`, which lose less there. Do not match by permutation.

{verdicts}

One pair decides nothing, so that ResNet-20, of which two networks are public, is undecided: its figures are below.

Setting: {networks}, CIFAR-10; maps of positions fitted on the first {train:,} training images without augmentation,
scored on {test:,} test images. Relative accuracy: accuracy over that of the target alone; mean over the pairs, 95%
intervals over images and networks, and the standard deviation over pairs. With two networks, intervals reflect the
images alone. *Recoloured*: least squares with the covariance of the target's activations. *Identity*: no map.

The bounds {collapsed} and {margin} were written before the figures of the first run were seen; the bound {well}, the
rows on single layers of ResNet-20 and on permutations, and that intervals decide, when they were known.

{architectures}

## Permutations

{permutations}

{footer}"""


def page(record: dict[str, Any]) -> str:
    """Return the page of the results from the record, as it is read from JSON."""
    return PAGE.format(
        footer=experiment.footer("direct_matching"), verdicts=study.verdicts(claims(record)),
        networks=record["networks"], train=record["preset"]["train"], test=record["preset"]["test"],
        collapsed=COLLAPSED, margin=MARGIN, well=WELL, permutations=_permutations(record["permutations"]),
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
    kept = [each["value"] for each in found["relative_accuracy"][RECOLOURED]]
    said = [
        f"Least squares keeps {np.mean(_values(found)):.3f} and recoloured maps {np.mean(kept):.3f}, as the mean over "
        "layers.",
        f"Cross-entropy with the target's outputs, as the mean over layers: {_unmapped(found)} without a map, "
        f"{np.mean([each['value'] for each in found['cross_entropy'][LEAST_SQUARES]]):.2f} with least squares.",
    ]
    if len(found["pairs"]) > 2:
        gains = np.array(found["by_pair"][RECOLOURED]) - np.array(found["by_pair"][LEAST_SQUARES])
        said.append(
            f"Recoloured maps are better in {int((gains.mean(0) > 0).sum())} of {gains.shape[1]} pairs, as the mean "
            "over "
            "layers."
        )
    if _has_reference(architecture, found, record):
        apart = max(abs(each[0] - r) for each, r in zip(found["by_pair"][LEAST_SQUARES], REFERENCE, strict=True))
        said.append(f"The pair 0 → 1 differs from the independent computation by at most {apart:.4f}.")
    return said


def _values(found: dict[str, Any], layers: Collection[str] = ()) -> list[float]:
    """Return the relative accuracies of least squares at some layers, by default at all."""
    scores = zip(found["layers"], found["relative_accuracy"][LEAST_SQUARES], strict=True)
    return [score["value"] for layer, score in scores if layer in (layers or found["layers"])]


def _unmapped(found: dict[str, Any]) -> str:
    losses = [each["value"] for each in found["cross_entropy"]["identity"]]
    return f"{np.mean(losses):.2f} ± {np.std(losses, ddof=1):.2f}"


def _over_pairs(found: dict[str, Any], method: str, less: str = "") -> list[dict[str, float]]:
    """Return the relative accuracies of permutations by layer, with the interval of Student's t over pairs."""
    values = np.array(found["by_pair"][method]) - (np.array(found["by_pair"][less]) if less else 0)
    return [experiment.over(row) for row in values]


def _permutations(found: dict[str, Any]) -> str:
    columns = zip(found["layers"], _over_pairs(found, PERMUTATION), _over_pairs(found, LEAST_SQUARES),
                  _over_pairs(found, PERMUTATION, LEAST_SQUARES), strict=True)  # fmt: skip
    table = study.markdown(("layer", PERMUTATION, LEAST_SQUARES, "difference"),
                           ((layer, *map(study.shown, scores)) for layer, *scores in columns))  # fmt: skip
    said = f"{len(found['pairs'])} pairs of Tiny-10 that share no network; 95% intervals of Student's t over pairs."
    return f"{said}\n\n{table}"


def claims(record: dict[str, Any]) -> list[dict[str, str]]:
    """Return the rows of the table of all experiments."""
    rows = []
    for architecture, found in record["architectures"].items():
        layers, scores = found["layers"], found["relative_accuracy"][LEAST_SQUARES]
        (n, units), values = experiment.counted(found["pairs"]), _values(found)
        n += f", {len(layers)} layers"
        span = f"{min(values):.3f} to {max(values):.3f}, worst at {layers[int(np.argmin(values))]}"
        if architecture == "resnet20":
            rows.append(
                COLLAPSES.row(span, n, [experiment.at_least(2, (study.below(s, COLLAPSED) for s in scores))], units)
            )
            some = _values(found, WELL_AT)
            held = [study.above(s, WELL) for layer, s in zip(layers, scores, strict=True) if layer in WELL_AT]
            rows.append(LAYERS_WELL.row(f"{min(some):.3f} to {max(some):.3f}", n, held, units))
        else:
            held = [experiment.at_least(len(layers) - 1, (study.above(score, WELL) for score in scores))]
            rows.append(ALMOST_ALL.row(span, n, held, units))
        late = list(zip(layers, found["procrustes_less"], strict=True))[-3:]
        ours = ", ".join(f"{layer} {less['value']:+.3f}" for layer, less in late)
        rows.append(AS_GOOD[architecture].row(ours, n, [study.above(less, -MARGIN) for _, less in late], units))
        mean, deviation = PUBLISHED[architecture]
        near = abs(np.mean([each["value"] for each in found["cross_entropy"]["identity"]]) - mean) <= deviation
        rows.append(UNMAPPED[architecture].row(_unmapped(found), n, [bool(near)], units))
    found = record["permutations"]
    kept, less = _over_pairs(found, PERMUTATION), _over_pairs(found, PERMUTATION, LEAST_SQUARES)
    rows.append(NOT_PERMUTATIONS.row(
        f"{min(s['value'] for s in kept):.3f} to {max(s['value'] for s in kept):.3f}; less than least squares by "
        f"{-max(s['value'] for s in less):.3f} to {-min(s['value'] for s in less):.3f}",
        f"{len(found['pairs'])} pairs, {len(kept)} layers",
        [experiment.at_least(2, (study.below(k, WELL), study.below(d, 0))) for k, d in zip(kept, less, strict=True)],
        len(found["pairs"]),
    ))  # fmt: skip
    return rows


if __name__ == "__main__":
    main()
