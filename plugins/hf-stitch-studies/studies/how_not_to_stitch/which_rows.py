"""Which rows? Dependence of layer identification on the kind of rows (Balogh & Jelasity 2025, table 1).

The same networks, images and metrics are tested with each kind of rows of ``hf_stitch.compare_all``, and with the rows
of the paper's code: CKA on flattened images; Procrustes and PWCCA on positions if two layers have equal grids, and on
means otherwise, which mixes two kinds of rows in one search. These rows also identify layers within each network.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import study
from dr_frankenstein import images
from how_not_to_stitch.experiment import NAMES, POORLY, WELL, between, filled, kinds, pairs_of, parser

import hf_stitch
from hf_stitch import Adapter, Samples
from hf_stitch.analysis import Score, identify_layers

METRICS = {"linear CKA": "linear_cka", "Procrustes": "procrustes", "PWCCA": "pwcca"}
ROWS = ("mean", "flat", "positions", "tokens", "resized")
PAPER = "paper's"
OF_PAPER = {"flat": ["linear CKA"], "mean": ["Procrustes", "PWCCA"], "positions": ["Procrustes", "PWCCA"]}
"""Components of the paper's rows -> metrics."""
IMAGES = 300
"""Test images."""
LEAST = 0.3
"""Minimum difference of hit rates for an artefact of the rows."""

Values = dict[tuple[str, str], np.ndarray]
Loaded = dict[str, Adapter]


def main() -> None:
    arguments = parser(__doc__).parse_args()
    samples = images.samples("cifar10", "test", IMAGES, arguments.data_dir)
    record: dict[str, Any] = {"preset": {"images": IMAGES}, "families": {}}
    for kind, loaded, layers in kinds(arguments):
        record["families"][kind] = measured(loaded, layers, samples)
    study.write_results("which_rows", record, page, arguments.out)


def measured(loaded: Loaded, layers: tuple[str, ...], samples: Samples) -> dict[str, Any]:
    """Identify the layers of all pairs of networks, and within each network, by metric and rows."""
    pairs = list(itertools.combinations(loaded, 2))
    # PWCCA requires more samples than features, unlike flattened images.
    asked = {rows: [title for title in METRICS if (title, rows) != ("PWCCA", "flat")] for rows in ROWS}
    values = compared(loaded, pairs, layers, samples, asked)
    within: dict[str, Values] = {title: {} for title in METRICS}
    for name, network in loaded.items():
        twice = compared({"a": network, "b": network}, [("a", "b")], layers, samples, OF_PAPER)
        for title, by_rows in twice.items():
            within[title][name, name] = by_rows[PAPER]["a", "b"]
    return {
        "networks": len(loaded), "layers": len(layers),
        "found": {m: {rows: identified(m, of, layers) for rows, of in kinds.items()} for m, kinds in values.items()},
        "itself": {
            title: {axis: one["score"] for axis, one in identified(title, of, layers).items()}
            for title, of in within.items()
        },
    }  # fmt: skip


def compared(
    loaded: Loaded, pairs: list[tuple[str, str]], layers: tuple[str, ...], samples: Samples,
    asked: Mapping[str, Sequence[str]],
) -> dict[str, dict[str, Values]]:  # fmt: skip
    """Return metric -> rows -> pair -> values of all pairs of layers.

    ``asked`` maps rows to metrics and includes :data:`OF_PAPER`; values on the paper's rows are added.
    """
    values: dict[str, dict[str, Values]] = {title: {} for title in METRICS}
    for rows, titles in asked.items():
        metrics = [METRICS[title] for title in titles]
        atlas = hf_stitch.compare_all(loaded, samples, layers=layers, metrics=metrics, rows=rows, batch_size=100)
        for title, metric in zip(titles, metrics, strict=True):
            values[title][rows] = {pair: atlas.between(*pair)[metric] for pair in pairs}
    values["linear CKA"][PAPER] = values["linear CKA"]["flat"]
    for title in ("Procrustes", "PWCCA"):
        mean, equal = values[title]["mean"], values[title]["positions"]
        values[title][PAPER] = {pair: np.where(np.isnan(equal[pair]), mean[pair], equal[pair]) for pair in pairs}
    return values


def identified(title: str, values: Values, layers: tuple[str, ...]) -> dict[str, Any]:
    """Identify layers along both axes; pairs of layers without such rows are not candidates."""
    identification = identify_layers(values, higher_is_better=title != "Procrustes", layers=layers)
    return {
        axis: {
            "score": identification.to_dict()["scores"][axis],
            "chance": float(np.mean(1 / identification.candidates[axis].clip(1))),
            "favourite": identification.favourite(axis), "hits": identification.hits[axis].mean(1),
        }
        for axis in ("a", "b")
    }  # fmt: skip


