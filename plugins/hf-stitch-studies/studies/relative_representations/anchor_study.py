"""Number, selection, similarity function and frequency of embedding of anchors (Moschella et al. 2023).

Number, selection and similarity are studied with heads for the 20 coarse classes of CIFAR-100 on published Tiny-10
networks, which replace each other, as in cross_seed.py. Every similarity of the registry is used as the projection. The
frequency is studied in end-to-end training on Fashion-MNIST, as in end_to_end.py. Cost is measured in processor time.

    python -m relative_representations.anchor_study --published PUBLISHED --data-dir DATA --cache CACHE \
        --out OUT

Without PUBLISHED, three small ResNets are trained, and cut at their last features only.
"""

import argparse
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import study
import torch
from matplotlib.figure import Figure
from relative_representations import (
    cross_architecture_images,
    cross_seed,
    end_to_end,
    experiment,
    heads,
    image_encoders,
    images,
    kept,
    swapping,
)
from relative_representations.encoders import Encoder
from relative_representations.experiment import Claim, spread
from relative_representations.image_encoders import FINAL
from relative_representations.kept import Array, Pairs
from relative_representations.swapping import Encoded
from torch import Tensor

import hf_stitch
from hf_stitch.plots import curves
from hf_stitch.relative import RelativeProjection

TASK = "cifar100"
CUTS = ("bn6", FINAL)


@dataclass(frozen=True)
class Preset:
    """Settings to compare.

    Attributes:
        networks: Maximum number of published networks.
        numbers: Numbers of anchors.
        kinds: Number of anchors for comparing selections.
        similarities: Number of anchors for comparing similarities.
        neighbours: Neighbours of the geodesic similarity.
        every: Numbers of steps between embeddings of the anchors.
        seeds: Networks for each of them.
    """

    networks: int
    numbers: Sequence[int]
    kinds: int
    similarities: int
    neighbours: int
    every: Sequence[int]
    seeds: int


PRESETS = {
    "small": Preset(3, (10, 50, 200, 800), 100, 300, 30, (1, 25, 10**6), 2),
    "test": Preset(2, (5, 20), 10, 80, 40, (1, 10**6), 2),
    "paper": Preset(10, (10, 30, 100, 300, 768, 3000), 300, 300, 30, (1, 5, 25, 100, 10**6), 10),
}
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
    "geodesic": {},
    "change_of_basis": {},
}
"""Name -> name in the registry, and options, if they differ from the defaults."""
SUFFICIENT, HALF = 0.9, 0.5
"""Anchors out of domain suffice if they keep at least ``SUFFICIENT`` of the stitched score above chance that random
anchors have, at every cut; in part from ``HALF`` at every cut. Fixed before any figure of these networks was seen."""
SLOWER = 1.1
"""Cost depends on the frequency of embedding if every step takes this many times the time of once before training."""
ABSOLUTE, AT_START = "absolute", "before training and after"


def main() -> None:
    """Run the experiment from the command line."""
    arguments = study.parser(__doc__, "data-dir", "published", "cache").parse_args()
    preset = PRESETS[arguments.preset]
    names, scores, chance = on_frozen(arguments, preset)
    record = {
        "preset": arguments.preset, "sizes": cross_architecture_images.PRESETS[arguments.preset], "settings": preset,
        "published": bool(arguments.published), "networks": names,
        "cuts": list(dict.fromkeys(row["cut"] for row in scores)), "chance": chance, "scores": scores,
        "frequency": in_training(arguments, preset),
    }  # fmt: skip
    study.leave("anchor_study", record, page, {"anchors_number": _curve(record)}, arguments.out)


