"""Records: dataclasses as the schema of JSON files, with a writer (:func:`encode`) and a reader (:func:`read`).

A record may be untrusted. :func:`read` checks types and ranges against the annotations of the fields; its errors name
the file, the field, the expected values and the actual value.
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
"""Network classes of this package that a blueprint may name, as ``module:attribute``."""

DEEPEST = 100
"""Maximum nesting depth of the values of a record."""

OTHERS, SPARSE, REQUIRED = {"others": True}, {"sparse": True}, {"required": True}
"""Metadata of fields: ``OTHERS`` for the field with all remaining keys; ``SPARSE`` for a field that is not written if
it is empty; ``REQUIRED`` for a field that is required in records, but optional in code. A field with
``{"saved": False}`` is not written."""

EMPTY: tuple[Any, ...] = (None, "", (), {})


class NameOfDtype(Constraint):
    """Name of a torch dtype, for example ``float32``."""

    def __contains__(self, value: Any) -> bool:
        import torch

        return isinstance(value, str) and isinstance(getattr(torch, value, None), torch.dtype)

    def __str__(self) -> str:
        return "a torch dtype"


Dtype = Annotated[str, NameOfDtype()]


@dataclasses.dataclass(frozen=True)
class Place:
    """Field of a record, for messages."""

    record: str
    field: str = ""  # path of the field; empty for the whole record

    def __truediv__(self, key: str | int) -> Place:
        """Return the place of a key or index in the value at this place."""
        return Place(self.record, f"{self.field}.{key}" if self.field else str(key))

    def __str__(self) -> str:
        return f"{self.field} in {self.record}" if self.field else self.record

    def wrong(self, expected: str, actual: Any) -> RecordError:
        """Create the error for a wrong value."""
        text = repr(actual)
        short = text if len(text) < 80 else f"{text[:80]}…"
        return RecordError(f"{self.record} is damaged: {self.field or 'it'} must be {expected}, got {short}; {AGAIN}")


class RecordError(ValueError):
    """Raised for an invalid value in a record."""


class Record:
    """Base class of dataclasses that are saved as JSON.

    Example:
        >>> @dataclasses.dataclass(frozen=True)
        ... class Size(Record):
        ...     height: int
        ...     width: int = 1
        >>> Size(3).to_dict(), Size.from_dict({"height": 3})
        ({'height': 3, 'width': 1}, Size(height=3, width=1))
    """

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values, the inverse of :meth:`from_dict`."""
        record: dict[str, Any] = encode(self)
        return record

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Self:
        """Restore an instance from the output of :meth:`to_dict`.

        Keys of newer versions are ignored; a warning names them.

        Args:
            record: Dictionary with one entry per field; fields with a default may be missing.
        """
        instance: Self = read(cls, record, f"the record of a {cls.__name__}")
        return instance


def encode(value: Any) -> Any:
    """Convert a value to JSON values; a dataclass becomes a mapping of its fields.

    NaN and infinite numbers become strings; mappings with keys other than strings become lists of pairs.

    >>> import numpy as np
    >>> encode({"loss": float("inf"), "steps": np.arange(3)})
    {'loss': 'inf', 'steps': [0, 1, 2]}
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if type(value).__module__ == "numpy":  # not imported here, to keep `hf-stitch --help` fast
        return encode(value.tolist())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        record: dict[str, Any] = {}
        for field in dataclasses.fields(value):
            content = getattr(value, field.name)
            if field.metadata.get("others"):
                record |= encode(content)
            elif field.metadata.get("saved", True) and not (field.metadata.get("sparse") and content in EMPTY):
                record[field.name] = encode(content)
        return record
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: encode(content) for key, content in value.items()}
        return [[encode(key), encode(content)] for key, content in value.items()]
    return [encode(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def read(kind: Any, value: Any, at: Place | str) -> Any:
    """Convert the output of :func:`encode` back to a value of a type or annotation.

    Unknown keys of a record are dropped with a warning.

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
    if hasattr(origin, "__value__"):  # a type alias, such as NDArray of NumPy 2.5 on Python 3.12 and later
        return _read(origin.__value__[parts], value, at)
    inner = parts[0] if origin is Annotated else kind
    if inner in (str, int, float, bool) or origin is Literal:
        if kind is float and value in ("nan", "inf", "-inf"):
            return float(value)
        if violated(kind, value) or (isinstance(value, int) and abs(value) >= 2**63):  # the limit of torch
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
        is_fixed = origin is tuple and parts[1:] != (...,)
        if not isinstance(value, (list, tuple)) or (is_fixed and len(value) != len(parts)):
            raise at.wrong(f"a list of {len(parts)}" if is_fixed else "a list", value)
        typed_entries = enumerate(zip(parts if is_fixed else parts[:1] * len(value), value, strict=True))
        return tuple(_read(part, entry, at / key) for key, (part, entry) in typed_entries)
    return value


