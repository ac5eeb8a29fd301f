"""Which rows? How much layer identification depends on what counts as a row (Balogh & Jelasity 2025, table 1).

The same networks, images and metrics, with each kind of rows of ``hf_stitch.compare_all``, and with those of the
paper's code: CKA on flattened images; Procrustes and PWCCA on positions if two layers have equal grids, and on means
otherwise, which are two kinds of rows in one search. With these rows, layers are identified within each network, too.

    python -m how_not_to_stitch.which_rows --data-dir DATA --networks TINY10 RESNET20 --out OUT
"""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import study
from dr_frankenstein import images, networks
from how_not_to_stitch.experiment import NAMES, POORLY, WELL, between, claim, pairs_of, question

import hf_stitch
from hf_stitch.analysis import Score, identify_layers

METRICS = {"linear CKA": "linear_cka", "Procrustes": "procrustes", "PWCCA": "pwcca"}
ROWS = ("mean", "flat", "positions", "tokens", "resized")
PAPER = "paper's"
OF_PAPER = {"flat": ["linear CKA"], "mean": ["Procrustes", "PWCCA"], "positions": ["Procrustes", "PWCCA"]}
"""Kinds of rows of which the paper's consist -> metrics."""
PRESETS = {"small": 300, "paper": 2000, "test": 60}
"""Test images."""
LEAST, RESAMPLES = 0.3, 2000
"""Difference of hit rates from which on a figure is an artefact of its rows, and resamples of networks."""

Values = dict[tuple[str, str], np.ndarray]


def main() -> None:
    """Run the experiment from the command line."""
    parser = study.parser(__doc__, "data-dir", presets=PRESETS)
    parser.add_argument("--networks", type=Path, nargs="+", required=True, help="folders of trained networks")
    arguments = parser.parse_args()
    count = PRESETS[arguments.preset]
    samples = images.samples("cifar10", "test", count, arguments.data_dir)
    record: dict[str, Any] = {"preset": {"name": arguments.preset, "images": count}, "families": {}}
    for folder in arguments.networks:
        loaded, layers = networks.read_folder(folder)
        kind = type(next(iter(loaded.values())).model).__name__
        record["families"][kind] = measured(loaded, layers, samples)
    study.leave("which_rows", record, page, {}, arguments.out)


def measured(
    loaded: dict[str, hf_stitch.Adapter], layers: tuple[str, ...], samples: hf_stitch.Samples
) -> dict[str, Any]:
    """Identify the layers of all pairs of networks, and within each network, by metric and rows.

    Returns:
        ``found``: metric -> rows -> axis -> accuracy, chance, hits of each pair; ``itself``: metric -> axis -> accuracy
        within networks, on the paper's rows; ``contrasts``: metric -> the largest difference of hit rates between two
        kinds of rows, with its interval; numbers of networks and layers.
    """
    pairs = list(itertools.combinations(loaded, 2))
    # PWCCA takes more samples than features, which flattened images have not.
    asked = {rows: [title for title in METRICS if (title, rows) != ("PWCCA", "flat")] for rows in ROWS}
    values = compared(loaded, pairs, layers, samples, asked)
    found = {
        title: {rows: identified(title, of, layers) for rows, of in each.items()} for title, each in values.items()
    }
    own: dict[str, Values] = {title: {} for title in METRICS}
    for name, network in loaded.items():
        twice = compared({"a": network, "b": network}, [("a", "b")], layers, samples, OF_PAPER)
        for title, each in twice.items():
            own[title][name, name] = each[PAPER]["a", "b"]
    return {
        "networks": len(loaded), "layers": len(layers), "found": found,
        "itself": {
            title: {axis: one["score"] for axis, one in identified(title, of, layers).items()}
            for title, of in own.items()
        },
        "contrasts": {title: contrast(each, pairs) for title, each in found.items()},
    }  # fmt: skip


