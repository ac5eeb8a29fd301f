"""Which rows? How much layer identification depends on what counts as a row (Balogh & Jelasity 2025, table 1).

The same networks, images and metrics, with each kind of rows of ``hf_stitch.compare_all``, and with those of the
paper's code: CKA on flattened images; Procrustes and PWCCA on positions if two layers have equal grids, and on means
otherwise, which are two kinds of rows in one search. With these rows, layers are identified within each network, too.
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
"""Kinds of rows of which the paper's consist -> metrics."""
IMAGES = 300
"""Test images."""
LEAST = 0.3
"""Difference of hit rates from which on a figure is an artefact of its rows."""

Values = dict[tuple[str, str], np.ndarray]
Loaded = dict[str, Adapter]


def main() -> None:
    arguments = parser(__doc__).parse_args()
    samples = images.samples("cifar10", "test", IMAGES, arguments.data_dir)
    record: dict[str, Any] = {"preset": {"images": IMAGES}, "families": {}}
    for kind, loaded, layers in kinds(arguments):
        record["families"][kind] = measured(loaded, layers, samples)
    study.leave("which_rows", record, page, arguments.out)


def measured(loaded: Loaded, layers: tuple[str, ...], samples: Samples) -> dict[str, Any]:
    """Identify the layers of all pairs of networks, and within each network, by metric and rows."""
    pairs = list(itertools.combinations(loaded, 2))
    # PWCCA takes more samples than features, which flattened images have not.
    asked = {rows: [title for title in METRICS if (title, rows) != ("PWCCA", "flat")] for rows in ROWS}
    values = compared(loaded, pairs, layers, samples, asked)
    own: dict[str, Values] = {title: {} for title in METRICS}
    for name, network in loaded.items():
        twice = compared({"a": network, "b": network}, [("a", "b")], layers, samples, OF_PAPER)
        for title, each in twice.items():
            own[title][name, name] = each[PAPER]["a", "b"]
    return {
        "networks": len(loaded), "layers": len(layers),
        "found": {t: {rows: identified(t, of, layers) for rows, of in each.items()} for t, each in values.items()},
        "itself": {
            title: {axis: one["score"] for axis, one in identified(title, of, layers).items()}
            for title, of in own.items()
        },
    }  # fmt: skip


def compared(
    loaded: Loaded, pairs: list[tuple[str, str]], layers: tuple[str, ...], samples: Samples,
    asked: Mapping[str, Sequence[str]],
) -> dict[str, dict[str, Values]]:  # fmt: skip
    """Return metric -> rows -> pair -> values of all pairs of layers.

    ``asked`` are rows -> metrics, among them those of :data:`OF_PAPER`, whose values on the paper's rows are added.
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
    """Identify layers along both axes; a pair of layers without such rows is no candidate."""
    found = identify_layers(values, higher_is_better=title != "Procrustes", layers=layers)
    return {
        axis: {
            "score": found.to_dict()["scores"][axis], "chance": float(np.mean(1 / found.candidates[axis].clip(1))),
            "favourite": found.favourite(axis), "hits": found.hits[axis].mean(1),
        }
        for axis in ("a", "b")
    }  # fmt: skip


def contrast(found: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Return the two kinds of rows, all of whose layers are candidates, whose hit rates differ most, along either axis.

    Its interval allows for the choice among all of them.
    """
    least = min(each["a"]["chance"] for each in found.values())
    whole = [rows for rows, each in found.items() if np.isclose(each["a"]["chance"], least)]
    pairs, choices = _pairs(count), list(itertools.product(itertools.combinations(whole, 2), "ab"))
    contrasts = [
        {"rows": rows, "axis": axis, **paired(*(found[each][axis]["hits"] for each in rows), pairs, len(choices))}
        for rows, axis in choices
    ]
    return max(contrasts, key=lambda one: abs(one["value"]))


