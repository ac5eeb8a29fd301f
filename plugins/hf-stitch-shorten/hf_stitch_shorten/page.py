"""Report page for a shortened network."""

from __future__ import annotations

import numpy as np

from hf_stitch.reports.drawing import heat_map, layout_of
from hf_stitch.reports.section import Figure, Section, Table, View
from hf_stitch_shorten.result import Shortened, listed, worded


def section(result: Shortened) -> Section:
    """Describe a shortened network: a heat map of intervals, scores, sizes and all intervals."""
    metric_name = worded(result.figure)
    figures = list(next(iter(result.scores.values())))
    tables = {
        "Scores on test samples": Table(
            ("network", *map(worded, figures)),
            [(who, *(str(row.get(name, "–")) for name in figures)) for who, row in result.scores.items()],
        ),
        "Size and speed": Table(
            ("network", "weights", "seconds per forward pass", "tokens generated per second"),
            [
                (who, f"{size.parameters:,}", f"{size.forward:.3g}",
                 "–" if size.generation is None else f"{size.generation:.0f}")
                for who, size in result.size.items()
            ],
        ),
        "Intervals": Table(
            ("removed", "after", metric_name, ""),
            [
                (listed(candidate.blocks), candidate.before, f"{candidate.value:.4g}", "★" if candidate.chosen else "")
                for candidate in result.candidates
            ],
        ),
    }  # fmt: skip
    question = f"How good is {result.network} without {listed(result.removed)}?"
    return Section(
        "A shorter network", question, result.verdict, [_map(result, metric_name)], tables=tables,
        notes=list(result.notes), data=result.data,
    )  # fmt: skip


def _map(result: Shortened, metric_name: str) -> Figure:
    """Plot the metric of each interval: the block before it against the number of removed blocks."""
    before = list(dict.fromkeys(candidate.before for candidate in result.candidates))
    counts = sorted({len(candidate.blocks) for candidate in result.candidates})
    values = np.full((len(counts), len(before)), np.nan)
    for candidate in result.candidates:
        values[counts.index(len(candidate.blocks)), before.index(candidate.before)] = candidate.value
    names = [str(count) for count in counts]
    rows = [(name, *("" if np.isnan(v) else f"{v:.3g}" for v in row)) for name, row in zip(names, values, strict=True)]
    caption = f"The {metric_name} without each interval of blocks, on the samples that chose the blocks."
    view = View("", caption, [heat_map(values, names, before, label=metric_name)], Table(("removed", *before), rows))
    return Figure([view], layout_of(len(names), len(before), "removed blocks", "block before them"))
