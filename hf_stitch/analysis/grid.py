"""Result of :func:`hf_stitch.stitch_grid`: scores of every matcher for every pair of layers, and their figures."""

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
from hf_stitch.scoring.measured import Kept, Measured, Score, not_beaten, with_interval
from hf_stitch.stitches import StitchingLayer
from hf_stitch.tasks.base import Answers, Array
from hf_stitch.tasks.heads import task_named

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure
    from rich.table import Table


ACCURATE = 0.8
"""Relative accuracy, or agreement, from which a stitch counts as accurate (Csiszárik et al. 2021, section 8)."""

SHARES = ("relative_accuracy", "accuracy", "agreement")
"""Figures from 0 to 1."""


@dataclass(frozen=True, eq=False)
class StitchGrid(Result):
    """Every layer of one network stitched into every layer of another, returned by :func:`hf_stitch.stitch_grid`.

    Methods take a figure and a matcher by their names; by default the first of each.

    The figures of classifiers are ``relative_accuracy`` (divided by the accuracy of the target; direct matching,
    functional, of Balogh and Jelasity 2025), ``accuracy`` and ``agreement`` (share of samples with the same prediction
    as the target); those of language models are ``relative_perplexity``, ``perplexity`` and ``agreement``.
    ``structural_error`` is ``‖T f − g‖² / ‖g‖²`` over all samples, for the activations f of the source and g of the
    target (direct matching, structural; squared and relative as in their code).

    For each detector there is ``auroc(<detector>)``: how well it tells the stitched activations from the target's own
    activations of the same samples. 0.5: not at all; 1: always. If the detector is
    two-sided, unusually small scores count as strange, too. ``dose(<detector>)`` is the relative residual of noise on
    the target's own activations that it tells apart as well as the stitch: 0 if less than the smallest of
    :data:`DOSES`, infinity if more than the largest. Further figures (``one_sided``, ``two_sided``, ``aupr``,
    ``fpr95``), noise of all kinds and doses, and the controls are in ``detections``.

    Attributes:
        scores: Matcher -> figure -> (layers of a, layers of b, 3) float64, the value and both ends of its 95% interval
            (bootstrap over samples). NaN where a stitch is undefined.
        baselines: ``mean_only`` (the target's mean activations) -> figure -> (layers of b, 3); ``source``, ``target``
            (the whole networks) and ``chance`` (a predictor that ignores the input) -> figure -> (3,).
        p_values: Matcher -> figure -> (2, layers of a, layers of b) float64. First, the p-value of the difference from
            the best stitch of the same layer of a (bootstrap over samples); second, of the same layer of b. 1 for the
            best one itself.
        layers_a: Layers of the source, the rows.
        layers_b: Layers of the target, the columns.
        task: Task of the stitched models.
        pooling: The pooling.
        n: Number of test samples.
        detections: Detector -> what it finds (:class:`Detection`), with its controls. Where a detector does not
            tell far samples apart, its other figures are no evidence.
        undefined: Stitch (``"matcher: layer of a -> layer of b"``) -> why it is undefined.
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
        """Names of the figures; of detectors, ``auroc`` and ``dose``."""
        own = next(iter(self.scores.values()))
        return *own, *(f"{figure}({label})" for label in self.detections for figure in ("auroc", "dose"))

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
            raise KeyError(f"the grid has no matcher {label!r}; it has {', '.join(self.matchers)}")
        name = self.figures[0] if figure is None else figure
        found = self._figures(label)
        if name not in found:
            raise KeyError(f"the grid has no figure {name!r}; it has {', '.join(found)}")
        return found[name]

    def score(self, layer_a: str, layer_b: str, figure: str | None = None, matcher: str | None = None) -> Score:
        """Return a figure of one stitch with its interval."""
        for layer, own, side in ((layer_a, self.layers_a, "a"), (layer_b, self.layers_b, "b")):
            if layer not in own:
                raise KeyError(f"the grid has no layer {layer!r} of {side}; it has {', '.join(own)}")
        place = self.layers_a.index(layer_a), self.layers_b.index(layer_b)
        return Score(*map(float, self.cells(matcher, figure)[place]))

    def as_good(
        self, figure: str | None = None, matcher: str | None = None, *, level: float = 0.05
    ) -> NDArray[np.bool_]:
        """Return which stitches are as good as the best one of the same layer, as far as the samples tell.

        Args:
            figure: Name of the figure.
            matcher: Label of the matcher.
            level: Level of the tests, together for all rivals of a layer (Holm 1979).

        Returns:
            (2, layers of a, layers of b) bool. First, compared with the best stitch of the same layer of a; second, of
            the same layer of b.
        """
        self.cells(matcher, figure)
        name, tested = figure or self.figures[0], self.p_values[matcher or self.matchers[0]]
        if name not in tested:
            raise KeyError(
                f"differences in {name} are not tested: figures of detectors have intervals, but no p-values. Those "
                f"with p-values are {', '.join(tested)}"
            )
        p_values = tested[name]
        return np.stack([not_rejected(p_values[0], level), not_rejected(p_values[1].T, level).T])

    def identify(self, figure: str | None = None, matcher: str | None = None, *, level: float = 0.05) -> Identification:
        """Test for each layer whether its best stitch is the one with the corresponding layer of the other network.

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
        distribution: as easy to tell as coloured noise above :data:`MAX_DOSE`, with higher scores than the target's own
        activations. Layers where the detector is no evidence (:attr:`Detection.blind`) take no part.

        Args:
            matcher: Label of the matcher.
            detector: Label of the detector; ``None`` asks for any of them.
        """
        label = matcher or self.matchers[0]
        values = self.values(label)
        accurate = values >= ACCURATE if self._rises else values <= 1 / ACCURATE
        found = np.zeros_like(accurate)
        for name in [detector] if detector else self.detections:
            figures = self.detections[name].figures.get(label, {})
            if not {"dose", "one_sided"} <= figures.keys():
                continue
            # Unusually small scores, as of least squares, which shrinks, contain nothing that the target never outputs.
            higher = figures["one_sided"][..., 1] > 0.5
            found |= (
                higher & (figures["dose"][..., 0] > MAX_DOSE) & ~np.isin(self.layers_b, [*self.detections[name].blind])
            )
        return accurate & found

    def stitched(self, layer_a: str, layer_b: str, matcher: str | None = None) -> StitchedModel:
        """Build the stitched model of one cell, with a copy of its stitching layer."""
        label = matcher or self.matchers[0]
        self.score(layer_a, layer_b, matcher=label)
        if (why := self.undefined.get(cell_name(label, layer_a, layer_b))) is not None:
            raise ValueError(f"the stitch {cell_name(label, layer_a, layer_b)} is undefined: {why}")
        if self.stitches is None or self.networks is None:
            raise ValueError("a grid that was loaded from a file contains scores, not weights: run stitch_grid again")
        layer = copy.deepcopy(self.stitches[label, layer_a, layer_b])
        source, target = self.networks
        recipe = {key: value for key, value in self.recipe.items() if key not in ("layers_a", "layers_b", "matchers")}
        recipe["matcher"] = self.recipe["matchers"][label]
        return join(source, layer_a, layer, target, layer_b, task=self.task, recipe=recipe)

    def to_pandas(self) -> pandas.DataFrame:
        """Return the scores in long format.

        Returns one row per matcher, figure (of detectors, all) and pair of layers, with the columns ``matcher``,
        ``figure``, ``layer_a``, ``layer_b``, ``value``, ``low`` and ``high``, and ``undefined`` (the reason, or None)
        if a stitch is undefined.
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

        An infinite dose has the colour of the largest dose that was measured. In figures of a detector, layers where it
        is no evidence are marked as blind, and stitches that are accurate but strange (:meth:`is_strange`) have a star.

        Args:
            figure: The figures; ``None`` uses the first, and the AUROC of each detector.
            matcher: Label of the matcher.
        """
        from hf_stitch.plots import heatmap, heatmaps

        label = matcher or self.matchers[0]
        if figure is not None and not figure:
            raise ValueError(f"name at least one figure; the grid has {', '.join(self.figures)}")
        shown = [figure] if isinstance(figure, str) else figure
        panels = [
            self._panel(label, name)
            for name in shown or (self.figures[0], *(f"auroc({detector})" for detector in self.detections))
        ]
        return heatmap(**panels[0]) if len(panels) == 1 else heatmaps(panels)

    def _panel(self, matcher: str, figure: str) -> dict[str, Any]:
        values = self.values(matcher, figure)
        marked = np.zeros(values.shape, bool)
        better = values if self.direction(figure) == "higher" else -values
        known = ~np.isnan(values).all(1)
        marked[known, np.nanargmax(better[known], 1)] = True
        detector = next((label for label in self.detections if figure.endswith(f"({label})")), None)
        strange = None if detector is None else self.is_strange(matcher, detector)
        explained = f"{figure if detector else figure.replace('_', ' ')}\n{self.direction(figure)} = better"
        values, limit = self._capped(figure, values)
        explained += f"; {limit}: at least {limit}" if limit else ""
        blind = self.detections[detector].blind if detector else {}
        least_good = f"at least {ACCURATE:g}" if self._rises else f"at most {1 / ACCURATE:g}"
        low, high = ends_of(values, self._whole(figure)) or (None, None)
        rows, columns = self._titles
        return {
            "values": values, "row_labels": self.layers_a,
            "column_labels": [f"{layer} (blind)" if layer in blind else layer for layer in self.layers_b],
            "row_title": rows, "column_title": columns,
            "title": f"{matcher}, {self.n} samples", "label": explained, "low": low, "high": high,
            "marked": marked, "marks": "best of each layer of the source", "starred": strange,
            "stars": f"accurate ({least_good}), but strange (dose above {MAX_DOSE:g})",
        }  # fmt: skip

    @property
    def _titles(self) -> tuple[str, str]:
        names = self.recipe.get("names") or {}
        a, b = ({"reference": self.recipe.get(side), "name": names.get(side)} for side in "ab")
        return titles_of(a, b, ("the source", "the target"))

    def _whole(self, figure: str) -> Ends | None:
        """The range in which a figure usually lies, if it has one; relative accuracies may lie above."""
        return (0.5, 1.0) if figure.startswith("auroc(") else (0.0, 1.0) if figure in SHARES else None

    def _capped(self, figure: str, values: Array) -> tuple[Array, str]:
        """Values whose infinite doses are the largest one that was measured, and this dose; empty if there are none."""
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
        beside = ", ".join(
            f"{name} {best(row[figure].reshape(-1, 3)[:, 0]):.3f}" for name, row in self.baselines.items()
        )
        caption = [f"{self.n} samples, pooling: {self.pooling}" + (f"; {beside}" if beside else ""), *self._gaps()]
        caption += self.cautions
        if self.detections and not all("far" in found.controls for found in self.detections.values()):
            caption.append("without far_data, it is unknown whether the detectors tell any samples apart")
        caption += [found.caution for found in self.detections.values() if found.caution]
        for label, found in self.detections.items():
            for what, why in list(found.undefined.items())[:1]:
                caption.append(f"{label} is undefined for {len(found.undefined)} figures, as {what}: {why}")
        table.caption = Text("; ".join(caption))
        for matcher in self.matchers:
            table.add_column(Text(matcher))
        for i, layer in enumerate(self.layers_a):
            table.add_row(Text(layer), *(Text(self._best(matcher, figure, i)) for matcher in self.matchers))
        return table

    def direction(self, figure: str) -> str:
        """Return ``"higher"`` or ``"lower"``, whichever is better for a figure; lower is, for those of detectors."""
        return "higher" if task_named(self.task).figures.get(figure) else "lower"

    @property
    def _rises(self) -> bool:
        return self.direction(self.figures[0]) == "higher"

    @property
    def cautions(self) -> list[str]:
        """What the scores are no evidence of, in sentences."""
        found = []
        if self.no_better:
            found.append(
                f"{len(self.no_better)} of {len(self.matchers) * len(self.layers_a) * len(self.layers_b)} stitches are "
                f"no better than the mean activations of the target or chance, by {self.figures[0].replace('_', ' ')} "
                f"(the 95% interval of the paired difference is not above 0), first {self.no_better[0]}"
            )
        a, b = ((self.recipe.get(side) or {}).get("weights_hash") for side in "ab")
        if a is not None and a == b and len({*self.layers_a, *self.layers_b}) > 1:
            found.append(SAME_NETWORK)
        return found

    def _gaps(self) -> Iterator[str]:
        """Describe how many stitches of each matcher are undefined, with the first of the reasons."""
        for matcher in self.matchers:
            missing = [cell for cell in self.undefined if cell.startswith(f"{matcher}: ")]
            if missing:
                count = len(self.layers_a) * len(self.layers_b)
                why = self.undefined[missing[0]]
                yield f"{len(missing)} of {count} stitches are undefined, first {missing[0]}: {why}"

    def _best(self, matcher: str, figure: str, row: int) -> str:
        cells = self.cells(matcher, figure)[row]
        if np.isnan(cells[:, 0]).all():
            return "undefined"
        place = int(np.nanargmax(cells[:, 0] if self.direction(figure) == "higher" else -cells[:, 0]))
        return f"{self.layers_b[place]}  {Score(*map(float, cells[place]))}"

    def _figures(self, matcher: str) -> dict[str, Array]:
        """All figures of a matcher, also those of detectors."""
        found = dict(self.scores[matcher])
        for label, detection in self.detections.items():
            found |= {f"{figure}({label})": values for figure, values in detection.figures.get(matcher, {}).items()}
        return found


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
    """Return the grid of what was measured of stitches and of the target's means, with a warning of its cautions."""
    task, (rows, columns) = task_named(pair.task), (pair.layers_a, pair.layers_b)
    drawn = {
        who: {name: row[name] for name in (*task.compared, "structural_error") if name in row}
        for who, row in task.drawn(_measures(pair, measured, stitches, seed), resamples=resamples, seed=seed).items()
    }
    cells: dict[str, dict[str, Array]] = {matcher: {} for matcher, _, _ in stitches}
    no_better = []
    for place, (matcher, la, lb) in enumerate(stitches):
        own = {figure: values[:, place] for figure, values in drawn["stitched"].items()}
        for figure, values in own.items():
            of = cells[matcher].setdefault(figure, np.full((len(values), len(rows), len(columns)), np.nan))
            of[:, rows.index(la), columns.index(lb)] = values
        mean = {figure: values[:, columns.index(lb)] for figure, values in drawn["mean_only"].items()}
        if not_beaten(task, {"stitched": own, "mean_only": mean, "chance": drawn["chance"]}):
            no_better.append(cell_name(matcher, la, lb))
    grid = StitchGrid(
        {matcher: {figure: with_interval(values) for figure, values in of.items()} for matcher, of in cells.items()},
        {
            who: {figure: with_interval(values) for figure, values in row.items()}
            for who, row in drawn.items()
            if who != "stitched"
        },
        {
            matcher: {
                figure: differences_from_best(values, task.figures.get(figure, False)) for figure, values in of.items()
            }
            for matcher, of in cells.items()
        },
        rows, columns, str(pair.task), pair.pooling, n, undefined=undefined, recipe=recipe, no_better=tuple(no_better),
        stitches=stitches, networks=(pair.source, pair.target),
    )  # fmt: skip
    if no_better:
        warn(grid.cautions[0])
    return grid


