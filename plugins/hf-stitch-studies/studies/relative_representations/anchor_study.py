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
from collections.abc import Mapping, Sequence
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
from relative_representations.experiment import spread
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

    def rises(self, cut: str) -> bool:
        """Whether the largest number of anchors exceeds the smallest when stitched."""
        numbers = self.settings("number")
        few, many = (self.stitched("number", cut, number) for number in (numbers[0], numbers[-1]))
        assert few is not None and many is not None
        return many.low > few.high

    def beaten(self, cut: str) -> list[str]:
        """Return the similarities whose stitched score is above that of the cosine."""
        cosine, found = self.stitched("similarity", cut, COSINE), []
        assert cosine is not None
        for name in self.settings("similarity"):
            other = self.stitched("similarity", cut, name)
            if other is not None and other.low > cosine.high:
                found.append(name)
        return found

    def frequency(self, setting: str) -> dict[str, Any]:
        """Return the scores of a frequency."""
        return next(row for row in self.record["frequency"] if row["setting"] == setting)

    def verdicts(self) -> dict[str, str]:
        """Return the verdicts by the rules of the page."""
        cuts = self.record["cuts"]
        rises, beaten = [self.rises(cut) for cut in cuts], [bool(self.beaten(cut)) for cut in cuts]
        shares = self.out_of_domain().values()
        seconds = [self.frequency(name)["seconds"] for name in ("every 1 steps", AT_START)]
        return {
            "number": _graded(all(rises), any(rises)),
            "out of domain": _graded(
                all(share.low >= SUFFICIENT for share in shares), all(share.value >= HALF for share in shares)
            ),
            "similarity": _graded(not any(beaten), not all(beaten)),
            "frequency": _graded(seconds[0] >= 1.1 * seconds[1], False),
        }


def _graded(whole: bool, part: bool) -> str:
    return "confirmed" if whole else "in part" if part else "refuted"