def paired(
    first: Sequence[float], second: Sequence[float], pairs: Sequence[tuple[Any, Any]], choices: int = 1
) -> dict[str, float]:
    """Return the difference of two hit rates of the same pairs of networks, with its interval.

    It is that of the Bayesian bootstrap over networks, with the same weights for both, at the level of
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


def artefact(found: Mapping[str, float]) -> bool | None:
    """Return whether a contrast exceeds the bound by its interval; ``None`` if the interval contains it."""
    low, high = found["low"], found["high"]
    if low > LEAST or high < -LEAST:
        return True
    return False if low > -LEAST and high < LEAST else None


def _contrasts(kind: str, one: dict[str, Any]) -> str:
    parts = []
    for title in ("Procrustes", "PWCCA"):
        found = contrast(one["found"][title], one["networks"])
        rates = " against ".join(
            f"{one['found'][title][rows][found['axis']]['score']['value']:.3f} ({rows})" for rows in found["rows"]
        )
        parts.append(f"{title} {rates}, difference {study.shown(found)}")
    return f"- {NAMES[kind]}, {pairs_of(one['networks'])}, largest contrast of hit rates: {'; '.join(parts)}."


def claims(record: dict[str, Any]) -> list[dict[str, str]]:
    families = record["families"]
    kind = max(families, key=lambda name: families[name]["networks"])
    one, count = families[kind], families[kind]["networks"]
    n, units, pairs = f"{pairs_of(count)}, {one['layers']} layers", count * (count - 1) // 2, _pairs(count)
    rows = []
    for title, asked in CLAIMS.items():
        rates = {name: [of["found"][title][PAPER][axis]["score"] for axis in "ab"] for name, of in families.items()}
        ours = "; ".join(f"{NAMES[name]} {study.both(each)}" for name, each in rates.items())
        holds, bound = (study.above, WELL) if title == "linear CKA" else (study.below, POORLY)
        rows.append(asked.row(ours, n, [holds(rate, bound) for rate in rates[kind]], units))
    hits = [score["value"] for of in one["itself"].values() for score in of.values()]
    within = f"{NAMES[kind]}: at least {min(hits):.3f}"
    rows.append(WITHIN.row(within, f"{count} networks, {one['layers']} layers", [hit == 1 for hit in hits], count))
    contrasts = {title: contrast(one["found"][title], count) for title in ("Procrustes", "PWCCA")}
    ours = "; ".join(f"{title} {study.shown(found)}" for title, found in contrasts.items())
    parts = list(map(artefact, contrasts.values()))
    rows.append(ARTEFACT.row(f"{NAMES[kind]}, difference of hit rates: {ours}", n, parts, units))
    parts, texts = [], []
    for title in contrasts:
        rates = ([one["found"][name]["mean"][axis]["hits"] for name in (title, "linear CKA")] for axis in "ab")
        apart = [paired(*each, pairs, choices=2) for each in rates]
        parts.append(study.at_least(2, (study.below(found, 0) for found in apart)))
        texts.append(f"{title} {study.both(apart)}")
    return [*rows, FEWER.row(f"{NAMES[kind]}, differences: {'; '.join(texts)}", n, parts, units)]


def _family(kind: str, one: dict[str, Any]) -> str:
    vit, lines = kind == "VisionTransformer", []
    for title, (rows, axes) in ((title, each) for title, found in one["found"].items() for each in found.items()):
        line = [title, rows, between(title, vit) if rows == PAPER else ""]
        for of in axes.values():
            line += [str(Score(**of["score"])), f"{of['chance']:.3f}", of["favourite"][0]]
        lines.append(line)
    head = ["metric", "rows", f"paper, {'ViT-Ti' if vit else 'ResNet-18'}"]
    head += [f"{axis}: {name}" for axis in "ab" for name in ("hit rate", "chance", "found most often")]
    return f"## {NAMES[kind]}\n\n{one['networks']} networks, {one['layers']} layers.\n\n{study.markdown(head, lines)}\n"