def _any_of(kind: Any, kinds: list[Any], value: Any, at: Place) -> Any:
    if value is None and len(kinds) < len(get_args(kind)):
        return None
    if len(kinds) == 1:
        return _read(kinds[0], value, at)
    for option in kinds:
        try:
            return _read(option, value, at)
        except RecordError:
            continue
    raise at.wrong(described(kind), value)


def _mapping(parts: tuple[Any, ...], value: Any, at: Place) -> dict[Any, Any]:
    """Read a mapping from an object, or from a list of pairs for keys other than strings."""
    pairs: Any = value.items() if isinstance(value, Mapping) else value
    if not isinstance(value, Mapping) and (parts[0] is str or not isinstance(value, (list, tuple))):
        raise at.wrong("an object", value)
    mapping = {}
    for pair in pairs:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise at.wrong("a list of pairs", value)
        mapping[_read(parts[0], pair[0], at)] = _read(parts[1], pair[1], at / str(pair[0]))
    return mapping


def _fields(kind: Any, value: Any, at: Place) -> Any:
    if not isinstance(value, Mapping):
        raise at.wrong("an object", value)
    schema, required, others = _schema(kind)
    for old, (new, values) in getattr(kind, "formerly", {}).items():  # names of fields and of values in older records
        if old in value and new not in value:
            content = value[old]
            rest = {key: field for key, field in value.items() if key != old}
            value = {**rest, new: values.get(content, content) if isinstance(content, str) else content}
    if missing := [name for name in required if name not in value]:
        raise at.wrong(f"an object with {' and '.join(missing)}", list(value))
    fields = {key: _read(annotation, value[key], at / key) for key, annotation in schema.items() if key in value}
    rest = {key: field for key, field in value.items() if key not in schema}
    if others is not None:
        fields[others] = rest
    else:
        warn_of_unknown(rest, at)
    try:
        return kind(**fields)
    except UnknownNameError:
        raise
    except (ValueError, TypeError) as error:
        raise RecordError(f"{at} is damaged: {error}; {AGAIN}") from error


def warn_of_unknown(keys: Collection[str], at: Place | str) -> None:
    """Warn of ignored keys of a record, if any."""
    if keys:
        warn(
            f"{at} contains unknown keys, which are ignored: {visible(', '.join(sorted(keys)))}; it was probably "
            "written by a newer version"
        )


def nested(
    value: Any, where: str, most: float = math.inf, unnamed: Collection[str] = ()
) -> Iterator[tuple[str | None, Any]]:
    """Yield all nested values of JSON values with their keys; entries of a list have the key of the list.

    Values below unnamed keys have the key ``None``. Raises an error for more than ``most`` values, and for values
    nested deeper than in any record.
    """
    level: list[tuple[str | None, Any]] = [("", value)]
    for _ in range(DEEPEST):
        deeper: list[tuple[str | None, Any]] = []
        for key, outer in level:
            most -= len(outer) if isinstance(outer, (Mapping, list)) else 0
            if most < 0:
                raise RecordError(f"{where} is damaged: it has more values than any record; {AGAIN}")
            if isinstance(outer, Mapping):
                deeper += [(None if key is None or key in unnamed else name, inner) for name, inner in outer.items()]
            elif isinstance(outer, list):
                deeper += [(key, inner) for inner in outer]
        yield from deeper
        level = deeper
        if not level:
            return
    raise RecordError(f"{where} is damaged: it has values nested more than {DEEPEST} deep; {AGAIN}")


@cache
def _schema(kind: Any) -> tuple[Mapping[str, Any], list[str], str | None]:
    """Return the annotations of the saved fields of a dataclass, the required fields, and the field of other keys."""
    hints, no_default = get_type_hints(kind, include_extras=True), (dataclasses.MISSING, dataclasses.MISSING)
    fields = [field for field in dataclasses.fields(kind) if field.metadata.get("saved", True)]
    others = next((field for field in fields if field.metadata.get("others")), None)
    required = [f for f in fields if f.metadata.get("required") or (f.default, f.default_factory) == no_default]
    return (
        {field.name: hints[field.name] for field in fields if field is not others},
        [field.name for field in required],
        None if others is None else others.name,
    )
