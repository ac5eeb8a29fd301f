"""Records: dataclasses are the schema of what is saved as JSON, with one writer (:func:`encode`) and one reader.

A record may be untrusted. :func:`read` checks types and ranges as the annotations of the fields declare them, and its
errors name the file, the field, what was expected and what came.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin, get_type_hints

from hf_stitch.options import Constraint, described, violated
from hf_stitch.printing import visible, warn
from hf_stitch.registry import UnknownNameError

AGAIN = "save or download it again"

NETWORKS = {"Head": "hf_stitch.artefacts.head:Head"}
"""Classes of networks of this package that a blueprint may name, as ``module:attribute``."""

DEEPEST = 100
"""Deepest nesting of the values of a record."""

OTHERS, SPARSE, REQUIRED = {"others": True}, {"sparse": True}, {"required": True}
"""Metadata of fields: the one that keeps all keys that no other field has; one that is not written if it is empty; one
that a record must have, although code may leave it out. A field with ``{"saved": False}`` is not written."""

EMPTY: tuple[Any, ...] = (None, "", (), {})


class NameOfDtype(Constraint):
    """The name of a dtype of torch, for example ``float32``."""

    def __contains__(self, value: Any) -> bool:
        import torch

        return isinstance(value, str) and isinstance(getattr(torch, value, None), torch.dtype)

    def __str__(self) -> str:
        return "a dtype of torch"


Dtype = Annotated[str, NameOfDtype()]


@dataclasses.dataclass(frozen=True)
class Place:
    """A field of a record, for messages."""

    record: str
    field: str = ""  # the path of the field in it; empty for the whole record

    def __truediv__(self, key: str | int) -> Place:
        """Return the place of a key or of an index in the value at this place."""
        return Place(self.record, f"{self.field}.{key}" if self.field else str(key))

    def __str__(self) -> str:
        return f"{self.field} in {self.record}" if self.field else self.record

    def wrong(self, expected: str, found: Any) -> RecordError:
        """Create the error for a wrong value."""
        text = repr(found)
        shown = text if len(text) < 80 else f"{text[:80]}…"
        return RecordError(f"{self.record} is damaged: {self.field or 'it'} must be {expected}, got {shown}; {AGAIN}")


class RecordError(ValueError):
    """Raised for a value that a record may not have."""


class Record:
    """Base of dataclasses that are saved as JSON.

    Example:
        >>> @dataclasses.dataclass(frozen=True)
        ... class Size(Record):
        ...     height: int
        ...     width: int = 1
        >>> Size(3).to_dict(), Size.from_dict({"height": 3})
        ({'height': 3, 'width': 1}, Size(height=3, width=1))
    """

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values, from which :meth:`from_dict` restores them."""
        found: dict[str, Any] = encode(self)
        return found

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Self:
        """Restore an instance from the output of :meth:`to_dict`.

        Keys of a newer version are ignored with a warning that names them.

        Args:
            record: Dictionary with one entry per field; those with a default may be missing.
        """
        found: Self = read(cls, record, f"the record of a {cls.__name__}")
        return found


