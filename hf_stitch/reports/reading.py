"""Reading the results on a page."""

from __future__ import annotations

import importlib
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from hf_stitch.reports.writing import DATA, FORMAT_VERSION
from hf_stitch.results import Result


def load_report(path: str | Path) -> list[Result]:
    """Read the results of a page that :func:`hf_stitch.report` or :meth:`Result.to_html` wrote.

    Args:
        path: The HTML file.

    Returns:
        The results, in the order of the page.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is not such a page, was written by a later version, or contains a result of a class that
            is not installed.

    Example:
        >>> import tempfile, numpy as np
        >>> from hf_stitch import SimilarityAtlas, report
        >>> atlas = SimilarityAtlas({"cka": np.eye(2)}, ("a0", "a1"), ("b0", "b1"), 9, "mean", {"cka": "moments"})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     report([atlas], Path(folder) / "cka.html")
        ...     load_report(Path(folder) / "cka.html")[0].best_pair()
        ('a0', 'b0')
    """
    parser = _Data()
    parser.feed(Path(path).read_text(encoding="utf-8"))
    if parser.text is None:
        raise ValueError(f"{path} is not a report of hf-stitch: it has no element {DATA!r}")
    record = json.loads(parser.text)
    if record.get("format_version", FORMAT_VERSION + 1) > FORMAT_VERSION:
        raise ValueError(
            f"{path} has format {record.get('format_version')}, but this version of hf-stitch reads up to "
            f"{FORMAT_VERSION}: update hf-stitch"
        )
    return [_result(path, each) for each in record["results"]]


def _result(path: str | Path, record: dict[str, Any]) -> Result:
    """Restore a result. Only modules that are loaded, or those of hf-stitch, are looked into for its class."""
    name, module = record.pop("result"), record.pop("module")
    if module.split(".")[0] == "hf_stitch":
        importlib.import_module(module)
    known = {(kind.__module__, kind.__name__): kind for kind in _below(Result)}
    if (module, name) not in known:
        raise ValueError(f"{path} contains a {name} of {module}, which is not known: import that module before")
    return known[module, name].from_dict(record)


def _below(kind: Any) -> set[Any]:
    found = set(kind.__subclasses__())
    return found.union(*map(_below, found))


class _Data(HTMLParser):
    """Finds the text of the data element."""

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
