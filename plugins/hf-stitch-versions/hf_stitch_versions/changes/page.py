"""Report page for the difference between two versions of a network."""

from __future__ import annotations

import math

from hf_stitch.reports.drawing import curves, texts
from hf_stitch.reports.section import Figure, Section, Table, View
from hf_stitch_versions.changes.result import LEAST_RATIO, Difference, Estimate

EFFECTS = ("part", "alone in the first network", "of the change", "noise of the same size", "times noise",
           "left when reverted", "error of the part")  # fmt: skip
"""Columns of the table of causal effects."""

WEIGHTS = ("part", "change", "cosine", "effective rank of the change", "rows changed", "format")
"""Columns of the table of weights."""

MOVES = ("block", "error", "after an orthogonal map", "after an affine map", "cosine", "linear CKA")
"""Columns of the table of activations."""


LINEAGE = ("block", "hidden units", "p by place", "p matched", "cosine of matched weights")
"""Columns of the table of lineage."""


def section(result: Difference) -> Section:
    """Describe what changed: the two curves of hybrids, then effects, outputs, weights, activations and lineage."""
    tables = {}
    if effects := [(part, part.effect) for part in result.parts if part.effect is not None]:
        tables["Effect of each part"] = Table(EFFECTS, [
            (
                part.label + " ★" * effect.causal, f"{effect.patch.value:.3g}", _percent(effect.share),
                f"{effect.noise:.3g}", str(effect.ratio), f"{effect.revert.value:.3g}", _number(effect.local),
            )
            for part, effect in effects
        ])  # fmt: skip
    if result.outputs is not None:
        outputs = result.outputs
        rows = [
            ("second from first", outputs.measure, str(outputs.forth)),
            ("first from second", outputs.measure, str(outputs.back)),
        ]
        rows += [("quantile", share, f"{value:.3g}") for share, value in outputs.quantiles.items()]
        rows += [("sample", name, f"{value:.3g}") for name, value in outputs.worst]
        if outputs.agreement is not None:
            rows.append(("equal predictions", "", str(outputs.agreement)))
        rows += [
            (name, "first, second", f"{first_score:.4g}, {second_score:.4g}; difference {change}")
            for name, (first_score, second_score, change) in outputs.scores.items()
        ]
        tables["Outputs"] = Table(("quantity", "of", "value"), rows)
    tables["Weights"] = Table(WEIGHTS, [
        (
            part.label, f"{part.weights.change:.3g}", f"{part.weights.cosine:.6g}", _number(part.weights.rank),
            _number(part.weights.rows), part.weights.format + " of the first" * part.weights.rounding,
        )
        for part in result.parts
    ])  # fmt: skip
    if moved := [(part.name, part.move) for part in result.parts if part.move is not None]:
        tables["Activations after each block: moved, or lost"] = Table(MOVES, [
            (name, *(_number(number) for number in (move.error, move.orthogonal, move.affine, move.cosine, move.cka)))
            for name, move in moved
        ])  # fmt: skip
    if result.lineage.blocks:
        tables["Lineage"] = Table(LINEAGE, [
            (
                row.block, str(row.units), f"1e{row.log10_p_place:.1f}", f"1e{row.log10_p_matched:.1f}",
                _number(row.cosine),
            )
            for row in result.lineage.blocks
        ])  # fmt: skip
    first, second = (result.a, result.b) if result.a != result.b else ("the first network", "the second")
    notes = [*result.failed, *result.notes, *_reading(result), result.lineage.sentence]
    question = f"What changed from {first} to {second}, and which part carries the change?"
    figures = [_figure(result)] if result.curves else []
    return Section("Two versions", question, result.verdict, figures, tables=tables, notes=notes, data=result.data)


def _reading(result: Difference) -> list[str]:
    """Explain how to read the numbers."""
    if result.outputs is None:
        return []
    return [
        f"Distance: {result.outputs.what}; {result.confidence:.0%} intervals over samples. A star marks a part with "
        f"more than {LEAST_RATIO:g} times the effect of noise, for all parts at once. The noise has the norm of the "
        "change, weight by weight.",
        "Errors of activations are relative to the variance of the first network, on held-out samples: a map recovers "
        "the part that moved; the rest is lost or new.",
        f"{result.forwards:.1f} forward passes per batch.",
    ]


def _figure(result: Difference) -> Figure:
    """Plot the two curves of hybrids."""
    assert result.outputs is not None
    names = list(result.curves)
    series = {
        name: {float(i): (estimate.value, estimate.low, estimate.high) for i, estimate in enumerate(points.values())}
        for name, points in result.series.items()
    }
    traces = curves(series)
    labels = texts(names)
    for trace in traces:
        trace["text"] = [labels[int(place)] for place in trace["x"]]
        trace["hovertemplate"] = "%{text}: %{y:.3g}<extra></extra>"
    layout = {
        "height": 460,
        "xaxis": {"tickvals": list(range(len(names))), "ticktext": labels, "automargin": True,
                  "title": {"text": "last part from the network that comes first"}},
        "yaxis": {"automargin": True, "rangemode": "tozero",
                  "title": {"text": f"{result.outputs.measure} from the first network"}},
    }  # fmt: skip
    rows = [
        (name, *(str(points[name]) for points in result.series.values())) for name in names
    ]  # fmt: skip
    caption = "Outputs of hybrids: a curve jumps where the change is."
    return Figure([View("", caption, traces, Table(("up to", *result.series), rows))], layout)


def _percent(share: Estimate) -> str:
    interval = "" if math.isnan(share.low) else f" [{100 * share.low:.1f}, {100 * share.high:.1f}]"
    return f"{share.value:.1%}{interval}"


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.3g}"
