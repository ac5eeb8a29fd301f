"""Number, selection, similarity function and frequency of embedding of anchors (Moschella et al. 2023).

Number, selection and similarity are studied with heads for the 20 coarse classes of CIFAR-100 on published Tiny-10
networks that replace each other, as in cross_seed.py. Every similarity of the registry serves as a projection. The
frequency is studied in end-to-end training on Fashion-MNIST, as in end_to_end.py. Cost is measured in processor time.
"""

import argparse
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import study
import torch
from dr_frankenstein import images
from relative_representations import end_to_end, heads, image_encoders, swapping
from relative_representations.cross_architecture_images import SIZES
from relative_representations.exchange import ABSOLUTE, Array, Estimate, Pairs, filled, spread
from relative_representations.image_encoders import FINAL
from relative_representations.swapping import Encoded
from torch import Tensor

from hf_stitch.relative import RelativeProjection

TASK = "cifar100"
CUTS = ("bn6", FINAL)


NETWORKS, NUMBERS = 3, (10, 50, 200, 800)
"""Number of published networks, and numbers of anchors to compare."""
SETTINGS = {"kinds": 100, "similarities": 300, "neighbours": 30, "seeds": 2}
"""Anchors for comparing selections and similarities; neighbours of the geodesic similarity; networks per frequency."""
EVERY = (1, 25, 10**6, None)
"""Steps between embeddings of the anchors; ``None``: a network on absolute vectors."""
KINDS = ("random", "stratified", "farthest_point", "kmeans")
OUT_OF_DOMAIN = "random, of Fashion-MNIST"
COSINE = "cosine"
SIMILARITIES: Mapping[str, dict[str, Any]] = {
    COSINE: {},
    "cosine, centred": {"name": "cosine", "center": True},
    "angular": {},
    "inner": {},
    "euclidean": {},
    "lp, p = 1": {"name": "lp", "p": 1.0},
    "geodesic": {"neighbours": SETTINGS["neighbours"]},
    "change_of_basis": {},
}
"""Name -> name in the registry and options, if they differ from the defaults."""
SUFFICIENT, HALF = 0.9, 0.5
"""Anchors out of domain suffice if they keep at least ``SUFFICIENT`` of the stitched score above chance of random
anchors, at every cut; in part from ``HALF`` at every cut. Fixed before any figure of these networks was known."""
SLOWER = 1.1
"""Minimum ratio of times, embedding at every step over embedding before training, for a cost that depends on it."""
AT_START = "before training and after"


def main() -> None:
    arguments = study.parser(__doc__, "data-dir", "published", "cache", required={"published"}).parse_args()
    names, scores, chance = on_frozen(arguments)
    record = {
        "sizes": SIZES, "settings": SETTINGS, "networks": names, "cuts": CUTS, "chance": chance, "scores": scores,
        "frequency": in_training(arguments.data_dir),
    }  # fmt: skip
    study.write_results("anchor_study", record, page, arguments.out)


def on_frozen(arguments: argparse.Namespace) -> tuple[list[str], list[dict[str, Any]], float]:
    """Compare numbers, selections and similarities for heads on frozen encoders."""
    encoders = image_encoders.published(arguments.published, "tiny10", NETWORKS)
    train, test = SIZES.samples(TASK, arguments.data_dir)
    clothes = images.raw("fashion_mnist", "train", 500, arguments.data_dir)
    scores = []
    for cut in CUTS:
        at_cut = [image_encoders.at(encoder, cut) for encoder in encoders]
        sides = [swapping.encoded(encoder, train, test, arguments.cache) for encoder in at_cut]
        foreign = [
            replace(side, pool=encoder.vectors(clothes, arguments.cache))
            for side, encoder in zip(sides, at_cut, strict=True)
        ]
        kinds, similarities, cosine = SETTINGS["kinds"], SETTINGS["similarities"], {"name": COSINE}
        jobs = [("number", str(n), sides, train, "random", n, cosine) for n in NUMBERS]
        jobs += [("selection", kind, sides, train, kind, kinds, cosine) for kind in KINDS]
        jobs += [("selection", OUT_OF_DOMAIN, foreign, clothes, "random", kinds, cosine)]
        for name, options in SIMILARITIES.items():
            jobs.append(("similarity", name, sides, train, "random", similarities, {"name": name, **options}))
        for part, setting, of, pool, kind, count, options in jobs:
            by = of[0].train if kind in ("farthest_point", "kmeans") else None
            f1, seconds = exchanged(of, swapping.choices(pool, of, kind, count, by), options)
            values = None if f1 is None else f1.round(1).tolist()
            scores.append({"part": part, "cut": cut, "setting": setting, "seconds": round(seconds, 2), "f1": values})
            print(f"{cut}, {part}, {setting}: done", flush=True)
    guesses = swapping.by_frequency(torch.tensor(train.labels), len(test))
    chance = swapping.scored(torch.tensor(test.labels), guesses)
    return [encoder.name for encoder in encoders], scores, round(chance, 1)


