"""Which similarity predicts functional differences (Balogh & Jelasity 2025, tables 2 and 3, after Ding et al. 2021)?

Distances between representations are correlated with differences of linear probing accuracy. Sensitivity: low-rank
approximations of the last layers of all networks. Specificity: all layers of all networks. Baselines are distances in
depth and in rank, which ignore the activations. Each folder has at least three networks of one architecture: Tiny-10,
ResNet-20 or the small ViT.
"""

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import study
from dr_frankenstein import networks
from hf_stitch_studies import Bench, bench
from hf_stitch_studies.benching.correlation import RELIABILITY
from how_not_to_stitch.experiment import PUBLISHED, cifar, filled, parser
from rich.console import Console

from hf_stitch import Adapter, Samples

METRICS = (
    "linear_cka:debiased=True", "pwcca:directions=all", "procrustes", "svcca", "cca:ridge=0.01", "rsa", "mutual_knn",
    "linear_regression", "soft_matching", "shape_distance:alpha=0.5",
)  # fmt: skip
MATCHERS = ("lstsq", "recoloured", "procrustes")
LAST = 0.5
"""The sensitivity test uses the last half of the layers, like the paper."""
TRAIN, TEST, REFERENCES, FUNCTIONAL_SAMPLES = 5000, 1000, 5, 300
"""Training and test images, references, and images for the fits of stitched models."""


def main() -> None:
    arguments = parser(__doc__).parse_args()
    samples = cifar(arguments, TRAIN, TEST)
    sizes = {"train": TRAIN, "test": TEST, "references": REFERENCES, "functional_samples": FUNCTIONAL_SAMPLES}
    record: dict[str, Any] = {"preset": sizes, "architectures": {}}
    for folder in arguments.networks:
        start = time.process_time()
        result = measured(*networks.read_folder(folder), *samples)
        Console(width=140).print(result)
        name = folder.name.removeprefix("drfrankenstein_")
        record["architectures"][name] = {**summary(result), "seconds": round(time.process_time() - start)}
    study.write_results("bench", record, page, arguments.out)


def measured(loaded: dict[str, Adapter], layers: Sequence[str], train: Samples, test: Samples) -> Bench:
    return bench(
        loaded, train, test_data=test, layers=layers, sensitivity_layers=layers[-int(LAST * len(layers)) :],
        pooling="cls" if tuple(layers) == networks.VIT_CUTS else "mean", metrics=METRICS, matchers=MATCHERS,
        functional=MATCHERS, functional_samples=FUNCTIONAL_SAMPLES, references=REFERENCES,
        task="image-classification", batch_size=200,
    )  # fmt: skip


def summary(result: Bench) -> dict[str, Any]:
    specificity = result.groups[-1]
    accuracies = {
        layer: round(float(specificity.accuracy[[name == layer for name in specificity.layers]].mean()), 4)
        for layer in result.layers
    }
    references = {
        group.layer or "specificity": [group.networks[group.references[0]], group.layers[group.references[0]]]
        for group in result.groups
    }
    undefined = {
        m: [sum(reasons.values()), max(reasons, key=reasons.__getitem__)] for m, reasons in result.undefined.items()
    }
    return {
        "networks": len(result.networks), "layers": list(result.layers), "pooling": result.pooling, "n": result.n,
        "scores": result.to_dict()["scores"], "accuracies": accuracies, "references": references,
        "undefined": undefined,
    }  # fmt: skip


FEW = 5
"""Minimum number of networks of a bench that decides claims."""
FUNCTIONAL, STRUCTURAL, CKA, PWCCA, OPD = "lstsq, functional", "lstsq, structural", "linear_cka", "pwcca", "procrustes"
LEAST, LEADER = 0.67, 0.1
"""Smallest τ of functional direct matching in the paper's tables; maximum distance of a measure close to the leader."""
SENSITIVE, SPECIFIC, CLOSE, POOR, UNSPECIFIC, INCONSISTENT, CONSISTENT, ELSEWHERE, *_BEYOND = study.stated(__file__)
BASELINES = dict(zip(("sensitivity", "specificity"), _BEYOND, strict=True))
TITLES = {
    "tiny10": "published Tiny-10 networks, next to the paper's ResNet-18",
    "vits": "small ViTs (6 blocks, 96 features, CLS), next to the paper's ViT-Ti",
}
"""Title of the section of a folder."""


