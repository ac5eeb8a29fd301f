"""Write results as one HTML page, and read them back."""

from __future__ import annotations

import base64
import hashlib
import json
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from html.parser import HTMLParser
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hf_stitch.plugins import hint_for
from hf_stitch.printing import visible
from hf_stitch.provenance import machine, versions
from hf_stitch.records import read
from hf_stitch.registry import registries
from hf_stitch.reports.drawing import png
from hf_stitch.reports.section import Figure, Picture, Section, Table
from hf_stitch.results import Result, fitting
from hf_stitch.running import Processes
from hf_stitch.storage.files import decoding, write_whole

FORMAT_VERSION = 1
"""Version of the data on a page."""

DATA = "hf-stitch-report"
"""Id of the element that contains the results as JSON."""

MOST = 1000
"""Rows of a data frame on a page."""


def report(
    results: Result | Iterable[Result], path: str | Path, *, title: str | None = None, command: str | None = None
) -> None:
    """Write results as one self-contained HTML page, which opens without a network or a server.

    The page shows the question and the answer of each result, and then its figures with captions and numbers. It
    contains the results as JSON, so that :func:`load_report` can restore them. Names of layers, labels and networks are
    escaped. With several processes, only the first one writes.

    Args:
        results: One result, or several for one page.
        path: The file; an existing file is replaced as a whole.
        title: Title of the page. Default: the titles of its sections.
        command: Command that reproduces the results, shown on the page.

    Raises:
        OSError: If the file cannot be written.

    Example:
        >>> import tempfile, numpy as np
        >>> from hf_stitch import SimilarityAtlas
        >>> atlas = SimilarityAtlas({"cka": np.eye(2)}, ("a0", "a1"), ("b0", "b1"), 9, "mean", {"cka": "moments"})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "cka.html"
        ...     report(atlas, path)
        ...     "The most similar layers by cka are a0 of a and b0 of b" in path.read_text()
        True
    """
    shown_results = [results] if isinstance(results, Result) else list(results)
    if not shown_results:
        raise ValueError("results must contain at least one result, got none")
    for result in shown_results:
        if not isinstance(result, Result):
            raise TypeError(f"results must be results of compare, stitch_grid, …, got {type(result).__name__}")
    if Processes.of(None).rank:
        return
    text = page(shown_results, title, command)
    write_whole(Path(path), lambda temporary: temporary.write_text(text, encoding="utf-8"))