def on_frozen(arguments: argparse.Namespace, preset: Preset) -> tuple[list[str], list[dict[str, Any]], float]:
    """Compare numbers, selections and similarities for heads on frozen encoders.

    Returns:
        Names of the networks; for each part of the study, cut and setting the F1 scores (rows of decoders by columns of
        encoders) and the seconds per head; and the F1 of chance.
    """
    base = cross_architecture_images.PRESETS[arguments.preset]
    encoders = _encoders(arguments, preset, base)
    train, test = (
        images.read(TASK, split, n, arguments.data_dir) for split, n in (("train", base.train), ("test", base.test))
    )
    clothes = images.read("fashion_mnist", "train", 500, arguments.data_dir)
    cuts = CUTS if isinstance(encoders[0], image_encoders.Published) else (FINAL,)
    scores = []
    for cut in cuts:
        at_cut = [image_encoders.at(each, cut) for each in encoders]
        sides = {each.name: swapping.encoded(each, train, test, arguments.cache) for each in at_cut}
        foreign = {each.name: replace(sides[each.name], pool=each.vectors(clothes, arguments.cache)) for each in at_cut}

        def add(part: str, setting: str, found: tuple[Array | None, float], cut: str = cut) -> None:
            f1, seconds = found
            values = None if f1 is None else f1.round(1).tolist()
            scores.append({"part": part, "cut": cut, "setting": setting, "seconds": round(seconds, 2), "f1": values})
            print(f"{cut}, {part}, {setting}: done", flush=True)

        def choose(
            pool: hf_stitch.Samples, of: Mapping[str, Encoded], kind: str, count: int, by: Tensor | None = None
        ) -> list[list[int]]:
            return swapping.choices(pool, of.values(), kind, replace(base, anchors=count, seeds=len(of)), by)

        for number in preset.numbers:
            found = exchanged(sides, choose(train, sides, "random", number), base, {"name": COSINE})
            add("number", str(number), found)
        for kind in KINDS:
            needed = sides[at_cut[0].name].train if kind in ("farthest_point", "kmeans") else None
            chosen = choose(train, sides, kind, preset.kinds, needed)
            add("selection", kind, exchanged(sides, chosen, base, {"name": COSINE}))
        chosen = choose(clothes, foreign, "random", preset.kinds)
        add("selection", OUT_OF_DOMAIN, exchanged(foreign, chosen, base, {"name": COSINE}))
        chosen = choose(train, sides, "random", preset.similarities)
        for name, options in SIMILARITIES.items():
            options = {"name": name, **options}
            if name == "geodesic":
                options["neighbours"] = preset.neighbours
            add("similarity", name, exchanged(sides, chosen, base, options))
    frequency = torch.bincount(torch.tensor(train.labels)).double()
    guesses = frequency.multinomial(len(test), replacement=True, generator=torch.Generator().manual_seed(0))
    chance = swapping.scored(torch.tensor(test.labels), guesses)["f1"]
    return [each.name for each in encoders], scores, round(chance, 1)


def _encoders(arguments: argparse.Namespace, preset: Preset, base: experiment.Preset) -> list[Encoder]:
    if arguments.published:
        return [*image_encoders.published(arguments.published, "tiny10", preset.networks)]
    return cross_seed.encoders_of(arguments, base)[0]


def exchanged(
    sides: Mapping[str, Encoded], chosen: Sequence[Sequence[int]], base: experiment.Preset, options: Mapping[str, Any]
) -> tuple[Array | None, float]:
    """Score every encoder under the relative heads of every other encoder.

    Args:
        sides: Vectors of the encoders.
        chosen: For the heads of each encoder, the indices of the anchors in the pool.
        base: Training of heads.
        options: Name and options of the similarity, and ``center``.

    Returns:
        F1 in percent (rows of decoders by columns of encoders), or ``None`` if the similarity is undefined with these
        anchors; and the processor time per decoder.
    """
    similarity = {key: value for key, value in options.items() if key != "center"}
    center = bool(options.get("center"))
    f1, started = np.zeros((len(sides), len(sides))), time.process_time()
    for row, (own, places) in enumerate(zip(sides.values(), chosen, strict=True)):
        try:
            projections = [
                RelativeProjection.of(side.pool[places], similarity, center=center) for side in sides.values()
            ]
            inputs = [_projected(p, side.test) for p, side in zip(projections, sides.values(), strict=True)]
            features = _projected(projections[row], own.train)
        except ValueError as error:
            print(f"{similarity['name']} is undefined: {error}", flush=True)
            return None, time.process_time() - started
        head = heads.trained(
            features, own.train_labels, int(own.train_labels.max()) + 1, epochs=base.epochs, batch=base.batch,
            learning_rate=base.learning_rate, seed=0,
        )  # fmt: skip
        f1[row] = [swapping.scored(own.test_labels, heads.answers(head, some))["f1"] for some in inputs]
    return f1, (time.process_time() - started) / len(sides)


