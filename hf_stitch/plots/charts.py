"""Points and curves with confidence intervals, and rows of bars."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from hf_stitch.options import checked

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PALETTE = ("#000000", "#e69f00", "#0072b2", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#7f7f7f")
"""Colours that colour-blind readers can distinguish (Okabe and Ito 2008)."""
MARKERS = "osD^vP*X"
"""One marker for each colour, for figures in black and white."""
DASHES = ("-", "--", ":", "-.")
MOST_KINDS = len(DASHES)
"""Number of kinds of curves that dashes can distinguish."""
COLOUR = "#31688e"

Role = Literal["source", "stitch", "target", "left out"]
"""Role of a part of a strip."""
COLOURS: dict[Role, str] = {"source": "#0072b2", "stitch": "#d55e00", "target": "#009e73", "left out": "#b5b5b5"}


def curves(
    series: Mapping[str, Mapping[float, tuple[float, float, float]]],
    *,
    axis: str,
    label: str,
    title: str = "",
    split: Mapping[str, tuple[str, str]] | None = None,
) -> Figure:
    """Plot one curve for each name, with a band of its confidence intervals.

    Curves differ in colour, and in marker or dashes, so that the figure can be read in black and white.

    Args:
        series: Name -> x coordinate -> ``(value, lower end, upper end)`` of the interval.
        axis: Label of the horizontal axis.
        label: Label of the vertical axis.
        title: Title of the figure (default: none).
        split: Name -> ``(colour, dashes)``, two texts for the legend. Curves with the same first text share a colour
            and a marker; curves with the same second text share dashes (up to 4). ``None`` (default): each curve has a
            different colour, and all are solid.

    Returns:
        The figure. Up to 8 colours are used, with a legend; more curves (or first texts) all have one colour, without a
        legend, because more colours could not be distinguished.

    Example:
        >>> figure = curves({"direct": {4: (0.5, 0.4, 0.6), 8: (0.9, 0.8, 1.0)}}, axis="rank", label="accuracy")
        >>> figure.axes[0].lines[0].get_xdata().tolist()
        [4.0, 8.0]
    """
    from matplotlib.figure import Figure

    if not series or not all(series.values()):
        raise ValueError("series must contain at least one point for each name, got none")
    texts_of = {name: (name, "") for name in series} if split is None else {name: split[name] for name in series}
    colours, dashes = (list(dict.fromkeys(texts[index] for texts in texts_of.values())) for index in (0, 1))
    if len(dashes) > MOST_KINDS:
        raise ValueError(f"at most {MOST_KINDS} kinds of dashes can be distinguished, got {', '.join(dashes)}")
    coloured = len(colours) <= len(PALETTE)
    figure = Figure(figsize=(6.0, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for name, points in series.items():
        index, dash = colours.index(texts_of[name][0]), DASHES[dashes.index(texts_of[name][1])]
        colour, marker = (PALETTE[index], MARKERS[index]) if coloured else (COLOUR, "o")
        xs = np.array(sorted(points), np.float64)
        values, lows, highs = np.array([points[x] for x in sorted(points)], np.float64).T
        style: dict[str, Any] = {"color": colour, "marker": marker, "linestyle": dash, "markersize": 4}
        axes.plot(xs, values, label=name, alpha=1.0 if coloured else 0.5, **style)
        axes.fill_between(xs, lows, highs, color=colour, alpha=0.2 if coloured else 0.05, linewidth=0)
    _add_legend(axes, colours if coloured else [], dashes)
    axes.set_xlabel(axis)
    axes.set_ylabel(label)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize="large")
    return figure


def _add_legend(axes: Axes, colours: list[str], dashes: list[str]) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=PALETTE[i], marker=MARKERS[i], markersize=4) for i in range(len(colours))]
    texts = list(colours)
    if len(dashes) > 1:
        handles += [Line2D([], [], color="black", ls=dash) for dash in DASHES[: len(dashes)]]
        texts += dashes
    if texts:
        position: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1.01, 0.5)} if len(texts) > 4 else {}
        axes.legend(handles, texts, frameon=False, fontsize="small", **position)


def intervals(scores: Mapping[str, tuple[float, float, float]], label: str) -> Figure:
    """Plot one point with its confidence interval for each name.

    Args:
        scores: Name -> ``(value, lower end, upper end)`` of the interval, in order from top to bottom.
        label: Label of the horizontal axis.

    Example:
        >>> figure = intervals({"stitched": (0.95, 0.93, 0.97), "chance": (0.10, 0.08, 0.12)}, "accuracy")
        >>> [tick.get_text() for tick in figure.axes[0].get_yticklabels()]
        ['stitched', 'chance']
    """
    return interval_panels({"": scores}, label)


def interval_panels(panels: Mapping[str, Mapping[str, tuple[float, float, float]]], label: str) -> Figure:
    """Plot panels of :func:`intervals` side by side, with the same horizontal axis.

    Args:
        panels: Title -> name -> ``(value, lower end, upper end)``. A row has the same name in all panels and stays
            empty where a panel lacks it.
        label: Label of the horizontal axis.

    Example:
        >>> figure = interval_panels({"first": {"a": (0.5, 0.4, 0.6)}, "second": {"b": (0.7, 0.6, 0.8)}}, "accuracy")
        >>> [axes.get_title() for axes in figure.axes], len(figure.axes[0].get_yticks())
        (['first', 'second'], 2)
    """
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(name for scores in panels.values() for name in scores))
    if not names:
        raise ValueError("scores must contain at least one name, got none")
    for scores in panels.values():
        for name, (_, low, high) in scores.items():
            if low > high:
                raise ValueError(f"the interval of {name!r} must begin before it ends, got {low} to {high}")

    width = 6.0 if len(panels) == 1 else 1.5 + 4.5 * len(panels)
    figure = Figure(figsize=(width, 0.42 * len(names) + 1.0), layout="constrained")
    for axes, (title, scores) in zip(
        figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0], panels.items(), strict=True
    ):
        _draw(axes, [scores.get(name, (np.nan,) * 3) for name in names])
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.set_title(title, fontsize=11)
        axes.set_xlabel(label)
    return figure


def _draw(axes: Axes, scores: list[tuple[float, float, float]]) -> None:
    values, lows, highs = np.array(scores, np.float64).T
    rows = np.arange(len(scores))
    axes.hlines(rows, lows, highs, color=COLOUR, linewidth=3, alpha=0.45)
    axes.plot(values, rows, "o", color=COLOUR, markersize=7)
    for row, value, high in zip(rows, values, highs, strict=True):
        if np.isfinite(value):
            end = high if np.isfinite(high) else value
            axes.annotate(
                f"{value:.3f}", (max(value, end), row), (8, 0), textcoords="offset points", va="center", fontsize=9
            )
    axes.margins(x=0.12)
    axes.grid(axis="x", alpha=0.25)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


@checked
def strips(parts: Iterable[tuple[str, str, float, Role]], label: str) -> Figure:
    """Plot rows of parts with lengths proportional to their sizes; unused parts are hatched.

    Args:
        parts: Row, name, size and role of each part, from left to right.
        label: Label of the sizes.

    Example:
        >>> figure = strips([("source", "front", 3.0, "source"), ("source", "back", 5.0, "left out")], "parameters")
        >>> [tick.get_text() for tick in figure.axes[0].get_yticklabels()]
        ['source']
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    segments = list(parts)
    if not segments:
        raise ValueError("parts must contain at least one part, got none")
    rows = list(dict.fromkeys(row for row, *_ in segments))
    figure = Figure(figsize=(8, 0.9 + 0.5 * len(rows)), layout="constrained")
    axes = figure.subplots()
    ends = dict.fromkeys(rows, 0.0)
    for row, _, size, role in segments:
        hatch = "//" if role == "left out" else None
        axes.barh(
            rows.index(row), size, left=ends[row], height=0.6, color=COLOURS[role], edgecolor="white", hatch=hatch
        )
        ends[row] += size
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.set_xlabel(label)
    axes.spines[["top", "right", "left"]].set_visible(False)
    roles = dict.fromkeys(role for *_, role in segments)
    figure.legend(handles=[Patch(color=COLOURS[role], label=role) for role in roles], loc="outside upper center",
                  ncols=len(roles), frameon=False)  # fmt: skip
    return figure
