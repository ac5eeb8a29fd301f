"""Which similarity predicts functional differences (Balogh & Jelasity 2025, tables 2 and 3, after Ding et al. 2021)?

Distances of representations are correlated with differences of linear probing accuracy. Sensitivity: low-rank
approximations of the last layers of all networks. Specificity: all layers of all networks. Beside the measures stand
distances that ignore the activations, in depth and in rank. Each folder has at least three networks of one
architecture: Tiny-10, ResNet-20 or the small ViT.

    python -m how_not_to_stitch.bench --data-dir DATA --networks TINY10 VITS --out OUT
"""

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import study
from dr_frankenstein import images, networks
from hf_stitch_studies import Bench, bench
from hf_stitch_studies.benching.correlation import RELIABILITY
from how_not_to_stitch.experiment import claim, question
from rich.console import Console

import hf_stitch

METRICS = (
    "linear_cka:debiased=True", "pwcca:directions=all", "procrustes", "svcca", "cca:ridge=0.01", "rsa", "mutual_knn",
    "linear_regression", "soft_matching", "shape_distance:alpha=0.5",
)  # fmt: skip
MATCHERS = ("lstsq", "recoloured", "procrustes")
LAST = 0.5
"""The sensitivity test takes the last half of the layers, as the paper does."""
PUBLISHED = {
    "sensitivity": {
        "convolutional": {"linear_cka": (0.569, 0.722), "pwcca": (0.628, 0.777), "procrustes": (0.548, 0.718),
                    "lstsq, structural": (0.658, 0.807), "lstsq, functional": (0.790, 0.917)},
        "vit": {"linear_cka": (0.485, 0.632), "pwcca": (0.826, 0.945), "procrustes": (0.732, 0.862),
                "lstsq, structural": (0.786, 0.906), "lstsq, functional": (0.745, 0.889)},
    },
    "specificity": {
        "convolutional": {"linear_cka": (0.859, 0.970), "pwcca": (0.729, 0.896), "procrustes": (0.768, 0.920),
                    "lstsq, structural": (0.876, 0.975), "lstsq, functional": (0.857, 0.970)},
        "vit": {"linear_cka": (0.719, 0.870), "pwcca": (0.650, 0.785), "procrustes": (0.531, 0.682),
                "lstsq, structural": (0.664, 0.802), "lstsq, functional": (0.782, 0.921)},
    },
}  # fmt: skip
"""τ and ρ of the paper on CIFAR-10, of ResNet-18 and of ViT-Ti: test -> kind of network -> measure."""
PRESETS = {
    "small": {"train": 5000, "test": 1000, "references": 5, "functional_samples": 300},
    "paper": {"train": 50_000, "test": 10_000, "references": 10, "functional_samples": 100},
    "test": {"train": 150, "test": 140, "references": 2, "functional_samples": 100},
}
"""Images, references, and images to which stitched models are fitted."""


def main() -> None:
    """Run the experiment from the command line."""
    parser = study.parser(__doc__, "data-dir", presets=PRESETS)
    parser.add_argument("--networks", type=Path, nargs="+", required=True, help="folders of trained networks")
    arguments = parser.parse_args()
    preset = PRESETS[arguments.preset]
    train, test = (images.samples("cifar10", split, preset[split], arguments.data_dir) for split in ("train", "test"))
    record: dict[str, Any] = {"preset": {"name": arguments.preset, **preset}, "architectures": {}}
    for folder in arguments.networks:
        start = time.process_time()
        found = measured(*networks.read_folder(folder), train, test, preset)
        Console(width=140).print(found)
        name = folder.name.removeprefix("drfrankenstein_")
        record["architectures"][name] = {**summary(found), "seconds": round(time.process_time() - start)}
    study.leave("bench", record, page, {}, arguments.out)


def measured(
    loaded: dict[str, hf_stitch.Adapter],
    layers: Sequence[str],
    train: hf_stitch.Samples,
    test: hf_stitch.Samples,
    preset: dict[str, int],
) -> Bench:
    """Run the bench on networks of one architecture."""
    return bench(
        loaded, train, test_data=test, layers=layers, sensitivity_layers=layers[-int(LAST * len(layers)) :],
        pooling="cls" if tuple(layers) == networks.VIT_CUTS else "mean", metrics=METRICS, matchers=MATCHERS,
        functional=MATCHERS, functional_samples=preset["functional_samples"], references=preset["references"],
        task="image-classification", batch_size=200,
    )  # fmt: skip


