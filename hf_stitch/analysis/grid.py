"""Result of :func:`hf_stitch.stitch_grid`: scores of every matcher for every pair of layers."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from hf_stitch.adapters import Adapter
from hf_stitch.analysis.detection.evidence import Cell
from hf_stitch.analysis.detection.noise import DOSES, MAX_DOSE
from hf_stitch.analysis.detection.result import Detection
from hf_stitch.analysis.evaluation import SAME_NETWORK
from hf_stitch.analysis.identification import Identification, identify_layers
from hf_stitch.analysis.resampling import not_rejected
from hf_stitch.analysis.shown import Ends, ends_of, titles_of
from hf_stitch.artefacts.joining import join
from hf_stitch.artefacts.modeling import StitchedModel
from hf_stitch.pairs import Pair
from hf_stitch.printing import warn
from hf_stitch.representation import Pooling
from hf_stitch.results import Result
from hf_stitch.scoring.halves import ONLY
from hf_stitch.scoring.measured import Measured, Record, Score, not_beaten, with_interval
from hf_stitch.stitches import StitchingLayer
from hf_stitch.tasks.base import Answers, Array
from hf_stitch.tasks.heads import task_named

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure
    from rich.table import Table


ACCURATE = 0.8
"""Smallest relative accuracy, or agreement, of an accurate stitch (Csiszárik et al. 2021, section 8)."""

SHARES = ("relative_accuracy", "accuracy", "agreement")
"""Figures from 0 to 1."""


@dataclass(frozen=True, eq=False)
class StitchGrid(Result):
    """Every layer of one network stitched into every layer of another, returned by :func:`hf_stitch.stitch_grid`.

    Methods accept the names of a figure and a matcher; the default is the first of each.

    The figures of classifiers are ``relative_accuracy`` (divided by the accuracy of the target; direct matching,
    functional, of Balogh and Jelasity 2025), ``accuracy`` and ``agreement`` (share of samples with the same prediction
    as the target); the figures of language models are ``relative_perplexity``, ``perplexity`` and ``agreement``.
    ``structural_error`` is ``‖T f − g‖² / ‖g‖²`` over all samples, for the activations f of the source and g of the
    target (direct matching, structural; squared and relative as in their code).

    Each detector adds ``auroc(<detector>)``: how well it distinguishes the stitched activations from the target's own
    activations of the same samples (0.5: not at all; 1: always). A two-sided detector also counts unusually small
    scores as strange. ``dose(<detector>)`` is the relative residual of noise on the target's own activations that the
    detector distinguishes as well as the stitch: 0 below the smallest of :data:`DOSES`, infinity above the largest.
    ``detections`` contains further figures (``one_sided``, ``two_sided``, ``aupr``, ``fpr95``), noise of all kinds and
    doses, and the controls.

    Attributes:
        scores: Matcher -> figure -> (layers of a, layers of b, 3) float64, the value and both ends of its 95% interval
            (bootstrap over samples). NaN where a stitch is undefined.
        baselines: ``mean_only`` (the target's mean activations) -> figure -> (layers of b, 3); ``source``, ``target``
            (the whole networks) and ``chance`` (a predictor that ignores the input) -> figure -> (3,).
        p_values: Matcher -> figure -> (2, layers of a, layers of b) float64. First, the p-value of the difference from
            the best stitch of the same layer of a (bootstrap over samples); second, of the same layer of b. 1 for the
            best stitch.
        layers_a: Layers of the source, the rows.
        layers_b: Layers of the target, the columns.
        task: Task of the stitched models.
        pooling: The pooling.
        n: Number of test samples.
        detections: Detector -> its :class:`Detection`, with controls. Where a detector does not distinguish far
            samples, its other figures are not evidence.
        undefined: Stitch (``"matcher: layer of a -> layer of b"``) -> reason why it is undefined.
        recipe: Record for reproducing the grid.
        no_better: Stitches that do not beat ``mean_only`` or ``chance``: the 95% interval of the paired difference of
            the first figure is not above 0.
        stitches: (matcher, layer of a, layer of b) -> stitching layer; not saved.
        networks: Source and target; not saved.

    Example:
        >>> cells = np.array([[[0.9, 0.8, 1.0], [0.4, 0.3, 0.5]]])
        >>> scores = {"lstsq": {"agreement": cells}}
        >>> grid = StitchGrid(scores, {}, {}, ("a0",), ("b0", "b1"), "text-generation", "none", 9)
        >>> print(grid.score("a0", "b0", "agreement"))
        0.900 [0.800, 1.000]
        >>> grid["lstsq"].shape
        (1, 2)
    """

    page: ClassVar[str] = "hf_stitch.reports.grid:section"
    scores: Mapping[str, Mapping[str, Array]]
    baselines: Mapping[str, Mapping[str, Array]]
    p_values: Mapping[str, Mapping[str, Array]]
    layers_a: tuple[str, ...]
    layers_b: tuple[str, ...]
    task: str
    pooling: Pooling
    n: int
    detections: Mapping[str, Detection] = field(default_factory=dict)
    undefined: Mapping[str, str] = field(default_factory=dict)
    recipe: Mapping[str, Any] = field(default_factory=dict)
    no_better: tuple[str, ...] = ()
    stitches: Mapping[tuple[str, str, str], StitchingLayer] | None = field(
        default=None, repr=False, metadata={"saved": False}
    )
    networks: tuple[Adapter, Adapter] | None = field(default=None, repr=False, metadata={"saved": False})

    def __post_init__(self) -> None:
        """Check the shapes of the scores."""
        shape = (len(self.layers_a), len(self.layers_b), 3)
        for matcher, row in self.scores.items():
            for figure, values in row.items():
                if values.shape != shape:
                    raise ValueError(f"{figure} of {matcher} must have the shape {shape}, got {values.shape}")

    @property
    def matchers(self) -> tuple[str, ...]:
        """Labels of the matchers."""
        return tuple(self.scores)

    @property
    def figures(self) -> tuple[str, ...]:
        """Names of the figures; for detectors, ``auroc`` and ``dose``."""
        scored = next(iter(self.scores.values()))
        return *scored, *(f"{figure}({label})" for label in self.detections for figure in ("auroc", "dose"))

    def __getitem__(self, matcher: str) -> Array:
        """Return the first figure of a matcher, (layers of a, layers of b) float64: e.g. the relative accuracy."""
        return self.values(matcher)

    def values(self, matcher: str | None = None, figure: str | None = None) -> Array:
        """Return a figure of all stitches of a matcher, (layers of a, layers of b), without intervals."""
        return self.cells(matcher, figure)[..., 0]

    def cells(self, matcher: str | None = None, figure: str | None = None) -> Array:
        """Return a figure of all stitches of a matcher with its intervals, (layers of a, layers of b, 3)."""
        label = self.matchers[0] if matcher is None else matcher
        if label not in self.scores:
            raise KeyError(f"matcher must be one of {', '.join(self.matchers)}, got {label!r}")
        name = self.figures[0] if figure is None else figure
        figures = self._figures(label)
        if name not in figures:
            raise KeyError(f"figure must be one of {', '.join(figures)}, got {name!r}")
        return figures[name]

    def score(self, layer_a: str, layer_b: str, figure: str | None = None, matcher: str | None = None) -> Score:
        """Return a figure of one stitch with its interval."""
        for layer, layers, side in ((layer_a, self.layers_a, "a"), (layer_b, self.layers_b, "b")):
            if layer not in layers:
                raise KeyError(f"layer_{side} must be one of {', '.join(layers)}, got {layer!r}")
        cell = self.layers_a.index(layer_a), self.layers_b.index(layer_b)
        return Score(*map(float, self.cells(matcher, figure)[cell]))

    def as_good(
        self, figure: str | None = None, matcher: str | None = None, *, level: float = 0.05
    ) -> NDArray[np.bool_]:
        """Return which stitches the samples do not distinguish from the best one of the same layer.

        Args:
            figure: Name of the figure.
            matcher: Label of the matcher.
            level: Level of the tests, together for all rivals of a layer (Holm 1979).

        Returns:
            (2, layers of a, layers of b) bool. First, compared with the best stitch of the same layer of a; second, of
            the same layer of b.
        """
        self.cells(matcher, figure)  # raises an error for unknown names
        name, by_figure = figure or self.figures[0], self.p_values[matcher or self.matchers[0]]
        if name not in by_figure:
            raise KeyError(
                f"figure must be one with p-values, {', '.join(by_figure)}, got {name!r}: figures of detectors have "
                "intervals only"
            )
        p_values = by_figure[name]
        return np.stack([not_rejected(p_values[0], level), not_rejected(p_values[1].T, level).T])

    def identify(self, figure: str | None = None, matcher: str | None = None, *, level: float = 0.05) -> Identification:
        """Test for each layer whether its best stitch connects it to the corresponding layer of the second network.

        Layer i of a corresponds to layer i of b. For grids of several pairs of networks, pass their :meth:`values` and
        :meth:`as_good` to :func:`hf_stitch.analysis.identify_layers`.

        Args:
            figure: Name of the figure.
            matcher: Label of the matcher.
            level: Level of the tests for ties (:meth:`as_good`).
        """
        values = self.values(matcher, figure)
        return identify_layers(
            values, higher_is_better=self.direction(figure or self.figures[0]) == "higher",
            as_good=self.as_good(figure, matcher, level=level), layers=self.layers_a,
        )  # fmt: skip

    def is_strange(self, matcher: str | None = None, detector: str | None = None) -> NDArray[np.bool_]:
        """Return which stitches, (layers of a, layers of b), are accurate, but out of distribution for a detector.

        Accurate: at least :data:`ACCURATE` in the first figure, or at most its inverse if lower is better. Out of
        distribution: as easy to distinguish as coloured noise above :data:`MAX_DOSE`, with higher scores than the
        target's own activations. Layers where the detector is not evidence (:attr:`Detection.blind`) are left out.

        Args:
            matcher: Label of the matcher.
            detector: Label of the detector; ``None`` uses any of them.
        """
        label = matcher or self.matchers[0]
        values = self.values(label)
        accurate = values >= ACCURATE if self._higher_is_better else values <= 1 / ACCURATE
        out_of_distribution = np.zeros_like(accurate)
        for name in [detector] if detector else self.detections:
            figures = self.detections[name].figures.get(label, {})
            if not {"dose", "one_sided"} <= figures.keys():
                continue
            # Unusually small scores, as from least squares (which shrinks), stay within the target's range.
            higher = figures["one_sided"][..., 1] > 0.5
            out_of_distribution |= (
                higher & (figures["dose"][..., 0] > MAX_DOSE) & ~np.isin(self.layers_b, [*self.detections[name].blind])
            )
        return accurate & out_of_distribution

    def stitched(self, layer_a: str, layer_b: str, matcher: str | None = None) -> StitchedModel:
        """Build the stitched model of one cell, with a copy of its stitching layer."""
        label = matcher or self.matchers[0]
        self.score(layer_a, layer_b, matcher=label)  # raises an error for unknown layers
        if (reason := self.undefined.get(cell_name(label, layer_a, layer_b))) is not None:
            raise ValueError(f"the stitch {cell_name(label, layer_a, layer_b)} is undefined: {reason}")
        if self.stitches is None or self.networks is None:
            raise ValueError("a grid loaded from a file contains scores, not weights; run stitch_grid again")
        layer = copy.deepcopy(self.stitches[label, layer_a, layer_b])
        source, target = self.networks
        recipe = {key: value for key, value in self.recipe.items() if key not in ("layers_a", "layers_b", "matchers")}
        recipe["matcher"] = self.recipe["matchers"][label]
        return join(source, layer_a, layer, target, layer_b, task=self.task, recipe=recipe)

    def to_pandas(self) -> pandas.DataFrame:
        """Return the scores in long format.

        Returns one row per matcher, figure (including all of detectors) and pair of layers, with the columns
        ``matcher``, ``figure``, ``layer_a``, ``layer_b``, ``value``, ``low`` and ``high``, and ``undefined`` (the
        reason, or None) if a stitch is undefined.
        """
        import pandas

        return pandas.DataFrame(
            [
                {
                    "matcher": matcher, "figure": figure, "layer_a": a, "layer_b": b,
                    **dict(zip(("value", "low", "high"), map(float, values[i, j]), strict=True)),
                    **({"undefined": self.undefined.get(cell_name(matcher, a, b))} if self.undefined else {}),
                }
                for matcher in self.matchers
                for figure, values in self._figures(matcher).items()
                for i, a in enumerate(self.layers_a)
                for j, b in enumerate(self.layers_b)
            ]
        )  # fmt: skip

    def plot(self, figure: str | Sequence[str] | None = None, *, matcher: str | None = None) -> Figure:
        """Plot figures of all pairs of layers as heat maps side by side, with a frame around the best of each row.

        An infinite dose has the colour of the largest measured dose. In figures of a detector, layers where it is not
        evidence are marked as blind, and stitches that are accurate but strange (:meth:`is_strange`) have a star.

        Args:
            figure: The figures; ``None`` uses the first, and the AUROC of each detector.
            matcher: Label of the matcher.
        """
        from hf_stitch.plots import heatmap, heatmaps

        label = matcher or self.matchers[0]
        if figure is not None and not figure:
            raise ValueError(f"figure must name at least one figure; the grid has {', '.join(self.figures)}")
        names = [figure] if isinstance(figure, str) else figure
        panels = [
            self._panel(label, name)
            for name in names or (self.figures[0], *(f"auroc({detector})" for detector in self.detections))
        ]
        return heatmap(**panels[0]) if len(panels) == 1 else heatmaps(panels)

    def _panel(self, matcher: str, figure: str) -> dict[str, Any]:
        values = self.values(matcher, figure)
        marked = np.zeros(values.shape, bool)
        better = values if self.direction(figure) == "higher" else -values
        rows_with_values = ~np.isnan(values).all(1)
        marked[rows_with_values, np.nanargmax(better[rows_with_values], 1)] = True
        detector = next((label for label in self.detections if figure.endswith(f"({label})")), None)
        strange = None if detector is None else self.is_strange(matcher, detector)
        colour_label = f"{figure if detector else figure.replace('_', ' ')}\n{self.direction(figure)} = better"
        values, limit = self._capped(figure, values)
        colour_label += f"; {limit}: at least {limit}" if limit else ""
        blind = self.detections[detector].blind if detector else {}
        least_good = f"at least {ACCURATE:g}" if self._higher_is_better else f"at most {1 / ACCURATE:g}"
        low, high = ends_of(values, self._usual_range(figure)) or (None, None)
        rows, columns = self._titles
        return {
            "values": values, "row_labels": self.layers_a,
            "column_labels": [f"{layer} (blind)" if layer in blind else layer for layer in self.layers_b],
            "row_title": rows, "column_title": columns,
            "title": f"{matcher}, {self.n} samples", "label": colour_label, "low": low, "high": high,
            "marked": marked, "marks": "best of each layer of the source", "starred": strange,
            "stars": f"accurate ({least_good}), but strange (dose above {MAX_DOSE:g})",
        }  # fmt: skip

    @property
    def _titles(self) -> tuple[str, str]:
        names = self.recipe.get("names") or {}
        a, b = ({"reference": self.recipe.get(side), "name": names.get(side)} for side in "ab")
        return titles_of(a, b, ("the source", "the target"))

    def _usual_range(self, figure: str) -> Ends | None:
        """Usual range of a figure; relative accuracies may exceed it."""
        return (0.5, 1.0) if figure.startswith("auroc(") else (0.0, 1.0) if figure in SHARES else None

    def _capped(self, figure: str, values: Array) -> tuple[Array, str]:
        """Return the values with infinite doses replaced by the largest measured one, and this dose or ``""``."""
        if not figure.startswith("dose(") or not np.isinf(values).any():
            return values, ""
        return np.minimum(values, max(DOSES)), f"{max(DOSES):g}"

    def __rich__(self) -> Table:
        """Return the table that ``rich`` prints: the best layer of the target for each layer of the source."""
        from rich.table import Table
        from rich.text import Text

        figure = self.figures[0]
        table = Table(
            "layer of the source", title=f"best of {len(self.layers_b)} layers of the target, by "
            f"{figure.replace('_', ' ')}", title_justify="left",
        )  # fmt: skip
        best = np.max if self.direction(figure) == "higher" else np.min
        rivals = ", ".join(
            f"{name} {best(row[figure].reshape(-1, 3)[:, 0]):.3f}" for name, row in self.baselines.items()
        )
        caption = [f"{self.n} samples, pooling: {self.pooling}" + (f"; {rivals}" if rivals else ""), *self._gaps()]
        caption += self.cautions
        if self.detections and not all("far" in detection.controls for detection in self.detections.values()):
            caption.append("without far_data, it is unknown whether the detectors distinguish any samples")
        caption += [detection.caution for detection in self.detections.values() if detection.caution]
        for label, detection in self.detections.items():
            for key, reason in list(detection.undefined.items())[:1]:
                caption.append(f"{label} is undefined for {len(detection.undefined)} figures, as {key}: {reason}")
        table.caption = Text("; ".join(caption))
        for matcher in self.matchers:
            table.add_column(Text(matcher))
        for i, layer in enumerate(self.layers_a):
            table.add_row(Text(layer), *(Text(self._best(matcher, figure, i)) for matcher in self.matchers))
        return table

    def direction(self, figure: str) -> str:
        """Return ``"higher"`` or ``"lower"``, whichever is better for a figure; lower is better for detectors."""
        return "higher" if task_named(self.task).figures.get(figure) else "lower"

    @property
    def _higher_is_better(self) -> bool:
        return self.direction(self.figures[0]) == "higher"

    @property
    def cautions(self) -> list[str]:
        """Sentences about the limits of the scores as evidence."""
        sentences = []
        if self.no_better:
            sentences.append(
                f"{len(self.no_better)} of {len(self.matchers) * len(self.layers_a) * len(self.layers_b)} stitches are "
                f"not better than the mean activations of the target or chance in {self.figures[0].replace('_', ' ')} "
                f"(the 95% interval of the paired difference is not above 0), first {self.no_better[0]}"
            )
        a, b = ((self.recipe.get(side) or {}).get("weights_hash") for side in "ab")
        if a is not None and a == b and len({*self.layers_a, *self.layers_b}) > 1:
            sentences.append(SAME_NETWORK)
        return sentences

    def _gaps(self) -> Iterator[str]:
        """Report how many stitches of each matcher are undefined, with the first reason."""
        for matcher in self.matchers:
            missing = [cell for cell in self.undefined if cell.startswith(f"{matcher}: ")]
            if missing:
                count = len(self.layers_a) * len(self.layers_b)
                reason = self.undefined[missing[0]]
                yield f"{len(missing)} of {count} stitches are undefined, first {missing[0]}: {reason}"

    def _best(self, matcher: str, figure: str, row: int) -> str:
        cells = self.cells(matcher, figure)[row]
        if np.isnan(cells[:, 0]).all():
            return "undefined"
        column = int(np.nanargmax(cells[:, 0] if self.direction(figure) == "higher" else -cells[:, 0]))
        return f"{self.layers_b[column]}  {Score(*map(float, cells[column]))}"

    def _figures(self, matcher: str) -> dict[str, Array]:
        """Return all figures of a matcher, including the figures of detectors."""
        figures = dict(self.scores[matcher])
        for label, detection in self.detections.items():
            figures |= {f"{figure}({label})": values for figure, values in detection.figures.get(matcher, {}).items()}
        return figures


def cell_name(matcher: str, layer_a: str, layer_b: str) -> str:
    """Return the key of a stitch in ``StitchGrid.undefined``."""
    return f"{matcher}: {layer_a} -> {layer_b}"


def mean_name(layer: str) -> str:
    """Return the name of the predictor that outputs the mean of a layer of the target."""
    return f"mean_only {layer}"


def grid_of(
    pair: Pair, measured: Measured, stitches: Mapping[Cell, StitchingLayer], undefined: Mapping[str, str],
    recipe: Mapping[str, Any], n: int, resamples: int, seed: int,
) -> StitchGrid:  # fmt: skip
    """Build the grid from the measurements of the stitches and of the target's means; warn about its limits."""
    task, (rows, columns) = task_named(pair.task), (pair.layers_a, pair.layers_b)
    resampled = {
        who: {name: row[name] for name in (*task.compared, "structural_error") if name in row}
        for who, row in task.drawn(_measures(pair, measured, stitches, seed), resamples=resamples, seed=seed).items()
    }
    cells: dict[str, dict[str, Array]] = {matcher: {} for matcher, _, _ in stitches}
    no_better = []
    for column, (matcher, la, lb) in enumerate(stitches):
        scores = {figure: values[:, column] for figure, values in resampled["stitched"].items()}
        for figure, values in scores.items():
            table = cells[matcher].setdefault(figure, np.full((len(values), len(rows), len(columns)), np.nan))
            table[:, rows.index(la), columns.index(lb)] = values
        mean = {figure: values[:, columns.index(lb)] for figure, values in resampled["mean_only"].items()}
        if not_beaten(task, {"stitched": scores, "mean_only": mean, "chance": resampled["chance"]}):
            no_better.append(cell_name(matcher, la, lb))
    grid = StitchGrid(
        {name: {figure: with_interval(values) for figure, values in row.items()} for name, row in cells.items()},
        {
            who: {figure: with_interval(values) for figure, values in row.items()}
            for who, row in resampled.items()
            if who != "stitched"
        },
        {
            matcher: {
                figure: differences_from_best(values, task.figures.get(figure, False)) for figure, values in row.items()
            }
            for matcher, row in cells.items()
        },
        rows, columns, str(pair.task), pair.pooling, n, undefined=undefined, recipe=recipe, no_better=tuple(no_better),
        stitches=stitches, networks=(pair.source, pair.target),
    )  # fmt: skip
    if no_better:
        warn(grid.cautions[0])
    return grid


def _measures(pair: Pair, measured: Measured, stitches: Iterable[Cell], seed: int) -> dict[str, Answers]:
    """Return the measures by kind of predictor, with one column per stitch and per mean."""
    task, answers, seen = task_named(pair.task), measured.answers[ONLY], measured.seen

    def stacked(rows: Sequence[Answers]) -> dict[str, Array]:
        return {name: np.stack([row[name] for row in rows], 1) for name in rows[0]}

    errors = [seen[Record("error", pair.pooling, cell_name(*cell))] for cell in stitches]
    norms = np.stack([seen[Record("norm", pair.pooling, layer)] for layer in pair.layers_b], 1)
    distances = {"error": np.stack(errors, 1), "norm": norms[:, [pair.layers_b.index(lb) for _, _, lb in stitches]]}
    measures: dict[str, Answers] = {
        "stitched": {**stacked([answers[cell_name(*cell)] for cell in stitches]), **distances},
        "mean_only": stacked([answers[mean_name(layer)] for layer in pair.layers_b]),
        **{who: answers[who] for who in ("source", "target") if who in answers},
    }
    chance = task.chance(measures, seed)
    return {**measures, "chance": {name: chance[name] for name in task.kept if name in chance}}


def differences_from_best(resampled: Array, higher_is_better: bool) -> Array:
    """Compute p-values of the difference of each stitch from the best of its row and of its column.

    The p-value comes from a normal distribution with the standard deviation of the difference over the resamples: a
    share of resamples could not be small enough for a Holm test of many layers. The best stitch is chosen on the same
    samples, so p-values of close rivals are slightly too small.
    """
    better = resampled if higher_is_better else -resampled
    p_values = []
    for axis in (2, 1):
        values = np.where(np.isnan(better[:1]), -np.inf, better[:1])
        best = np.take_along_axis(better, values.argmax(axis, keepdims=True), axis)
        difference = best - better
        spread = np.nanstd(difference[1:], 0, ddof=1) if len(difference) > 1 else np.nan
        with np.errstate(divide="ignore", invalid="ignore"):  # 0 / 0 for equal stitches: their p-value is 1
            p = 2 * ndtr(-np.nan_to_num(difference[0] / spread, nan=0.0))
        p_values.append(np.where(np.isnan(better[0]), np.nan, np.where((best == better)[0], 1.0, p)))
    return np.stack(p_values)
