"""Base class of results, with output as table, text, HTML, JSON and data frame."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import pkgutil
import reprlib
import types
import typing
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, get_args, get_origin, get_type_hints

import numpy as np

from hf_stitch.plugins import install_hint
from hf_stitch.printing import Visible, make_visible, visible
from hf_stitch.processes import Processes
from hf_stitch.storage.files import decoding, write_whole

if TYPE_CHECKING:
    import pandas
    from rich.console import RenderableType

WIDTH = 120
"""Width of a text table in characters."""

DEEPEST = 100
"""Deepest nesting of the values of a result."""


class Result(ABC):
    """Base class of the frozen dataclasses that workflows and analyses return.

    A subclass defines its fields, a table (``__rich__``) and a data frame (:meth:`to_pandas`); most subclasses also
    have a ``plot()`` method. Text, HTML and JSON output are derived from these. In JSON, NaN and infinite numbers
    become strings, and a mapping with keys that are not strings becomes a list of pairs. A field with the metadata
    ``{"saved": False}`` (weights, networks) is left out, and needs a default.

    Attributes:
        derived: Names of properties that :meth:`to_dict` adds for readers of the JSON and :meth:`from_dict` ignores.
        page: Dotted name of the function that describes a result of this class on a page
            (:class:`hf_stitch.reports.section.Section`). Default: its text, its ``plot()`` and its data frame.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Accuracies(Result):
        ...     values: Mapping[str, float]
        ...     def __rich__(self):
        ...         return ", ".join(f"{name} {value:.2f}" for name, value in self.values.items())
        ...     def to_pandas(self):
        ...         import pandas
        ...         return pandas.DataFrame([self.values])
        >>> result = Accuracies({"stitched": 0.91, "chance": float("nan")})
        >>> print(result)
        stitched 0.91, chance nan
        >>> result.to_dict()
        {'values': {'stitched': 0.91, 'chance': 'nan'}}
        >>> str(Accuracies.from_dict(result.to_dict())) == str(result)
        True
    """

    derived: ClassVar[tuple[str, ...]] = ()
    page: ClassVar[str] = "hf_stitch.reports.general:section"

    def __init_subclass__(cls, **options: Any) -> None:
        """Let rich print what a subclass shows as text alone, and name a result whose fields do not fit together."""
        super().__init_subclass__(**options)
        if (shown := cls.__dict__.get("__rich__")) is None:
            return

        @wraps(shown)
        def safely(self: Result) -> Visible:
            with fitting(self):
                return Visible(shown(self))

        cls.__rich__ = safely  # type: ignore[method-assign]

    @abstractmethod
    def __rich__(self) -> RenderableType:
        """Return the table that ``rich`` prints."""

    @abstractmethod
    def to_pandas(self) -> pandas.DataFrame:
        """Return the values as a data frame, one row for each value."""

    def __str__(self) -> str:
        """Return the table as text."""
        from rich.console import Console

        shown: Any = self.__rich__()
        if isinstance(shown.shown, str):
            return visible(shown.shown)
        console = Console(width=WIDTH, file=io.StringIO(), emoji=False)
        with console.capture() as captured:
            console.print(shown)
        return "\n".join(line.rstrip() for line in captured.get().rstrip("\n").split("\n"))

    def _repr_html_(self) -> str:
        """Return the table as HTML, for notebooks."""
        from rich.console import Console

        console = Console(width=WIDTH, record=True, file=io.StringIO(), emoji=False)
        console.print(self.__rich__())
        return console.export_html(inline_styles=True, code_format="<pre style='line-height:1.25'>{code}</pre>")

    def to_dict(self) -> dict[str, Any]:
        """Return the fields and derived properties as JSON values; :meth:`from_dict` is the inverse."""
        with fitting(self):
            return {**encode(self), **{name: encode(getattr(self, name)) for name in self.derived}}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Self:
        """Make a result from the output of :meth:`to_dict`.

        Args:
            record: JSON values of all fields. Derived properties are ignored.

        Returns:
            The result.

        Raises:
            ValueError: If a field is missing, unknown, or has the wrong type.
        """
        read: Self = decode(cls, {key: value for key, value in record.items() if key not in cls.derived}, cls.__name__)
        _check_writable(record, cls.__name__)
        return read

    def save(self, path: str | Path) -> None:
        """Write the result to a JSON file; an existing file is replaced atomically.

        Of several processes, all of which have the result, the first one writes; the others do not wait for it.

        Args:
            path: The file; missing folders are created.
        """
        if Processes.of(None).rank:
            return
        text = json.dumps({"result": type(self).__name__, **self.to_dict()}, indent=1, ensure_ascii=False) + "\n"
        write_whole(Path(path), lambda place: place.write_text(text, encoding="utf-8"))

    def to_html(self, path: str | Path, *, title: str | None = None) -> None:
        """Write the result as an HTML page that opens from the disk; see :func:`hf_stitch.report`.

        Args:
            path: The file.
            title: Title of the page.
        """
        write: Any = pkgutil.resolve_name("hf_stitch.reports.writing:report")  # a room above this one
        write(self, path, title=title)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file written by :meth:`save`.

        Args:
            path: The file.

        Returns:
            The result.

        Raises:
            FileNotFoundError: If the file does not exist.
            ValueError: If the file is not JSON or contains a result of another class, or if a field is missing,
                unknown or has the wrong type; the message names the file and the field.
        """
        with decoding(path):
            record = json.loads(Path(path).read_text(encoding="utf-8"))
            kind = record.pop("result", None) if isinstance(record, dict) else None
            if kind != cls.__name__:
                found = f"a result of class {kind}" if kind else "no result"
                where = f" ({hint})" if (hint := install_hint("results", str(kind))) else ""
                raise ValueError(
                    f"it contains {found}, not {cls.__name__}; load it with the class that saved it{where}"
                )
            return cls.from_dict(record)


