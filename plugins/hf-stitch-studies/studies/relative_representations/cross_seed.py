"""Swap in encoders of other seeds (Moschella et al. 2023, section 3).

The encoders are published Tiny-10 networks, which differ in their initialisation and in the order of batches, up to one
of three cuts. Heads are trained on the vectors of one network, on CIFAR-10 and on two tasks that the networks were not
trained on. Then every other network replaces it. Untrained twins show what architecture and images alone achieve.

    python -m relative_representations.cross_seed --published PUBLISHED --data-dir DATA --cache CACHE --out OUT

Without PUBLISHED, three small ResNets are trained, and cut at their last features only.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import study
from relative_representations import image_encoders, images, kept, swapping
from relative_representations.encoders import Encoder
from relative_representations.experiment import Claim, Preset
from relative_representations.image_encoders import FINAL
from relative_representations.kept import Estimate, Pairs
from relative_representations.swapping import ABSOLUTE, CENTRED, CHANCE, INVERSE, RELATIVE, TRUNCATED

import hf_stitch

PRESETS = {
    "small": Preset(4_000, 2_000, 300, 4, 128, 2e-3, 1, corpus=8_000, pretraining=6),
    "test": Preset(150, 60, 80, 1, 32, 1e-3, 1, corpus=150, pretraining=1),
    "paper": Preset(50_000, 10_000, 768, 10, 32, 1e-4, 3, corpus=50_000, pretraining=100),
}
NETWORKS = {"small": 6, "test": 2, "paper": 10}
TWINS = {"small": 3, "test": 2, "paper": 10}
"""Number of untrained networks."""
TASKS = {
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100, 20 coarse classes",
    "fashion_mnist": "Fashion-MNIST",
}
CUTS = ("bn5", "bn6", FINAL)
METHODS = (ABSOLUTE, RELATIVE, CENTRED, *swapping.TRANSLATIONS)
ENOUGH, LITTLE = 0.8, 0.2
"""In a cell (task and cut) the claim holds if the interval of the share above chance that relative representations keep
lies above ``ENOUGH``, that of absolute ones below ``LITTLE``, and the stitched F1 of relative ones above that of
untrained twins. Fixed before any figure was seen."""


def encoders_of(arguments: argparse.Namespace, preset: Preset) -> tuple[list[Encoder], list[Encoder]]:
    """Load the published networks and create untrained twins, or train three seeds of a ResNet."""
    corpus = images.read("cifar10", "train", preset.corpus, arguments.data_dir)
    count = TWINS[arguments.preset]
    if arguments.published:
        networks = image_encoders.published(arguments.published, "tiny10", NETWORKS[arguments.preset])
        some = corpus.take(min(len(corpus), 2_000))
        return [*networks], [image_encoders.untrained("tiny10", seed, some) for seed in range(count)]

    def trained(epochs: int, seeds: int) -> list[Encoder]:
        recipes = (image_encoders.Recipe("resnet", epochs, seed) for seed in range(seeds))
        return [image_encoders.local(recipe, corpus, arguments.cache, f"seed {recipe.seed}") for recipe in recipes]

    return trained(preset.pretraining, 3), trained(0, count)


def cuts_of(encoders: Sequence[Encoder]) -> tuple[str, ...]:
    """Return the cuts of encoders: networks that are trained here have the last one only."""
    return CUTS if isinstance(encoders[0], image_encoders.Published) else (FINAL,)


def swapped(
    encoders: Sequence[Encoder], cut: str, train: hf_stitch.Samples, test: hf_stitch.Samples,
    arguments: argparse.Namespace, preset: Preset, *, translate: bool = True,
) -> pd.DataFrame:  # fmt: skip
    """Score all encoders under the heads of each other, at one cut.

    The heads of every network use anchors of their own, so that intervals over networks include the choice of anchors.
    """
    at_cut = [image_encoders.at(encoder, cut) for encoder in encoders]
    sides = {each.name: swapping.encoded(each, train, test, arguments.cache) for each in at_cut}
    draws = swapping.choices(train, sides.values(), "random", vary(preset, len(sides)))
    found = []
    for place, decoder in enumerate(sides):
        anchors = draws[place * preset.seeds : (place + 1) * preset.seeds]
        options: dict[str, Any] = {} if translate else {"translations": {}}
        found.append(
            swapping.exchange(sides, anchors, preset, int(train.num_classes or 0), decoders=[decoder], **options)
        )
    return pd.concat(found, ignore_index=True)


def vary(preset: Preset, networks: int) -> Preset:
    """Return the preset with draws of anchors for every network."""
    return Preset(**{**vars(preset), "seeds": preset.seeds * networks})


def main() -> None:
    """Run the experiment from the command line."""
    arguments = study.parser(__doc__, "data-dir", "published", "cache").parse_args()
    preset = PRESETS[arguments.preset]
    trained, untrained = encoders_of(arguments, preset)
    scores, pictures = [], {}
    for task in TASKS:
        train, test = (
            images.read(task, split, n, arguments.data_dir)
            for split, n in (("train", preset.train), ("test", preset.test))
        )
        for cut in cuts_of(trained):
            found = swapped(trained, cut, train, test, arguments, preset)
            scores += kept.scores(found, task=task, cut=cut, encoders="trained")
            twins = swapped(untrained, cut, train, test, arguments, preset, translate=False)
            scores += kept.scores(twins, task=task, cut=cut, encoders="untrained")
            pictures[f"cross_seed_{task}_{cut}"] = swapping.matrices(found, (RELATIVE,), f"{task}, {cut}")[RELATIVE]
            print(f"{task}, {cut}: done", flush=True)
    record = {
        "preset": arguments.preset, "sizes": preset, "published": bool(arguments.published),
        "networks": [each.name for each in trained], "untrained": [each.name for each in untrained],
        "cuts": list(cuts_of(trained)), "scores": scores,
    }  # fmt: skip
    study.leave("cross_seed", record, page, pictures, arguments.out)


class Cell:
    """The scores of one task at one cut.

    Args:
        record: The record.
        task: The task.
        cut: The cut.
    """

    def __init__(self, record: dict[str, Any], task: str, cut: str) -> None:
        self._record, self._place = record, {"task": task, "cut": cut}
        self._pairs = {
            "trained": Pairs(["network"] * len(record["networks"])),
            "untrained": Pairs(["network"] * len(record["untrained"])),
        }
        self.chance = float(np.nanmean(self.f1(CHANCE)))

    def f1(self, method: str, encoders: str = "trained") -> kept.Array:
        """Return F1 by decoder and encoder."""
        return kept.matrix(self._record, method, encoders=encoders, **self._place)

    def ceiling(self, method: str, encoders: str = "trained") -> float:
        """Return the mean F1 of heads with their own encoders."""
        return float(np.diag(self.f1(method, encoders)).mean())

    def stitched(self, method: str, encoders: str = "trained") -> Estimate:
        """Estimate the mean F1 over pairs."""
        return self._pairs[encoders].mean(self.f1(method, encoders))

    def kept(self, method: str) -> Estimate:
        """Estimate the share of the score above chance that is kept."""
        return self._pairs["trained"].kept(self.f1(method), self.chance)

    @property
    def better(self) -> bool:
        """Whether relative representations exceed absolute ones, paired by networks."""
        return self._pairs["trained"].mean(self.f1(RELATIVE) - self.f1(ABSOLUTE)).low > 0

    @property
    def trained_counts(self) -> bool:
        """Whether trained networks exceed untrained ones."""
        return self.stitched(RELATIVE).minus(self.stitched(RELATIVE, "untrained")).low > 0

    @property
    def holds(self) -> bool:
        """Whether the claim holds by the rule of the page."""
        shares = self.kept(RELATIVE).low >= ENOUGH and self.kept(ABSOLUTE).high <= LITTLE
        return shares and self.trained_counts


def cells(record: dict[str, Any]) -> dict[tuple[str, str], Cell]:
    """Return the cells of a record by task and cut."""
    return {(task, cut): Cell(record, task, cut) for task in TASKS for cut in record["cuts"]}


def parts(record: dict[str, Any]) -> list[bool | None]:
    """Return whether the claim holds in all cells, and whether relative heads are above absolute ones in any."""
    found = list(cells(record).values())
    return [all(cell.holds for cell in found), any(cell.better for cell in found)]


SWAPPED = Claim(
    "section 3", "Heads on relative representations accept encoders of other seeds, absolute heads do not", "–",
    f"in each cell (task and cut), relative heads keep {ENOUGH:.0%} or more of the score above chance and absolute "
    "ones at "
    f"most {LITTLE:.0%}, by the interval, and the stitched score is above that of untrained twins (interval of the "
    "difference); in part: in some cells, or relative heads are above absolute ones, paired by networks",
)  # fmt: skip

PAGE = """# Swap in encoders of other seeds (after Moschella et al., ICLR 2023, section 3)

