"""Results of :func:`hf_stitch.evaluate`: scores of a stitched model, and where it differs from its target."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from torch import nn

from hf_stitch.adapters import Adapter
from hf_stitch.analysis.shown import names_of
from hf_stitch.artefacts.record import SCORED
from hf_stitch.data import Samples
from hf_stitch.data.overlap import FITTED, samples_text
from hf_stitch.results import Result
from hf_stitch.scoring.measured import Score as Score
from hf_stitch.tasks.base import Answers, Task
from hf_stitch.tasks.per_sample import named

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure
    from rich.table import Table

    from hf_stitch.artefacts import StitchedModel
    from hf_stitch.plots.charts import Role

SAME_NETWORK = (
    "source and target are the same network: a stitch into an early layer scores well because the target recomputes "
    "the later layers; a high score does not show that the layers correspond"
)
"""Caution about a stitch between different layers of one network."""


@dataclass(frozen=True)
class StitchedParts:
    """Parts of a stitched model."""

    source_name: str  # the network of the front half
    source_layer: str  # the layer at which it is cut
    source_parameters: int  # number of parameters that run
    source_whole: int | None  # number of parameters of the whole network; None if it is not in memory
    source_hash: str | None  # hash of the weights of the whole network
    target_name: str  # the network of the back half
    target_layer: str  # the layer after which it continues
    target_parameters: int  # number of parameters that run
    target_whole: int | None  # number of parameters of the whole network
    target_hash: str | None  # hash of the weights of the whole network
    stitch: str  # kind and widths of the stitching layer
    stitch_parameters: int  # number of its parameters
    recipe: Mapping[str, Any] = field(default_factory=dict)  # how it was fitted, without the record of the samples

    @classmethod
    def of(cls, model: StitchedModel, source: Any = None, target: Any = None) -> StitchedParts:
        """Describe the parts of a stitched model."""
        info = model.describe()
        width, width_b = info.widths
        names = names_of(*({"reference": e.public.to_dict(), "class": e.library} for e in (info.source, info.target)))
        networks = [source, target] if model.parents is None else model.parents
        whole = [_count(parent.model) if isinstance(parent, Adapter) else None for parent in networks]
        return cls(
            names[0], info.source_layer, _count(model.source), whole[0], info.source.weights_hash,
            names[1], info.target_layer, _count(model) - _count(model.source) - _count(model.stitch),
            whole[1], info.target.weights_hash, f"{info.body['name']}, {width} → {width_b}", _count(model.stitch),
            {key: value for key, value in info.recipe.items() if key not in (FITTED, SCORED)}
        )  # fmt: skip

    @property
    def inside_one_network(self) -> bool:
        """Whether source and target are the same network."""
        return self.source_hash is not None and self.source_hash == self.target_hash

    @property
    def at_one_layer(self) -> bool:
        """Whether source and target are one network cut at one layer, so that the identity is exact."""
        return self.inside_one_network and self.source_layer == self.target_layer

    @property
    def segments(self) -> list[tuple[str, str, int, Role]]:
        """Row (``source``, ``stitched``, ``target``), name, number of parameters and role of each part."""
        front, back = f"up to {self.source_layer}", f"after {self.target_layer}"
        segments: list[tuple[str, str, int, Role]] = [
            ("source", f"source {front}", self.source_parameters, "source"),
            ("stitched", f"source {front}", self.source_parameters, "source"),
            ("stitched", f"stitch, {self.stitch}", self.stitch_parameters, "stitch"),
            ("stitched", f"target {back}", self.target_parameters, "target"),
        ]
        if self.source_whole is not None:
            rest = max(self.source_whole - self.source_parameters, 0)
            segments.insert(1, ("source", f"source after {self.source_layer}", rest, "left out"))
        if self.target_whole is not None:
            rest = max(self.target_whole - self.target_parameters, 0)
            segments.append(("target", f"target up to {self.target_layer}", rest, "left out"))
        return [*segments, ("target", f"target {back}", self.target_parameters, "target")]


def _count(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())


@dataclass(frozen=True)
class Example:
    """Sample with different outputs of a stitched model and its target."""

    id: str  # id of the sample
    distance: float  # distance between both outputs
    stitched: str  # prediction of the stitched model: the class, or its cross-entropy
    target: str  # prediction of the target
    label: str | None = None  # the true class; None if it is unknown
    sample: Any = field(default=None, repr=False, compare=False, metadata={"saved": False})  # the sample


@dataclass(frozen=True)
class Evaluation(Result):
    """Scores of a stitched model compared with baselines, returned by :func:`hf_stitch.evaluate`.

    Attributes:
        task: Task of the head that was scored; ``feature-extraction`` for a model without a head.
        n: Number of held-out samples.
        data: Fingerprint of the held-out samples.
        fitted_share: Share of the samples that the stitching layer was fitted to, matched by content; ``None`` if the
            model does not record them. Scores on these samples are too good.
        scores: Nested mapping, name of a predictor (``stitched``, ``identity``, ``mean_only``, ``source``, ``target``,
            ``chance``) -> name of a figure (``accuracy``, ``relative_accuracy``, …) -> :class:`Score`.
        left_out: Name of a predictor without scores -> reason.
        parts: Parts of the stitched model.
        confusion: Class predicted by the target -> class predicted by the stitched model -> number of samples; empty if
            the model is not a classifier.
        examples: The samples with the largest differences, if ``evaluate(…, examples=…)`` requested them.
        no_better: Baselines among ``identity``, ``mean_only`` and ``chance`` that the model does not beat: the 95%
            interval of the paired difference of the first figure is not above 0. An exact identity is left out.

    Example:
        >>> scores = {
        ...     "stitched": {"accuracy": Score(0.81, 0.78, 0.84)},
        ...     "chance": {"accuracy": Score(0.1, 0.08, 0.12)},
        ... }
        >>> evaluation = Evaluation("image-classification", 1000, "sha256:0", scores)
        >>> evaluation["accuracy"].value
        0.81
        >>> print(evaluation.scores["chance"]["accuracy"])
        0.100 [0.080, 0.120]
    """

    page: ClassVar[str] = "hf_stitch.reports.stitched:evaluation_section"
    task: str
    n: int
    data: str
    scores: Mapping[str, Mapping[str, Score]] = field(default_factory=dict)
    fitted_share: float | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)
    parts: StitchedParts | None = None
    confusion: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    examples: tuple[Example, ...] = ()
    no_better: tuple[str, ...] = ()

    def __getitem__(self, figure: str) -> Score:
        """Return a figure of the stitched model, e.g. ``evaluation["relative_accuracy"]``."""
        return self.scores["stitched"][figure]

    @property
    def cautions(self) -> list[str]:
        """Sentences about the limits of the scores as evidence."""
        sentences = []
        if self.no_better:
            rows = [self.scores[name] for name in ("stitched", *self.no_better)]
            figure = next(
                name for name in rows[0] if not all(math.isnan(row[name].value) for row in rows if name in row)
            )
            names = ", ".join(self.no_better).replace("_", " ")
            sentences.append(
                f"{figure.replace('_', ' ')} is not better than {names} (the 95% interval of the paired difference is "
                "not above 0), so it does not show that the stitching layer transfers information"
            )
        if self.parts is not None and self.parts.inside_one_network and not self.parts.at_one_layer:
            sentences.append(SAME_NETWORK)
        return sentences

    def for_card(self) -> dict[str, Any]:
        """Return the scores for a model card as JSON values, without parts, classes and samples."""
        scores = replace(self, parts=None, confusion={}, examples=()).to_dict()
        return {name: value for name, value in scores.items() if name not in ("parts", "confusion", "examples")}

    def to_pandas(self) -> pandas.DataFrame:
        """Return the scores in long format."""
        import pandas

        return pandas.DataFrame(
            [
                {"predictor": who, "figure": figure, **asdict(score)}
                for who, figures in self.scores.items()
                for figure, score in figures.items()
            ]
        )

    def __rich__(self) -> Table:
        """Return the table that ``rich`` prints, one row per predictor."""
        from rich.table import Table
        from rich.text import Text

        figures = list(next(iter(self.scores.values())))
        table = Table(
            "predictor",
            *(f.replace("_", " ") for f in figures),
            title=f"{samples_text(self.n, self.fitted_share)}, 95% intervals over samples",
        )
        notes = [f"no {who}: {reason}" for who, reason in self.left_out.items()]
        if self.parts is not None and (errors := self.parts.recipe.get("held_out_errors")):
            rivals = ", ".join(f"{name} {error:.3g}" for name, error in errors.items())
            notes.append(f"matcher {self.parts.recipe['matcher']['name']}, by the error on held-out anchors ({rivals})")
        table.caption = "; ".join(notes + self.cautions) or None
        for who, row in self.scores.items():
            cells = (Text(str(row.get(figure, "–")).replace(" [", "\n[")) for figure in figures)
            table.add_row(who, *cells, style="bold" if who == "stitched" else "")
        return table

    def plot(self, figure: str | None = None) -> Figure:
        """Plot one figure of each predictor that has it, with confidence intervals."""
        from hf_stitch.plots import intervals

        name = figure or next(iter(self.scores["stitched"]))
        rows = {who.replace("_", " "): row[name] for who, row in self.scores.items() if name in row}
        if not rows:
            raise KeyError(f"figure must be one of {', '.join(self.scores['stitched'])}, got {name!r}")
        return intervals(
            {who: (score.value, score.low, score.high) for who, score in rows.items()}, label=name.replace("_", " ")
        )

    def plot_parts(self) -> Figure:
        """Plot both networks as strips: the parts that run, the unused parts, and the stitch between them."""
        from hf_stitch.plots import strips

        if self.parts is None:
            raise ValueError("the evaluation does not contain the parts of the model; run evaluate again")
        return strips(self.parts.segments, "parameters")


def class_names(stitched: StitchedModel, samples: Samples) -> dict[int, str]:
    """Return the names of the target's classes, from the data if the target (as in timm) does not name them."""
    names = {int(number): str(name) for number, name in (stitched.config.id2label or {}).items()}
    generic = all(name == f"LABEL_{number}" for number, name in names.items())
    if generic and samples.label_names and len(samples.label_names) == stitched.config.num_labels:
        return dict(enumerate(samples.label_names))
    return names