@contextmanager
def fitting(result: Result) -> Iterator[None]:
    """Name a result in errors of code that shows it: its fields come from a file and may not fit together.

    Args:
        result: The result.

    Yields:
        Nothing; the result is shown in the body of the ``with`` statement.

    Raises:
        ValueError: For everything that is raised, except memory, disk and missing packages.
    """
    try:
        yield
    except (OSError, ImportError, MemoryError):
        raise
    except Exception as error:
        make_visible(error)
        failure = f"this {type(result).__name__} cannot be shown: "
        if str(error).startswith(failure):
            raise
        kind = "" if isinstance(error, ValueError) else f"its fields do not fit together, {type(error).__name__}: "
        raise ValueError(f"{failure}{kind}{error}") from error


def _check_writable(record: Any, where: str) -> None:
    """Check that JSON values can be written again: not nested too deep, and no text with half a character."""
    level = [record]
    for _ in range(DEEPEST):
        inside = [each for each in level if isinstance(each, (dict, list))]
        level = [item for each in inside for item in (each if isinstance(each, list) else [*each, *each.values()])]
        for item in level:
            if isinstance(item, str):
                item.encode()
        if not level:
            return
    raise ValueError(f"{where} has values nested more than {DEEPEST} deep, as no result has")


def encode(value: Any) -> Any:
    """Convert a value to JSON values; a dataclass becomes a mapping of its fields.

    Args:
        value: Numbers, strings, ``None``, arrays, mappings, lists, tuples, dataclasses, or nested values of these.

    Returns:
        JSON values. NaN and infinite numbers become strings; mappings with keys that are not strings become lists of
        pairs.

    Example:
        >>> encode({"loss": float("inf"), "steps": np.arange(3)})
        {'loss': 'inf', 'steps': [0, 1, 2]}
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, np.generic):
        return encode(value.item())
    if isinstance(value, np.ndarray):
        return encode(value.tolist())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: encode(getattr(value, field.name)) for field in _saved(value)}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: encode(item) for key, item in value.items()}
        return [[encode(key), encode(item)] for key, item in value.items()]
    return [encode(item) for item in value] if isinstance(value, (list, tuple)) else value


def decode(kind: Any, value: Any, where: str) -> Any:
    """Convert the output of :func:`encode` back to a value of a given type.

    Args:
        kind: The type, as a type annotation.
        value: JSON values.
        where: Name of the value in error messages.

    Returns:
        The value.

    Raises:
        ValueError: If ``value`` does not fit the type.

    Example:
        >>> decode(Mapping[str, tuple[float, ...]], {"loss": ["inf", 0.5]}, "curves")
        {'loss': (inf, 0.5)}
    """
    try:
        return _decoded(kind, value, where)
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError) as error:
        if isinstance(error, ValueError) and str(error).startswith(where):
            raise  # it names this field, or one in it
        raise ValueError(f"{where} cannot be decoded from {reprlib.repr(value):.80}: {error}") from error


def _decoded(kind: Any, value: Any, where: str) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if isinstance(value, str):
        value.encode()  # half a character, which JSON can hold, is an error
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind, value, where)
    if origin in (types.UnionType, typing.Union):
        rest = [argument for argument in arguments if argument is not type(None)]
        return None if value is None else decode(rest[0], value, where)
    if origin is np.ndarray:
        return np.array(value, dtype=get_args(arguments[1])[0])
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        pairs = value.items() if isinstance(value, Mapping) else value
        return {decode(arguments[0], k, where): decode(arguments[1], v, f"{where}[{k!r}]") for k, v in pairs}
    if origin is not None and isinstance(origin, type) and issubclass(origin, Sequence):
        _check(isinstance(value, (list, tuple)), "a list", value)
        fixed = origin is tuple and len(arguments) > 1 and arguments[1] is not Ellipsis
        each = zip(arguments if fixed else arguments[:1] * len(value), value, strict=True)
        return tuple(decode(of, item, f"{where}[{place}]") for place, (of, item) in enumerate(each))
    if origin is Literal:
        _check(value in arguments, f"one of {', '.join(map(repr, arguments))}", value)
    if kind in (str, int, bool):
        _check(type(value) is kind, kind.__name__, value)
    return float(value) if kind is float else value


def _check(fits: bool, expected: str, value: Any) -> None:
    if not fits:
        raise TypeError(f"expected {expected}, got {type(value).__name__}")


def _saved(kind: Any) -> list[dataclasses.Field[Any]]:
    """The fields of a dataclass, without those with the metadata ``{"saved": False}``."""
    return [field for field in dataclasses.fields(kind) if field.metadata.get("saved", True)]


def _dataclass(kind: Any, record: Mapping[str, Any], where: str) -> Any:
    _check(isinstance(record, Mapping), "an object", record)
    known = {field.name: field for field in _saved(kind)}
    optional = (dataclasses.MISSING, dataclasses.MISSING)
    missing = [n for n, f in known.items() if n not in record and (f.default, f.default_factory) == optional]
    unknown = [name for name in record if name not in known]
    if missing or unknown:
        wrong = [f"lacks {', '.join(missing)}"] * bool(missing) + [f"has no field {', '.join(unknown)}"] * bool(unknown)
        raise ValueError(f"{where} {' and '.join(wrong)}; its fields are {', '.join(known)}")
    hints = get_type_hints(kind)
    return kind(**{name: decode(hints[name], value, f"{where}.{name}") for name, value in record.items()})
