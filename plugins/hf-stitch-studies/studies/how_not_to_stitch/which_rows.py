"""Which rows? How much layer identification depends on what counts as a row (Balogh & Jelasity 2025, table 1).

The same networks, images and metrics, with each kind of rows of ``hf_stitch.compare_all``, and with those of the
paper's code: CKA on flattened images; Procrustes and PWCCA on positions if two layers have equal grids, and on means
otherwise, which are two kinds of rows in one search.

    python -m how_not_to_stitch.which_rows --data-dir DATA --networks TINY10 RESNET20 --out OUT
"""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import study
from dr_frankenstein import images, networks

import hf_stitch
from hf_stitch.analysis import Score, identify_layers

METRICS = {"linear CKA": "linear_cka", "Procrustes": "procrustes", "PWCCA": "pwcca"}
ROWS = ("mean", "flat", "positions", "tokens", "resized")
PAPER = "paper's"
PUBLISHED = {"linear CKA": (0.961, 0.348), "Procrustes": (0.192, 0.183), "PWCCA": (0.125, 0.083)}
"""Accuracies of the paper's table 1, between networks: ResNet-18, ViT-Ti."""
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
    """Identify the layers of all pairs of networks, by metric and rows.

    Returns:
        ``found``: metric -> rows -> axis -> accuracy, chance, hits of each pair; ``contrasts``: metric -> the largest
        difference of hit rates between two kinds of rows, with its interval; numbers of networks and layers.
    """
    pairs = list(itertools.combinations(loaded, 2))
    values: dict[str, dict[str, Values]] = {title: {} for title in METRICS}
    for rows in ROWS:
        # PWCCA takes more samples than features, which flattened images have not.
        asked = {title: metric for title, metric in METRICS.items() if (title, rows) != ("PWCCA", "flat")}
        atlas = hf_stitch.compare_all(
            loaded, samples, layers=layers, metrics=[*asked.values()], rows=rows, batch_size=100
        )
        for title, metric in asked.items():
            values[title][rows] = {pair: atlas.between(*pair)[metric] for pair in pairs}
    values["linear CKA"][PAPER] = values["linear CKA"]["flat"]
    for title in ("Procrustes", "PWCCA"):
        mean, equal = values[title]["mean"], values[title]["positions"]
        values[title][PAPER] = {pair: np.where(np.isnan(equal[pair]), mean[pair], equal[pair]) for pair in pairs}
    found = {
        title: {rows: identified(title, of, layers) for rows, of in each.items()} for title, each in values.items()
    }
    return {
        "networks": len(loaded), "layers": len(layers), "found": found,
        "contrasts": {title: contrast(each, pairs) for title, each in found.items()},
    }  # fmt: skip


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

    Empty if there is one such kind. The interval is that of the Bayesian bootstrap over networks, paired: both kinds
    have the same weights.
    """
    names = list(dict.fromkeys(itertools.chain(*pairs)))
    drawn = np.random.default_rng(0).dirichlet(np.ones(len(names)), RESAMPLES)
    weights = np.stack([drawn[:, names.index(a)] * drawn[:, names.index(b)] for a, b in pairs], 1)
    weights /= weights.sum(1, keepdims=True)
    least = min(each["a"]["chance"] for each in found.values())
    whole = [rows for rows, each in found.items() if np.isclose(each["a"]["chance"], least)]
    best: dict[str, Any] = {}
    for first, second in itertools.combinations(whole, 2):
        for axis in ("a", "b"):
            differences = np.subtract(found[first][axis]["hits"], found[second][axis]["hits"])
            value = float(differences.mean())
            if not best or abs(value) > abs(best["difference"]):
                low, high = np.quantile(weights @ differences, [0.025, 0.975])
                best = {"rows": [first, second], "axis": axis, "difference": value, "low": low, "high": high}
    return best


NAMES = {"Tiny10": "Tiny-10", "ResNet20": "ResNet-20", "VisionTransformer": "small ViT"}
PAGE = """# Which rows?

A metric of similarity compares two matrices of rows, and what a row is, is a choice: an image (its mean over
positions, or all positions concatenated), or a position of an image. Table 1 of Balogh & Jelasity (AAAI 2025) reports
that Procrustes and PWCCA rarely find the corresponding layer of a network of another seed, and that CKA nearly always
does. Is this a property of the metrics, or of their rows?

{verdict}

**Rule**, written before the run: the hit rate of Procrustes or of PWCCA is an artefact of its rows if it differs by
more than {least} between two kinds of rows, with a paired interval (Bayesian bootstrap over networks) beyond {least};
it is none if the interval stays within; else it is undecided. One pair of networks has no interval. Only kinds of rows
under which every layer is a candidate take part.