@torch.no_grad()
def _projected(projection: RelativeProjection, vectors: Tensor) -> Tensor:
    return torch.cat(list(projection.stream(vectors)))


def in_training(arguments: argparse.Namespace, preset: Preset) -> list[dict[str, Any]]:
    """Compare how often anchors are embedded in end-to-end training.

    Returns:
        For each setting the F1 scores by decoder and encoder, and the seconds per network.
    """
    base = end_to_end.PRESETS[arguments.preset]
    task = end_to_end.of_images("fashion_mnist", base, arguments.data_dir)
    anchors = end_to_end.anchors_of(task, base.anchors)
    found = []
    for every in (*preset.every, None):
        started = time.process_time()
        trained = [
            end_to_end.fit(task, None if every is None else anchors, seed, every or 1) for seed in range(preset.seeds)
        ]
        seconds = (time.process_time() - started) / len(trained)
        f1 = np.zeros((len(trained), len(trained)))
        for (row, target), (column, source) in product(enumerate(trained), repeat=2):
            f1[row, column] = swapping.scored(task.labels[task.test], target.answers(source, task.test))["f1"]
        name = ABSOLUTE if every is None else AT_START if every >= 10**6 else f"every {every} steps"
        found.append({"setting": name, "seconds": round(seconds, 2), "f1": f1.round(1).tolist()})
        print(f"frequency, {name}: done", flush=True)
    return found


class Study:
    """The scores of a record."""

    def __init__(self, record: dict[str, Any]) -> None:
        self.record, self.pairs = record, Pairs(["network"] * len(record["networks"]))

    def settings(self, part: str) -> list[str]:
        """Return the settings of a part."""
        return list(dict.fromkeys(row["setting"] for row in self.record["scores"] if row["part"] == part))

    def f1(self, part: str, cut: str, setting: str) -> Array | None:
        """Return the scores of a setting at a cut, or ``None`` if it is undefined there."""
        values = self._row(part, cut, setting)["f1"]
        return None if values is None else np.array(values)

    def _row(self, part: str, cut: str, setting: str) -> dict[str, Any]:
        wanted = (part, cut, setting)
        return next(
            row for row in self.record["scores"] if (row["part"], row["cut"], row["setting"]) == wanted
        )  # fmt: skip

    def own(self, part: str, cut: str, setting: str) -> float:
        """Return the mean F1 of heads with their own encoders."""
        f1 = self.f1(part, cut, setting)
        return float("nan") if f1 is None else float(np.diag(f1).mean())

    def stitched(self, part: str, cut: str, setting: str) -> kept.Estimate | None:
        """Estimate the mean F1 over pairs."""
        f1 = self.f1(part, cut, setting)
        return None if f1 is None else self.pairs.mean(f1)

    def row(self, part: str, cut: str, setting: str) -> str:
        """Return a row of a table."""
        f1, seconds = self.f1(part, cut, setting), self._row(part, cut, setting)["seconds"]
        if f1 is None:
            return f"| {cut} | {setting} | undefined | undefined | – | – |"
        share = self.pairs.kept(f1, self.record["chance"])
        return (
            f"| {cut} | {setting} | {np.diag(f1).mean():.1f} | {self.pairs.mean(f1).shown()} | {share.shown(2)} | "
            f"{seconds:.1f} |"
        )

    def out_of_domain(self) -> dict[str, kept.Estimate]:
        """Estimate, by cut, the stitched score above chance with anchors out of domain over that with random ones."""
        found = {}
        for cut in self.record["cuts"]:
            foreign, own = (self.f1("selection", cut, kind) for kind in (OUT_OF_DOMAIN, KINDS[0]))
            assert foreign is not None and own is not None
            found[cut] = self.pairs.ratio(foreign - self.record["chance"], own - self.record["chance"])
        return found

    def more(self, part: str, cut: str, setting: str, other: str) -> kept.Estimate:
        """Estimate by how much a setting has a higher stitched score than another one, paired by networks."""
        one, less = (self.f1(part, cut, each) for each in (setting, other))
        return self.pairs.mean(np.full(self.pairs.mask.shape, np.nan) if one is None or less is None else one - less)

    def frequency(self, setting: str) -> dict[str, Any]:
        """Return the scores of a frequency."""
        return next(row for row in self.record["frequency"] if row["setting"] == setting)