def _measures(pair: Pair, measured: Measured, stitches: Iterable[Cell], seed: int) -> dict[str, Answers]:
    """Return the measures by kind of predictor, those of stitches and means with a column for each."""
    task, found, seen = task_named(pair.task), measured.answers[""], measured.seen

    def stacked(rows: Sequence[Answers]) -> dict[str, Array]:
        return {name: np.stack([row[name] for row in rows], 1) for name in rows[0]}

    errors = [seen[Kept("error", pair.pooling, cell_name(*cell))] for cell in stitches]
    norms = np.stack([seen[Kept("norm", pair.pooling, layer)] for layer in pair.layers_b], 1)
    apart = {"error": np.stack(errors, 1), "norm": norms[:, [pair.layers_b.index(lb) for _, _, lb in stitches]]}
    measures: dict[str, Answers] = {
        "stitched": {**stacked([found[cell_name(*cell)] for cell in stitches]), **apart},
        "mean_only": stacked([found[mean_name(layer)] for layer in pair.layers_b]),
        **{who: found[who] for who in ("source", "target") if who in found},
    }
    chance = task.chance(measures, seed)
    return {**measures, "chance": {name: chance[name] for name in task.kept if name in chance}}


def differences_from_best(drawn: Array, higher_is_better: bool) -> Array:
    """Compute p-values of the difference of each stitch from the best of its row and of its column.

    The p-value is that of a normal distribution with the standard deviation of the difference over the resamples: a
    share of resamples could not be small enough for a Holm test of many layers. The best stitch is chosen on the same
    samples, so that p-values of close rivals are somewhat too small.
    """
    better = drawn if higher_is_better else -drawn
    found = []
    for axis in (2, 1):
        values = np.where(np.isnan(better[:1]), -np.inf, better[:1])
        best = np.take_along_axis(better, values.argmax(axis, keepdims=True), axis)
        apart = best - better
        spread = np.nanstd(apart[1:], 0, ddof=1) if len(apart) > 1 else np.nan
        with np.errstate(divide="ignore", invalid="ignore"):  # 0 / 0 for equal ones, of which the p-value is 1
            p = 2 * ndtr(-np.nan_to_num(apart[0] / spread, nan=0.0))
        found.append(np.where(np.isnan(better[0]), np.nan, np.where((best == better)[0], 1.0, p)))
    return np.stack(found)