**What to do**: use relative heads to change the encoder for another seed on the task it was trained on. On other tasks,
they keep .59 to .74 of the score above chance; a map fitted on the same anchors (least squares, ridge) keeps more.

{verdicts}

Setting: {setting} Heads (LayerNorm → (Linear 256 → SiLU → LayerNorm) × 2 → Linear) are trained on {train:,} images and
scored on {test:,}, with {anchors} random anchors of the training images; the heads of every network use anchors of their
own. Weighted F1 in percent over all {pairs} ordered pairs; the split of CIFAR-100 is not the official one. *Own*: a head
with the encoder that it was trained on. *Kept*: (F1 − chance) / (own − chance). *Chance* predicts by the frequency of
classes. Intervals are 95% over networks (both networks of a pair are drawn), not over images.

The rule was fixed before any figure was seen, with intervals that do not overlap in place of differences until this
version. It holds in {held} of {cells} cells.

| task | cut | chance | own, relative | absolute, stitched | relative, stitched | relative, kept | absolute, kept | untrained twins, relative: own | stitched | holds |
|---|---|---|---|---|---|---|---|---|---|---|
{summary}

{findings}

All methods: F1 with the own encoder, stitched, and the share above chance that is kept. Maps (inverse relative to
Procrustes) are fitted on the same anchors and lead to the absolute head; *inverse relative* truncates only rounding
errors (`rcond=1e-7`), *truncated* directions below a tenth of the largest (`rcond=.1`).

