"""Results written as one HTML page, and read from it."""

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
    """Write results as one HTML page, which opens from the disk, without a network or a server, and can be mailed.

    The page begins with what was asked and what came out, and then shows the figures, each with its finding and its
    numbers. It contains the results as JSON, from which :func:`load_report` restores them. Names of layers, labels and
    networks stay text, whatever they contain. Of several processes, the first one writes.

    Args:
        results: The result, or several for one page.
        path: The file; an existing one is replaced as a whole.
        title: Title of the page. Default: those of its sections.
        command: Command that makes the results again, shown on the page.

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
    shown = [results] if isinstance(results, Result) else list(results)
    if not shown:
        raise ValueError("a report needs at least one result, got none")
    for result in shown:
        if not isinstance(result, Result):
            raise TypeError(
                f"a report shows results, got {type(result).__name__}: pass what compare, stitch_grid, … return"
            )
    if Processes.of(None).rank:
        return
    text = page(shown, title, command)
    write_whole(Path(path), lambda place: place.write_text(text, encoding="utf-8"))


def page(results: list[Result], title: str | None = None, command: str | None = None) -> str:
    """Return results as HTML; see :func:`report`."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    sections = [_section(result) for result in results]
    about = {"versions": versions(), "machine": machine(), "command": command}
    kept = {"format_version": FORMAT_VERSION, **about, "results": [_kept(result) for result in results]}
    parts = files("hf_stitch.reports")
    scripts = [(parts / name).read_text(encoding="utf-8") for name in ("vendor/plotly-cartesian.min.js", "report.js")]
    environment = Environment(
        loader=PackageLoader("hf_stitch.reports", "."), autoescape=True, undefined=StrictUndefined,
        finalize=lambda value: visible(value) if type(value) is str else value,
    )  # fmt: skip
    data = {section.data for section in sections} - {None}
    return environment.get_template("page.html.jinja").render(
        title=title or " · ".join(dict.fromkeys(section.title for section in sections)),
        sections=sections,
        figures=_json([
            {"networks": s.networks or str(place), "figures": [_drawn(figure) for figure in s.figures]}
            for place, s in enumerate(sections)
        ]),
        recipes=[json.dumps(section.recipe, indent=1, ensure_ascii=False, default=str) for section in sections],
        data=_json(kept), data_id=DATA, several_data=len(data) > 1, **about,
        style=(parts / "report.css").read_text(encoding="utf-8"), scripts=scripts,
        policy=" ".join(f"'sha256-{_digest(script)}'" for script in scripts),
    )  # fmt: skip


def _section(result: Result) -> Section:
    describe: Callable[[Any], Section] = pkgutil.resolve_name(result.page)
    with fitting(result):
        return describe(result)


def _drawn(figure: Figure) -> dict[str, Any]:
    """Return what the script draws; the tables are in the page."""
    views = [{"label": view.label, "caption": view.caption, "traces": view.traces} for view in figure.views]
    return {"views": views, "layout": figure.layout, "start": figure.start}


def _kept(result: Result) -> dict[str, Any]:
    return {"result": type(result).__name__, "module": type(result).__module__, **result.to_dict()}


def _json(value: Any) -> str:
    """Serialise for a script element: no character of it can end the element, or is special to JavaScript."""
    text = visible(json.dumps(value, ensure_ascii=False, separators=(",", ":")))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def load_report(path: str | Path) -> list[Result]:
    """Read the results, in their order, of a page that :func:`hf_stitch.report` or :meth:`Result.to_html` wrote.

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
            raise ValueError(f"it is not a report of hf-stitch: it has no element {DATA!r}")
        record = read(Mapping[str, Any], json.loads(parser.text), DATA)
        version = read(int, record.get("format_version"), "format_version")
        if version > FORMAT_VERSION:
            raise ValueError(
                f"it has format {version}, but this version of hf-stitch reads up to {FORMAT_VERSION}: update hf-stitch"
            )
        return [_result(each) for each in read(tuple[Mapping[str, Any], ...], record.get("results"), "results")]


def _result(record: Mapping[str, Any]) -> Result:
    """Restore a result of a registered class, or of one that the program has imported.

    What is imported is the entry of the registry; the module in the record only tells classes of one name apart.
    """
    fields = dict(record)
    name, module = (read(str, fields.pop(key, None), f"the {key} of a result") for key in ("result", "module"))
    imported = {(kind.__module__, kind.__name__): kind for kind in _below(Result)}
    if (module, name) in imported:
        return imported[module, name].from_dict(fields)
    package = module.partition(".")[0]
    if name in registries.results:
        kind = registries.results.get(name)
        if package in ("hf_stitch", kind.__module__.partition(".")[0]):  # results moved between them
            return kind.from_dict(fields)
    hint = package.startswith("hf_stitch") and hint_for("results", name)
    raise ValueError(f"it contains a {name} of {module}, which is not known: {hint or 'import that module before'}")


def _below(kind: Any) -> set[Any]:
    found = set(kind.__subclasses__())
    return found.union(*map(_below, found))


class _Data(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.text: str | None = None
        self._inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Notice the data element."""
        self._inside = tag == "script" and ("id", DATA) in attrs

    def handle_endtag(self, tag: str) -> None:
        """Leave it."""
        self._inside = False

    def handle_data(self, data: str) -> None:
        """Take its text."""
        if self._inside:
            self.text = (self.text or "") + data


def section(result: Result) -> Section:
    """Describe a result by its text, its plot and its data frame."""
    frame = result.to_pandas()
    rows = [tuple(map(str, row)) for row in frame.head(MOST).itertuples(index=False)]
    notes = [f"The table shows {MOST} of {len(frame)} rows; all are in the data."] if len(frame) > MOST else []
    own, text = getattr(result, "verdict", None), str(result)
    shown: Any = result.__rich__()
    first = getattr(shown.renderable, "title", None)  # which a narrow table breaks into lines
    verdict = f"{own.rstrip('.')}." if isinstance(own, str) else str(first or text.split("\n")[0].strip())
    numbers = {"Numbers": Table([str(column) for column in frame.columns], rows)}
    drawn, why = _plot(result) if hasattr(result, "plot") else ("", "")
    pictures = [Picture(verdict, drawn, f"Plot of {type(result).__name__}", sample=False)] if drawn else []
    notes += [f"There is no picture: {why}."] if why else []
    recipe = getattr(result, "recipe", {})
    return Section(
        type(result).__name__, "", verdict, pictures=pictures, tables=numbers, text=text, notes=notes, recipe=recipe,
        data=getattr(result, "data", None) if isinstance(getattr(result, "data", None), str) else None,
    )  # fmt: skip


def _plot(result: Any) -> tuple[str, str]:
    """Return the figure of a result as a ``data:`` address, or why there is none."""
    if find_spec("matplotlib") is None:
        return "", "matplotlib is not installed (pip install 'hf-stitch[plots]')"
    try:
        return png(result.plot().savefig), ""
    except (
        TypeError,
        ValueError,
    ) as error:  # plots that need arguments, of undefined values, or of names that no font has
        return "", str(error)