def compared(
    loaded: dict[str, hf_stitch.Adapter], pairs: list[tuple[str, str]], layers: tuple[str, ...],
    samples: hf_stitch.Samples, asked: Mapping[str, Sequence[str]],
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


def contrast(found: dict[str, Any], pairs: list[tuple[str, str]]) -> dict[str, Any]:
    """Return the two kinds of rows, all of whose layers are candidates, whose hit rates differ most, along either axis.

    Empty if there is one such kind.
    """
    least = min(each["a"]["chance"] for each in found.values())
    whole = [rows for rows, each in found.items() if np.isclose(each["a"]["chance"], least)]
    best: dict[str, Any] = {}
    for first, second in itertools.combinations(whole, 2):
        for axis in "ab":
            between_rows = paired(found[first][axis]["hits"], found[second][axis]["hits"], pairs)
            if not best or abs(between_rows["value"]) > abs(best["difference"]):
                best = {
                    "rows": [first, second], "axis": axis, "difference": between_rows["value"],
                    "low": between_rows["low"], "high": between_rows["high"],
                }  # fmt: skip
    return best


def paired(first: list[float], second: list[float], pairs: list[tuple[Any, Any]]) -> dict[str, float]:
    """Return the difference of two hit rates of the same pairs, with its interval.

    It is that of the Bayesian bootstrap over networks, with the same weights for both.
    """
    names = list(dict.fromkeys(itertools.chain(*pairs)))
    drawn = np.random.default_rng(0).dirichlet(np.ones(len(names)), RESAMPLES)
    weights = np.stack([drawn[:, names.index(a)] * drawn[:, names.index(b)] for a, b in pairs], 1)
    weights /= weights.sum(1, keepdims=True)
    differences = np.subtract(first, second)
    low, high = np.quantile(weights @ differences, [0.025, 0.975])
    return {"value": float(differences.mean()), "low": float(low), "high": float(high)}


RATES = "hit rate {} along both axes, on the paper's rows, by the interval; Tiny-10 decides"
CLAIMS = {
    "linear CKA": claim(
        "table 1, between networks", "CKA performs very well at finding the corresponding layer",
        between("linear CKA"), RATES.format(f"of at least {WELL}"),
    ),
    **{
        title: claim(
            "table 1, between networks", f"{title} struggles to find the corresponding layer", between(title),
            RATES.format(f"below {POORLY}"),
        )
        for title in ("PWCCA", "Procrustes")
    },
}  # fmt: skip
WITHIN = claim(
    "table 1, within a network",
    "PWCCA, Procrustes and CKA find every layer in its own network",
    "100% each",
    "every layer of every network, along both axes, on the paper's rows",
)
ARTEFACT = question(
    "after paper 4, table 1",
    "The low hit rates of Procrustes and PWCCA are artefacts of their rows",
    "–",
    f"for each of the two, the largest difference between kinds of rows exceeds {LEAST}, by the paired interval",
)
FEWER = question(
    "after paper 4, table 1",
    "On one kind of rows, means, Procrustes and PWCCA identify fewer layers than CKA",
    "–",
    "for each of the two, the paired difference from CKA is below 0 along both axes, by the interval",
)
PAGE = """# Which rows? (Balogh & Jelasity, AAAI 2025, table 1)

**What to do**: name the rows beside every figure, use one kind of rows within a search, and never compare values of
different rows (`hf_stitch.compare(…, rows=…)` records them). The paper's table is reproduced with its rows, and it is
these rows, not the metrics, that make Procrustes and PWCCA fail.

{claims}

A metric of similarity compares two matrices of rows, and what a row is, is a choice: an image (its mean over
positions, or all positions concatenated), or a position of an image. The paper's code has CKA on flattened images;
Procrustes and PWCCA on positions where two layers have equal grids, and on means elsewhere: two kinds of rows in one
search. {images} test images of CIFAR-10, all pairs of networks at once; 95% intervals, clustered by network.

{contrasts}

The rule for artefacts was written before the run; those for the paper's claims after it, from the paper's text. The
interval of a contrast is that of the Bayesian bootstrap over networks, with the same weights for both kinds of rows.
Only kinds of rows under which every layer is a candidate take part. One pair of networks decides nothing.

{families}
Rows: `mean` over positions; `flat`: all positions of an image, concatenated; `positions`: one row for each position,
for pairs of layers with equal grids only (elsewhere a layer has fewer candidates, so that chance is higher); `tokens`:
the same with prefix tokens; `resized`: positions after the grid of a was resized to that of b; `paper's`: see above.
PWCCA of flattened images is undefined, since they have more features than there are images.

{footer}"""


def page(record: dict[str, Any]) -> str:
    """Return the page of the results from the record, as it is read from JSON."""
    families = record["families"]
    options = f"--preset {record['preset']['name']} --data-dir DATA --networks {' '.join(map(str.upper, families))}"
    return PAGE.format(
        claims=study.verdicts(claims(record)), images=record["preset"]["images"],
        contrasts="\n".join(_contrasts(kind, one) for kind, one in families.items()),
        families="\n".join(_family(kind, one) for kind, one in families.items()),
        footer=study.footer("which_rows", "how_not_to_stitch.which_rows", f"{options} --out OUT"),
    )  # fmt: skip


def artefact(found: dict[str, Any]) -> bool | None:
    """Return whether a contrast exceeds the bound by its interval; ``None`` if the interval contains it."""
    low, high = found["low"], found["high"]
    if low > LEAST or high < -LEAST:
        return True
    return False if low > -LEAST and high < LEAST else None


def _contrasts(kind: str, one: dict[str, Any]) -> str:
    parts = []
    for title in ("Procrustes", "PWCCA"):
        if not (found := one["contrasts"][title]):
            parts.append(f"{title} has one kind of rows")
            continue
        rates = " against ".join(
            f"{one['found'][title][rows][found['axis']]['score']['value']:.3f} ({rows})" for rows in found["rows"]
        )
        parts.append(f"{title} {rates}, difference {study.shown({**found, 'value': found['difference']})}")
    return f"- {NAMES[kind]}, {pairs_of(one['networks'])}, largest contrast of hit rates: {'; '.join(parts)}."


def claims(record: dict[str, Any]) -> list[dict[str, str]]:
    """Return the rows of the table of all experiments. The architecture with the most networks decides."""
    families = record["families"]
    kind = max(families, key=lambda name: families[name]["networks"])
    one, count = families[kind], families[kind]["networks"]
    n, units = f"{pairs_of(count)}, {one['layers']} layers", count * (count - 1) // 2
    rows = []
    for title, asked in CLAIMS.items():
        rates = {name: [of["found"][title][PAPER][axis]["score"] for axis in "ab"] for name, of in families.items()}
        ours = "; ".join(f"{NAMES[name]} {' and '.join(map(study.shown, both))}" for name, both in rates.items())
        parts = [(study.above if title == "linear CKA" else study.below)(rate, _bound(title)) for rate in rates[kind]]
        rows.append(asked.row(ours, n, parts, units))
    hits = [score["value"] for of in one["itself"].values() for score in of.values()]
    within = f"{NAMES[kind]}: at least {min(hits):.3f}"
    rows.append(WITHIN.row(within, f"{count} networks, {one['layers']} layers", [hit == 1 for hit in hits], count))
    contrasts = {title: one["contrasts"][title] for title in ("Procrustes", "PWCCA")}
    ours = "; ".join(
        f"{title} {study.shown({**found, 'value': found['difference']})}" for title, found in contrasts.items() if found
    )
    parts = [artefact(found) if found else None for found in contrasts.values()]
    rows.append(ARTEFACT.row(f"{NAMES[kind]}, difference of hit rates: {ours or 'undefined'}", n, parts, units))
    apart = {title: _from_cka(one["found"], title, count) for title in contrasts}
    ours = "; ".join(f"{title} {' and '.join(map(study.shown, both))}" for title, both in apart.items())
    fewer = [[study.below(found, 0) for found in both] for both in apart.values()]
    parts = [None if None in both and False not in both else all(both) for both in fewer]
    rows.append(FEWER.row(f"{NAMES[kind]}, differences: {ours}", n, parts, units))
    return rows


def _from_cka(found: dict[str, Any], title: str, count: int) -> list[dict[str, float]]:
    """Return the differences of hit rates between a metric and CKA on means, along both axes."""
    pairs = list(itertools.combinations(range(count), 2))
    both = ([found[name]["mean"][axis]["hits"] for axis in "ab"] for name in (title, "linear CKA"))
    return [paired(own, cka, pairs) for own, cka in zip(*both, strict=True)]


def _bound(title: str) -> float:
    return WELL if title == "linear CKA" else POORLY


def _family(kind: str, one: dict[str, Any]) -> str:
    vit = kind == "VisionTransformer"
    lines = [
        [
            title, rows, between(title, vit) if rows == PAPER else "",
            *(cell for axis in "ab" for cell in (
                str(Score(**axes[axis]["score"])), f"{axes[axis]['chance']:.3f}", axes[axis]["favourite"][0]
            )),
        ]
        for title, found in one["found"].items() for rows, axes in found.items()
    ]  # fmt: skip
    head = ["metric", "rows", f"paper, {'ViT-Ti' if vit else 'ResNet-18'}"]
    head += [f"{axis}: {name}" for axis in "ab" for name in ("hit rate", "chance", "found most often")]
    return f"## {NAMES[kind]}\n\n{one['networks']} networks, {one['layers']} layers.\n\n{study.markdown(head, lines)}\n"


if __name__ == "__main__":
    main()