NUMBER = Claim(
    "key findings", "More anchors generally improve frozen encoders", "–",
    "at every cut, the stitched score with the most anchors is above that with the fewest, by the paired interval",
)  # fmt: skip
DIVERSITY = Claim(
    "key findings", "The diversity of anchors affects the quality of representations", "–",
    "stratified, farthest or k-means anchors have a higher stitched score than random ones at every cut, or a lower "
    "one, by "
    "the paired interval; not known otherwise",
)  # fmt: skip
OUTSIDE = Claim(
    "anchor selection", "Anchors may be out of domain", "–",
    f"at every cut, they keep {SUFFICIENT:.0%} or more of the stitched score above chance of random anchors, by the "
    "interval; "
    f"in part: {HALF:.0%} or more",
)  # fmt: skip
COSINE_WORKS = Claim(
    "limitations", "The cosine works well", "–",
    f"at every cut, stitched heads keep {HALF:.0%} or more of the score above chance, by the interval",
)  # fmt: skip
GEODESICS = Claim(
    "limitations", "Geodesic instead of Euclidean distances could improve the quality of representations", "–",
    "at some cut, the stitched score is above that of the Euclidean distance, by the paired interval",
)  # fmt: skip
COST = Claim(
    "limitations", "The cost of training depends on how often anchors are embedded", "–",
    f"embedding at every step takes {SLOWER} times as long or more as embedding only before training and after",
)  # fmt: skip
OTHERS = study.Claim(
    study.OWN, "after paper 2, limitations",
    "Another similarity than the cosine is better for heads on frozen encoders", "–",
    "at every cut, the stitched score of some other similarity is above that of the cosine, by the paired interval",
)  # fmt: skip

PAGE = """# Anchors: number, selection, similarity and frequency (after Moschella et al., ICLR 2023)

**What to do**: take some hundred random anchors of the domain; more hardly help, and no selection is better at both cuts.
Centre the vectors before the cosine. Embed anchors again every 25 steps rather than at every one.

{verdicts}

Setting: {setting} Heads for the 20 coarse classes of CIFAR-100 (not the official split), on which no encoder was
trained, on {train:,} images, scored on {test:,}; every network's encoder replaces that of every other network. Weighted
F1 in percent, over {pairs} ordered pairs; chance {chance}. Intervals are 95% over networks; the heads of every network
use anchors of their own. *Kept*: (F1 − chance) / (own − chance). Seconds of processor time per network to project, train
and score, on a busy core.

The rules on number, domain and cost were fixed before any figure of these networks was seen, that on number with intervals
that do not overlap; the others were written when these figures were known. Until this version, "the cosine works well"
was graded by whether another similarity is better, which the paper leaves open.

Number of random anchors (cosine):

| cut | anchors | own | stitched | kept above chance | seconds |
|---|---|---|---|---|---|
{number}

Selection ({kinds} anchors, cosine; farthest points and k-means in the vectors of the first network):

| cut | selection | own | stitched | kept above chance | seconds |
|---|---|---|---|---|---|
{selection}

Similarity functions of the registry as projections ({similarities} random anchors, which are centred on their mean only
where the name says so; geodesic: {neighbours} neighbours):

| cut | similarity | own | stitched | kept above chance | seconds |
|---|---|---|---|---|---|
{similarity}

Frequency of embedding in end-to-end training (Fashion-MNIST, {seeds} seeds, as in
[the end-to-end experiment](end_to_end.md); mean ± standard deviation over networks and over ordered pairs;
seconds per network):

| anchors embedded | own | stitched | seconds |
|---|---|---|---|
{frequency}

{findings}

This page and [its figures as JSON](anchor_study.json) are written by the command (preset {preset}, one core):

```
python -m relative_representations.anchor_study --published PUBLISHED --data-dir DATA --cache CACHE --out OUT
```
"""  # noqa: E501

