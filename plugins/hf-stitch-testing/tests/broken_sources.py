"""Sources of data and commands with one defect each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

import heavy_command
import ready_command
from broken import Broken
from datasets import Dataset
from hf_stitch_testing import check_command, check_data_source

from hf_stitch.data import DataSource

NUMBERS = count()


class Lines(DataSource):
    """A split of lines, with a defect to choose."""

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
        empty = {"none": Dataset.from_dict({"text": ["one"]}).select([])} if self.defect == "splits" else {}
        return {"all": Dataset.from_dict({"text": rows}), **empty}


def lines(defect: str) -> type[Lines]:
    return type("Changed", (Lines,), {"defect": defect, **({"name": "a:b"} if defect == "name" else {})})


SOURCES = {
    "name": "name must be a string without a colon, got 'a:b'",
    "splits": "split 'none' must not be empty",
    "samples": "Samples.of must find the samples of split 'all'",
    "repeatable": "two reads of split 'all' differ in row 0",
    "missing": "no-such-place must raise FileNotFoundError or ValueError",
}
COMMANDS: dict[str, tuple[Callable[..., Any], str]] = {
    "typed": (ready_command.of_no_type, "typer must accept the types of all parameters, got AssertionError"),
    "described": (ready_command.undescribed, "the first line of the docstring must describe"),
    "parameters": (ready_command.without_help, "must have a help text; missing for name"),
    "help": (ready_command.helpless, "with --help, the command must exit with 0"),
    "light": (heavy_command.seeded, "importing heavy_command must not import torch"),
    "runs": (ready_command.failing, "must exit with 0, got ValueError: you is not at home"),
}

TABLES = [
    Broken(
        check_data_source,
        lambda part: (lines(part), "poem"),
        SOURCES,
        also={"splits": {"samples"}},  # of a split without any
    ),
    Broken(
        check_command,
        lambda part: (COMMANDS[part][0] if part else ready_command.greet, *(["you"] if part != "light" else [])),
        {part: message for part, (_, message) in COMMANDS.items()},
        also={"typed": {"parameters", "help", "runs", "unknown_option"}},  # typer makes no command of it
    ),
]
