"""Report page for a network with an exchanged tower."""

from __future__ import annotations

from hf_stitch.reports.section import Section, Table
from hf_stitch_towers.result import ACCURACY, Exchanged, worded


def section(result: Exchanged) -> Section:
    """Describe an exchanged tower: scores, baselines, and the choice of the map."""
    tables = {
        "Outputs against the original, on test images": Table(
            ("row", *map(worded, result.figures)),
            [(who, *(str(row[name]) for name in result.figures)) for who, row in result.scores.items()],
        ),
        "Choice of the map": Table(
            ("matcher", "score on held-out images, higher is better"),
            [(name, f"{value:.4g}") for name, value in result.held_out.items()],
        ),
    }
    if not result.held_out:
        del tables["Choice of the map"]
    if result.captions:
        rows = [(str(caption.image), caption.before, caption.after) for caption in result.captions]
        tables["Captions of test images"] = Table(("image", "before", "after"), rows)
    legend = (
        "Rows are features of an image: from the new tower with its map, the same for another image, the mean of the "
        "old tower, and the new tower without a map or with the mean and variance of the old one. Lower is better for "
        "the divergence, higher for the rest; likelihoods are changes in nats per token.",
        *(
            ()
            if ACCURACY in result.figures
            else ("Agreement with the original is not accuracy: to find the better network, score both on a task.",)
        ),
    )
    question = f"Is {result.network} as good as before with {result.encoder} as its {result.part} tower?"
    return Section(
        "Exchanged tower", question, result.verdict, [], tables=tables, notes=[*result.notes, *legend], data=result.data
    )  # fmt: skip