def page(record: dict[str, Any]) -> str:
    sections = "".join(_section(name, run) for name, run in record["architectures"].items())
    return filled(__file__, claims(record), record["architectures"], sections=sections, **record["preset"])


def claims(record: dict[str, Any]) -> list[dict[str, str]]:
    benches = {name: run for name, run in record["architectures"].items() if run["networks"] >= FEW}
    name = max(benches, key=lambda bench_name: benches[bench_name]["networks"])
    scores, count = benches[name]["scores"], benches[name]["networks"]
    sensitive, specific = ({_plain(m): s["tau"] for m, s in scores[test].items()} for test in BASELINES)
    n = f"{count} networks ({name}), {len(benches[name]['layers'])} layers"
    first, functional = sensitive[FUNCTIONAL], specific[FUNCTIONAL]
    rivals = {measure: specific[measure] for measure in (CKA, PWCCA, OPD, STRUCTURAL)}
    close = [study.above(study.difference(functional, rival), -LEADER) for rival in rivals.values()]
    leader = max(rivals, key=lambda measure: rivals[measure]["value"])
    tau = f"τ {study.shown(functional, 2)}"

    def lower(asked: study.Claim, of: Mapping[str, Any], measure: str, *than: str) -> dict[str, str]:
        gaps = {rival: study.difference(of[measure], of[rival]) for rival in than}
        text = "; ".join(f"less {rival} {study.shown(gap, 2)}" for rival, gap in gaps.items())
        held = [study.below(gap, 0) for gap in gaps.values()]
        return asked.row(f"τ {study.shown(of[measure], 2)}; {text}", n, held, count)

    return [
        SENSITIVE.row(f"τ {study.shown(first, 2)}", n, [study.above(first, LEAST)], count),
        SPECIFIC.row(tau, n, [study.above(functional, LEAST)], count),
        CLOSE.row(f"{tau}; {leader} {study.shown(rivals[leader], 2)}", n, close, count),
        lower(POOR, sensitive, CKA, PWCCA, STRUCTURAL),
        lower(UNSPECIFIC, specific, PWCCA, CKA, FUNCTIONAL),
        _inconsistent(record["architectures"], n, count),
        CONSISTENT.untested("τ of every layer in the record of the bench"),
        ELSEWHERE.untested("these data, and ten and five networks trained on them"),
        *(_baselines(test, asked, scores[test], n, count) for test, asked in BASELINES.items()),
    ]  # fmt: skip


def _inconsistent(architectures: Mapping[str, Any], n: str, count: int) -> dict[str, str]:
    """Compare τ of Procrustes between all tests and architectures."""
    taus = {
        (test, architecture): run["scores"][test][OPD]["tau"]
        for architecture, run in architectures.items()
        for test in BASELINES
    }
    wide, choices = {}, len(taus) * (len(taus) - 1) // 2
    for (test, architecture), tau in taus.items():
        z = {end: float(np.arctanh(np.clip(value, -0.999999, 0.999999))) for end, value in tau.items()}
        widened = study.adjusted(z, choices, architectures[architecture]["networks"] - 1)
        wide[test, architecture] = {end: float(np.tanh(value)) for end, value in widened.items()}
    gaps = [study.above(study.difference(a, b), 0.3) for a, b in itertools.permutations(wide.values(), 2)]
    least, most = (choose(taus, key=lambda name: taus[name]["value"]) for choose in (min, max))
    ours = " to ".join(f"{study.shown(taus[name], 2)} ({', '.join(name)})" for name in (least, most))
    return INCONSISTENT.row(f"τ {ours}", n, [study.at_least(1, gaps)], count)