def encode(value: Any) -> Any:
    """Convert a value to JSON values; a dataclass becomes a mapping of its fields.

    NaN and infinite numbers become strings; mappings with keys that are not strings become lists of pairs.

    >>> import numpy as np
    >>> encode({"loss": float("inf"), "steps": np.arange(3)})
    {'loss': 'inf', 'steps': [0, 1, 2]}
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if type(value).__module__ == "numpy":  # not imported here: `hf-stitch --help` needs none
        return encode(value.tolist())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        found: dict[str, Any] = {}
        for each in dataclasses.fields(value):
            item = getattr(value, each.name)
            if each.metadata.get("others"):
                found |= encode(item)
            elif each.metadata.get("saved", True) and not (each.metadata.get("sparse") and item in EMPTY):
                found[each.name] = encode(item)
        return found
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: encode(item) for key, item in value.items()}
        return [[encode(key), encode(item)] for key, item in value.items()]
    return [encode(item) for item in value] if isinstance(value, (list, tuple)) else value


def read(kind: Any, value: Any, at: Place | str) -> Any:
    """Convert the output of :func:`encode` back to a value of a given type, which may be any annotation.

    Keys of a record that its class does not have are dropped, with a warning.

    >>> read(Mapping[str, tuple[float, ...]], {"loss": ["inf", 0.5]}, "curves.json")
    {'loss': (inf, 0.5)}
    >>> read(Mapping[str, tuple[float, ...]], {"loss": [0.5, "x"]}, "curves.json")
    Traceback (most recent call last):
    ...
    hf_stitch.records.RecordError: curves.json is damaged: loss.1 must be a number, got 'x'; save or download it again
    """
    return _read(kind, value, Place(at) if isinstance(at, str) else at)


def _read(kind: Any, value: Any, at: Place) -> Any:
    if dataclasses.is_dataclass(kind):
        return _fields(kind, value, at)
    origin, parts = get_origin(kind), get_args(kind)
    inner = parts[0] if origin is Annotated else kind
    if inner in (str, int, float, bool) or origin is Literal:
        if kind is float and value in ("nan", "inf", "-inf"):
            return float(value)
        if violated(kind, value) or (isinstance(value, int) and abs(value) >= 2**63):  # torch has no larger ones
            raise at.wrong(described(kind), value)
        return float(value) if inner is float else value
    if origin in (Union, UnionType):
        return _any_of(kind, [part for part in parts if part is not type(None)], value, at)
    if getattr(origin, "__module__", "") == "numpy":
        import numpy as np

        try:
            return np.array(value, dtype=get_args(parts[1])[0])
        except (ValueError, TypeError, OverflowError) as error:
            raise at.wrong("an array of numbers", value) from error
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(parts, value, at)
    if isinstance(origin, type) and issubclass(origin, Sequence):
        fixed = origin is tuple and parts[1:] != (...,)
        if not isinstance(value, (list, tuple)) or (fixed and len(value) != len(parts)):
            raise at.wrong(f"a list of {len(parts)}" if fixed else "a list", value)
        each = enumerate(zip(parts if fixed else parts[:1] * len(value), value, strict=True))
        return tuple(_read(one, item, at / place) for place, (one, item) in each)
    return value


def _any_of(kind: Any, kinds: list[Any], value: Any, at: Place) -> Any:
    if value is None and len(kinds) < len(get_args(kind)):
        return None
    if len(kinds) == 1:
        return _read(kinds[0], value, at)
    for each in kinds:
        try:
            return _read(each, value, at)
        except RecordError:
            continue
    raise at.wrong(described(kind), value)


def _mapping(parts: tuple[Any, ...], value: Any, at: Place) -> dict[Any, Any]:
    """Read an object, or the list of pairs that stands for a mapping whose keys are no texts."""
    pairs: Any = value.items() if isinstance(value, Mapping) else value
    if not isinstance(value, Mapping) and (parts[0] is str or not isinstance(value, (list, tuple))):
        raise at.wrong("an object", value)
    found = {}
    for pair in pairs:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise at.wrong("a list of pairs", value)
        found[_read(parts[0], pair[0], at)] = _read(parts[1], pair[1], at / str(pair[0]))
    return found


def _fields(kind: Any, value: Any, at: Place) -> Any:
    if not isinstance(value, Mapping):
        raise at.wrong("an object", value)
    schema, required, others = _schema(kind)
    for old, (new, values) in getattr(kind, "formerly", {}).items():  # names of fields and of values in older records
        if old in value and new not in value:
            there = value[old]
            kept = {key: item for key, item in value.items() if key != old}
            value = {**kept, new: values.get(there, there) if isinstance(there, str) else there}
    if missing := [name for name in required if name not in value]:
        raise at.wrong(f"an object with {' and '.join(missing)}", list(value))
    found = {key: _read(each, value[key], at / key) for key, each in schema.items() if key in value}
    rest = {key: item for key, item in value.items() if key not in schema}
    if others is not None:
        found[others] = rest
    else:
        warn_of_unknown(rest, at)
    try:
        return kind(**found)
    except UnknownNameError:
        raise
    except (ValueError, TypeError) as error:
        raise RecordError(f"{at} is damaged: {error}; {AGAIN}") from error


def warn_of_unknown(keys: Collection[str], at: Place | str) -> None:
    """Name the keys of a record, if there are any, that are ignored."""
    if keys:
        warn(
            f"{at} has {visible(', '.join(sorted(keys)))}, which this version does not know and ignores; it was "
            "probably written by a newer version"
        )


def nested(
    value: Any, where: str, most: float = math.inf, unnamed: Collection[str] = ()
) -> Iterator[tuple[str | None, Any]]:
    """Yield all values inside of JSON values with their keys; entries of a list have that of the list.

    What is inside of the unnamed keys has none. More values than the most, or deeper ones than in any record, are
    refused.
    """
    level: list[tuple[str | None, Any]] = [("", value)]
    for _ in range(DEEPEST):
        inside: list[tuple[str | None, Any]] = []
        for key, each in level:
            most -= len(each) if isinstance(each, (Mapping, list)) else 0
            if most < 0:
                raise RecordError(f"{where} is damaged: it has more values than any record; {AGAIN}")
            if isinstance(each, Mapping):
                inside += [(None if key is None or key in unnamed else name, item) for name, item in each.items()]
            elif isinstance(each, list):
                inside += [(key, item) for item in each]
        yield from inside
        level = inside
        if not level:
            return
    raise RecordError(f"{where} has values nested more than {DEEPEST} deep, as nothing has that is saved here")


@cache
def _schema(kind: Any) -> tuple[Mapping[str, Any], list[str], str | None]:
    """Return the annotations of the saved fields of a dataclass, those that a record must have, and that of others."""
    hints, none = get_type_hints(kind, include_extras=True), (dataclasses.MISSING, dataclasses.MISSING)
    fields = [each for each in dataclasses.fields(kind) if each.metadata.get("saved", True)]
    others = next((each for each in fields if each.metadata.get("others")), None)
    required = [f for f in fields if f.metadata.get("required") or (f.default, f.default_factory) == none]
    return (
        {each.name: hints[each.name] for each in fields if each is not others},
        [each.name for each in required],
        None if others is None else others.name,
    )