def summary(found: Bench) -> dict[str, Any]:
    """Return the figures of the page as JSON values.

    Returns:
        ``scores``: test -> method -> its record; ``accuracies``: layer -> probing accuracy, mean over networks;
        ``references``: group -> the best reference; ``undefined``: method -> number of pairs and the most
        frequent reason.
    """
    record = found.to_dict()
    specificity = found.groups[-1]
    accuracies = {
        layer: round(float(specificity.accuracy[[own == layer for own in specificity.layers]].mean()), 4)
        for layer in found.layers
    }
    references = {
        group.layer or "specificity": [group.networks[group.references[0]], group.layers[group.references[0]]]
        for group in found.groups
    }
    undefined = {
        method: [sum(reasons.values()), max(reasons, key=lambda reason: reasons[reason])]
        for method, reasons in found.undefined.items()
    }
    return {
        "networks": len(found.networks), "layers": list(found.layers), "pooling": found.pooling, "n": found.n,
        "scores": record["scores"], "accuracies": accuracies, "references": references,
        "undefined": undefined,
    }  # fmt: skip


FEW = 5
"""Number of networks below which a bench decides nothing."""
FUNCTIONAL, STRUCTURAL, CKA, PWCCA, OPD = "lstsq, functional", "lstsq, structural", "linear_cka", "pwcca", "procrustes"
LEAST, LEADER = 0.67, 0.1
"""The least τ of functional direct matching in the paper's tables, and how far a measure close to the leader is from
it."""
DECIDES = f"; benches of at least {FEW} networks decide"
SENSITIVE = claim(
    "5.2, table 2", "Functional direct matching has a consistently high rank correlation in the sensitivity test",
    "τ .67 to .81; ResNet-18, CIFAR-10 .790", f"τ of at least {LEAST}, by the interval{DECIDES}",
)  # fmt: skip
SPECIFIC = claim(
    "5.2, table 3", "Functional direct matching has a consistently high rank correlation in the specificity test",
    "τ .74 to .89; ResNet-18, CIFAR-10 .857", f"τ of at least {LEAST}, by the interval{DECIDES}",
)  # fmt: skip
CLOSE = claim(
    "5.2, table 3", "Functional direct matching has the highest rank correlation, or is close to the leader",
    ".857, leader .876 (structural direct matching)",
    f"in the specificity test, τ at most {LEADER} below each other of the paper's measures, by the interval of the "
    f"difference (MOVER){DECIDES}",
)  # fmt: skip
POOR = claim(
    "5.2, table 2", "CKA performs poorly in the sensitivity test", "τ .569; PWCCA .628, structural .658",
    f"τ below those of PWCCA and structural direct matching, by the interval of the difference (MOVER){DECIDES}",
)  # fmt: skip
UNSPECIFIC = claim(
    "5.2, table 3", "PWCCA has low rank correlations in the specificity test", "τ .729; CKA .859, functional .857",
    f"τ below those of CKA and functional direct matching, by the interval of the difference (MOVER){DECIDES}",
)  # fmt: skip
INCONSISTENT = claim(
    "5.2, tables 2 and 3", "Orthogonal Procrustes shows inconsistent results", "τ ≈ 0 to .93",
    "between tests or architectures, τ differs by more than .3, by the interval of the difference (MOVER)",
)  # fmt: skip
CONSISTENT = claim(
    "5.2",
    "Sensitivity is consistent for individual layers",
    "–",
    "τ of each layer within .1 of the mean",
)
ELSEWHERE = claim("tables 2 and 3", "The same on SVHN and ImageNet", "four of six rows", "as on CIFAR-10")
BASELINES = {
    test: question(
        f"after paper 4, table {table}", f"Some measure is a better test of {test} than depth and rank alone", "–",
        "a measure beats each baseline that is defined: the lower end of the interval of the difference of τ (a "
        f"jackknife over networks) is above 0; refuted if each measure has one that it cannot beat{DECIDES}",
    )
    for table, test in ((2, "sensitivity"), (3, "specificity"))
}  # fmt: skip