def confused(predicted: Mapping[str, Answers], names: Mapping[int, str]) -> dict[str, dict[str, int]]:
    """Count which class the stitched model predicts where the target predicts a class."""
    classes = (predicted[who]["class"].astype(int).tolist() for who in ("target", "stitched"))
    counts: dict[str, dict[str, int]] = {}
    for (target, stitched), count in sorted(Counter(zip(*classes, strict=True)).items()):
        row = counts.setdefault(named(target, names), {})  # several classes may have one name
        row[named(stitched, names)] = row.get(named(stitched, names), 0) + count
    return counts


def differing(
    task: Task, predicted: Mapping[str, Answers], samples: Samples, names: Mapping[int, str], count: int
) -> tuple[Example, ...]:
    """Find the samples with the largest differences between the stitched model and the target."""
    if not count:
        return ()
    stitched, target = predicted["stitched"], predicted["target"]
    distance = task.apart(stitched, target)
    order = np.argsort(-np.nan_to_num(distance), kind="stable")[:count].tolist()
    example_samples = samples.select(order)
    (batch,) = example_samples.batches(len(order))
    return tuple(
        Example(
            str(example_samples.ids[row]), float(distance[index]), task.shown(stitched, index, names),
            task.shown(target, index, names), task.label_shown(target, index, names), batch.samples[row]
        )
        for row, index in enumerate(order)
    )  # fmt: skip