def page(results: list[Result], title: str | None = None, command: str | None = None) -> str:
    """Return results as HTML; see :func:`report`."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    sections = [_section(result) for result in results]
    about = {"versions": versions(), "machine": machine(), "command": command}
    data_of_page = {"format_version": FORMAT_VERSION, **about, "results": [_record(result) for result in results]}
    package = files("hf_stitch.reports")
    scripts = [(package / name).read_text(encoding="utf-8") for name in ("vendor/plotly-cartesian.min.js", "report.js")]
    environment = Environment(
        loader=PackageLoader("hf_stitch.reports", "."), autoescape=True, undefined=StrictUndefined,
        finalize=lambda value: visible(value) if type(value) is str else value,
    )  # fmt: skip
    fingerprints = {section.data for section in sections} - {None}
    return environment.get_template("page.html.jinja").render(
        title=title or " · ".join(dict.fromkeys(section.title for section in sections)),
        sections=sections,
        figures=_json([
            {"networks": s.networks or str(number), "figures": [_plot_data(figure) for figure in s.figures]}
            for number, s in enumerate(sections)
        ]),
        recipes=[json.dumps(section.recipe, indent=1, ensure_ascii=False, default=str) for section in sections],
        data=_json(data_of_page), data_id=DATA, several_data=len(fingerprints) > 1, **about,
        style=(package / "report.css").read_text(encoding="utf-8"), scripts=scripts,
        policy=" ".join(f"'sha256-{_digest(script)}'" for script in scripts),
    )  # fmt: skip


def _section(result: Result) -> Section:
    describe: Callable[[Any], Section] = pkgutil.resolve_name(result.page)
    with fitting(result):
        return describe(result)


def _plot_data(figure: Figure) -> dict[str, Any]:
    """Return the data that the script plots; the tables are in the page."""
    views = [{"label": view.label, "caption": view.caption, "traces": view.traces} for view in figure.views]
    return {"views": views, "layout": figure.layout, "start": figure.start}


def _record(result: Result) -> dict[str, Any]:
    return {"result": type(result).__name__, "module": type(result).__module__, **result.to_dict()}


def _json(value: Any) -> str:
    """Serialise for a script element, and escape characters that could end it or are special to JavaScript."""
    text = visible(json.dumps(value, ensure_ascii=False, separators=(",", ":")))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def load_report(path: str | Path) -> list[Result]:
    """Load the results of a page written by :func:`hf_stitch.report` or :meth:`Result.to_html`, in order.

    Args:
        path: The HTML file.

    Example:
        >>> import tempfile, numpy as np
        >>> from hf_stitch import SimilarityAtlas, report
        >>> atlas = SimilarityAtlas({"cka": np.eye(2)}, ("a0", "a1"), ("b0", "b1"), 9, "mean", {"cka": "moments"})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     report([atlas], Path(folder) / "cka.html")
        ...     load_report(Path(folder) / "cka.html")[0].best_pair()
        ('a0', 'b0')
    """
    with decoding(path):
        parser = _Data()
        parser.feed(Path(path).read_text(encoding="utf-8"))
        if parser.text is None:
            raise ValueError(f"it is not a report of hf-stitch: element {DATA!r} is missing")
        record = read(Mapping[str, Any], json.loads(parser.text), DATA)
        version = read(int, record.get("format_version"), "format_version")
        if version > FORMAT_VERSION:
            raise ValueError(
                f"it has format {version}, but this version of hf-stitch reads up to {FORMAT_VERSION}; update hf-stitch"
            )
        return [_result(fields) for fields in read(tuple[Mapping[str, Any], ...], record.get("results"), "results")]


def _result(record: Mapping[str, Any]) -> Result:
    """Restore a result of a registered or already imported class.

    Only entries of the registry are imported; the module in the record distinguishes classes of one name.
    """
    fields = dict(record)
    name, module = (read(str, fields.pop(key, None), f"the {key} of a result") for key in ("result", "module"))
    imported = {(cls.__module__, cls.__name__): cls for cls in _below(Result)}
    if (module, name) in imported:
        return imported[module, name].from_dict(fields)
    package = module.partition(".")[0]
    if name in registries.results:
        cls = registries.results.get(name)
        if package in ("hf_stitch", cls.__module__.partition(".")[0]):  # results moved between them
            return cls.from_dict(fields)
    hint = package.startswith("hf_stitch") and hint_for("results", name)
    raise ValueError(f"it contains a {name} of {module}, which is unknown; {hint or 'import that module first'}")


def _below(parent: Any) -> set[Any]:
    subclasses = set(parent.__subclasses__())
    return subclasses.union(*map(_below, subclasses))


class _Data(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.text: str | None = None
        self._inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Detect the data element."""
        self._inside = tag == "script" and ("id", DATA) in attrs

    def handle_endtag(self, tag: str) -> None:
        """Leave the element."""
        self._inside = False

    def handle_data(self, data: str) -> None:
        """Collect the text of the data element."""
        if self._inside:
            self.text = (self.text or "") + data


def section(result: Result) -> Section:
    """Describe a result with its text, plot and data frame."""
    frame = result.to_pandas()
    rows = [tuple(map(str, row)) for row in frame.head(MOST).itertuples(index=False)]
    notes = [f"The table shows {MOST} of {len(frame)} rows; all are in the data."] if len(frame) > MOST else []
    own_verdict, text = getattr(result, "verdict", None), str(result)
    printed: Any = result.__rich__()
    title = getattr(printed.renderable, "title", None)  # a narrow table would break it into lines
    verdict = (
        f"{own_verdict.rstrip('.')}." if isinstance(own_verdict, str) else str(title or text.split("\n")[0].strip())
    )
    numbers = {"Numbers": Table([str(column) for column in frame.columns], rows)}
    plot, reason = _plot(result) if hasattr(result, "plot") else ("", "")
    pictures = [Picture(verdict, plot, f"Plot of {type(result).__name__}", sample=False)] if plot else []
    notes += [f"The figure is missing: {reason}."] if reason else []
    recipe = getattr(result, "recipe", {})
    return Section(
        type(result).__name__, "", verdict, pictures=pictures, tables=numbers, text=text, notes=notes, recipe=recipe,
        data=getattr(result, "data", None) if isinstance(getattr(result, "data", None), str) else None,
    )  # fmt: skip


def _plot(result: Any) -> tuple[str, str]:
    """Return the figure of a result as a ``data:`` address, or the reason why it is missing."""
    if find_spec("matplotlib") is None:
        return "", "matplotlib is not installed (pip install 'hf-stitch[plots]')"
    try:
        return png(result.plot().savefig), ""
    except (TypeError, ValueError) as error:  # plots that require arguments, or with undefined values or missing glyphs
        return "", str(error)
