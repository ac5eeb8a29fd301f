"""Report page for the comparison of two versions of a network."""

from __future__ import annotations

from hf_stitch.reports.drawing import curves, texts
from hf_stitch.reports.section import Figure, Section, Table, View
from hf_stitch_versions.sameness.result import AS_THEY_ARE, LEAST, Sameness

COLUMNS = ("module", "in the second network", "class", "difference", "null", "ratio", "repaired")


def section(result: Sameness) -> Section:
    """Describe where the networks differ: a curve over the modules, the findings, and a table of all modules."""
    rows = [
        (
            row.name + f" (call {row.call + 1})" * (row.call > 0) or "(output)", row.other, row.kind,
            f"{row.difference:.3g}", f"{row.null:.3g}", f"{row.ratio:.3g}", f"{row.repaired:.3g}",
        )
        for row in result.modules
    ]  # fmt: skip
    traces = curves(result.series)
    names = texts(row[0] for row in rows)
    for trace in traces:
        trace["mode"] = "lines"
        trace["text"] = [names[int(place)] for place in trace["x"]]
        trace["hovertemplate"] = "%{text}: %{y:.3g} times the null<extra></extra>"
    places = {(row.name, row.call): place for place, row in reversed(list(enumerate(result.modules)))}
    marks = [places[finding.seen_at, 0] for finding in result.findings if (finding.seen_at, 0) in places]
    traces.append(
        {
            "type": "scatter", "mode": "markers", "name": "findings", "showlegend": bool(marks), "x": marks,
            "y": [result.series[AS_THEY_ARE].get(float(place), (None,))[0] for place in marks],
            "text": [names[place] for place in marks], "hovertemplate": "%{text}<extra></extra>",
            "marker": {"symbol": "star", "size": 12, "color": "#000000"},
        }
    )  # fmt: skip
    end = len(rows) - 1
    traces.append(
        {
            "type": "scatter", "mode": "lines", "name": "tolerance", "hoverinfo": "skip", "showlegend": True,
            "x": [0, end], "y": [result.tolerance] * 2, "line": {"color": "#8a8a8a", "dash": "dash"},
        }
    )  # fmt: skip
    layout = {
        "height": 420, "xaxis": {"title": {"text": "module, in order of execution"}},
        "yaxis": {"type": "log", "automargin": True, "title": {"text": "difference over null"}},
    }  # fmt: skip
    caption = f"Difference of each module in units of its null. Equal outputs are drawn at {LEAST:g}."
    figure = Figure([View("", caption, traces, Table(COLUMNS, rows))], layout)
    tables = {}
    if result.findings:
        tables["What differs"] = Table(
            ("module", "first seen at", "times the null", "what"),
            [
                (", ".join(f.places) or f.module or "(the network)", f.seen_at, f"{f.ratio:.3g}", f.cause)
                for f in result.findings
            ],
        )
    if result.settings or result.inputs:
        differences = [("input", text) for text in result.inputs] + [("setting", text) for text in result.settings]
        tables["Settings and inputs"] = Table(("kind", "first against second"), differences)
    paired = "names" if result.by_names else "values and weights, in order"
    notes = [
        f"Modules are paired by {paired}. The null is the effect of computing the first network in {result.null} "
        f"instead of {result.reference}; a module differs if it exceeds {result.tolerance:g} times its null.",
    ]
    if result.unseen:
        notes.append(f"{result.runtime}: {'; '.join(result.unseen)}.")
    if result.causes:
        tables["Causes"] = Table(("kind", "change of the first network"), [(c.kind, c.text) for c in result.causes])
    lists = {"Different inside equal modules": result.inside}
    lists |= {"Only in the first network": result.missing, "Only in the second network": result.extra}
    for label, left in lists.items():
        if left:
            more = f" and {len(left) - 20} more" if len(left) > 20 else ""
            notes.append(f"{label}: {', '.join(left[:20])}{more}.")
    first, second = (result.a, result.b) if result.a != result.b else ("the first network", "the second")
    question = f"Is {second} the same network as {first}, and where do they first differ?"
    return Section("Two versions", question, result.verdict, [figure], tables=tables, notes=notes, data=result.data)