| task | cut | method | own | stitched | kept above chance |
|---|---|---|---|---|---|
{methods}

This page and [its figures as JSON](cross_seed.json) are written by the command (preset {preset}, one core):

```
python -m relative_representations.cross_seed --published PUBLISHED --data-dir DATA --cache CACHE --out OUT
```
"""  # noqa: E501

OF_PUBLISHED = """the encoders are {count} published Tiny-10 networks (Csiszárik et al. 2021; CIFAR-10, accuracy .86 to
.87 as published), which differ in initialisation and order of batches, not the autoencoders and pretrained networks of
the paper. The vector of an image is the mean over the positions of bn5 (32 features), bn6 (64), or of the features
before the classifier (*final*, 64), which have collapsed onto the classes of CIFAR-10. {twins} untrained networks, with
the statistics of images in BatchNorm, serve as a baseline."""
OF_TRAINED = """the encoders are {count} ResNets of 128 features, trained here on a few thousand images of CIFAR-10, cut
at their last features; this checks that the script runs. {twins} untrained networks serve as a baseline."""


def page(record: dict[str, Any]) -> str:
    """Return the page of the results from the record, as it is read from JSON."""
    sizes, found, count = record["sizes"], cells(record), len(record["networks"])
    setting = OF_PUBLISHED if record["published"] else OF_TRAINED
    return PAGE.format(
        setting=setting.format(count=count, twins=len(record["untrained"])), train=sizes["train"], test=sizes["test"],
        anchors=sizes["anchors"], pairs=count * (count - 1), preset=record["preset"],
        verdicts=study.verdicts(claims(record)), held=sum(cell.holds for cell in found.values()), cells=len(found),
        summary="\n".join(_row(task, cut, cell) for (task, cut), cell in found.items()),
        findings="\n".join(f"- {finding}" for finding in findings(found)),
        methods="\n".join(
            f"| {task} | {cut} | {method} | {cell.ceiling(method):.1f} | {cell.stitched(method).shown()} | "
            f"{cell.kept(method).shown(2)} |"
            for (task, cut), cell in found.items() for method in METHODS
        ),
    )  # fmt: skip


def _row(task: str, cut: str, cell: Cell) -> str:
    figures = [
        TASKS[task], cut, f"{cell.chance:.1f}", f"{cell.ceiling(RELATIVE):.1f}", cell.stitched(ABSOLUTE).shown(),
        cell.stitched(RELATIVE).shown(), cell.kept(RELATIVE).shown(2), cell.kept(ABSOLUTE).shown(2),
        f"{cell.ceiling(RELATIVE, 'untrained'):.1f}", cell.stitched(RELATIVE, "untrained").shown(),
        "yes" if cell.holds else "no",
    ]  # fmt: skip
    return f"| {' | '.join(figures)} |"


def findings(found: dict[tuple[str, str], Cell]) -> list[str]:
    """Return sentences on what misses, on the cuts, and on translation."""
    text = []
    reasons = {
        "relative representations keep too little": lambda cell: cell.kept(RELATIVE).low < ENOUGH,
        "absolute ones keep too much": lambda cell: cell.kept(ABSOLUTE).high > LITTLE,
        "untrained twins do as well": lambda cell: not cell.trained_counts,
    }
    for reason, applies in reasons.items():
        where = [f"{task} at {cut}" for (task, cut), cell in found.items() if applies(cell)]
        if where:
            text.append(f"The claim misses because {reason}: {', '.join(where)}.")
    for method, name in ((CENTRED, "Centring"), ("ridge", "Ridge to the absolute head")):
        gains = [cell.stitched(method).value - cell.stitched(RELATIVE).value for cell in found.values()]
        text.append(
            f"{name} changes the stitched score by {np.mean(gains):+.1f} points on average over the cells "
            f"({min(gains):+.1f} to {max(gains):+.1f})."
        )
    gains = [cell.stitched(TRUNCATED).value - cell.stitched(INVERSE).value for cell in found.values()]
    text.append(
        "Truncating small directions changes the stitched score of the inverse relative projection by "
        f"{np.mean(gains):+.1f} points on average ({min(gains):+.1f} to {max(gains):+.1f})."
    )
    best = [max(METHODS, key=lambda method: cell.stitched(method).value) for cell in found.values()]
    text.append(
        "The highest stitched score is that of "
        + ", ".join(f"{name} in {best.count(name)}" for name in dict.fromkeys(best))
        + f" of {len(best)} cells."
    )
    return text


def claims(record: dict[str, Any]) -> list[dict[str, str]]:
    """Return the rows of this experiment in the table of all experiments."""
    found, count = cells(record).values(), len(record["networks"])
    spans = [[cell.kept(method).value for cell in found] for method in (RELATIVE, ABSOLUTE)]
    ours = ", ".join(
        f"{method} {min(s):.2f} to {max(s):.2f}" for method, s in zip((RELATIVE, ABSOLUTE), spans, strict=True)
    )
    n = f"{count} networks, {count * (count - 1)} pairs, {len(found)} cells"
    return [SWAPPED.row(f"kept above chance: {ours}", n, parts(record), count)]


if __name__ == "__main__":
    main()
