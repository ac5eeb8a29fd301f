"""The page of a network with another tower."""

from __future__ import annotations

from hf_stitch.reports.section import Section, Table
from hf_stitch_towers.result import ACCURACY, Exchanged, worded


def section(result: Exchanged) -> Section:
    """Describe an exchanged tower: scores beside baselines, and how the map was chosen."""
    tables = {
        "Outputs against the original, on test images": Table(
            ("row", *map(worded, result.figures)),
            [(who, *(str(row[name]) for name in result.figures)) for who, row in result.scores.items()],
        ),
        "Choice of the map": Table(
            ("matcher", "what chose it, the greater the better, on images that fitted nothing"),
            [(name, f"{value:.4g}") for name, value in result.held_out.items()],
        ),
    }
    if not result.held_out:
        del tables["Choice of the map"]
    if result.captions:
        rows = [(str(each.image), each.before, each.after) for each in result.captions]
        tables["What is written about test images"] = Table(("image", "before", "after"), rows)
    legend = (
        "Each row is what is read of an image: the new tower through its map, that of another image, the mean "
        "of the old tower for every image, and the new tower as it is and with the mean and variance of the old one. "
        "Divergence is better the lower, all else the higher; likelihoods are changes in nats per token.",
        *(
            ()
            if ACCURACY in result.figures
            else ("Likeness to the original is not accuracy: to know which network is better, score both on a task.",)
        ),
    )
    asked = f"Is {result.network} as good as before with {result.encoder} as its {result.part} tower?"
    return Section(
        "Another tower", asked, result.verdict, [], tables=tables, notes=[*result.notes, *legend], data=result.data
    )  # fmt: skip