def contrast(by_rows: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Return the two kinds of rows with the largest difference of hit rates, along either axis.

    Only kinds of rows with all layers as candidates count. The interval allows for the choice among all contrasts.
    """
    least = min(axes["a"]["chance"] for axes in by_rows.values())
    whole = [rows for rows, axes in by_rows.items() if np.isclose(axes["a"]["chance"], least)]
    pairs, choices = _pairs(count), list(itertools.product(itertools.combinations(whole, 2), "ab"))
    contrasts = [
        {"rows": rows, "axis": axis, **paired(*(by_rows[r][axis]["hits"] for r in rows), pairs, len(choices))}
        for rows, axis in choices
    ]
    return max(contrasts, key=lambda candidate: abs(candidate["value"]))


def paired(
    first: Sequence[float], second: Sequence[float], pairs: Sequence[tuple[Any, Any]], choices: int = 1
) -> dict[str, float]:
    """Return the difference of two hit rates of the same pairs of networks, with its interval.

    The interval comes from the Bayesian bootstrap over networks, with the same weights for both rates, at the level of
    :func:`study.adjusted`.
    """
    differences = np.subtract(first, second)
    ends = 0.025 / choices, 1 - 0.025 / choices
    low, high = np.quantile(study.network_weights(pairs, 2000 * choices) @ differences, ends)
    return {"value": float(differences.mean()), "low": float(low), "high": float(high)}


def _pairs(count: int) -> list[tuple[int, int]]:
    return list(itertools.combinations(range(count), 2))


*_CLAIMS, WITHIN, ARTEFACT, FEWER = study.stated(__file__)
CLAIMS = dict(zip(("linear CKA", "PWCCA", "Procrustes"), _CLAIMS, strict=True))


def page(record: dict[str, Any]) -> str:
    families = record["families"]
    return filled(
        __file__, claims(record), families, images=record["preset"]["images"],
        contrasts="\n".join(_contrasts(kind, one) for kind, one in families.items()),
        families="\n".join(_family(kind, one) for kind, one in families.items()),
    )  # fmt: skip


def artefact(gap: Mapping[str, float]) -> bool | None:
    """Return whether a contrast exceeds the bound by its interval; ``None`` if the interval contains it."""
    low, high = gap["low"], gap["high"]
    if low > LEAST or high < -LEAST:
        return True
    return False if low > -LEAST and high < LEAST else None


def _contrasts(kind: str, one: dict[str, Any]) -> str:
    parts = []
    for title in ("Procrustes", "PWCCA"):
        largest = contrast(one["found"][title], one["networks"])
        rates = " against ".join(
            f"{one['found'][title][rows][largest['axis']]['score']['value']:.3f} ({rows})" for rows in largest["rows"]
        )
        parts.append(f"{title} {rates}, difference {study.shown(largest)}")
    return f"- {NAMES[kind]}, {pairs_of(one['networks'])}, largest contrast of hit rates: {'; '.join(parts)}."


def claims(record: dict[str, Any]) -> list[dict[str, str]]:
    families = record["families"]
    kind = max(families, key=lambda name: families[name]["networks"])
    one, count = families[kind], families[kind]["networks"]
    n, units, pairs = f"{pairs_of(count)}, {one['layers']} layers", count * (count - 1) // 2, _pairs(count)
    rows = []
    for title, asked in CLAIMS.items():
        rates = {name: [of["found"][title][PAPER][axis]["score"] for axis in "ab"] for name, of in families.items()}
        ours = "; ".join(f"{NAMES[name]} {study.both(scores)}" for name, scores in rates.items())
        holds, bound = (study.above, WELL) if title == "linear CKA" else (study.below, POORLY)
        rows.append(asked.row(ours, n, [holds(rate, bound) for rate in rates[kind]], units))
    hits = [score["value"] for of in one["itself"].values() for score in of.values()]
    within = f"{NAMES[kind]}: at least {min(hits):.3f}"
    rows.append(WITHIN.row(within, f"{count} networks, {one['layers']} layers", [hit == 1 for hit in hits], count))
    contrasts = {title: contrast(one["found"][title], count) for title in ("Procrustes", "PWCCA")}
    ours = "; ".join(f"{title} {study.shown(largest)}" for title, largest in contrasts.items())
    parts = list(map(artefact, contrasts.values()))
    rows.append(ARTEFACT.row(f"{NAMES[kind]}, difference of hit rates: {ours}", n, parts, units))
    parts, texts = [], []
    for title in contrasts:
        rates = ([one["found"][name]["mean"][axis]["hits"] for name in (title, "linear CKA")] for axis in "ab")
        gaps = [paired(*scores, pairs, choices=2) for scores in rates]
        parts.append(study.at_least(2, (study.below(gap, 0) for gap in gaps)))
        texts.append(f"{title} {study.both(gaps)}")
    return [*rows, FEWER.row(f"{NAMES[kind]}, differences: {'; '.join(texts)}", n, parts, units)]


def _family(kind: str, one: dict[str, Any]) -> str:
    vit, lines = kind == "VisionTransformer", []
    for title, (rows, axes) in ((title, item) for title, scores in one["found"].items() for item in scores.items()):
        line = [title, rows, between(title, vit) if rows == PAPER else ""]
        for of in axes.values():
            line += [str(Score(**of["score"])), f"{of['chance']:.3f}", of["favourite"][0]]
        lines.append(line)
    head = ["metric", "rows", f"paper, {'ViT-Ti' if vit else 'ResNet-18'}"]
    head += [f"{axis}: {name}" for axis in "ab" for name in ("hit rate", "chance", "found most often")]
    return f"## {NAMES[kind]}\n\n{one['networks']} networks, {one['layers']} layers.\n\n{study.markdown(head, lines)}\n"