def _baselines(test: str, asked: study.Claim, scores: Mapping[str, Any], n: str, count: int) -> dict[str, str]:
    beats = beaten(scores, count)
    winners = [name for name, won in beats.items() if won]
    taus = {name: float(scores[name]["tau"]["value"]) for name in beats}
    best = max(beats, key=lambda name: -2.0 if math.isnan(taus[name]) else taus[name])
    ours = (
        f"{len(winners)} of {len(beats)} measures{''.join(f', {name}' for name in winners)}; best {best}, τ "
        f"{_score(scores[best]['tau'])}; "
        + ", ".join(f"{name} {_score(scores[name]['tau'])}" for name in ("rank only", "depth only"))
        + f"; F itself on other images {_score(scores[RELIABILITY]['tau'])}"
    )
    return asked.row(ours, n, [study.at_least(1, beats.values())], count)


def beaten(scores: Mapping[str, Any], count: int) -> dict[str, bool | None]:
    """Return whether each measure beats each defined baseline; ``None`` where the intervals do not decide."""
    gaps = {
        name: [gap for gap in score["beyond"].values() if not math.isnan(float(gap["value"]))]
        for name, score in scores.items() if score["beyond"] and name != RELIABILITY
    }  # fmt: skip

    def won(differences: Sequence[Mapping[str, float]]) -> bool | None:
        wins = [study.above(study.adjusted(gap, len(gaps), count - 1), 0) for gap in differences]
        losses = [study.below(study.adjusted(gap, len(differences), count - 1), 0) for gap in differences]
        return False if True in losses or not differences else study.at_least(len(wins), wins)

    return {name: won(differences) for name, differences in gaps.items()}


def _section(name: str, run: dict[str, Any]) -> str:
    kind = "vit" if name.startswith("vit") else "convolutional"
    accuracies = ", ".join(f"{layer} {value:.3f}" for layer, value in run["accuracies"].items())
    text = f"\n## {run['networks']} {TITLES.get(name, name)}\n\nProbing accuracy, mean over networks: {accuracies}.\n"
    for test, scores in run["scores"].items():
        won = beaten(scores, run["networks"])
        lines = [_line(method, score, PUBLISHED[test][kind], won.get(method)) for method, score in scores.items()]
        head = ["measure", "paper, τ / ρ", "τ", "ρ", "references", "τ − rank only", "τ − depth only"]
        text += f"\n### {test.capitalize()}\n\n{study.markdown(head, lines)}\n"
    if run["networks"] < FEW:
        text += "\n" + study.text(__file__, "few").format(count=run["networks"]) + "\n"
    if run["undefined"]:
        reasons = "; ".join(f"{method}, {count} ({reason})" for method, (count, reason) in run["undefined"].items())
        text += f"\nUndefined pairs, of all references, with the most frequent reason: {reasons}. They are left out.\n"
    return text


def _line(method: str, score: dict[str, Any], published: Mapping[str, tuple[float, float]], won: Any) -> list[str]:
    paper = published.get(_plain(method))
    label = f"**{method}**" if won else method
    missing = f" ({score['undefined']} of {score['pairs']} pairs undefined)" if score["undefined"] else ""
    low, high = map(float, score["spread"])
    return [
        label + missing, "–" if paper is None else f"{paper[0]:.2f} / {paper[1]:.2f}",
        *(_score(score[name]) for name in ("tau", "rho")), "–" if math.isnan(low) else f"{low:.2f} to {high:.2f}",
        *(_score(score["beyond"].get(name)) for name in ("rank only", "depth only")),
    ]  # fmt: skip


def _score(score: dict[str, Any] | None) -> str:
    figures = [math.nan] * 3 if score is None else [float(score[name]) for name in ("value", "low", "high")]
    return "–" if math.isnan(figures[0]) else "{:.2f} [{:.2f}, {:.2f}]".format(*figures)


def _plain(method: str) -> str:
    return method.partition("(")[0]
