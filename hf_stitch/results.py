"""Base class of results, with output as table, text, HTML, JSON and data frame."""

from __future__ import annotations

import io
import json
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from hf_stitch.plugins import hint_for
from hf_stitch.printing import Visible, make_visible, visible
from hf_stitch.records import encode, nested, read
from hf_stitch.running import Processes
from hf_stitch.storage.files import decoding, write_whole

if TYPE_CHECKING:
    import pandas
    from rich.console import RenderableType

WIDTH = 120
"""Width of a text table in characters."""


class Result(ABC):
    """Base class of the frozen dataclasses that workflows and analyses return.

    A subclass defines its fields, a table (``__rich__``) and a data frame (:meth:`to_pandas`); most subclasses also
    have a ``plot()`` method. Text, HTML and JSON output are derived from them. In JSON, NaN and infinite numbers
    become strings, and mappings with keys other than strings become lists of pairs. A field with the metadata
    ``{"saved": False}`` (weights, networks) is not written and requires a default.

    Attributes:
        derived: Names of properties that :meth:`to_dict` adds for readers of the JSON; :meth:`from_dict` ignores them.
        page: Dotted name of the function that creates the page section of a result of this class
            (:class:`hf_stitch.reports.section.Section`). Default: text, ``plot()`` and data frame.

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
    page: ClassVar[str] = "hf_stitch.reports.page:section"

    def __init_subclass__(cls, **options: Any) -> None:
        """Wrap ``__rich__`` to escape control characters, and to name results with inconsistent fields in errors."""
        super().__init_subclass__(**options)
        if (render := cls.__dict__.get("__rich__")) is None:
            return

        @wraps(render)
        def safely(self: Result) -> Visible:
            with fitting(self):
                return Visible(render(self))

        cls.__rich__ = safely  # type: ignore[method-assign]

    @abstractmethod
    def __rich__(self) -> RenderableType:
        """Return the table for ``rich``."""

    @abstractmethod
    def to_pandas(self) -> pandas.DataFrame:
        """Return the values as a data frame, one row per value."""

    def __str__(self) -> str:
        from rich.console import Console

        table: Any = self.__rich__()
        if isinstance(table.renderable, str):
            return visible(table.renderable)
        console = Console(width=WIDTH, file=io.StringIO(), emoji=False)
        with console.capture() as captured:
            console.print(table)
        return "\n".join(line.rstrip() for line in captured.get().rstrip("\n").split("\n"))

    def _repr_html_(self) -> str:
        from rich.console import Console

        console = Console(width=WIDTH, record=True, file=io.StringIO(), emoji=False)
        console.print(self.__rich__())
        return console.export_html(inline_styles=True, code_format="<pre style='line-height:1.25'>{code}</pre>")

    def to_dict(self) -> dict[str, Any]:
        """Return the fields and derived properties as JSON values, the inverse of :meth:`from_dict`."""
        with fitting(self):
            return {**encode(self), **{name: encode(getattr(self, name)) for name in self.derived}}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Self:
        """Create a result from the output of :meth:`to_dict`.

        Args:
            record: JSON values of all fields. Derived properties are ignored.
        """
        where = f"the record of {cls.__name__}"
        result = read(cls, {key: field for key, field in record.items() if key not in cls.derived}, where)
        for key, leaf in nested(record, where):  # check that it can be written: limited nesting, no lone surrogates
            for text in (key, leaf):
                if isinstance(text, str):
                    text.encode()
        return result

    def save(self, path: str | Path) -> None:
        """Write the result to a JSON file; an existing file is replaced atomically.

        With several processes, the first process writes, and the rest do not wait.

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
        write: Any = pkgutil.resolve_name("hf_stitch.reports.page:report")  # late, because it imports this module
        write(self, path, title=title)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file written by :meth:`save`."""
        with decoding(path):
            record = json.loads(Path(path).read_text(encoding="utf-8"))
            kind = record.pop("result", None) if isinstance(record, dict) else None
            if kind != cls.__name__:
                content = f"a result of class {kind}" if kind else "other data"
                where = f" ({hint})" if (hint := hint_for("results", str(kind))) else ""
                raise ValueError(
                    f"it contains {content}, not {cls.__name__}; load it with the class that saved it{where}"
                )
            return cls.from_dict(record)


@contextmanager
def fitting(result: Result) -> Iterator[None]:
    """Add the name of a result to errors during display: fields from a file may be inconsistent."""
    try:
        yield
    except (OSError, ImportError, MemoryError):
        raise
    except Exception as error:
        make_visible(error)
        failure = f"this {type(result).__name__} cannot be shown: "
        if str(error).startswith(failure):
            raise
        kind = "" if isinstance(error, ValueError) else f"its fields are inconsistent, {type(error).__name__}: "
        raise ValueError(f"{failure}{kind}{error}") from error