OF_PUBLISHED = """{count} published Tiny-10 networks trained on CIFAR-10 (Csiszárik et al. 2021), up to bn6 or to the
features before the classifier (*final*), means over positions, 64 features each."""
OF_TRAINED = """{count} ResNets of 128 features, trained here on a few thousand images of CIFAR-10, cut at their last
features; this checks that the script runs."""


def page(record: dict[str, Any]) -> str:
    """Return the page of the results from the record, as it is read from JSON."""
    found, sizes, settings, count = Study(record), record["sizes"], record["settings"], len(record["networks"])

    def table(part: str) -> str:
        return "\n".join(found.row(part, cut, name) for cut in record["cuts"] for name in found.settings(part))

    return PAGE.format(
        setting=(OF_PUBLISHED if record["published"] else OF_TRAINED).format(count=count), train=sizes["train"],
        test=sizes["test"], pairs=count * (count - 1), chance=record["chance"], verdicts=study.verdicts(claims(record)),
        number=table("number"), selection=table("selection"), similarity=table("similarity"),
        kinds=settings["kinds"], similarities=settings["similarities"], neighbours=settings["neighbours"],
        seeds=len(record["frequency"][0]["f1"]),
        frequency="\n".join(_frequency_row(row) for row in record["frequency"]),
        findings="\n".join(f"- {finding}" for finding in findings(found)), preset=record["preset"],
    )  # fmt: skip


def _frequency_row(row: dict[str, Any]) -> str:
    f1 = np.array(row["f1"])
    other = f1[~np.eye(len(f1), dtype=bool)]
    return f"| {row['setting']} | {spread(np.diag(f1).tolist())} | {spread(other.tolist())} | {row['seconds']:.1f} |"


def findings(found: Study) -> list[str]:
    """Return sentences on number, selection, similarity and cost."""
    text, numbers, kinds = [], found.settings("number"), found.settings("selection")
    for cut in found.record["cuts"]:

        def stitched(part: str, name: str, cut: str = cut) -> float:
            estimate = found.stitched(part, cut, name)
            return float("-inf") if estimate is None else estimate.value

        steps = list(pairwise(numbers))
        gains = [stitched("number", more) - stitched("number", fewer) for fewer, more in steps]
        text.append(
            f"At {cut}, the stitched score changes by "
            + ", ".join(f"{gain:+.1f} ({a} to {b})" for gain, (a, b) in zip(gains, steps, strict=True))
            + "."
        )
        inside = {kind: stitched("selection", kind) for kind in kinds if kind != OUT_OF_DOMAIN}
        best, worst = max(inside, key=lambda kind: inside[kind]), min(inside, key=lambda kind: inside[kind])
        share = found.out_of_domain()[cut]
        text.append(
            f"At {cut}, in-domain selections reach {inside[worst]:.1f} ({worst}) to {inside[best]:.1f} ({best}). "
            f"Anchors of another domain keep {share.shown(2)} of the score above chance of random ones."
        )
        values = {name: stitched("similarity", name) for name in found.settings("similarity")}
        ranked = sorted((name for name in values if np.isfinite(values[name])), key=lambda name: -values[name])
        beaten = [name for name in found.settings("similarity") if found.more("similarity", cut, name, COSINE).low > 0]
        text.append(
            f"At {cut}, stitched, from best to worst: "
            + ", ".join(f"{name} {values[name]:.1f}" for name in ranked)
            + f". Above the cosine, paired by networks: {', '.join(beaten) if beaten else 'none'}."
        )
    absolute = found.frequency(ABSOLUTE)["seconds"]
    costs = ", ".join(
        f"{row['setting']} {row['seconds'] / absolute:.2f}"
        for row in found.record["frequency"]
        if row["setting"] != ABSOLUTE
    )
    text.append(f"Time of end-to-end training over that of absolute training: {costs}.")
    return text


