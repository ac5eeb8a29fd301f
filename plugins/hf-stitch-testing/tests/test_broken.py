"""Entries that break one promise fail the part that checks it, and no other."""

from __future__ import annotations

import re

import broken_maps
import broken_metrics
import broken_networks
import broken_sources
import broken_tasks
import pytest
from broken import Broken

MODULES = (broken_maps, broken_metrics, broken_networks, broken_sources, broken_tasks)
TABLES = [table for module in MODULES for table in module.TABLES]
CASES = [pytest.param(table, part, id=f"{table.check.__name__}-{part}") for table in TABLES for part in table.messages]
ELSEWHERE = {
    "check_override": {"cuts", "exact"},
    "check_task": {"saved"},
    "check_data_source": {"read_data"},
    "check_command": {"unknown_option"},
}


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.check.__name__)
def test_what_the_defects_are_added_to_conforms(table: Broken) -> None:
    assert table.failing("") == {}


@pytest.mark.parametrize(("table", "part"), CASES)
def test_an_entry_fails_only_the_part_that_it_violates(table: Broken, part: str) -> None:
    found = table.failing(part)
    assert found.keys() == {part, *table.also.get(part, ())}, found
    assert re.search(table.messages[part], found[part]), found


@pytest.mark.parametrize("name", sorted({table.check.__name__ for table in TABLES}))
def test_every_part_can_fail(name: str) -> None:
    tables = [table for table in TABLES if table.check.__name__ == name]
    parts = {part.name for part in tables[0].check.parts(*tables[0].make(""))}
    assert parts == {*ELSEWHERE.get(name, ())}.union(*(table.messages for table in tables))
