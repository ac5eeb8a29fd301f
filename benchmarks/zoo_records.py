"""Records of the sweep over model families, and their page in the documentation."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "docs" / "zoo.json"
"""The records of the last sweep, one row per family."""

TITLES = {
    "timm": ("timm: the smallest model of every module", 94),
    "image": ("transformers: image classification", 38),
    "text": ("transformers: sequence classification", 112),
    "causal": ("transformers: causal language models", 150),
    "masked": ("transformers: masked language models", 46),
}
"""Suite -> title, and target for the number of families with at least two exact cuts."""

DEAR = 1.25
"""Families with a higher cost of encode and decode over one forward pass are listed by name."""

INTRODUCTION = """# The zoo

This page lists the cuts that hf-stitch finds in each family of networks, and shows that they are exact. The records are
in `docs/zoo.json`; `python -m benchmarks.zoo` repeats records of other versions of torch, timm and transformers. All
networks have random weights.

The sweep takes the model with the fewest parameters from every module of `timm.models`, and a tiny network of every
type in transformers' `AutoModelFor…` (four layers of width 64, as far as the config allows). *Cuts* counts verified
cuts. *Exact* counts cuts with bit-identical `decode(encode(x)[l], l)` and `model(x)` in an independent check
(`benchmarks/exactness.py`) on other inputs, including ragged texts with padding on either side. In networks with more
than 50 million parameters, only five evenly spaced candidates are tried. *Operations* is the number of floating-point
operations of encode and decode at the middle cut, divided by the operations of one forward pass. *Time* is the same
ratio in seconds (one thread, median of five paired runs). The number of samples is doubled until a forward pass takes
at least 50 ms, up to 128 samples. Texts have 64 tokens. *Padding* is the padding side of the adapter; *moved* is the
largest difference of an activation between eight padded texts of several lengths and each text alone, with tokenizers
of both sides (relative to the largest activation; `inf` if padding counts as text).

