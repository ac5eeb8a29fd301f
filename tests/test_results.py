"""Base class of results: JSON round trip and errors."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np
import pandas
import pytest
from hypothesis import given, strategies as st
from numpy.typing import NDArray

from hf_stitch.results import Result


@dataclass(frozen=True)
class Point:
    value: float
    low: float | None = None


@dataclass(frozen=True, eq=False)
class Everything(Result):
    derived: ClassVar[tuple[str, ...]] = ("total",)

    name: str
    axis: Literal["a", "b"]
    points: Mapping[str, Mapping[float, Point]]
    paths: Mapping[tuple[str, str], float]
    values: NDArray[np.float64]
    hits: NDArray[np.bool_]
    steps: tuple[int, ...]
    maybe: Point | None = None
    recipe: Mapping[str, Any] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return float(self.values.sum())

    def __rich__(self) -> str:
        return f"{self.name}: {self.total}"

    def to_pandas(self) -> pandas.DataFrame:
        return pandas.DataFrame([{"name": self.name}])


numbers = st.floats(allow_nan=True, allow_infinity=True)


def make(value: float, names: list[str]) -> Everything:
    return Everything(
        "x", "a", {name: {0.5: Point(value), 2.0: Point(1.0, value)} for name in names}, {("p", "q"): value},
        np.array([[value, 1.0]]), np.array([True, False]), (1, 2), Point(value), {"any": ["thing", None]},
    )  # fmt: skip


@given(numbers, st.lists(st.text(max_size=3), unique=True, max_size=3))
def test_json_round_trip_keeps_every_field(value: float, names: list[str]) -> None:
    found = make(value, names)
    text = json.dumps(found.to_dict(), allow_nan=False)
    again = Everything.from_dict(json.loads(text))
    assert json.dumps(again.to_dict(), allow_nan=False) == text
    assert again.values.dtype == np.float64 and again.hits.dtype == np.bool_
    assert np.array_equal(again.values, found.values, equal_nan=True)
    assert again.steps == (1, 2) and isinstance(again.maybe, Point) and list(again.paths) == [("p", "q")]


def test_save_and_load(tmp_path) -> None:
    path = tmp_path / "new" / "x.json"
    make(0.5, ["n"]).save(path)
    assert Everything.load(path).to_dict() == make(0.5, ["n"]).to_dict()
    assert [p.name for p in path.parent.iterdir()] == ["x.json"]
    path.write_text('{"result": "Another"}')
    with pytest.raises(ValueError, match="contains a result of class Another, not Everything"):
        Everything.load(path)


def test_unknown_and_missing_fields_are_named() -> None:
    record = make(0.5, []).to_dict()
    del record["steps"]
    with pytest.raises(ValueError, match=r"the record of Everything is damaged: it must be an object with steps, got"):
        Everything.from_dict(record)
    with pytest.raises(ValueError, match=r"the record of Everything .* points must be an object, got 3"):
        Everything.from_dict({**make(0.5, []).to_dict(), "points": 3})
    with pytest.warns(UserWarning, match="the record of Everything contains unknown keys, which are ignored: new"):
        assert Everything.from_dict({**make(0.5, []).to_dict(), "new": 1}).name == "x"


def test_text_and_html_output() -> None:
    assert str(make(0.5, [])) == "x: 1.5"
    assert "1.5" in make(0.5, [])._repr_html_()


def test_values_that_are_nested_too_deep_are_refused(tmp_path) -> None:
    path = tmp_path / "x.json"
    for depth in (90, 900):
        record = {"result": "Everything", **make(0.5, []).to_dict(), "recipe": "@"}
        path.write_text(json.dumps(record).replace('"@"', '{"a":' * depth + "1" + "}" * depth))
        with nullcontext() if depth < 100 else pytest.raises(ValueError, match=r"x\.json .* more than 100 deep"):
            Everything.load(path).to_html(tmp_path / "x.html")


def test_pipes_are_refused_and_any_wrong_content_names_the_file(tmp_path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe is a pipe, a socket or a device"):
        Everything.load(tmp_path / "pipe")
    record = {"result": "Everything", **make(0.5, []).to_dict(), "recipe": {"a": ["\ud800"]}}
    (tmp_path / "x.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"x\.json cannot be read: 'utf-8' codec can't encode"):
        Everything.load(tmp_path / "x.json")
    (tmp_path / "x.json").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"x\.json cannot be read: 'utf-8' codec"):
        Everything.load(tmp_path / "x.json")


def test_a_result_whose_fields_do_not_fit_together_is_named() -> None:
    broken = replace(make(0.5, []), values=None)
    for show in (str, lambda result: result._repr_html_()):
        with pytest.raises(ValueError, match="Everything cannot be shown: its fields are inconsistent, AttributeError"):
            show(broken)