{families}
Rows: `mean` over positions; `flat`: all positions of an image, concatenated; `positions`: one row for each position,
for pairs of layers with equal grids only (elsewhere a layer has fewer candidates, so that chance is higher); `tokens`:
the same with prefix tokens; `resized`: positions after the grid of a was resized to that of b; `paper's`: CKA flat,
Procrustes and PWCCA on positions where grids are equal and on means elsewhere. PWCCA of flattened images is undefined,
since they have more features than there are images. {images} test images of CIFAR-10, all pairs of networks at once.

**What to do**: name the rows beside every figure, use one kind within a search, and never compare values of different
rows (`hf_stitch.compare(…, rows=…)` records them).

{footer}"""


def page(record: dict[str, Any]) -> str:
    """Return the page of the results from the record, as it is read from JSON."""
    families = record["families"]
    options = f"--preset {record['preset']['name']} --data-dir DATA --networks {' '.join(map(str.upper, families))}"
    return PAGE.format(
        verdict="\n".join(verdict(kind, one) for kind, one in families.items()), least=LEAST,
        families="\n".join(_family(kind, one) for kind, one in families.items()), images=record["preset"]["images"],
        footer=study.footer("which_rows", "how_not_to_stitch.which_rows", f"{options} --out OUT"),
    )  # fmt: skip


def decided(found: dict[str, Any], count: int) -> str:
    """Return what the rule says of a contrast of ``count`` networks."""
    low, high = found["low"], found["high"]
    if count > 2 and (low > LEAST or high < -LEAST):
        return "an artefact of the rows"
    return "no artefact of the rows" if count > 2 and low > -LEAST and high < LEAST else "undecided"


def verdict(kind: str, one: dict[str, Any]) -> str:
    """Return the verdict on both metrics for an architecture."""
    parts = []
    for title in ("Procrustes", "PWCCA"):
        if not (found := one["contrasts"][title]):
            parts.append(f"{title} undecided: one kind of rows")
            continue
        rates = " against ".join(
            f"{one['found'][title][rows][found['axis']]['score']['value']:.3f} ({rows})" for rows in found["rows"]
        )
        parts.append(f"{title}, {decided(found, one['networks'])}: {rates}")
    return f"- **{NAMES[kind]}**: hit rates of {'; '.join(parts)}."


def claims(record: dict[str, Any]) -> list[dict[str, str]]:
    """Return the rows of the table of all experiments: the paper's table 1 with its rows, and with one kind of rows.

    The claim is found if CKA exceeds .5 along both axes, and the others stay below it by more than .3.
    """
    rows = []
    for kind, one in record["families"].items():
        n = f"{one['networks']} networks, {one['layers']} layers"
        for used, place in ((PAPER, "table 1"), ("mean", "beyond")):
            rates = {
                title: [found[used][axis]["score"]["value"] for axis in "ab"] for title, found in one["found"].items()
            }
            cka, *others = rates.values()
            ours = "; ".join(f"{title} {a:.3f}/{b:.3f}" for title, (a, b) in rates.items())
            held = [min(cka) > 0.5 and max(other) < min(cka) - LEAST for other in others]
            with_rows = "with the paper's rows" if used == PAPER else "with one kind of rows, means"
            rows.append(study.claim(
                "4", place, f"{NAMES[kind]}: CKA identifies layers, Procrustes and PWCCA rarely do, {with_rows}",
                "CKA .961, Procrustes .192, PWCCA .125" if used == PAPER else "–", ours, n,
                f"stand-in {study.decided(held)}" if one["networks"] > 2 else "undecided",
            ))  # fmt: skip
    return rows


def _family(kind: str, one: dict[str, Any]) -> str:
    paper = int(kind == "VisionTransformer")
    lines = [
        [
            title, rows, f"{PUBLISHED[title][paper]:.3f}" if rows == PAPER else "",
            *(cell for axis in "ab" for cell in (
                str(Score(**axes[axis]["score"])), f"{axes[axis]['chance']:.3f}", axes[axis]["favourite"][0]
            )),
        ]
        for title, found in one["found"].items() for rows, axes in found.items()
    ]  # fmt: skip
    head = ["metric", "rows", f"paper, {('ResNet-18', 'ViT-Ti')[paper]}"]
    head += [f"{axis}: {name}" for axis in "ab" for name in ("hit rate", "chance", "found most often")]
    return f"## {NAMES[kind]}\n\n{one['networks']} networks, {one['layers']} layers.\n\n{study.markdown(head, lines)}\n"


if __name__ == "__main__":
    main()