If fewer than two blocks are cuts, the page lists other layers on the path of the whole computation (the first and last
layers of HRNet, TNT, LiLT, NeoMME, Reformer, Zamba, Zaya and Gemma 3n, because their blocks are bypassed). In
encoder–decoders, the encoder's text passes through the cut and the decoder's ids belong to the context. Gemma 4 is
examined without per-layer inputs, because they bypass every layer except the last. The parallel streams of DeepSeek V4
and HY V4 have four axes and are not a supported representation. Reformer is examined on texts that fill its chunks.
"""


@dataclass(frozen=True)
class Record:
    """Results for one family.

    Attributes:
        suite: ``timm``, or a head of transformers.
        family: Module of ``timm.models``, or model type of transformers.
        model: Name of the timm model, or of the transformers class.
        candidates: Number of blocks that are candidates for cuts.
        cuts: Number of verified cuts. Only five candidates are tried in networks with more than 50 million parameters.
        exact: Number of cuts that :mod:`benchmarks.exactness` found exact.
        plans: Plan -> number of cuts that use it.
        middle: The cut in the middle.
        operations: Floating-point operations of encode and decode at the middle cut, relative to one forward pass.
        seconds: Seconds of encode and decode at the middle cut, relative to one forward pass.
        padding: Sides where padding does not change activations of a text; empty for other modalities.
        moved: Largest difference of the activations of texts padded on either side from each text alone, relative to
            the largest activation.
        reason: Reason for fewer than two cuts, or an empty string.
        inexact: The cut that is not exact and the inputs that show it, or an empty string.
        versions: Versions of the libraries at the examination; empty in old records.
    """

    suite: str
    family: str
    model: str = ""
    candidates: int = 0
    cuts: int = 0
    exact: int = 0
    plans: dict[str, int] = field(default_factory=dict)
    middle: str = ""
    operations: float | None = None
    seconds: float | None = None
    padding: str = ""
    moved: float | None = None
    reason: str = ""
    inexact: str = ""
    versions: str = ""


def read(path: Path = FILE) -> dict[tuple[str, str], Record]:
    """Read the records of a file: (suite, family) -> record."""
    return {(record.suite, record.family): record for record in rows_of(Record, path)}


def rows_of(kind: Callable[..., Any], path: Path) -> list[Any]:
    """Read the rows of a file."""
    return [kind(**row) for row in json.loads(path.read_text(encoding="utf-8"))] if path.exists() else []


def write(records: Collection[Record], path: Path = FILE) -> None:
    """Write records in the order of the page, one per line, so that a changed family changes one line."""
    suites = list(TITLES)
    write_rows(sorted(records, key=lambda record: (suites.index(record.suite), record.family)), path)


def write_rows(rows: Iterable[Any], path: Path) -> None:
    """Write rows, one per line."""
    lines = ",\n".join(json.dumps(dataclasses.asdict(row), ensure_ascii=False) for row in rows)
    part = path.with_suffix(".part")
    part.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    part.replace(path)


def report(records: Collection[Record]) -> str:
    """Render the page from the records of a sweep."""
    by_suite = {suite: sorted((r for r in records if r.suite == suite), key=lambda r: r.family) for suite in TITLES}
    rows = [_summary(suite, members) for suite, members in by_suite.items() if members]
    head = "| suite | families | with two exact cuts or more | target | with inexact cuts |\n|---|---|---|---|---|\n"
    sections = [_section(suite, members) for suite, members in by_suite.items() if members]
    versions = sorted({r.versions for r in records if r.versions})
    measured = f"Measured with {'; '.join(versions)}.\n" if versions else ""
    return "\n".join([INTRODUCTION, head + "\n".join(rows) + "\n", measured, _costs(records), *sections])


def _summary(suite: str, records: Sequence[Record]) -> str:
    title, target = TITLES[suite]
    good = sum(record.exact > 1 for record in records)
    return f"| {title} | {len(records)} | **{good}** | {target} | {sum(bool(r.inexact) for r in records)} |"


def _costs(records: Collection[Record]) -> str:
    ratios = [r.operations for r in records if r.operations is not None]
    if not ratios:
        return ""
    lines = [
        f"In the median family, encode and decode at the middle cut take {statistics.median(ratios):.2f} times the "
        "operations of one forward pass (matrix products and convolutions are counted). Both ratios in detail:\n",
        "| | families | median | at most 1.25 | above |",
        "|---|---|---|---|---|",
        _cost("operations", [(r, r.operations) for r in records if r.operations is not None]),
        _cost("seconds", [(r, r.seconds) for r in records if r.seconds is not None]),
    ]
    for suite in TITLES:
        seconds = [(r, r.seconds) for r in records if r.suite == suite and r.seconds is not None]
        if seconds:
            lines.append(_cost(f"seconds, {suite}", seconds, named=False))
    return "\n".join(lines) + "\n"


def _cost(title: str, ratios_of_records: Sequence[tuple[Record, float]], *, named: bool = True) -> str:
    ratios = [ratio for _, ratio in ratios_of_records]
    above = [f"{r.family} ({r.suite}) {ratio:.2f}" for r, ratio in ratios_of_records if ratio > DEAR]
    share = 1 - len(above) / len(ratios_of_records)
    names = ", ".join(above) if named else str(len(above))
    return f"| {title} | {len(ratios_of_records)} | {statistics.median(ratios):.2f} | {share:.0%} | {names or 'none'} |"


def _section(suite: str, records: Sequence[Record]) -> str:
    lines = [
        f"## {TITLES[suite][0]}\n",
        "| family | model | candidates | cuts | exact | plan | middle | operations | time | padding | moved | reason |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in records:
        plans = ", ".join(f"{count} {plan}" if len(r.plans) > 1 else plan for plan, count in r.plans.items())
        figures = ["–" if ratio is None else f"{ratio:.2f}" for ratio in (r.operations, r.seconds)]
        figures += [r.padding or "–", "–" if r.moved is None else f"{r.moved:.0e}"]
        reason = (r.inexact or r.reason).replace("|", "\\|")
        reason = reason if r.model else f"not examined (could not be created and run in time): {reason}"
        middle = f"`{r.middle}`" if r.middle else "–"
        cells = [r.family, r.model, r.candidates or r.cuts, r.cuts, r.exact, plans or "–", middle]
        lines.append("| " + " | ".join(map(str, [*cells, *figures, reason])) + " |")
    return "\n".join(lines) + "\n"
