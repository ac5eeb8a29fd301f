"""Sources of data and commands that break one promise fail the part that checks it, and no other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count
from typing import Any
from unittest import SkipTest

import heavy_command
import pytest
import ready_command
from datasets import Dataset
from failing_parts import assert_fails_only, failing, names

from hf_stitch.cli.listing import listing
from hf_stitch.data import DataSource
from hf_stitch.registry import Entry, registries
from hf_stitch.testing import check_command, check_data_source, parametrize_with_checks

NUMBERS = count()


class Lines(DataSource):
    """Two splits of lines, with a defect to choose."""

    name = "lines"
    defect = ""

    def splits(self, place: str) -> Mapping[str, Any]:
        if place != "poem" and self.defect != "missing":
            raise ValueError(f"there is no {place}")
        rows = ["one", "two", "three"]
        if self.defect == "repeatable":
            rows = rows[::-1] if next(NUMBERS) % 2 else rows
        if self.defect == "samples":
            return {"all": Dataset.from_dict({"a": [None, None], "b": [None, None]})}
        empty = Dataset.from_dict({"text": ["one"]}).select([]) if self.defect == "splits" else None
        return {"all": Dataset.from_dict({"text": rows}), **({} if empty is None else {"none": empty})}


def lines(defect: str, **changes: Any) -> type[Lines]:
    return type("Changed", (Lines,), {"defect": defect, **changes})


SOURCES: dict[str, tuple[type[Lines], str]] = {
    "name": (lines("", name="a:b"), "name must be text without a colon, got 'a:b'"),
    "splits": (lines("splits"), "split 'none' must not be empty"),
    "samples": (lines("samples"), "Samples.of must find the samples of split 'all'"),
    "repeatable": (lines("repeatable"), "two readings of split 'all' differ in row 0"),
    "missing": (lines("missing"), "no-such-place must raise FileNotFoundError or ValueError"),
}


@pytest.mark.parametrize("part", SOURCES)
def test_a_source_fails_only_the_part_that_it_violates(part: str) -> None:
    kind, message = SOURCES[part]
    assert failing(check_data_source, Lines, "poem") == {}
    if part == "splits":  # samples of a split without any cannot be found
        assert "splits" in failing(check_data_source, kind, "poem")
        with pytest.raises(AssertionError, match=message):
            check_data_source(kind, "poem")
        return
    assert_fails_only(part, message, check_data_source, kind, "poem")


def test_a_source_that_read_data_reads_differently(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registries.data._entries, "lines", Entry.of("lines", Lines))
    assert failing(check_data_source, "lines", "poem", missing="prose") == {}

    def read(self: Any, place: str, own: Callable[..., Any] = Lines.splits) -> Any:
        found = own(self, place)
        return found if getattr(self, "kept", False) else {"all": found["all"].select([2, 1, 0])}

    monkeypatch.setattr(Lines, "splits", read)
    source = Lines()
    source.kept = True
    found = failing(check_data_source, source, "poem")
    assert "splits and read_data of split 'all' differ in row 0" in found["read_data"]


@parametrize_with_checks(check_data_source, "sklearn", "digits", missing="iris")
def test_the_built_in_source_conforms(check: Any) -> None:
    check()


COMMANDS: dict[str, tuple[Callable[..., Any], tuple[str, ...], str]] = {
    "described": (ready_command.undescribed, ("you",), "the first line of the docstring must describe"),
    "parameters": (ready_command.without_help, ("you",), "must have a help text, but not name"),
    "help": (ready_command.helpless, ("you",), "with --help, the command must exit with 0"),
    "light": (heavy_command.seeded, (), "importing heavy_command must not import torch"),
    "runs": (ready_command.failing, ("you",), "must exit with 0, got ValueError: you is not at home"),
}


@pytest.mark.parametrize("part", COMMANDS)
def test_a_command_fails_only_the_part_that_it_violates(part: str) -> None:
    function, arguments, message = COMMANDS[part]
    assert_fails_only(part, message, check_command, function, *arguments)


def test_a_command_whose_types_typer_refuses() -> None:
    parts = {part.name: part for part in check_command.parts(ready_command.of_no_type, "you")}
    with pytest.raises(AssertionError, match="typer must accept the types of all parameters, got AssertionError"):
        parts["typed"]()
    with pytest.raises(AssertionError, match="a command must be a function or a typer app, got ABCMeta"):
        check_command(Lines)


def test_a_command_that_takes_any_option(monkeypatch: pytest.MonkeyPatch) -> None:
    import typer.core

    monkeypatch.setattr(typer.core.TyperCommand, "ignore_unknown_options", True)
    monkeypatch.setattr(typer.core.TyperCommand, "allow_extra_args", True)
    found = failing(check_command, ready_command.greet, "you")
    assert list(found) == ["unknown_option"] and "must exit with 2, got 0" in found["unknown_option"]


def test_a_module_that_cannot_be_imported_by_its_name_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("__main__", "no_such_module.of_a_file"):
        monkeypatch.setattr(ready_command.greet, "__module__", module)
        parts = {part.name: part for part in check_command.parts(ready_command.greet, "you")}
        with pytest.raises(SkipTest, match="imported"):
            parts["light"]()
        check_command(ready_command.greet, "you")


@parametrize_with_checks(check_command, listing, "metrics")
def test_a_built_in_command_conforms(check: Any) -> None:
    check()


def test_every_part_can_fail() -> None:
    assert {*SOURCES, "read_data"} == names(check_data_source, Lines, "poem")
    assert {*COMMANDS, "typed", "unknown_option"} == names(check_command, listing)


@parametrize_with_checks(check_command, ready_command.several, "farewell", "you")
def test_an_app_of_several_commands_conforms(check: Any) -> None:
    check()


def test_an_app_needs_a_help_text() -> None:
    message = "the first line of the help text must describe"
    assert_fails_only("described", message, check_command, ready_command.several_undescribed, "farewell", "you")