def exchanged(
    sides: Sequence[Encoded], chosen: Sequence[Sequence[int]], options: Mapping[str, Any]
) -> tuple[Array | None, float]:
    """Score every encoder under the relative heads of every other encoder."""
    similarity = {key: value for key, value in options.items() if key != "center"}
    center, started = bool(options.get("center")), time.process_time()
    f1 = np.zeros((len(sides), len(sides)))
    for row, (decoder, places) in enumerate(zip(sides, chosen, strict=True)):
        try:
            projections = [RelativeProjection.of(side.pool[places], similarity, center=center) for side in sides]
            inputs = [_projected(p, side.test) for p, side in zip(projections, sides, strict=True)]
            features = _projected(projections[row], decoder.train)
        except ValueError as error:
            print(f"{similarity['name']} is undefined: {error}", flush=True)
            return None, time.process_time() - started
        head = heads.trained(features, decoder.train_labels, int(decoder.train_labels.max()) + 1, SIZES.epochs)
        f1[row] = [swapping.scored(decoder.test_labels, heads.answers(head, some)) for some in inputs]
    return f1, (time.process_time() - started) / len(sides)


@torch.no_grad()
def _projected(projection: RelativeProjection, vectors: Tensor) -> Tensor:
    return torch.cat(list(projection.stream(vectors)))


def in_training(data_dir: str | None) -> list[dict[str, Any]]:
    """Compare embedding frequencies in end-to-end training: for each setting, F1 and seconds per network."""
    task, settings = end_to_end.Task.read(data_dir), []
    for every in EVERY:
        started = time.process_time()
        trained = [end_to_end.fit(task, every, seed) for seed in range(SETTINGS["seeds"])]
        seconds = (time.process_time() - started) / len(trained)
        f1 = np.array(end_to_end.exchanged(trained, task))
        name = ABSOLUTE if every is None else AT_START if every >= 10**6 else f"every {every} steps"
        settings.append({"setting": name, "seconds": round(seconds, 2), "f1": f1.round(1).tolist()})
        print(f"frequency, {name}: done", flush=True)
    return settings


class Study:
    """Scores of a record, by part, cut and setting; NaN where a setting is undefined."""

    def __init__(self, record: dict[str, Any]) -> None:
        self.cuts, self.chance, count = record["cuts"], record["chance"], len(record["networks"])
        self.pairs = Pairs(["network"] * count)
        self.f1: dict[tuple[str, str, str], Array] = {}
        self.seconds: dict[tuple[str, str, str], float] = {}
        for row in record["scores"]:
            place = row["part"], row["cut"], row["setting"]
            self.f1[place] = np.full((count, count), np.nan) if row["f1"] is None else np.array(row["f1"])
            self.seconds[place] = row["seconds"]

    def settings(self, part: str) -> list[str]:
        return list(dict.fromkeys(setting for name, _, setting in self.f1 if name == part))

    def stitched(self, part: str, cut: str, setting: str) -> Estimate:
        return self.pairs.mean(self.f1[part, cut, setting])

    def kept(self, part: str, cut: str, setting: str) -> Estimate:
        """Estimate the kept share of the score above chance."""
        return self.pairs.kept(self.f1[part, cut, setting], self.chance)

    def more(self, part: str, cut: str, setting: str, base: str) -> Estimate:
        """Estimate the difference between the stitched scores of two settings, paired by networks."""
        return self.pairs.mean(self.f1[part, cut, setting] - self.f1[part, cut, base])

    def out_of_domain(self, cut: str) -> Estimate:
        """Estimate the ratio of stitched scores above chance, anchors out of domain over random anchors."""
        foreign, random = (self.f1["selection", cut, kind] - self.chance for kind in (OUT_OF_DOMAIN, KINDS[0]))
        return self.pairs.ratio(foreign, random)

    def better(self, cut: str) -> dict[str, Estimate]:
        """Estimate the gain in stitched score of other similarities over the cosine."""
        gains = {name: self.more("similarity", cut, name, COSINE) for name in self.settings("similarity")}
        return {name: gain for name, gain in gains.items() if name != COSINE and np.isfinite(gain.value)}


NUMBER, DIVERSITY, OUTSIDE, COSINE_WORKS, GEODESICS, COST, OTHERS = study.stated(__file__)


def page(record: dict[str, Any]) -> str:
    scores, sizes, settings, count = Study(record), record["sizes"], record["settings"], len(record["networks"])
    return filled(
        __file__, claims(record), "--published PUBLISHED", count=count, train=sizes["train"],
        test=sizes["test"], pairs=count * (count - 1), chance=record["chance"],
        number=_table(scores, "number", "anchors"), selection=_table(scores, "selection", "selection"),
        similarity=_table(scores, "similarity", "similarity"), frequency=_frequency(record["frequency"]),
        **{name: settings[name] for name in ("kinds", "similarities", "neighbours")},
        seeds=len(record["frequency"][0]["f1"]),
        findings="\n".join(findings(record)),
    )  # fmt: skip


