"""Reading the results on a page."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from hf_stitch.plugins import hint_for
from hf_stitch.records import read
from hf_stitch.registry import registries
from hf_stitch.reports.writing import DATA, FORMAT_VERSION
from hf_stitch.results import Result
from hf_stitch.storage.files import decoding


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
