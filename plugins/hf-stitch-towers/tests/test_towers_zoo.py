"""The table of types: its page follows from its rows, and every type has exact cuts or a reason."""

from __future__ import annotations

from benchmarks import towers_zoo

ROWS = towers_zoo.read()


def test_the_page_is_that_of_the_rows() -> None:
    assert towers_zoo.PAGE.read_text(encoding="utf-8") == towers_zoo.report(ROWS)


def test_every_type_has_exact_cuts_or_a_reason() -> None:
    assert len(ROWS) > 150
    assert not [kind for kind, row in ROWS.items() if row.inexact or not (row.cuts or row.reason)]


def test_a_type_is_examined_again() -> None:
    row, recorded = towers_zoo.examine("clip", towers_zoo.types()["clip"]), ROWS["clip"]
    assert (row.tower, row.projector, row.decoder) == (recorded.tower, recorded.projector, recorded.decoder)