PAGE = """# Which similarity predicts functional differences? (Balogh & Jelasity, AAAI 2025, tables 2 and 3)

**What to do**: report depth and rank beside every measure. On layers that correspond, the distance in depth predicts
differences of probing accuracy better than all measures here, and the rank as well as the best; which measure is best
hardly matters beside that.

{claims}

The test of Ding et al. (2021): a distance d of representations is good if it ranks them as the difference of their
linear probing accuracies F does. A is the representation with the best F. The tables have Kendall's τ and Spearman's
ρ of d(A, B) and |F(A) − F(B)|.

- *Sensitivity*: B are low-rank approximations of one layer of all networks, at the paper's ranks by width; the basis is
  that of the training images. τ is the mean over the last half of the layers. Within one network, every distance that
  grows as the rank falls has the same τ, so that only several networks tell such distances apart.
- *Specificity*: B are all layers of all networks.

Here: CIFAR-10, {train} training images (probes, bases, stitches on pooled features), {test} test images. A is chosen
on half of the test images, among representations of full rank; F and d are those of the other half. No network is
compared with itself. 95% intervals: a jackknife that leaves out one network at a time, with another A if its
network is left out; they cover the choice of networks, not of images. "references": smallest and largest τ, if A is the
best representation of each of the {references} best networks. "rank only" and "depth only" ignore the
activations; the rule for them was fixed before any figure was seen (that an interval with 0 in it decides nothing,
after), those for the paper's claims after this run, from its text. A row in bold beats each of the two that is defined.
"depth only" is constant within a layer, so it is undefined for sensitivity; "rank only" is the difference of widths in
the specificity test. "probing, other half", a row that was added later, is the difference of F itself on the half of
the images that chose A: how far F predicts itself. A distance without noise may exceed it a little. τ-b leaves out
ties: "depth only" need not order the seeds of a layer, whose differences in F are largely noise, and every measure
must.

Metrics have the reference as their first argument, on means over positions (CLS for the ViT; the paper flattens for
CKA); a similarity s is the distance 1 − s. *Structural*: relative squared error on test images of the stitch from B to
A, fitted to pooled training features. *Functional*: 1 minus the relative accuracy of the stitched model, all positions,
fitted to {functional_samples} images. For sensitivity, it is fitted to approximated positions, whose basis is that of
these images. The rule of this row was written before its figure; architectures without it were measured before.
{sections}
{footer}"""

TITLES = {
    "tiny10": "published Tiny-10 networks, beside the paper's ResNet-18",
    "vits": "small ViTs (6 blocks, 96 features, CLS), beside the paper's ViT-Ti",
}
"""Title of the section of a folder."""


def page(record: dict[str, Any]) -> str:
    """Return the page of the results from the record, as it is read from JSON."""
    preset, architectures = record["preset"], record["architectures"]
    folders = " ".join(map(str.upper, architectures))
    return PAGE.format(
        claims=study.verdicts(claims(record)),
        sections="".join(_section(name, found) for name, found in architectures.items()),
        footer=study.footer("bench", "how_not_to_stitch.bench", f"--data-dir DATA --networks {folders} --out OUT"),
        **preset,
    )  # fmt: skip


def claims(record: dict[str, Any]) -> list[dict[str, str]]:
    """Return the rows of the table of all experiments."""
    benches = {name: found for name, found in record["architectures"].items() if found["networks"] >= FEW}
    if not benches:
        return []
    name = max(benches, key=lambda each: benches[each]["networks"])
    scores, count = benches[name]["scores"], benches[name]["networks"]
    sensitive, specific = ({_plain(m): s["tau"] for m, s in scores[test].items()} for test in BASELINES)
    n = f"{count} networks ({name}), {len(benches[name]['layers'])} layers"
    others = [specific[measure] for measure in (CKA, PWCCA, OPD, STRUCTURAL)]
    close = [study.above(study.difference(specific[FUNCTIONAL], other), -LEADER) for other in others]
    leader = max((CKA, PWCCA, OPD, STRUCTURAL), key=lambda measure: specific[measure]["value"])

    def lower(of: Mapping[str, Any], measure: str, *than: str) -> dict[str, Any]:
        apart = {other: study.difference(of[measure], of[other]) for other in than}
        text = "; ".join(f"less {other} {study.shown(found, 2)}" for other, found in apart.items())
        return {
            "ours": f"τ {study.shown(of[measure], 2)}; {text}", "n": n, "units": count,
            "parts": [study.below(found, 0) for found in apart.values()],
        }  # fmt: skip

    taus = [
        (f"{test}, {each}", found["scores"][test][OPD]["tau"])
        for each, found in record["architectures"].items() for test in BASELINES
    ]  # fmt: skip
    most, least = (choose(taus, key=lambda pair: pair[1]["value"]) for choose in (max, min))
    return [
        _sensitive(sensitive, n, count),
        SPECIFIC.row(
            f"τ {study.shown(specific[FUNCTIONAL], 2)}", n, [study.above(specific[FUNCTIONAL], LEAST)], count
        ),
        CLOSE.row(
            f"τ {study.shown(specific[FUNCTIONAL], 2)}; {leader} {study.shown(specific[leader], 2)}", n, close, count
        ),
        POOR.row(**lower(sensitive, CKA, PWCCA, STRUCTURAL)),
        UNSPECIFIC.row(**lower(specific, PWCCA, CKA, FUNCTIONAL)),
        INCONSISTENT.row(
            f"τ {study.shown(least[1], 2)} ({least[0]}) to {study.shown(most[1], 2)} ({most[0]})", n,
            [study.above(study.difference(most[1], least[1]), 0.3)], count,
        ),
        CONSISTENT.untested("τ of every layer in the record of the bench"),
        ELSEWHERE.untested("these data, and ten and five networks trained on them"),
        *(_baselines(test, asked, scores[test], n, count) for test, asked in BASELINES.items()),
    ]  # fmt: skip


