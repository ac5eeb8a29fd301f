"""Figures of README.md and docs/ are those of the records that studies/claims.toml names."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import run
from study_scripts import RESULTS, STUDIES

ROOT = STUDIES.parents[2]
PAGES = [
    "README.md",
    "docs/what-we-found.md",
    *(f"docs/{part}/{page.name}" for part in ("how-to", "explanation")
      for page in sorted((ROOT / "docs" / part).glob("*.md"))),
]  # fmt: skip
CLAIMS = tomllib.loads((STUDIES / "claims.toml").read_text())
NUMBER = re.compile(r"(?<![\w.])(?:\d[\d,]*)?(?:\.?\d+)(%?)")
REDUCE = {"min": min, "max": max, "mean": lambda values: sum(values) / len(values)}


def numbers(text: str) -> list[tuple[float, int, bool]]:
    """Return the figures of a text: value, decimals, and whether it is in percent."""
    found = []
    for match in NUMBER.finditer(re.sub(r"(?<=\d)_(?=\d)", "", re.sub(r"\]\([^)]*\)", "]", text))):
        digits = match.group().rstrip("%").replace(",", "")
        found.append((float(digits), len(digits.partition(".")[2]), bool(match.group(1))))
    return found


def agrees(shown: tuple[float, int, bool], value: float) -> bool:
    """Return whether a figure is a value, rounded."""
    return abs(shown[0] - value) <= 0.5 * 10 ** -shown[1] + 1e-9


def reached(value: Any, path: list[str]) -> Iterator[Any]:
    """Yield what is at a path, where * stands for every key or place."""
    if not path:
        yield value
    elif path[0] == "*":
        for each in value.values() if isinstance(value, dict) else value:
            yield from reached(each, path[1:])
    else:
        yield from reached(value[path[0] if isinstance(value, dict) else int(path[0])], path[1:])


def computed(record: Any, how: str) -> float:
    """Compute a figure from a record."""
    reduce, _, path = how.partition(" ")
    path, _, least = path.partition(" >= ")
    values = list(reached(record, path.split("/")))
    assert values, f"nothing is at {path}"
    if reduce == "count":
        return sum(not least or value >= float(least) for value in values)
    assert reduce != "value" or len(values) == 1, f"{path} has {len(values)} values"
    return float(values[0] if reduce == "value" else REDUCE[reduce](values))


def sources(claim: dict[str, Any]) -> list[float]:
    """Return the figures that a claim may have: those of a row, or of words that its page, test or code contains."""
    if "row" in claim:
        [study] = [each for each in run.STUDIES if each.name == claim["result"]]
        rows = [row for row in study.module().claims(study.record()) if row["claim"] == claim["row"]]
        assert rows, f"{claim['result']} has no row {claim['row']!r}"
        phrases = [" ".join((row["claim"], row["ours"], row["n"])) for row in rows]
    else:
        phrases = [claim["phrase"]] if isinstance(claim["phrase"], str) else claim["phrase"]
        place = RESULTS / f"{claim['result']}.md" if "result" in claim else ROOT / claim["source"]
        text = " ".join(place.read_text().split())
        for phrase in phrases:
            assert " ".join(phrase.split()) in text, f"{place.name} does not say {phrase!r}"
    return [value for each in phrases for value, _, _ in numbers(each)]


def normal(text: str) -> str:
    return " ".join(text.replace("**", "").split())


@pytest.mark.parametrize("claim", CLAIMS["figure"], ids=lambda claim: claim["says"][:60])
def test_a_public_figure_is_that_of_its_record(claim: dict[str, Any]) -> None:
    assert normal(claim["says"]) in normal((ROOT / claim["page"]).read_text()), f"{claim['page']} does not say it"
    shown = numbers(claim["says"])
    assert shown, "there is no figure"
    if "record" in claim:
        place = ROOT / claim["record"] if claim["record"].startswith("docs/") else STUDIES / claim["record"]
        found = [computed(json.loads(Path(place).read_text()), how) for how in claim["values"]]
        assert len(found) == len(shown)
        for figure, value in zip(shown, found, strict=True):
            assert agrees(figure, 100 * value if figure[2] else value), f"{figure[0]} is {value} in the record"
    else:
        found = sources(claim)
        for figure in shown:
            share = [100 * value for value in found] if figure[2] else []
            assert any(agrees(figure, value) for value in found + share), f"{figure[0]} is not among {found}"


@pytest.mark.parametrize("page", PAGES)
def test_a_figure_without_a_record_is_refused(page: str) -> None:
    text = (ROOT / page).read_text().partition("## Install")[0]
    text = normal(re.sub(r"```.*?```", "", text, flags=re.S))
    for said in [normal(claim["says"]) for claim in CLAIMS["figure"] if claim["page"] == page]:
        text = text.replace(said, "")
    text = re.sub(r"`[^`]*`|\]\([^)]*\)", "", text)
    found, settings = {match.group() for match in NUMBER.finditer(text)}, set(CLAIMS["settings"].get(page, []))
    without, unused = sorted(found - settings), sorted(settings - found)
    assert not without, (
        f"{page} has {', '.join(without)}: add an entry to studies/claims.toml, or, if it is no result, the number to "
        "its [settings]"
    )
    assert not unused, f"{page} no longer has {', '.join(unused)}: remove it from [settings] of studies/claims.toml"


@pytest.mark.parametrize("claim", CLAIMS["retired"], ids=lambda claim: claim["said"][:60])
def test_a_retired_claim_stays_away(claim: dict[str, str]) -> None:
    assert claim["why"]
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        assert normal(claim["said"]) not in normal(page.read_text()), f"{page.name} says it again"


@pytest.mark.parametrize(("how", "value"), [
    ("min a/*/b", 1.0), ("max a/*/b", 3.0), ("mean a/*/b", 2.0), ("count a/*/b >= 2", 1), ("value c/1", 5.0),
])  # fmt: skip
def test_values_are_computed_from_a_record(how: str, value: float) -> None:
    assert math.isclose(computed({"a": {"x": {"b": 1}, "y": {"b": 3}}, "c": [4, 5]}, how), value)


def test_a_figure_is_a_value_rounded() -> None:
    assert [agrees(figure, 0.842) for figure in numbers(".84 and 0.85, 1,226")] == [True, False, False]
    assert numbers("keep 85% of 1,000") == [(85.0, 0, True), (1000.0, 0, False)]
