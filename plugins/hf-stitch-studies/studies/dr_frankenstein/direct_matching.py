"""Direct matching between networks of different seeds, at every layer (Csiszárik et al. 2021, section 4.2).

The methods are least squares, Procrustes and least squares with the covariance of the target, with positions as rows,
on training images without augmentation; for some pairs of Tiny-10, also permutations. Scores are relative accuracies on
the test images. The first pair of Tiny-10 is compared with an independent computation in float64.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import study
from dr_frankenstein import experiment, frankenstein
from dr_frankenstein.experiment import CUTS, TITLES, Networks, Sizes, scored

from hf_stitch import registries

SIZES = Sizes(5_000, 10_000)
LEAST_SQUARES, PROCRUSTES, RECOLOURED = frankenstein.START, "Procrustes", "recoloured"
REFERENCE = (1.000, 0.921, 0.787, 0.907, 0.834, 0.945, 0.965, 0.986)
"""Relative accuracy of network 1 with the front of network 0, computed independently in float64 (± .003)."""
COLLAPSED, WELL = 0.5, 0.8
"""Below the first relative accuracy, least squares has collapsed; from the second, it performs well."""
MARGIN = 0.02
"""Procrustes is as good as least squares if it is worse by less than this."""
WELL_AT = ("layer1.0", "layer1.1", "layer1.2", "layer2.0", "layer2.1")
"""Layers of ResNet-20 where least squares performs well in the paper."""
PUBLISHED = {"tiny10": (6.99, 1.96), "resnet20": (4.69, 2.91)}
"""The paper's cross-entropy with the target without a map: mean and deviation over runs and layers."""
PERMUTATION, PERMUTED_PAIRS, PERMUTED = "permutation", 4, Sizes(500, 1_000)
"""Pairs of Tiny-10 and images for permutations; a small part of the images decides."""
MAPS = (LEAST_SQUARES, PROCRUSTES, RECOLOURED)
METHODS = (*MAPS, *frankenstein.BASELINES)


def main() -> None:
    arguments = experiment.read(__doc__)
    record, samples = experiment.started(arguments, SIZES), SIZES.samples(arguments.data_dir)
    for architecture in CUTS:
        networks = experiment.loaded(architecture, arguments)
        record["architectures"][architecture] = measured(architecture, networks, samples)
        if architecture == "tiny10":
            record["permutations"] = permuted(networks, PERMUTED.samples(arguments.data_dir))
    study.write_results("direct_matching", record, page, arguments.out)


def measured(architecture: str, networks: Networks, samples: Sequence[Any]) -> dict[str, Any]:
    """Stitch pairs of networks at every layer with every method."""
    names, layers, pairs = list(networks), CUTS[architecture], frankenstein.ring(networks)
    if len(names) > 3:
        pairs += list(zip(names, names[3:] + names[:3], strict=True))
    direct = {method: registries.matchers.build(method.lower()) for method in (PROCRUSTES, RECOLOURED)}
    answers = frankenstein.answers(networks, pairs, layers, *samples, direct=direct, trained={})
    return {
        "pairs": [f"{a} → {b}" for a, b in pairs], "layers": list(layers),
        "target_accuracy": (answers.targets.argmax(-1) == answers.labels).double().mean(1).tolist(),
        "relative_accuracy": {m: [answers.relative(layer, m) for layer in layers] for m in METHODS},
        "by_pair": {m: [answers.by_pair(layer, m) for layer in layers] for m in MAPS},
        "procrustes_less": [answers.relative(layer, PROCRUSTES, LEAST_SQUARES) for layer in layers],
        "recoloured_less": [answers.relative(layer, RECOLOURED, LEAST_SQUARES) for layer in layers],
        "cross_entropy": {m: [answers.imitation(layer, m) for layer in layers] for m in ("identity", LEAST_SQUARES)},
    }  # fmt: skip


def permuted(networks: Networks, samples: Sequence[Any]) -> dict[str, Any]:
    """Stitch pairs of Tiny-10 by permutations and by least squares."""
    direct, layers = {PERMUTATION: registries.matchers.build(PERMUTATION)}, CUTS["tiny10"]
    pairs = experiment.disjoint(networks, PERMUTED_PAIRS)
    answers = frankenstein.answers(networks, pairs, layers, *samples, direct=direct, trained={})
    return {
        "pairs": [f"{a} → {b}" for a, b in pairs], "layers": layers,
        "by_pair": {m: [answers.by_pair(layer, m) for layer in layers] for m in (PERMUTATION, LEAST_SQUARES)},
        "less": [answers.relative(layer, PERMUTATION, LEAST_SQUARES) for layer in layers],
    }  # fmt: skip


COLLAPSES, LAYERS_WELL, ALMOST_ALL, AS_GOOD, UNMAPPED, NOT_PERMUTATIONS = study.stated(__file__)


def page(record: dict[str, Any]) -> str:
    permutations = record["permutations"]
    columns = (
        _over_pairs(permutations, *which) for which in ((PERMUTATION,), (LEAST_SQUARES,), (PERMUTATION, LEAST_SQUARES))
    )
    rows = [(layer, *map(study.shown, scores)) for layer, *scores in zip(permutations["layers"], *columns, strict=True)]
    return experiment.written(
        __file__, record, claims(record), train=record["preset"]["train"], test=record["preset"]["test"],
        collapsed=COLLAPSED, margin=MARGIN, well=WELL, permuted=len(permutations["pairs"]),
        permutations=study.markdown(("layer", PERMUTATION, LEAST_SQUARES, "difference"), rows),
        architectures="\n\n".join(_section(*named_run, record) for named_run in record["architectures"].items()),
    )  # fmt: skip


