"""Run a study, or write all pages and the table of all studies from the records.

    python run.py dr_frankenstein.matching --published PUBLISHED --networks NETWORKS --data-dir DATA --out OUT
    python run.py pages

Pages and table are computed from the records only.
"""

import importlib
import json
import sys
import textwrap
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType

from study import VERDICTS, Record, claim, markdown

from hf_stitch.storage.files import write_whole

HERE = Path(__file__).resolve().parent
PAGES = HERE / "results"
LISTED = tomllib.loads((HERE / "index.toml").read_text())
PAPERS: dict[str, str] = LISTED["papers"]
"""Number of a paper, or :data:`study.OWN` -> title of its table."""


@dataclass(frozen=True)
class Study:
    """Study with a script that writes a record and a page."""

    script: str  # module of the script
    name: str  # of the record and of the page

    @classmethod
    def of(cls, listed: str) -> "Study":
        """Read an entry of ``studies`` in ``index.toml``."""
        script, _, name = listed.partition(":")
        return cls(script, name or script.rpartition(".")[2])

    def module(self) -> ModuleType:
        """Import the script."""
        return importlib.import_module(self.script)

    def record(self) -> Record | None:
        """Read the record, or return ``None`` if it does not exist."""
        path = PAGES / f"{self.name}.json"
        return json.loads(path.read_text()) if path.is_file() else None


STUDIES = tuple(map(Study.of, LISTED["studies"]))
"""Studies in the order of their rows in the table of all studies."""


def write_pages() -> None:
    """Write every page that has a record, its figures drawn from the record, and the table of all studies."""
    for study in STUDIES:
        if (record := study.record()) is not None:
            module = study.module()
            write_whole(PAGES / f"{study.name}.md", partial(Path.write_text, data=module.page(record)))
            for name, figure in module.pictures(record).items() if hasattr(module, "pictures") else ():
                write_whole(PAGES / f"{name}.png", partial(figure.savefig, dpi=120, format="png"))
    write_whole(PAGES / "index.md", partial(Path.write_text, data=index(list(claims()))))


COLUMNS = {"place": "place", "claim": "claim", "published": "paper's figure"} | {
    name: name for name in ("ours", "n", "verdict", "page")
}
"""Key of a row -> its header in the table."""


def index(rows: Sequence[dict[str, str]]) -> str:
    """Return the table of all studies, by paper, from the rows of :func:`claims`."""
    tables = []
    for paper, title in PAPERS.items():
        cells = [[row[key] for key in COLUMNS] for row in rows if row["paper"] == paper]
        tables.append(f"## {title}\n\n{markdown([*COLUMNS.values()], cells)}")
    counts = {word: sum(row["verdict"].removeprefix("stand-in ") == word for row in rows) for word in VERDICTS}
    times = json.loads((PAGES / "times.json").read_text())
    hours = sum(study_times["processor_seconds"] for study_times in times.values()) / 3600
    verdicts = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
    counted = (
        f"{len(rows)} rows: {verdicts}. Recorded processor time of the experiments, without the training of existing "
        f"networks: {hours:.1f} hours."
    )
    beyond = [f"- [{about}]({page}.md)" for page, about in LISTED["beyond"].items() if (PAGES / f"{page}.md").is_file()]
    text = (HERE / "index.md").read_text()
    return text.format(counts=textwrap.fill(counted, 120), tables="\n\n".join(tables), beyond="\n".join(beyond))


def claims() -> Iterator[dict[str, str]]:
    """Yield the rows of the table: the claims of every record, and the untested claims."""
    for study in STUDIES:
        claimed, record = getattr(study.module(), "claims", None), study.record()
        if claimed is not None and record is not None:
            yield from ({**row, "page": _link(study.name)} for row in claimed(record))
    for row in LISTED["untested"]:
        stated = claim(row["paper"], row["place"], row["claim"], "–", row["why"], "–", "not tested")
        yield {**stated, "page": _link(row["page"]) if "page" in row else "–"}


def _link(name: str) -> str:
    return f"[{name.replace('_', ' ')}]({name}.md)"


if __name__ == "__main__":
    if sys.argv[1:] == ["pages"]:
        write_pages()
    else:
        script = importlib.import_module(sys.argv.pop(1))
        script.main()
