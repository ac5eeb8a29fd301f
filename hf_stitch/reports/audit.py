"""The page of an audit: how accurate a stitched model is, and whether its activations are out of distribution."""

from __future__ import annotations

import numpy as np

from hf_stitch.analysis.auditing import STITCHED, Audit
from hf_stitch.analysis.detection.noise import DOSES
from hf_stitch.reports import evaluation as scores
from hf_stitch.reports.drawing import bars, rows_layout
from hf_stitch.reports.section import Figure, Section, Table, View


def section(audit: Audit) -> Section:
    """Describe an audit."""
    page = scores.section(audit.evaluation)
    views = [view for part in audit.detections for view in _views(audit, part)]
    figures = list(page.figures)
    if views:
        rows = max(len(view.table.rows) for view in views)
        figures.append(Figure(views, rows_layout(rows, "AUROC, 95% interval")))
    notes = [*page.notes, f"The relative residual is {audit.residual['body']:.3f}."]
    notes += [f"{name} does not count: it {why}." for name, why in audit.left_out.items()]
    verdict = f"{audit.verdict[0].upper()}{audit.verdict[1:]}."
    asked = (
        f"Is the stitched model accurate ({audit.figure.replace('_', ' ')} of {audit.min_relative_accuracy:g}), and "
        f"do detectors find its activations out of distribution (stranger than noise of dose {audit.max_dose:g})?"
    )
    return Section(
        "Audit of a stitched model", asked, verdict, figures, page.pictures, notes=notes, recipe=page.recipe,
        networks=page.networks, data=page.data,
    )  # fmt: skip


AUROC = "AUROC against the target's own activations, 95% interval"


def _views(audit: Audit, part: str) -> list[View]:
    """Return what each detector finds of the stitch, of noise of known size, and of its controls."""
    views = []
    for name, found in audit.detections[part].items():
        rows = {STITCHED: found.figures[STITCHED].get("auroc", np.full((1, 1, 3), np.nan))[0, 0]}
        rows |= {f"noise of dose {d:g}": row for d, row in zip(DOSES, found.doses["coloured"][0], strict=True)}
        rows |= {control: values[0] for control, values in found.controls.items()}
        kept = {row: values for row, values in rows.items() if not np.isnan(values[0])}
        label = f"{name} ({part})" if len(audit.detections) > 1 else name
        dose = found.figures[STITCHED]["dose"][0, 0, 0]
        caption = f"{label}: the stitched activations are as strange as noise of dose {dose:.3g}."
        if label in audit.left_out:
            caption = f"{label} does not count: it {audit.left_out[label]}."
        table = Table(("activations", AUROC), [(r, f"{v[0]:.3f} [{v[1]:.3f}, {v[2]:.3f}]") for r, v in kept.items()])
        traces = [bars({row: tuple(map(float, values)) for row, values in kept.items()}, STITCHED)]  # type: ignore[misc]
        views.append(View(label, caption, traces, table))
    return views
