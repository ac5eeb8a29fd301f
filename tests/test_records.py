"""The reader and the writer of records."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np
import pytest

from hf_stitch.options import Count, Fraction
from hf_stitch.records import OTHERS, REQUIRED, SPARSE, Dtype, Record, RecordError, encode, nested, read


@dataclass(frozen=True)
class Leaf(Record):
    size: Count
    share: Fraction = 0.5

    def __post_init__(self) -> None:
        if self.size > 9:
            raise ValueError(f"a leaf of {self.size} falls off")


@dataclass(frozen=True)
class Tree(Record):
    leaves: tuple[Leaf, ...]
    kind: Literal["oak", "elm"] = "oak"
    dtype: Dtype = "float32"
    height: int | str | None = None
    pairs: Mapping[int, float] = field(default_factory=dict)
    named: dict[str, Any] = field(default_factory=dict, metadata=REQUIRED)
    note: str = field(default="", metadata=SPARSE)
    twin: Tree | None = field(default=None, metadata=SPARSE)


@dataclass(frozen=True)
class Bag(Record):
    name: str
    rest: dict[str, Any] = field(default_factory=dict, metadata=OTHERS)


TREE = Tree((Leaf(2), Leaf(3, 0.0)), "elm", "bfloat16", "tall", {1: float("nan"), 2: 3.0}, {"a": [1]}, twin=Tree(()))


def test_a_record_is_read_as_it_was_written() -> None:
    record = json.loads(json.dumps(TREE.to_dict(), allow_nan=False))
    assert record["pairs"] == [[1, "nan"], [2, 3.0]] and "note" not in record and "twin" not in record["twin"]
    assert Tree.from_dict(record).to_dict() == record and Tree.from_dict(record).leaves == TREE.leaves
    bag = {"name": "b", "of_others": {"x": [1]}}
    assert encode(read(Bag, bag, "a file")) == bag


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"leaves": 5}, "leaves must be a list, got 5"),
        ({"leaves": [5]}, r"leaves\.0 must be an object, got 5"),
        ({"leaves": [{}]}, r"leaves\.0 must be an object with size, got \[\]"),
        ({"leaves": [{"size": True}]}, r"leaves\.0\.size must be an integer >= 1, got True"),
        ({"leaves": [{"size": 2**63}]}, r"leaves\.0\.size must be an integer >= 1, got 9223372036854775808"),
        ({"leaves": [{"size": 1, "share": "nan"}]}, r"leaves\.0\.share must be a number >= 0 and <= 1, got 'nan'"),
        ({"leaves": [{"size": 10}]}, r"leaves\.0 in a file is damaged: a leaf of 10 falls off"),
        ({"kind": []}, r"kind must be one of 'oak', 'elm', got \[\]"),
        ({"dtype": "__loader__"}, "dtype must be a torch dtype, got '__loader__'"),
        ({"height": 1.5}, "height must be an integer or a text or None, got 1.5"),
        ({"pairs": [[1]]}, r"pairs must be a list of pairs, got \[\[1\]\]"),
        ({"pairs": [["x", 1]]}, "pairs must be an integer, got 'x'"),
        ({"pairs": [[1, "x"]]}, r"pairs\.1 must be a number, got 'x'"),
        ({"named": [["a", 1]]}, r"named must be an object, got \[\['a', 1\]\]"),
        ({"note": None}, "note must be a text, got None"),
        ({"twin": {"leaves": []}}, r"twin must be an object with named, got \['leaves'\]"),
    ],
)
def test_a_wrong_value_is_named_with_its_place(change: dict[str, Any], message: str) -> None:
    with pytest.raises(RecordError, match=rf"{message}.*; save or download it again"):
        read(Tree, {**TREE.to_dict(), **change}, "a file")


def test_keys_of_a_newer_version_are_named_and_ignored() -> None:
    record = TREE.to_dict()
    record["leaves"][1]["colour"] = "green"
    with pytest.warns(UserWarning, match=r"^leaves\.1 in a file contains unknown keys, which are ignored: colour"):
        assert read(Tree, record, "a file").leaves == TREE.leaves


def test_values_are_listed_with_their_keys_up_to_a_number_and_a_depth() -> None:
    values = {"a": [1, {"b": 2}], "c": {"d": {"e": 3}}}
    assert [(key, each) for key, each in nested(values, "x", unnamed=("c",)) if isinstance(each, int)] == [
        ("a", 1), ("b", 2), (None, 3),
    ]  # fmt: skip
    assert len(list(nested(values, "x", most=7))) == 7
    with pytest.raises(RecordError, match="x is damaged: it has more values than any record"):
        list(nested(values, "x", most=6))


def test_arrays_named_by_a_type_alias_are_arrays() -> None:
    """NumPy 2.5 declares ``NDArray`` as such an alias on Python 3.12 and later."""
    from typing_extensions import TypeAliasType

    scalar = TypeVar("scalar", bound=np.generic)
    alias = TypeAliasType("alias", np.ndarray[Any, np.dtype[scalar]], type_params=(scalar,))
    assert read(alias[np.float64], [1.0, 2.0], "a file").tolist() == [1.0, 2.0]
    assert isinstance(read(alias[np.float64], [1.0, 2.0], "a file"), np.ndarray)
