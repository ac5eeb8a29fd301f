"""The page docs/real-networks.md, from the record."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

JOBS = {
    "cuts": ("Are all listed cuts exact?", "at least two cuts, each equal to the whole network bit for bit"),
    "compare": ("Are similar layers at the same relative depth?",
                "best matches lie closer in depth than by chance, and than with an untrained second network"),
    "grid": ("How well does the best stitch reproduce its target?",
             "better than mean activations and than an untrained source, on samples that did not choose the layers"),
    "matcher": ("Which matcher?", "chosen on some samples, it beats lstsq on others, beyond the interval"),
    "audit": ("Is a stitch at half of the depth evidence of similarity?", "accurate and in distribution"),
    "swap": ("Does a head accept another encoder?", "more accurate than with mean activations, beyond the interval"),
    "same": ("Is it the same network?", "a copy is the same; the first difference of a fault is in the changed module"),
    "diff": ("What changed, and where?", "the first cause is the tuned block; other changes have no rule (–)"),
    "shorten": ("How much is lost with fewer blocks?", "more neighbours than both other methods, beyond the interval"),
    "depth": ("Which block has the best features?", "better than the last block, on folds that did not choose it"),
    "probe": ("Does a probe survive the change of its encoder?",
              "better than the most frequent class, and than a probe carried to an untrained encoder"),
    "upgrade": ("How much of the new encoder's retrieval does a map keep?",
                "`auto` is at least as good as both maps of isotrieve, up to the paired interval"),
}  # fmt: skip
"""Job -> the question that its table answers, and its rule."""

VERDICTS = {True: "yes", False: "**no**", None: "–"}
TABLES = "## Networks and jobs"
"""Heading of what is generated; the text above it is written by hand."""


def page(text: str, record: Mapping[str, Any]) -> str:
    """Return the page: its text up to the tables, a table of networks and jobs, and a table for each job."""
    rows = record["rows"]
    lines = [text.partition(TABLES)[0] + TABLES, "", *overview(rows), ""]
    for job, (question, rule) in JOBS.items():
        found = [name for name in rows if name.startswith(f"{job}: ")]
        if found:
            columns = f"| {job} | what came out | rule met | seconds | GB |"
            lines += [f"## {question}", "", f"Rule: {rule}.", "", columns, "|---|---|---|---|---|"]
            lines += [*(line(name.partition(": ")[2], rows[name]) for name in found), ""]
    return "\n".join(lines)


def overview(rows: Mapping[str, Any]) -> list[str]:
    """Return a table: for each network and job, how many rows hold of how many; and the minutes of all of them."""
    lines = [f"| network | {' | '.join(JOBS)} | minutes |", "|---" * (len(JOBS) + 2) + "|"]
    for network in [name[6:] for name in rows if name.startswith("cuts: ")]:
        cells, seconds = dict.fromkeys(JOBS, ""), 0.0
        for job in JOBS:
            own = [row for name, row in rows.items() if name.startswith(f"{job}: ")
                   and network in re.split(", | by | and | → ", name.partition(": ")[2])]  # fmt: skip
            judged = [row.get("figures", {}).get("holds", False) for row in own]
            judged = [holds for holds in judged if holds is not None]
            cells[job] = f"{sum(judged)} of {len(judged)}" if judged else "run" if own else ""
            seconds += sum(row.get("seconds", 0) for row in own)
        lines.append(f"| {network} | {' | '.join(cells.values())} | {seconds / 60:.0f} |")
    return lines


def line(name: str, row: Mapping[str, Any]) -> str:
    """Return a row of a table."""
    if "error" in row:
        error = " ".join(row["error"].replace("|", "/").split())
        return f"| {name} | failed: {error[:200]} | – | – | – |"
    figures = row["figures"]
    return (
        f"| {name} | {figures['outcome']} | {VERDICTS[figures.get('holds')]} | {row['seconds']:,.0f} | "
        f"{row['memory']:.1f} |"
    )