def claims(record: dict[str, Any]) -> list[dict[str, str]]:
    """Return the rows of this experiment in the table of all experiments."""
    found, cuts, count = Study(record), record["cuts"], len(record["networks"])
    numbers, n = found.settings("number"), f"{count} networks, {count * (count - 1)} pairs, {len(cuts)} cuts"

    def row(
        claim: study.Claim, shown: Callable[[str], str], held: Callable[[str], Iterable[bool | None]]
    ) -> dict[str, str]:
        ours = "; ".join(f"{cut}: {shown(cut)}" for cut in cuts)
        return claim.row(ours, n, [part for cut in cuts for part in held(cut)], count)

    def gained(cut: str) -> kept.Estimate:
        return found.more("number", cut, numbers[-1], numbers[0])

    def agreed(name: str) -> bool:
        return {chosen(cut)[name].above(0) for cut in cuts} in ({True}, {False})

    def chosen(cut: str) -> dict[str, kept.Estimate]:
        return {name: found.more("selection", cut, name, KINDS[0]) for name in KINDS[1:]}

    def better(cut: str) -> dict[str, kept.Estimate]:
        names = [name for name in found.settings("similarity") if name != COSINE]
        defined = [name for name in names if found.f1("similarity", cut, name) is not None]
        return {name: found.more("similarity", cut, name, COSINE) for name in defined}

    def cosine(cut: str) -> kept.Estimate:
        f1 = found.f1("similarity", cut, COSINE)
        assert f1 is not None
        return found.pairs.kept(f1, record["chance"])

    seconds = {each["setting"]: each["seconds"] for each in record["frequency"]}
    outside = found.out_of_domain()
    rows = [
        row(NUMBER, lambda cut: f"{gained(cut).shown()} points of F1, {numbers[-1]} against {numbers[0]}",
            lambda cut: [gained(cut).above(0)]),
        row(DIVERSITY, lambda cut: ", ".join(f"{name} {each.shown()}" for name, each in chosen(cut).items()),
            lambda _: [any(agreed(name) for name in KINDS[1:]) or None]),
        row(OUTSIDE, lambda cut: f"{outside[cut].shown(2)} of the score above chance of random ones",
            lambda cut: [outside[cut].above(SUFFICIENT), outside[cut].above(HALF)]),
        row(COSINE_WORKS, lambda cut: f"keeps {cosine(cut).shown(2)}", lambda cut: [cosine(cut).above(HALF)]),
    ]  # fmt: skip
    geodesic = {cut: found.more("similarity", cut, "geodesic", "euclidean") for cut in cuts}
    above = [each.above(0) for each in geodesic.values()]
    ours = "; ".join(f"{cut}: {each.shown()} points of F1" for cut, each in geodesic.items())
    rows.append(GEODESICS.row(ours, n, [True if True in above else None if None in above else False], count))
    ours, trained = ", ".join(f"{name} {value}" for name, value in seconds.items()), len(record["frequency"][0]["f1"])
    slower = seconds["every 1 steps"] >= SLOWER * seconds[AT_START]
    rows.append(COST.row(f"seconds: {ours}", f"{trained} networks", [slower], trained))
    rows.append(row(
        OTHERS, lambda cut: ", ".join(f"{name} {each.shown()}" for name, each in better(cut).items()),
        lambda cut: [any(each.low > 0 for each in better(cut).values())],
    ))  # fmt: skip
    return rows


def _curve(record: dict[str, Any]) -> Figure:
    found = Study(record)
    series: dict[str, dict[float, tuple[float, float, float]]] = {}
    for cut in record["cuts"]:
        for number in found.settings("number"):
            stitched, own = found.stitched("number", cut, number), found.own("number", cut, number)
            assert stitched is not None
            series.setdefault(f"{cut}, own", {})[float(number)] = (own, own, own)
            series.setdefault(f"{cut}, stitched", {})[float(number)] = (stitched.value, stitched.low, stitched.high)
    figure = curves(series, axis="anchors", label="weighted F1, percent", title=f"Heads on {TASK} (20 coarse classes)")
    figure.axes[0].set_xscale("log")
    return figure


if __name__ == "__main__":
    main()
