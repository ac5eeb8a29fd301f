"""Are angles between encodings preserved across seeds and architectures (Moschella et al. 2023, section 3)?

For pairs of networks, the script compares the angles between pairs of samples under both, measured at the origin and at
the mean: test images under published networks at three cuts, test questions under language models trained here, and
nodes of citation graphs under graph networks. Untrained networks and randomly paired angles serve as baselines.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any

import numpy as np
import study
import torch
from dr_frankenstein import images
from matplotlib.figure import Figure
from relative_representations import cross_seed, graph_stitching, image_encoders, text_encoders, texts
from relative_representations.kept import ABSOLUTE, Array, Estimate, Pairs, filled, span
from torch import Tensor

from hf_stitch import registries
from hf_stitch.metrics import relative_cosine

SAMPLES, TWINS, TEXT_SEEDS = 300, 5, 2
"""Numbers of samples, of untrained networks on images, and of language models of each family."""
CORPUS, PRETRAINING = 3_000, 2
"""Number of texts, and of epochs, of language models."""
CENTRES = ("origin", "mean")
FIGURES = {"correlation": 3, "difference": 1, "difference, paired at random": 1, "relative cosine": 3}
"""Measure -> number of digits in the table."""
SEEDS, ARCHITECTURES = KINDS = ("other seeds", "other architectures")
MODALITIES = ("images", "text", "graphs")

Vectors = Mapping[str, Sequence[Tensor]]
"""Architecture -> vectors of the same samples ``(n, d)`` under each of its networks."""


@dataclass(frozen=True)
class Cell:
    """Vectors of some samples at one cut of trained and of untrained networks."""

    modality: str
    data: str
    cut: str
    trained: Vectors
    untrained: Vectors


def of_images(arguments: argparse.Namespace) -> Iterator[Cell]:
    """Encode test images by networks trained on CIFAR-10, and by untrained ones."""
    trained = {
        name: image_encoders.published(arguments.published, name, number)
        for name, number in zip(image_encoders.PUBLISHED, (10, 2), strict=True)
    }
    untrained = image_encoders.untrained(TWINS, arguments.data_dir)
    for data, title in cross_seed.TASKS.items():
        test = images.raw(data, "test", SAMPLES, arguments.data_dir)
        for cut in cross_seed.CUTS:
            found = (
                {name: [image_encoders.at(each, cut).vectors(test, arguments.cache) for each in group]}
                for name, group in [*trained.items(), ("untrained", untrained)]
            )
            *own, twins = found
            yield Cell("images", title, cut, {name: some for each in own for name, some in each.items()}, twins)


def of_text(arguments: argparse.Namespace) -> Iterator[Cell]:
    """Encode test questions by small language models, trained on words and untrained."""
    corpus = texts.english(CORPUS, arguments.data_dir)
    test = texts.trec("test", SAMPLES, arguments.data_dir)

    def encoded(epochs: int) -> Vectors:
        found: dict[str, list[Tensor]] = {}
        for place, (family, recipe) in enumerate(text_encoders.FAMILIES.items()):
            for seed in range(TEXT_SEEDS):  # others in every family: equal weights would agree
                of = replace(recipe, epochs=epochs, seed=10 * place + seed)
                encoder = text_encoders.local(of, corpus, arguments.cache)
                found.setdefault(family, []).append(encoder.vectors(test, arguments.cache))
        return found

    yield Cell("text", "TREC", "mean over tokens", encoded(PRETRAINING), encoded(0))


@torch.no_grad()
def of_graphs(arguments: argparse.Namespace) -> Iterator[Cell]:
    """Encode test nodes by the absolute networks of ``graph_stitching.py``, and by untrained ones."""
    for name, title in graph_stitching.DATA.items():
        task = graph_stitching.task_of(name, arguments.data_dir)

        def embedded(network: Any, task: graph_stitching.Task = task) -> Tensor:
            codes: Tensor = network.eval().embed(task.graph.x, task.graph.edge_index)
            return codes[task.test[:SAMPLES]]

        trained: dict[str, list[Tensor]] = {}
        untrained: dict[str, list[Tensor]] = {}
        for architecture, seed in product(graph_stitching.ARCHITECTURES, range(graph_stitching.SEEDS)):
            with torch.enable_grad():
                whole = graph_stitching.trained(name, architecture, ABSOLUTE, seed, task, arguments.cache)
            trained.setdefault(architecture, []).append(embedded(whole.network))
            fresh = graph_stitching.network_of(architecture, 1_000 + seed, task)
            untrained.setdefault(architecture, []).append(embedded(fresh))
        yield Cell("graphs", title, "last convolution", trained, untrained)


def main() -> None:
    arguments = study.parser(__doc__, "data-dir", "published", "cache", required={"data-dir", "published"}).parse_args()
    networks: dict[str, Any] = {}
    scores: list[dict[str, Any]] = []
    for cell in (cell for of in (of_images, of_text, of_graphs) for cell in of(arguments)):
        both = {"trained": cell.trained, "untrained": cell.untrained}
        networks[cell.modality] = {
            kind: [name for name, group in some.items() for _ in group] for kind, some in both.items()
        }
        for (kind, some), centre in product(both.items(), CENTRES):
            found = likenesses([vectors for group in some.values() for vectors in group], centre == "mean")
            place = {"modality": cell.modality, "data": cell.data, "cut": cell.cut, "networks": kind, "centre": centre}
            scores += [{**place, "measure": name, "values": rows} for name, rows in found.items()]
        print(f"{cell.data}, {cell.cut}: done", flush=True)
    record = {"samples": SAMPLES, "networks": networks, "scores": scores}
    study.leave("angles", record, page, arguments.out, pictures(record))


def likenesses(vectors: Sequence[Tensor], centred: bool) -> dict[str, list[list[float]]]:
    """Compare the angles under all pairs of encoders, at the origin or at the mean."""
    of = [angles(rows - rows.mean(0) if centred else rows) for rows in vectors]
    order = np.random.default_rng(0).permutation(len(of[0]))
    found = {name: np.eye(len(of)) for name in FIGURES}
    for i, j in combinations(range(len(of)), 2):
        one, other = of[i], of[j]
        values = (
            np.corrcoef(one, other)[0, 1], np.abs(one - other).mean(), np.abs(one - other[order]).mean(),
            relative_cosine(vectors[i], vectors[j], center=centred).item(),
        )  # fmt: skip
        for name, value in zip(FIGURES, values, strict=True):
            found[name][i, j] = found[name][j, i] = value
    return {name: values.round(FIGURES[name]).tolist() for name, values in found.items()}


def angles(rows: Tensor) -> Array:
    """Return the angles between all pairs of different rows in degrees ``(n · (n - 1) / 2,)``."""
    first, second = torch.triu_indices(len(rows), len(rows), 1)
    return registries.similarities.build("angular")(rows, rows)[first, second].rad2deg().double().numpy()


class Measured:
    """The comparisons of one modality."""

    def __init__(self, record: dict[str, Any], modality: str) -> None:
        of = record["networks"][modality]
        self.trained = {SEEDS: Pairs(of["trained"]), ARCHITECTURES: Pairs(of["trained"], between=True)}
        self.untrained = {SEEDS: Pairs(of["untrained"])}
        if len(set(of["untrained"])) > 1:
            self.untrained[ARCHITECTURES] = Pairs(of["untrained"], between=True)
        self.groups, self.count = of["trained"], len(of["untrained"])
        rows = [row for row in record["scores"] if row["modality"] == modality]
        self.cells = list(dict.fromkeys((row["data"], row["cut"]) for row in rows))
        self._values = {
            (row["data"], row["cut"], row["networks"], row["centre"], row["measure"]): np.array(row["values"])
            for row in rows
        }

    def of(self, kind: str, cell: tuple[str, str], measure: str, centre: str, trained: bool = True) -> Estimate:
        """Estimate the mean of a measure over pairs; untrained networks may be of one architecture only."""
        pairs = self.trained[kind] if trained else self.untrained.get(kind, self.untrained[SEEDS])
        return pairs.mean(self._values[*cell, "trained" if trained else "untrained", centre, measure])

    def more(self, kind: str, cell: tuple[str, str], centre: str = "origin") -> Estimate:
        """Estimate by how much angles correlate more than under untrained networks."""
        own, less = (self.of(kind, cell, "correlation", centre, trained) for trained in (True, False))
        return own.minus(less)

    def preserved(self, kind: str, cell: tuple[str, str]) -> bool | None:
        """Return whether angles are preserved by the rule of the page."""
        random, own = (self._values[*cell, "trained", "origin", name] for name in list(FIGURES)[2:0:-1])
        return study.every([self.more(kind, cell).above(0), self.trained[kind].mean(random - own).above(0)])


CLAIMS = dict(zip(MODALITIES, study.stated(__file__), strict=True))
SECTION = study.text(__file__, "section")


def page(record: dict[str, Any]) -> str:
    sections = []
    for modality in MODALITIES:
        found = Measured(record, modality)
        numbers = ", ".join(f"{found.groups.count(name)} {name}" for name in dict.fromkeys(found.groups))
        counts = ", ".join(f"{int(pairs.mask.sum()) // 2} pairs of {kind}" for kind, pairs in found.trained.items())
        sections.append(
            SECTION.format(
                title=modality.capitalize(), setting=study.text(__file__, modality),
                pairs=f"Networks: {numbers} ({counts}); {found.count} untrained ones", table=_table(found),
                findings="\n".join(f"- {finding}" for finding in findings(found)),
            )
        )  # fmt: skip
    sections, options = "\n\n".join(sections), "--published PUBLISHED"
    return filled(__file__, claims(record), options, samples=record["samples"], sections=sections)


def _table(found: Measured) -> str:
    kinds = [(kind, True) for kind in found.trained] + [(kind, False) for kind in found.untrained]
    rows = []
    for cell, (kind, trained) in product(found.cells, kinds):
        figures = []
        for centre, (measure, digits) in product(CENTRES, FIGURES.items()):
            estimate = found.of(kind, cell, measure, centre, trained)
            figures.append(estimate.shown(2) if measure == "correlation" else f"{estimate.value:.{digits}f}")
        more, held = "–", "–"
        if trained:
            more = found.more(kind, cell).shown(2)
            held = {True: "yes", False: "no", None: "undecided"}[found.preserved(kind, cell)]
        rows.append((*cell, kind if trained else f"{kind}, untrained", figures[0], more, *figures[1:], held))
    measures = ("difference", "paired at random", "relative cosine")
    header = ("data", "cut", "pairs", "correlation, origin", "more than untrained", *measures, "correlation, mean")
    return study.markdown((*header, *measures, "preserved"), rows)


def findings(found: Measured) -> Iterator[str]:
    """Yield sentences on the spans of correlations and on what the uncentred relative cosine hides."""
    for kind in KINDS:
        values = [found.of(kind, cell, "correlation", "origin").value for cell in found.cells]
        counts = [sum(found.more(kind, cell, centre).low > 0 for cell in found.cells) for centre in CENTRES]
        yield (
            f"{kind.capitalize()}: angles at the origin correlate by {span(values)}, and more than under untrained "
            f"networks (interval of the difference) in {counts[0]} of {len(values)} at the origin, and in {counts[1]} "
            "about the mean."
        )
    spans = [
        span((found.of(SEEDS, cell, "relative cosine", centre, trained=False).value for cell in found.cells), ".3f")
        for centre in CENTRES
    ]
    yield f"Untrained networks have a relative cosine of {spans[0]} about the origin and of {spans[1]} about the mean."


def claims(record: dict[str, Any]) -> list[dict[str, str]]:
    rows = []
    for modality, kind in product(MODALITIES, KINDS):
        found = Measured(record, modality)
        own, less = (
            span(found.of(kind, cell, "correlation", "origin", trained).value for cell in found.cells)
            for trained in (True, False)
        )
        held = [found.preserved(kind, cell) for cell in found.cells]
        cells = f"{len(held)} cell{'s' * (len(held) > 1)}"
        n = f"{int(found.trained[kind].mask.sum()) // 2} pairs of networks, {cells}"
        ours = f"correlation {own}, untrained {less}; preserved in {held.count(True)} of {cells}"
        rows.append(CLAIMS[modality].of(modality, kind).row(ours, n, held, len(found.groups)))
    return rows


def pictures(record: dict[str, Any]) -> dict[str, Figure]:
    found = [Measured(record, modality) for modality in MODALITIES]
    names = [", ".join(cell) for each in found for cell in each.cells]
    figure = Figure(figsize=(10.0, 0.45 * len(names) + 1.6), layout="constrained")
    kinds = {SEEDS: (SEEDS, True), ARCHITECTURES: (ARCHITECTURES, True), f"{SEEDS}, untrained": (SEEDS, False)}
    for axes, centre in zip(figure.subplots(1, len(CENTRES), sharey=True), CENTRES, strict=True):
        for shift, (label, (kind, trained)) in enumerate(kinds.items()):
            estimates = [each.of(kind, cell, "correlation", centre, trained) for each in found for cell in each.cells]
            values = np.array([[each.value, each.low, each.high] for each in estimates])
            places, ends = [-row - 0.2 * shift for row in range(len(names))], np.abs(values[:, 1:] - values[:, :1]).T
            axes.errorbar(values[:, 0], places, xerr=ends, fmt="o", markersize=4, label=label)
        axes.set_yticks([-row - 0.2 for row in range(len(names))], names)
        axes.set(title=f"angles at the {centre}", xlabel="correlation under two networks")
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    return {"angles": figure}
