"""Swap in encoders of other seeds (Moschella et al. 2023, section 3).

The encoders are published Tiny-10 networks that differ in their initialisation and batch order, up to one of three
cuts. Heads are trained on the vectors of one network, on CIFAR-10 and on two tasks that the networks were not trained
on. Then every other network replaces it. Untrained twins serve as a baseline for architecture and images alone.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import study
from relative_representations import exchange, image_encoders, swapping
from relative_representations.exchange import ABSOLUTE, RELATIVE, Exchange, Pairs, filled, span
from relative_representations.image_encoders import FINAL, Published
from relative_representations.swapping import CENTRED, INVERSE, TRANSLATIONS, TRUNCATED, Sizes

from hf_stitch import Samples
from hf_stitch.matchers import Matcher

SIZES = Sizes(4_000, 2_000, 300, 4)
NETWORKS, TWINS = 6, 3
"""Numbers of published and of untrained networks."""
TASKS = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100, 20 coarse classes", "fashion_mnist": "Fashion-MNIST"}
CUTS = ("bn5", "bn6", FINAL)
METHODS = (ABSOLUTE, RELATIVE, CENTRED, *TRANSLATIONS)
ENOUGH, LITTLE = 0.8, 0.2
"""Shares of the score above chance: minimum kept by relative heads, maximum kept by absolute heads. Fixed before any
figure was known."""


def swapped(
    encoders: Sequence[Published], cut: str, train: Samples, test: Samples, cache: Path,
    sizes: Sizes, translations: Mapping[str, Matcher] = TRANSLATIONS,
) -> pd.DataFrame:  # fmt: skip
    """Score all encoders under each other's heads, at one cut.

    The heads of every network use separate anchors, so that intervals over networks include the choice of anchors.
    """
    at_cut = [image_encoders.at(encoder, cut) for encoder in encoders]
    sides = {encoder.name: swapping.encoded(encoder, train, test, cache) for encoder in at_cut}
    anchors = swapping.choices(train, sides.values(), "random", sizes.anchors)
    return swapping.exchange(sides, anchors, sizes.epochs, int(train.num_classes or 0), translations)


def main() -> None:
    arguments = study.parser(__doc__, "data-dir", "published", "cache", required={"published"}).parse_args()
    trained = image_encoders.published(arguments.published, "tiny10", NETWORKS)
    untrained = image_encoders.untrained(TWINS, arguments.data_dir)
    scores = []
    for task in TASKS:
        train, test = SIZES.samples(task, arguments.data_dir)
        for cut in CUTS:
            frame = swapped(trained, cut, train, test, arguments.cache, SIZES)
            scores += exchange.scores(frame, task=task, cut=cut, encoders="trained")
            twins = swapped(untrained, cut, train, test, arguments.cache, SIZES, translations={})
            scores += exchange.scores(twins, task=task, cut=cut, encoders="untrained")
            print(f"{task}, {cut}: done", flush=True)
    record = {
        "sizes": SIZES, "networks": [network.name for network in trained],
        "untrained": [network.name for network in untrained],
        "cuts": list(CUTS), "scores": scores,
    }  # fmt: skip
    study.write_results("cross_seed", record, page, arguments.out)


class Cell(Exchange):
    """Scores of one task at one cut, with the scores of untrained twins."""

    twins: Exchange

    @property
    def trained_counts(self) -> bool:
        return self.stitched(RELATIVE).minus(self.twins.stitched(RELATIVE)).low > 0

    @property
    def claim_holds(self) -> bool:
        return self.holds(ENOUGH, LITTLE) and self.trained_counts


def cells(record: dict[str, Any]) -> dict[tuple[str, str], Cell]:
    trained, untrained = (Pairs(["network"] * len(record[name])) for name in ("networks", "untrained"))
    by_place = {}
    for task, cut in product(TASKS, record["cuts"]):
        by_place[task, cut] = cell = Cell.of(record, trained, task=task, cut=cut, encoders="trained")
        cell.twins = Exchange.of(record, untrained, task=task, cut=cut, encoders="untrained")
    return by_place


def parts(record: dict[str, Any]) -> list[bool | None]:
    """Return whether the claim holds in all cells, and whether relative heads beat absolute heads in any cell."""
    all_cells = list(cells(record).values())
    return [all(cell.claim_holds for cell in all_cells), any(cell.more().low > 0 for cell in all_cells)]


(SWAPPED,) = study.stated(__file__)
OF_PUBLISHED = study.text(__file__, "of_published")


def page(record: dict[str, Any]) -> str:
    sizes, grid, count = record["sizes"], cells(record), len(record["networks"])
    return filled(
        __file__, claims(record), "--published PUBLISHED",
        setting=OF_PUBLISHED.format(count=count, twins=len(record["untrained"])), train=sizes["train"],
        test=sizes["test"], anchors=sizes["anchors"], pairs=count * (count - 1),
        held=sum(cell.claim_holds for cell in grid.values()),
        cells=len(grid), summary=_summary(grid), methods=by_method(grid),
        findings="\n".join(f"- {finding}" for finding in findings(grid)),
    )  # fmt: skip


def _summary(grid: Mapping[tuple[str, str], Cell]) -> str:
    rows = [
        (
            TASKS[task], cut, f"{cell.chance:.1f}", f"{cell.own(RELATIVE):.1f}", cell.stitched(ABSOLUTE).shown(),
            cell.stitched(RELATIVE).shown(), cell.kept(RELATIVE).shown(2), cell.kept(ABSOLUTE).shown(2),
            f"{cell.twins.own(RELATIVE):.1f}", cell.twins.stitched(RELATIVE).shown(),
            "yes" if cell.claim_holds else "no",
        )
        for (task, cut), cell in grid.items()
    ]  # fmt: skip
    header = (
        "task", "cut", "chance", "own, relative", "absolute, stitched", "relative, stitched", "relative, kept",
        "absolute, kept", "untrained twins, relative: own", "stitched", "holds",
    )  # fmt: skip
    return study.markdown(header, rows)


def by_method(grid: Mapping[tuple[str, str], Exchange]) -> str:
    """Tabulate all defined methods, by task and cut."""
    rows = [
        (*place, method, *cell.row(method)) for place, cell in grid.items() for method in METHODS
        if cell.defined(method)
    ]  # fmt: skip
    return study.markdown(("task", "cut", "method", "own", "stitched", "kept above chance"), rows)


def misses(grid: Mapping[tuple[str, str], Exchange], failed: Mapping[str, Callable[[Any], bool]]) -> list[str]:
    """Return sentences on the cells where the claim fails, by reason."""
    text = []
    for reason, applies in failed.items():
        if where := [f"{task} at {cut}" for (task, cut), cell in grid.items() if applies(cell)]:
            text.append(f"The claim fails because {reason}: {', '.join(where)}.")
    return text


def gained(grid: Mapping[tuple[str, str], Exchange], method: str, base: str, suffix: str = "over the cells ") -> str:
    """Report the mean change of the stitched score from one method to another."""
    gains = [cell.stitched(method).value - cell.stitched(base).value for cell in grid.values()]
    return f"{np.mean(gains):+.1f} points on average {suffix}({span(gains, '+.1f')})."


def findings(grid: Mapping[tuple[str, str], Cell]) -> list[str]:
    """Return sentences on failures of the claim, on the cuts, and on translation."""
    best = [max(METHODS, key=lambda method: cell.stitched(method).value) for cell in grid.values()]
    wins = ", ".join(f"{name} in {best.count(name)}" for name in dict.fromkeys(best))
    return [
        *misses(grid, {
            "relative representations keep too little": lambda cell: cell.kept(RELATIVE).low < ENOUGH,
            "absolute representations keep too much": lambda cell: cell.kept(ABSOLUTE).high > LITTLE,
            "untrained twins do as well": lambda cell: not cell.trained_counts,
        }),
        f"Centring changes the stitched score by {gained(grid, CENTRED, RELATIVE)}",
        f"Ridge to the absolute head changes the stitched score by {gained(grid, 'ridge', RELATIVE)}",
        "Truncating small directions changes the stitched score of the inverse relative projection by "
        + gained(grid, TRUNCATED, INVERSE, ""),
        f"Methods with the highest stitched score: {wins} of {len(best)} cells.",
    ]  # fmt: skip


def claims(record: dict[str, Any]) -> list[dict[str, str]]:
    all_cells, count = cells(record).values(), len(record["networks"])
    ours = ", ".join(f"{name} {span(cell.kept(name).value for cell in all_cells)}" for name in (RELATIVE, ABSOLUTE))
    n = f"{count} networks, {count * (count - 1)} pairs, {len(all_cells)} cells"
    return [SWAPPED.row(f"kept above chance: {ours}", n, parts(record), count)]