def _section(architecture: str, run: dict[str, Any], record: dict[str, Any]) -> str:
    header = ["layer", LEAST_SQUARES, "sd over pairs", PROCRUSTES, "less least squares", RECOLOURED,
              "less least squares", "identity", "mean only"]  # fmt: skip
    direct = run["by_pair"][LEAST_SQUARES]
    reference = architecture == "tiny10" and record["networks"].startswith("the authors")
    rows = []
    for i, layer in enumerate(run["layers"]):
        scores = {method: scored(run["relative_accuracy"][method][i]) for method in METHODS}
        rows.append([
            layer, scores[LEAST_SQUARES], f"{np.std(direct[i], ddof=1):.3f}", f"{scores[PROCRUSTES].value:.3f}",
            scored(run["procrustes_less"][i]), f"{scores[RECOLOURED].value:.3f}",
            scored(run["recoloured_less"][i]), *(f"{scores[m].value:.3f}" for m in frankenstein.BASELINES),
        ])  # fmt: skip
        if reference:
            rows[-1] += [f"{direct[i][0]:.3f}", f"{REFERENCE[i]:.3f}"]
    lines = [
        f"Least squares keeps {_mean(run['relative_accuracy'][LEAST_SQUARES]):.3f} and recoloured maps "
        f"{_mean(run['relative_accuracy'][RECOLOURED]):.3f}, as the mean over layers.",
        f"Cross-entropy with the target's outputs, as the mean over layers: {_unmapped(run)} without a map, "
        f"{_mean(run['cross_entropy'][LEAST_SQUARES]):.2f} with least squares.",
    ]
    if len(run["pairs"]) > 2:
        gains = np.subtract(run["by_pair"][RECOLOURED], direct).mean(0)
        better = int((gains > 0).sum())
        lines.append(f"Recoloured maps are better in {better} of {len(gains)} pairs, as the mean over layers.")
    if reference:
        header += ["0 → 1 alone", "0 → 1, computed independently"]
        gap = max(abs(values[0] - r) for values, r in zip(direct, REFERENCE, strict=True))
        lines.append(f"The pair 0 → 1 differs from the independent computation by at most {gap:.4f}.")
    return "\n\n".join([
        f"## {TITLES[architecture]}",
        f"{len(run['pairs'])} ordered pairs ({', '.join(run['pairs'])}); accuracy of the targets "
        f"{study.span(run['target_accuracy'], '.4f')}.",
        study.markdown(header, rows), "\n".join(f"- {line}" for line in lines),
    ])  # fmt: skip


def _mean(scores: Sequence[Mapping[str, float]]) -> float:
    return float(np.mean([score["value"] for score in scores]))


def _unmapped(run: dict[str, Any]) -> str:
    losses = [loss["value"] for loss in run["cross_entropy"]["identity"]]
    return f"{np.mean(losses):.2f} ± {np.std(losses, ddof=1):.2f}"


def _over_pairs(run: dict[str, Any], method: str, less: str = "") -> list[dict[str, float]]:
    """Return relative accuracies by layer, or their differences, with Student's t intervals over pairs."""
    values = np.array(run["by_pair"][method]) - (np.array(run["by_pair"][less]) if less else 0)
    return [study.over(row) for row in values]


def claims(record: dict[str, Any]) -> list[dict[str, str]]:
    rows = []
    for architecture, run in record["architectures"].items():
        scores = dict(zip(run["layers"], run["relative_accuracy"][LEAST_SQUARES], strict=True))
        n, units = experiment.counted(run["pairs"])
        n += f", {len(scores)} layers"
        values = {layer: score["value"] for layer, score in scores.items()}
        span = f"{study.span(values.values())}, worst at {min(values, key=values.__getitem__)}"
        if architecture == "resnet20":
            wide = [study.adjusted(score, len(scores) - 1) for score in scores.values()]
            low = study.at_least(2, (study.below(score, COLLAPSED) for score in wide))
            rows.append(COLLAPSES.row(span, n, [low], units))
            some = [scores[layer] for layer in scores if layer in WELL_AT]
            held = [study.above(score, WELL) for score in some]
            rows.append(LAYERS_WELL.row(study.span(score["value"] for score in some), n, held, units))
        else:
            wide = [study.adjusted(score, 2) for score in scores.values()]
            held = [study.at_least(len(scores) - 1, (study.above(score, WELL) for score in wide))]
            rows.append(ALMOST_ALL.row(span, n, held, units))
        late = list(zip(scores, run["procrustes_less"], strict=True))[-3:]
        ours = ", ".join(f"{layer} {less['value']:+.3f}" for layer, less in late)
        held = [study.above(less, -MARGIN) for _, less in late]
        rows.append(AS_GOOD.of(TITLES[architecture]).row(ours, n, held, units))
        mean, deviation = PUBLISHED[architecture]
        near = abs(_mean(run["cross_entropy"]["identity"]) - mean) <= deviation
        rows.append(UNMAPPED.of(TITLES[architecture], mean, deviation).row(_unmapped(run), n, [near], units))
    run = record["permutations"]
    permuted, less = _over_pairs(run, PERMUTATION), _over_pairs(run, PERMUTATION, LEAST_SQUARES)
    fewer = [study.at_least(2, (study.below(k, WELL), study.below(d, 0))) for k, d in zip(permuted, less, strict=True)]
    ours = (
        f"{study.span(score['value'] for score in permuted)}; less than least squares by "
        f"{study.span(-score['value'] for score in less)}"
    )
    pairs = len(run["pairs"])
    return [*rows, NOT_PERMUTATIONS.row(ours, f"{pairs} pairs, {len(permuted)} layers", fewer, pairs)]