def _table(scores: Study, part: str, title: str) -> str:
    rows: list[Sequence[str]] = []
    for cut, name in product(scores.cuts, scores.settings(part)):
        place = part, cut, name
        matched = np.diag(scores.f1[place]).mean()
        figures = scores.stitched(*place).shown(), scores.kept(*place).shown(2), f"{scores.seconds[place]:.1f}"
        defined = np.isfinite(matched)
        rows.append((cut, name, *((f"{matched:.1f}", *figures) if defined else ("undefined", "undefined", "–", "–"))))
    return study.markdown(("cut", title, "own", "stitched", "kept above chance", "seconds"), rows)


def _frequency(settings: Iterable[Mapping[str, Any]]) -> str:
    rows = []
    for row in settings:
        f1 = np.array(row["f1"])
        same = np.eye(len(f1), dtype=bool)
        rows.append((row["setting"], *(spread(f1[some].tolist()) for some in (same, ~same)), f"{row['seconds']:.1f}"))
    return study.markdown(("anchors embedded", "own", "stitched", "seconds"), rows)


def findings(record: dict[str, Any]) -> Iterator[str]:
    """Yield sentences on number, selection, similarity and cost."""
    scores = Study(record)
    for cut in scores.cuts:
        numbers, kinds, names = (
            {name: scores.stitched(part, cut, name).value for name in scores.settings(part)}
            for part in ("number", "selection", "similarity")
        )
        steps = ", ".join(f"{numbers[b] - numbers[a]:+.1f} ({a} to {b})" for a, b in pairwise(numbers))
        del kinds[OUT_OF_DOMAIN]
        best, worst = (choose(kinds, key=lambda kind: kinds[kind]) for choose in (max, min))
        ranked = sorted((name for name in names if np.isfinite(names[name])), key=lambda name: -names[name])
        beaten = [name for name, more in scores.better(cut).items() if more.low > 0]
        yield study.text(__file__, "findings").format(
            cut=cut, steps=steps, least=kinds[worst], worst=worst, most=kinds[best], best=best,
            foreign=scores.out_of_domain(cut).shown(2), beaten=", ".join(beaten) if beaten else "none",
            ranked=", ".join(f"{name} {names[name]:.1f}" for name in ranked),
        )  # fmt: skip
    seconds = {row["setting"]: row["seconds"] for row in record["frequency"]}
    absolute = seconds.pop(ABSOLUTE)
    costs = ", ".join(f"{name} {value / absolute:.2f}" for name, value in seconds.items())
    yield f"- Time of end-to-end training relative to absolute training: {costs}."


def claims(record: dict[str, Any]) -> list[dict[str, str]]:
    scores, count, cuts = Study(record), len(record["networks"]), record["cuts"]
    n, numbers = f"{count} networks, {count * (count - 1)} pairs, {len(cuts)} cuts", scores.settings("number")
    seconds = {estimate["setting"]: estimate["seconds"] for estimate in record["frequency"]}
    trained = record["settings"]["seeds"]

    def row(claim: study.Claim, figures: Sequence[str], parts: Iterable[bool | None]) -> dict[str, str]:
        return claim.row("; ".join(f"{cut}: {text}" for cut, text in zip(cuts, figures, strict=True)), n, parts, count)

    def listed(estimates: Mapping[str, Estimate]) -> str:
        return ", ".join(f"{name} {estimate.shown()}" for name, estimate in estimates.items())

    gained = [scores.more("number", cut, numbers[-1], numbers[0]) for cut in cuts]
    chosen = [{name: scores.more("selection", cut, name, KINDS[0]) for name in KINDS[1:]} for cut in cuts]
    agreed = [{estimate[name].above(0) for estimate in chosen} in ({True}, {False}) for name in KINDS[1:]]
    outside = [scores.out_of_domain(cut) for cut in cuts]
    cosine = [scores.kept("similarity", cut, COSINE) for cut in cuts]
    geodesic = [scores.more("similarity", cut, "geodesic", "euclidean") for cut in cuts]
    better = map(scores.better, cuts)
    above, others = [estimate.above(0) for estimate in geodesic], list(better)
    slower = seconds["every 1 steps"] >= SLOWER * seconds[AT_START]
    spent = ", ".join(f"{name} {value}" for name, value in seconds.items())
    return [
        row(NUMBER, [f"{estimate.shown()} points of F1, {numbers[-1]} against {numbers[0]}" for estimate in gained],
            [estimate.above(0) for estimate in gained]),
        row(DIVERSITY, [listed(estimate) for estimate in chosen], [any(agreed) or None]),
        row(OUTSIDE, [f"{estimate.shown(2)} of the score above chance of random anchors" for estimate in outside],
            [estimate.above(bound) for estimate in outside for bound in (SUFFICIENT, HALF)]),
        row(COSINE_WORKS, [f"keeps {estimate.shown(2)}" for estimate in cosine],
            [estimate.above(HALF) for estimate in cosine]),
        row(GEODESICS, [f"{estimate.shown()} points of F1" for estimate in geodesic],
            [True if True in above else None if None in above else False]),
        COST.row(f"seconds: {spent}", f"{trained} networks", [slower], trained),
        row(OTHERS, [listed(estimate) for estimate in others],
            [any(more.low > 0 for more in estimate.values()) for estimate in others]),
    ]  # fmt: skip