PAGE = """# Anchors: number, selection, similarity and frequency (after Moschella et al., ICLR 2023)

Setting: {setting} Heads for the 20 coarse classes of CIFAR-100 (not the official split), on which no encoder was
trained, on {train:,} images, scored on {test:,}; every network's encoder replaces that of every other network. Weighted
F1 in percent, over {pairs} ordered pairs; chance {chance}. Intervals are 95% over networks; the heads of every network
use anchors of their own. *Kept*: (F1 − chance) / (own − chance). Seconds of processor time per network to project, train
and score, on a busy core.

The rules, fixed before any figure of these networks was seen:

- *More anchors generally improve performance* (key findings): confirmed if the stitched score with the largest number
  is above that with the smallest (intervals apart) at every cut, in part at one.
- *Anchors may be out of domain* (section on anchor selection): confirmed if they keep at least {sufficient:.0%} of the
  stitched score above chance of random anchors (lower end of the interval) at every cut, in part from {half:.0%}.
- *The cosine works well, others are open* (limitations): confirmed if no other similarity, nor the centred cosine, has a
  higher stitched score (intervals apart) at any cut, in part if not at every cut.
- *Cost depends on the frequency of embedding* (limitations): confirmed if embedding at every step takes at least 1.1
  times the time of embedding only before training and after.

{verdicts}

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
    study, sizes, settings, count = Study(record), record["sizes"], record["settings"], len(record["networks"])

    def table(part: str) -> str:
        return "\n".join(study.row(part, cut, name) for cut in record["cuts"] for name in study.settings(part))

    return PAGE.format(
        setting=(OF_PUBLISHED if record["published"] else OF_TRAINED).format(count=count), train=sizes["train"],
        test=sizes["test"], pairs=count * (count - 1), chance=record["chance"], sufficient=SUFFICIENT, half=HALF,
        verdicts="\n".join(f"- **{name.capitalize()}: {verdict}.**" for name, verdict in study.verdicts().items()),
        number=table("number"), selection=table("selection"), similarity=table("similarity"),
        kinds=settings["kinds"], similarities=settings["similarities"], neighbours=settings["neighbours"],
        seeds=len(record["frequency"][0]["f1"]),
        frequency="\n".join(_frequency_row(row) for row in record["frequency"]),
        findings="\n".join(f"- {finding}" for finding in findings(study)), preset=record["preset"],
    )  # fmt: skip


def _frequency_row(row: dict[str, Any]) -> str:
    f1 = np.array(row["f1"])
    other = f1[~np.eye(len(f1), dtype=bool)]
    return f"| {row['setting']} | {spread(np.diag(f1).tolist())} | {spread(other.tolist())} | {row['seconds']:.1f} |"


def findings(study: Study) -> list[str]:
    """Return sentences on number, selection, similarity and cost."""
    text, numbers, kinds = [], study.settings("number"), study.settings("selection")
    for cut in study.record["cuts"]:

        def stitched(part: str, name: str, cut: str = cut) -> float:
            found = study.stitched(part, cut, name)
            return float("-inf") if found is None else found.value

        steps = list(pairwise(numbers))
        gains = [stitched("number", more) - stitched("number", fewer) for fewer, more in steps]
        text.append(
            f"At {cut}, the stitched score changes by "
            + ", ".join(f"{gain:+.1f} ({a} to {b})" for gain, (a, b) in zip(gains, steps, strict=True))
            + "."
        )
        inside = {kind: stitched("selection", kind) for kind in kinds if kind != OUT_OF_DOMAIN}
        best, worst = max(inside, key=lambda kind: inside[kind]), min(inside, key=lambda kind: inside[kind])
        share = study.out_of_domain()[cut]
        text.append(
            f"At {cut}, in-domain selections reach {inside[worst]:.1f} ({worst}) to {inside[best]:.1f} ({best}). "
            f"Anchors of another domain keep {share.shown(2)} of the score above chance of random ones."
        )
        values = {name: stitched("similarity", name) for name in study.settings("similarity")}
        ranked = sorted((name for name in values if np.isfinite(values[name])), key=lambda name: -values[name])
        beaten = study.beaten(cut)
        text.append(
            f"At {cut}, stitched, from best to worst: "
            + ", ".join(f"{name} {values[name]:.1f}" for name in ranked)
            + f". Above the cosine with intervals apart: {', '.join(beaten) if beaten else 'none'}."
        )
    absolute = study.frequency(ABSOLUTE)["seconds"]
    costs = ", ".join(
        f"{row['setting']} {row['seconds'] / absolute:.2f}"
        for row in study.record["frequency"]
        if row["setting"] != ABSOLUTE
    )
    text.append(f"Time of end-to-end training over that of absolute training: {costs}.")
    return text


def claims(record: dict[str, Any]) -> list[dict[str, str]]:
    """Return the rows of this experiment in the table of all experiments."""
    study = Study(record)
    verdicts, cuts, numbers = study.verdicts(), record["cuts"], study.settings("number")
    count = len(record["networks"])
    n = f"{count} networks, {count * (count - 1)} pairs, {len(cuts)} cuts"

    def spans(part: str, names: Sequence[str]) -> str:
        return "; ".join(
            f"{cut}: "
            + ", ".join(
                f"{name} {'undefined' if (found := study.stitched(part, cut, name)) is None else f'{found.value:.1f}'}"
                for name in names
            )
            for cut in cuts
        )

    shares = ", ".join(f"{cut} {share.shown(2)}" for cut, share in study.out_of_domain().items())
    seconds = {row["setting"]: row["seconds"] for row in record["frequency"]}
    rows = (
        (
            "key findings", "More anchors generally improve frozen encoders", "number", n,
            "stitched F1 by number of anchors: " + spans("number", (numbers[0], numbers[-1])),
        ),
        (
            "section 3, anchors", "Anchors may be out of domain", "out of domain", n,
            f"score above chance over that of in-domain anchors: {shares}",
        ),
        (
            "limitations", "The cosine works well; other similarity functions are open", "similarity", n,
            "stitched F1: " + spans("similarity", study.settings("similarity")),
        ),
        (
            "limitations", "Cost depends on how often anchors are embedded", "frequency",
            f"{len(record['frequency'][0]['f1'])} networks",
            "seconds: " + ", ".join(f"{name} {value}" for name, value in seconds.items()),
        ),
    )  # fmt: skip
    return [
        {
            "paper": "2", "place": place, "claim": claim, "published": "–", "ours": ours, "n": size,
            "verdict": f"stand-in {verdicts[name]}",
        }
        for place, claim, name, size, ours in rows
    ]  # fmt: skip


def _curve(record: dict[str, Any]) -> Figure:
    study = Study(record)
    series: dict[str, dict[float, tuple[float, float, float]]] = {}
    for cut in record["cuts"]:
        for number in study.settings("number"):
            stitched, own = study.stitched("number", cut, number), study.own("number", cut, number)
            assert stitched is not None
            series.setdefault(f"{cut}, own", {})[float(number)] = (own, own, own)
            series.setdefault(f"{cut}, stitched", {})[float(number)] = (stitched.value, stitched.low, stitched.high)
    figure = curves(series, axis="anchors", label="weighted F1, percent", title=f"Heads on {TASK} (20 coarse classes)")
    figure.axes[0].set_xscale("log")
    return figure


if __name__ == "__main__":
    main()
