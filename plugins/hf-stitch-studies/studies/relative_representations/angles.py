"""Are angles between encodings preserved across seeds and architectures (Moschella et al. 2023, section 3)?

The script compares the angles between pairs of samples under pairs of networks, at the origin and at the mean: test
images under published networks at three cuts, test questions under language models trained here, and nodes of citation
graphs under graph networks. Untrained networks and randomly paired angles serve as baselines.
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
from relative_representations.exchange import ABSOLUTE, Array, Estimate, Pairs, filled, span
from torch import Tensor

from hf_stitch import registries
from hf_stitch.metrics import relative_cosine

SAMPLES, TWINS, TEXT_SEEDS = 300, 5, 2
"""Numbers of samples, untrained networks on images, and language models per family."""
CORPUS, PRETRAINING = 3_000, 2
"""Numbers of texts and epochs of language models."""
CENTRES = ("origin", "mean")
FIGURES = {"correlation": 3, "difference": 1, "difference, paired at random": 1, "relative cosine": 3}
"""Measure -> digits in the table."""
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
    """Encode test images with networks trained on CIFAR-10, and with untrained networks."""
    trained = {
        name: image_encoders.published(arguments.published, name, number)
        for name, number in zip(image_encoders.PUBLISHED, (10, 2), strict=True)
    }
    untrained = image_encoders.untrained(TWINS, arguments.data_dir)
    for data, title in cross_seed.TASKS.items():
        test = images.raw(data, "test", SAMPLES, arguments.data_dir)
        for cut in cross_seed.CUTS:
            encoded = (
                {name: [image_encoders.at(encoder, cut).vectors(test, arguments.cache) for encoder in group]}
                for name, group in [*trained.items(), ("untrained", untrained)]
            )
            *published, twins = encoded
            yield Cell("images", title, cut, {name: some for group in published for name, some in group.items()}, twins)


def of_text(arguments: argparse.Namespace) -> Iterator[Cell]:
    """Encode test questions with small language models, trained on words and untrained."""
    corpus = texts.english(CORPUS, arguments.data_dir)
    test = texts.trec("test", SAMPLES, arguments.data_dir)

    def encoded(epochs: int) -> Vectors:
        vectors: dict[str, list[Tensor]] = {}
        for place, (family, recipe) in enumerate(text_encoders.FAMILIES.items()):
            for seed in range(TEXT_SEEDS):  # different seeds in every family, because equal weights would agree
                of = replace(recipe, epochs=epochs, seed=10 * place + seed)
                encoder = text_encoders.local(of, corpus, arguments.cache)
                vectors.setdefault(family, []).append(encoder.vectors(test, arguments.cache))
        return vectors

    yield Cell("text", "TREC", "mean over tokens", encoded(PRETRAINING), encoded(0))


@torch.no_grad()
def of_graphs(arguments: argparse.Namespace) -> Iterator[Cell]:
    """Encode test nodes with the absolute networks of ``graph_stitching.py``, and with untrained networks."""
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
            by_measure = likenesses([vectors for group in some.values() for vectors in group], centre == "mean")
            place = {"modality": cell.modality, "data": cell.data, "cut": cell.cut, "networks": kind, "centre": centre}
            scores += [{**place, "measure": name, "values": rows} for name, rows in by_measure.items()]
        print(f"{cell.data}, {cell.cut}: done", flush=True)
    record = {"samples": SAMPLES, "networks": networks, "scores": scores}
    study.write_results("angles", record, page, arguments.out, pictures(record))


def likenesses(vectors: Sequence[Tensor], centred: bool) -> dict[str, list[list[float]]]:
    """Compare the angles under all pairs of encoders, at the origin or at the mean."""
    of = [angles(rows - rows.mean(0) if centred else rows) for rows in vectors]
    order = np.random.default_rng(0).permutation(len(of[0]))
    values_of = {name: np.eye(len(of)) for name in FIGURES}
    for i, j in combinations(range(len(of)), 2):
        first, second = of[i], of[j]
        values = (
            np.corrcoef(first, second)[0, 1], np.abs(first - second).mean(), np.abs(first - second[order]).mean(),
            relative_cosine(vectors[i], vectors[j], center=centred).item(),
        )  # fmt: skip
        for name, value in zip(FIGURES, values, strict=True):
            values_of[name][i, j] = values_of[name][j, i] = value
    return {name: values.round(FIGURES[name]).tolist() for name, values in values_of.items()}


def angles(rows: Tensor) -> Array:
    """Return the angles between all pairs of different rows in degrees ``(n · (n - 1) / 2,)``."""
    first, second = torch.triu_indices(len(rows), len(rows), 1)
    return registries.similarities.build("angular")(rows, rows)[first, second].rad2deg().double().numpy()


class Measured:
    """Comparisons of one modality."""

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
        """Estimate the mean of a measure over pairs; untrained networks may share one architecture."""
        pairs = self.trained[kind] if trained else self.untrained.get(kind, self.untrained[SEEDS])
        return pairs.mean(self._values[*cell, "trained" if trained else "untrained", centre, measure])

    def more(self, kind: str, cell: tuple[str, str], centre: str = "origin") -> Estimate:
        """Estimate the gain in correlation of angles over untrained networks."""
        correlation, less = (self.of(kind, cell, "correlation", centre, trained) for trained in (True, False))
        return correlation.minus(less)

    def preserved(self, kind: str, cell: tuple[str, str]) -> bool | None:
        """Return whether angles are preserved by the rule of the page."""
        random, paired = (self._values[*cell, "trained", "origin", name] for name in list(FIGURES)[2:0:-1])
        return study.every([self.more(kind, cell).above(0), self.trained[kind].mean(random - paired).above(0)])


CLAIMS = dict(zip(MODALITIES, study.stated(__file__), strict=True))
SECTION = study.text(__file__, "section")


def page(record: dict[str, Any]) -> str:
    sections = []
    for modality in MODALITIES:
        measured = Measured(record, modality)
        numbers = ", ".join(f"{measured.groups.count(name)} {name}" for name in dict.fromkeys(measured.groups))
        counts = ", ".join(f"{int(pairs.mask.sum()) // 2} pairs of {kind}" for kind, pairs in measured.trained.items())
        sections.append(
            SECTION.format(
                title=modality.capitalize(), setting=study.text(__file__, modality),
                pairs=f"Networks: {numbers} ({counts}); {measured.count} untrained networks", table=_table(measured),
                findings="\n".join(f"- {finding}" for finding in findings(measured)),
            )
        )  # fmt: skip
    sections, options = "\n\n".join(sections), "--published PUBLISHED"
    return filled(__file__, claims(record), options, samples=record["samples"], sections=sections)


def _table(measured: Measured) -> str:
    kinds = [(kind, True) for kind in measured.trained] + [(kind, False) for kind in measured.untrained]
    rows = []
    for cell, (kind, trained) in product(measured.cells, kinds):
        figures = []
        for centre, (measure, digits) in product(CENTRES, FIGURES.items()):
            estimate = measured.of(kind, cell, measure, centre, trained)
            figures.append(estimate.shown(2) if measure == "correlation" else f"{estimate.value:.{digits}f}")
        more, held = "–", "–"
        if trained:
            more = measured.more(kind, cell).shown(2)
            held = {True: "yes", False: "no", None: "undecided"}[measured.preserved(kind, cell)]
        rows.append((*cell, kind if trained else f"{kind}, untrained", figures[0], more, *figures[1:], held))
    measures = ("difference", "paired at random", "relative cosine")
    header = ("data", "cut", "pairs", "correlation, origin", "more than untrained", *measures, "correlation, mean")
    return study.markdown((*header, *measures, "preserved"), rows)


def findings(measured: Measured) -> Iterator[str]:
    """Yield sentences on the spans of correlations and on the uncentred relative cosine."""
    for kind in KINDS:
        values = [measured.of(kind, cell, "correlation", "origin").value for cell in measured.cells]
        counts = [sum(measured.more(kind, cell, centre).low > 0 for cell in measured.cells) for centre in CENTRES]
        yield (
            f"{kind.capitalize()}: angles at the origin correlate by {span(values)}. They correlate more than under "
            f"untrained networks (interval of the difference) in {counts[0]} of {len(values)} cells at the origin, "
            f"and in {counts[1]} about the mean."
        )
    spans = [
        span(
            (measured.of(SEEDS, cell, "relative cosine", centre, trained=False).value for cell in measured.cells), ".3f"
        )
        for centre in CENTRES
    ]
    yield f"Untrained networks have a relative cosine of {spans[0]} about the origin and of {spans[1]} about the mean."


def claims(record: dict[str, Any]) -> list[dict[str, str]]:
    rows = []
    for modality, kind in product(MODALITIES, KINDS):
        measured = Measured(record, modality)
        trained_span, less = (
            span(measured.of(kind, cell, "correlation", "origin", trained).value for cell in measured.cells)
            for trained in (True, False)
        )
        held = [measured.preserved(kind, cell) for cell in measured.cells]
        cells = f"{len(held)} cell{'s' * (len(held) > 1)}"
        n = f"{int(measured.trained[kind].mask.sum()) // 2} pairs of networks, {cells}"
        ours = f"correlation {trained_span}, untrained {less}; preserved in {held.count(True)} of {cells}"
        rows.append(CLAIMS[modality].of(modality, kind).row(ours, n, held, len(measured.groups)))
    return rows


def pictures(record: dict[str, Any]) -> dict[str, Figure]:
    measured = [Measured(record, modality) for modality in MODALITIES]
    names = [", ".join(cell) for figures in measured for cell in figures.cells]
    figure = Figure(figsize=(10.0, 0.45 * len(names) + 1.6), layout="constrained")
    kinds = {SEEDS: (SEEDS, True), ARCHITECTURES: (ARCHITECTURES, True), f"{SEEDS}, untrained": (SEEDS, False)}
    for axes, centre in zip(figure.subplots(1, len(CENTRES), sharey=True), CENTRES, strict=True):
        for shift, (label, (kind, trained)) in enumerate(kinds.items()):
            estimates = [m.of(kind, cell, "correlation", centre, trained) for m in measured for cell in m.cells]
            values = np.array([[estimate.value, estimate.low, estimate.high] for estimate in estimates])
            places, ends = [-row - 0.2 * shift for row in range(len(names))], np.abs(values[:, 1:] - values[:, :1]).T
            axes.errorbar(values[:, 0], places, xerr=ends, fmt="o", markersize=4, label=label)
        axes.set_yticks([-row - 0.2 for row in range(len(names))], names)
        axes.set(title=f"angles at the {centre}", xlabel="correlation under two networks")
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    return {"angles": figure}
