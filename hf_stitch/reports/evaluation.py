"""The page of an evaluation: a stitched model beside its baselines."""

from __future__ import annotations

from hf_stitch.analysis.evaluation import Evaluation
from hf_stitch.reports.drawing import numbers, texts
from hf_stitch.reports.section import Figure, Section, Table


def section(evaluation: Evaluation) -> Section:
    """Describe an evaluation.

    Args:
        evaluation: The evaluation.
    """
    first = next(iter(evaluation.scores["stitched"]))
    notes = [f"No {name}: {why}." for name, why in evaluation.left_out.items()]
    if evaluation.fitted_share:
        notes.append(
            f"The stitch was fitted to {evaluation.fitted_share:.1%} of these samples: the scores are too good."
        )
    return Section(
        "Scores of a stitched model",
        f"How well does the stitched model do its task ({evaluation.task}) on {evaluation.n} held-out samples?",
        _finding(evaluation, first),
        [_figure(evaluation, figure) for figure in evaluation.scores["stitched"]],
        notes,
        {"data": evaluation.data},
    )


def _finding(evaluation: Evaluation, figure: str) -> str:
    score = evaluation.scores["stitched"][figure]
    sentence = f"{figure.replace('_', ' ')} {score} for the stitched model"
    others = {name: row[figure] for name, row in evaluation.scores.items() if name != "stitched" and figure in row}
    beside = [f"{other.value:.3f} for {name.replace('_', ' ')}" for name, other in others.items()]
    return f"{sentence[0].upper()}{sentence[1:]}" + (f", {', '.join(beside)}" if beside else "") + "."


def _figure(evaluation: Evaluation, figure: str) -> Figure:
    rows = {name: row[figure] for name, row in evaluation.scores.items() if figure in row}
    values = [score.value for score in rows.values()]
    up = [score.high - score.value for score in rows.values()]
    down = [score.value - score.low for score in rows.values()]
    colours = ["#0072b2" if name == "stitched" else "#8a8a8a" for name in rows]
    trace = {
        "type": "scatter", "mode": "markers", "x": numbers(values), "y": texts(name.replace("_", " ") for name in rows),
        "error_x": {"type": "data", "symmetric": False, "array": numbers(up), "arrayminus": numbers(down)},
        "marker": {"color": colours, "size": 10}, "hovertemplate": "%{y}: %{x:.4f}<extra></extra>", "showlegend": False,
    }  # fmt: skip
    layout = {
        "xaxis": {"title": {"text": f"{figure.replace('_', ' ')}, 95% interval over samples"}},
        "yaxis": {"autorange": "reversed", "automargin": True, "type": "category"},
        "height": 160 + 34 * len(rows),
    }
    table = Table(("predictor", figure.replace("_", " ")), [(name, str(score)) for name, score in rows.items()])
    return Figure(_finding(evaluation, figure), {"": [trace]}, layout, table)
