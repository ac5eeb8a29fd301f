"""Writing a page: sections, data, styles and scripts in one file."""

from __future__ import annotations

import base64
import hashlib
import json
import pkgutil
from collections.abc import Callable, Iterable
from importlib.resources import files
from pathlib import Path
from typing import Any

from hf_stitch.printing import visible
from hf_stitch.provenance import machine, versions
from hf_stitch.reports.section import Figure, Section
from hf_stitch.results import Result, fitting
from hf_stitch.running import Processes
from hf_stitch.storage.files import write_whole

FORMAT_VERSION = 1
"""Version of the data on a page."""

DATA = "hf-stitch-report"
"""Id of the element that contains the results as JSON."""


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