def _sensitive(scores: Mapping[str, Any], n: str, count: int) -> dict[str, str]:
    if FUNCTIONAL not in scores:
        return SENSITIVE.untested("low-rank approximations that are stitched, in the bench, for ten networks")
    found = scores[FUNCTIONAL]
    return SENSITIVE.row(f"τ {study.shown(found, 2)}", n, [study.above(found, LEAST)], count)


def _baselines(test: str, asked: study.Claim, scores: Mapping[str, Any], n: str, count: int) -> dict[str, str]:
    measures = {name: score for name, score in scores.items() if score["beyond"] and name != RELIABILITY}
    winners = [name for name, score in measures.items() if beaten(score)]
    best = max(measures, key=lambda name: _finite(measures[name]["tau"]["value"]))
    ours = (
        f"{len(winners)} of {len(measures)} measures{''.join(f', {name}' for name in winners)}; best {best}, τ "
        f"{_score(measures[best]['tau'])}; "
        + ", ".join(f"{name} {_score(scores[name]['tau'])}" for name in ("rank only", "depth only"))
        + f"; F itself on other images {_score(scores[RELIABILITY]['tau'])}"
    )
    found = [beaten(score) for score in measures.values()]
    return asked.row(ours, n, [True if True in found else None if None in found else False], count)


def _finite(value: Any) -> float:
    return -2.0 if math.isnan(float(value)) else float(value)


def _section(name: str, found: dict[str, Any]) -> str:
    kind = "vit" if name.startswith("vit") else "convolutional"
    accuracies = ", ".join(f"{layer} {value:.3f}" for layer, value in found["accuracies"].items())
    text = f"\n## {found['networks']} {TITLES.get(name, name)}\n\nProbing accuracy, mean over networks: {accuracies}.\n"
    for test, scores in found["scores"].items():
        lines = [_line(method, score, PUBLISHED[test][kind]) for method, score in scores.items()]
        text += (
            f"\n### {test.capitalize()}\n\n| measure | paper, τ / ρ | τ | ρ | references | τ − rank only | "
            f"τ − depth only |\n|---|---|---|---|---|---|---|\n{chr(10).join(lines)}\n"
        )
    if found["networks"] < FEW:
        text += (
            f"\nWith {found['networks']} networks, the jackknife rests on as many values: an interval without width is "
            "chance, and a difference that it sets apart from 0 is a hint, no proof.\n"
        )
    if found["undefined"]:
        reasons = "; ".join(f"{method}, {count} ({why})" for method, (count, why) in found["undefined"].items())
        text += f"\nUndefined pairs, of all references, with the most frequent reason: {reasons}. They are left out.\n"
    return text


def _line(method: str, score: dict[str, Any], published: dict[str, tuple[float, float]]) -> str:
    paper = published.get(_plain(method))
    label = f"**{method}**" if beaten(score) else method
    missing = f" ({score['undefined']} of {score['pairs']} pairs undefined)" if score["undefined"] else ""
    low, high = map(float, score["spread"])
    cells = [
        label + missing, "–" if paper is None else f"{paper[0]:.2f} / {paper[1]:.2f}",
        *(_score(score[name]) for name in ("tau", "rho")), "–" if math.isnan(low) else f"{low:.2f} to {high:.2f}",
        *(_score(score["beyond"].get(name)) for name in ("rank only", "depth only")),
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _score(score: dict[str, Any] | None) -> str:
    figures = [math.nan] * 3 if score is None else [float(score[name]) for name in ("value", "low", "high")]
    return "–" if math.isnan(figures[0]) else "{:.2f} [{:.2f}, {:.2f}]".format(*figures)


def beaten(score: dict[str, Any]) -> bool | None:
    """Return whether a measure beats each baseline that is defined; ``None`` where the intervals do not tell."""
    known = [study.above(found, 0) for found in score["beyond"].values() if not math.isnan(float(found["value"]))]
    if False in known or not known:
        return False
    return None if None in known else True


def _plain(method: str) -> str:
    """Return the name of a method without its options."""
    return method.partition("(")[0]


if __name__ == "__main__":
    main()
