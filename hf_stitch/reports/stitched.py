"""Pages of a stitched model: scores next to baselines, parts, differences from the target, and audit."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hf_stitch.analysis.auditing import STITCHED, Audit
from hf_stitch.analysis.detection.noise import DOSES
from hf_stitch.analysis.evaluation import Evaluation, Example, StitchedParts
from hf_stitch.reports.drawing import COLOURS, bars, heat_map, layout_of, numbers, picture, rows_layout, texts
from hf_stitch.reports.section import Figure, Picture, Section, Table, Trace, View, key_of

CLASSES, PAIRS = 30, 200
"""Largest number of classes in a confusion matrix, and of pairs of classes in its table."""

ROLES = {"source": COLOURS[0], "stitch": COLOURS[1], "target": COLOURS[2], "left out": "#8a8a8a"}
AUROC = "AUROC against the target's own activations, 95% interval"


def evaluation_section(evaluation: Evaluation) -> Section:
    """Describe an evaluation."""
    figure = next(iter(evaluation.scores["stitched"]))
    notes = [f"No {name}: {reason}." for name, reason in evaluation.left_out.items()]
    if evaluation.fitted_share:
        notes.append(
            f"The stitch was fitted to {evaluation.fitted_share:.1%} of these samples: the scores are too good."
        )
    parts = evaluation.parts
    figures = [] if parts is None else [_strip(parts)]
    figures.append(_scores(evaluation))
    if evaluation.confusion:
        figures.append(_confusion(evaluation.confusion))
    return Section(
        "A stitched model" if parts else "Scores of a stitched model",
        f"How well does the stitched model do its task ({evaluation.task}) on {evaluation.n} held-out samples?",
        finding(evaluation, figure),
        figures,
        [_example(example) for example in evaluation.examples],
        notes=notes,
        recipe={} if parts is None else parts.recipe,
        networks=key_of(parts.source_hash, parts.target_hash) if parts else "",
        data=evaluation.data,
    )


def finding(evaluation: Evaluation, figure: str) -> str:
    """Return a sentence with a figure of the stitched model and its baselines."""
    score = evaluation.scores["stitched"][figure]
    name = figure.replace("_", " ")
    baselines = {who: row[figure] for who, row in evaluation.scores.items() if who != "stitched" and figure in row}
    comparisons = [
        f"{rival.value:.3f} for {who.replace('_', ' ')}"
        for who, rival in baselines.items()
        if not np.isnan(rival.value)
    ]
    text = f"{name[0].upper()}{name[1:]} {score} for the stitched model"
    return text + (f", {', '.join(comparisons)}" if comparisons else "") + "."


def _scores(evaluation: Evaluation) -> Figure:
    views = []
    for figure in evaluation.scores["stitched"]:
        name = figure.replace("_", " ")
        rows = {who.replace("_", " "): row[figure] for who, row in evaluation.scores.items() if figure in row}
        trace = bars({who: (score.value, score.low, score.high) for who, score in rows.items()}, "stitched")
        table = Table(("predictor", f"{name}, 95% interval"), [(who, str(score)) for who, score in rows.items()])
        views.append(View(name, finding(evaluation, figure), [trace], table))
    return Figure(views, rows_layout(len(evaluation.scores), "value, 95% interval"))


def _strip(parts: StitchedParts) -> Figure:
    """Plot both networks as strips: the parts that run, the unused parts, and the stitch between them."""
    segments = parts.segments
    traces = []
    for row, part, count, role in segments:
        trace: Trace = {
            "type": "bar", "orientation": "h", "x": numbers([count]), "y": texts([row]), "showlegend": False,
            "marker": {"color": ROLES[role], "line": {"width": 1, "color": "#ffffff"}},
            "hovertemplate": f"{texts([part])[0]}: %{{x:,}} parameters ({role})<extra></extra>",
        }  # fmt: skip
        if role == "left out":
            trace["marker"] |= {"pattern": {"shape": "/", "fgcolor": "#ffffff", "fillmode": "overlay"}}
        traces.append(trace)
    stitched_parts = [(part, count) for row, part, count, _ in segments if row == "stitched"]
    parameter_count = sum(count for _, count in stitched_parts)
    shares = ", ".join(f"{count / parameter_count:.0%} {part}" for part, count in stitched_parts)
    caption = (
        f"{parts.source_name} runs up to {parts.source_layer}, and {parts.target_name} continues after "
        f"{parts.target_layer}: {parameter_count:,} parameters ({shares}); hatched parts are left out."
    )
    layout = {
        "barmode": "stack", "height": 230, "xaxis": {"title": {"text": "parameters"}},
        "yaxis": {"autorange": "reversed", "automargin": True, "type": "category"},
    }  # fmt: skip
    rows = [(row, part, f"{count:,}", role) for row, part, count, role in segments]
    return Figure([View("", caption, traces, Table(("network", "part", "parameters", "role"), rows))], layout)


def _confusion(counts: Mapping[str, Mapping[str, int]]) -> Figure:
    """Plot which class the stitched model predicts where the target predicts another one."""
    total = sum(sum(row.values()) for row in counts.values())
    pairs = sorted(
        ((target, pred, n) for target, row in counts.items() for pred, n in row.items() if pred != target),
        key=lambda pair: -pair[2],
    )
    different_count = sum(n for _, _, n in pairs)
    differences: dict[str, int] = {}
    for target, pred, n in pairs:
        differences[target], differences[pred] = differences.get(target, 0) + n, differences.get(pred, 0) + n
    for name in counts:
        differences.setdefault(name, 0)
    top = sorted(differences, key=lambda name: -differences[name])[:CLASSES]
    cells = np.array([[counts.get(target, {}).get(pred, 0) for pred in top] for target in top], np.float64)
    caption = f"Both predict the same class for {total - different_count} of {total} samples"
    caption += f"; most often, {pairs[0][0]} becomes {pairs[0][1]} ({pairs[0][2]} samples)." if pairs else "."
    if len(differences) > CLASSES:
        caption += f" The figure shows the {CLASSES} of {len(differences)} classes with the most differences."
    heat = heat_map(cells, top, top, label="samples")
    heat["hovertemplate"] = "target: %{y}<br>stitched: %{x}<br>%{z} samples<extra></extra>"
    table = Table(
        ("class predicted by the target", "class predicted by the stitched model", "samples"),
        [(target, pred, str(n)) for target, pred, n in pairs[:PAIRS]],
    )
    layout = layout_of(len(top), len(top), "predicted by the target", "predicted by the stitched model")
    return Figure([View("", caption, [heat], table)], layout)


def _example(example: Example) -> Picture:
    truth = "" if example.label is None else f", truth {example.label}"
    caption = (
        f"{example.id}: target {example.target}, stitched {example.stitched}{truth} (distance {example.distance:.3f})"
    )
    return picture(caption, example.sample)


def audit_section(audit: Audit) -> Section:
    """Describe an audit."""
    page = evaluation_section(audit.evaluation)
    views = [view for part in audit.detections for view in _views(audit, part)]
    figures = list(page.figures)
    if views:
        rows = max(len(view.table.rows) for view in views)
        figures.append(Figure(views, rows_layout(rows, "AUROC, 95% interval")))
    notes = [*page.notes, f"The relative residual is {audit.residual['body']:.3f}."]
    notes += [f"{name} does not count: it {reason}." for name, reason in audit.left_out.items()]
    verdict = f"{audit.verdict[0].upper()}{audit.verdict[1:]}."
    question = (
        f"Is the stitched model accurate ({audit.figure.replace('_', ' ')} of {audit.min_relative_accuracy:g}), and "
        f"do detectors find its activations out of distribution (stranger than noise of dose {audit.max_dose:g})?"
    )
    return Section(
        "Audit of a stitched model", question, verdict, figures, page.pictures, notes=notes, recipe=page.recipe,
        networks=page.networks, data=page.data,
    )  # fmt: skip


def _views(audit: Audit, part: str) -> list[View]:
    """Return the AUROCs of each detector for the stitch, for noise of known size, and for its controls."""
    views = []
    for name, detection in audit.detections[part].items():
        rows = {STITCHED: detection.figures[STITCHED].get("auroc", np.full((1, 1, 3), np.nan))[0, 0]}
        rows |= {f"noise of dose {d:g}": row for d, row in zip(DOSES, detection.doses["coloured"][0], strict=True)}
        rows |= {control: values[0] for control, values in detection.controls.items()}
        defined = {row: values for row, values in rows.items() if not np.isnan(values[0])}
        label = f"{name} ({part})" if len(audit.detections) > 1 else name
        dose = detection.figures[STITCHED]["dose"][0, 0, 0]
        caption = f"{label}: the stitched activations are as strange as noise of dose {dose:.3g}."
        if label in audit.left_out:
            caption = f"{label} does not count: it {audit.left_out[label]}."
        table = Table(("activations", AUROC), [(r, f"{v[0]:.3f} [{v[1]:.3f}, {v[2]:.3f}]") for r, v in defined.items()])
        traces = [bars({row: tuple(map(float, values)) for row, values in defined.items()}, STITCHED)]  # type: ignore[misc]
        views.append(View(label, caption, traces, table))
    return views
