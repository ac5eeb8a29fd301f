"""Run every experiment whose results are in docs/results, and write the pages and their table from the records.

    python examples/results.py run --data-dir DATA --published PUBLISHED --out OUT
    python examples/results.py pages

An experiment that is done is not run again, so that an interrupted run goes on where it stopped; several runs at once
share the work. After a change of a script or of its presets, remove its folder in OUT. Pages and table contain only
what the records do.
"""

import argparse
import importlib
import json
import resource
import runpy
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from filelock import FileLock, Timeout
from other_claims import other_claims
from rich.console import Console

from hf_stitch.storage.files import write_whole

EXAMPLES = Path(__file__).resolve().parent
PAGES = EXAMPLES.parent / "docs" / "results"
PAPERS = {
    "1": "Similarity and matching (Csiszárik et al., NeurIPS 2021)",
    "2": "Relative representations (Moschella et al., ICLR 2023)",
    "3": "Filter-subspace similarity (Chen, Miao & Qiu, NeurIPS 2023)",
    "4": "How not to stitch (Balogh & Jelasity, AAAI 2025)",
}
VERDICTS = ("confirmed", "in part", "refuted", "undecided", "out of reach", "not yet")


@dataclass(frozen=True)
class Experiment:
    """An experiment, whose script writes a record and a page.

    The script defines ``page(record)``, the text of the page, and ``claims(record)``, its rows in the table.

    Attributes:
        folder: Folder of the script in ``examples``.
        name: Name of the record and of the page.
        options: Arguments of the script besides ``--preset``, ``--data-dir`` and ``--out``. ``{published}``,
            ``{networks}`` and ``{cache}`` stand for folders.
        script: Name of the script, if it is not ``name``.
        data: Whether the script reads data sets.
    """

    folder: str
    name: str
    options: tuple[str, ...]
    script: str = ""
    data: bool = True

    @property
    def file(self) -> Path:
        """The script."""
        return EXAMPLES / self.folder / f"{self.script or self.name}.py"

    def arguments(self, shared: argparse.Namespace) -> list[str]:
        """Return the arguments of the script."""
        out = shared.out
        places = {"published": shared.published, "networks": out / "networks", "cache": out / "cache"}
        data = ["--data-dir", shared.data_dir] if shared.data_dir and self.data else []
        options = [option.format(**places) for option in self.options]
        return ["--preset", shared.preset, *data, "--out", str(out / self.name), *options]


MATCHING = ("--published", "{published}", "--networks", "{networks}")
RELATIVE = ("--cache", "{cache}")
IMAGES = ("--published", "{published}", *RELATIVE)
EXPERIMENTS: tuple[Experiment, ...] = (
    *(
        Experiment("dr_frankenstein", name, MATCHING)
        for name in (
            "direct_matching", "matching", "widths", "training_variants", "similarity_in_training", "low_cka",
            "initialisations", "mode_connectivity", "sparsity", "low_rank", "across_data_sets", "several_stitches",
        )
    ),
    *(
        Experiment("relative_representations", name, IMAGES)
        for name in ("cross_seed", "angles", "cross_architecture_images", "anchor_study", "similarity_signal")
    ),
    *(
        Experiment("relative_representations", name, RELATIVE)
        for name in ("pretrained", "translated_labels", "reconstruction", "end_to_end")
    ),
    *(Experiment("relative_representations", name, RELATIVE) for name in ("graph_stitching", "performance_proxy")),
    *(
        Experiment("relative_representations", name, (*RELATIVE, "--encoders", "local"))
        for name in ("cross_architecture_text", "cross_language")
    ),
    Experiment("relative_representations", "word_vectors", (*RELATIVE, "--texts", "{cache}/texts")),
    Experiment("dr_frankenstein", "swapping", MATCHING, script="swaps"),
    Experiment("dynamics", "training_dynamics", RELATIVE, script="dynamics"),
    *(Experiment("filter_atoms", name, (), data=False) for name in ("propositions", "toy_regression")),
    *(
        Experiment("filter_atoms", name, MATCHING)
        for name in (
            "correlation", "blindness", "probing_data", "decorrelation", "across_data_sets_atoms", "unequal_widths",
            "dynamics_atoms", "federated", "federated_ensembles", "federated_table", "continual",
        )
    ),
)  # fmt: skip


def imported(experiment: Experiment) -> ModuleType:
    """Import the script of an experiment, beside which the modules that it imports are."""
    forget()
    sys.path.insert(0, str(experiment.file.parent))
    try:
        return importlib.import_module(experiment.file.stem)
    finally:
        sys.path.remove(str(experiment.file.parent))


def forget() -> None:
    """Forget all modules of the folders of scripts: some have the same name in two folders."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and Path(file).parent.parent == EXAMPLES:
            del sys.modules[name]


def record_of(experiment: Experiment, folder: Path = PAGES) -> dict[str, Any] | None:
    """Read the record of an experiment, or return ``None`` if there is none."""
    path = folder / f"{experiment.name}.json"
    return json.loads(path.read_text()) if path.is_file() else None


# -- run ---------------------------------------------------------------------------------------------------------------


RUNS_ELSEWHERE = 75
"""Exit status of a process that finds its experiment running in another one."""


def run(experiment: Experiment, shared: argparse.Namespace) -> str:
    """Run an experiment in a process of its own, which goes on if this one ends.

    Returns:
        What happened: ``done before``, ``runs elsewhere``, ``failed`` or ``done``.
    """
    if times_of(experiment, shared) is not None:
        return "done before"
    data = ["--data-dir", shared.data_dir] if shared.data_dir else []
    command = [
        sys.executable, str(Path(__file__).resolve()), "one", experiment.name, "--preset", shared.preset, *data,
        "--published", str(shared.published), "--out", str(shared.out),
    ]  # fmt: skip
    folder = shared.out / experiment.name
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "log.txt", "a") as log:
        code = subprocess.run(command, stdout=log, stderr=log, check=False).returncode
    if code == RUNS_ELSEWHERE:
        return "runs elsewhere"
    times = times_of(experiment, shared)
    return f"failed; see {folder / 'log.txt'}" if code or times is None else f"done in {times['seconds']:,} s"


def run_here(experiment: Experiment, shared: argparse.Namespace) -> None:
    """Run an experiment in this process and write its time, unless it runs in another process.

    Raises:
        SystemExit: If it runs in another process.
    """
    folder = shared.out / experiment.name
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        sys.exit(RUNS_ELSEWHERE)
    with lock:
        if times_of(experiment, shared) is not None:
            return
        began = time.time()
        sys.path[0], sys.argv = str(experiment.file.parent), [str(experiment.file), *experiment.arguments(shared)]
        runpy.run_path(str(experiment.file), run_name="__main__")
        used = [resource.getrusage(of) for of in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        times = {
            "preset": shared.preset,
            "seconds": round(time.time() - began),
            "processor_seconds": round(sum(each.ru_utime + each.ru_stime for each in used)),
        }
        write_whole(folder / "done.json", lambda path: path.write_text(json.dumps(times) + "\n"))


def times_of(experiment: Experiment, shared: argparse.Namespace) -> dict[str, Any] | None:
    """Read the time of an experiment that is done with the preset, or return ``None``."""
    path = shared.out / experiment.name / "done.json"
    times = json.loads(path.read_text()) if path.is_file() else None
    return times if times is not None and times["preset"] == shared.preset else None


def run_all(arguments: argparse.Namespace) -> int:
    """Run the experiments one after another; copy the records of those that are done and write all pages."""
    console, failed = Console(), False
    for number, experiment in enumerate(chosen(arguments.names), 1):
        console.print(f"{number}. {experiment.name} …")
        happened = run(experiment, arguments)
        failed |= happened.startswith("failed")
        console.print(f"   {happened}", markup=False)
        if arguments.publish:
            publish(arguments.out)
    return int(failed)


def chosen(names: Sequence[str]) -> list[Experiment]:
    """Return the experiments of some names, or all.

    Raises:
        SystemExit: If there is no experiment of a name.
    """
    known = {experiment.name: experiment for experiment in EXPERIMENTS}
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"there is no experiment {unknown[0]!r}; there are {', '.join(known)}")
    return [known[name] for name in names] if names else list(EXPERIMENTS)


def publish(out: Path) -> None:
    """Copy the records and times of experiments that are done to the pages, and write the pages."""
    times = _times()
    for experiment in EXPERIMENTS:
        folder = out / experiment.name
        if (folder / "done.json").is_file() and (record := folder / f"{experiment.name}.json").is_file():
            text = record.read_text()
            write_whole(PAGES / record.name, lambda path, text=text: path.write_text(text))
            times[experiment.name] = json.loads((folder / "done.json").read_text())
    write_whole(PAGES / "times.json", lambda path: path.write_text(json.dumps(times, indent=1) + "\n"))
    write_pages()


# -- pages -------------------------------------------------------------------------------------------------------------


def write_pages() -> None:
    """Write every page that has a record, and the table of all experiments."""
    for experiment in EXPERIMENTS:
        if (record := record_of(experiment)) is not None:
            text = imported(experiment).page(record)
            write_whole(PAGES / f"{experiment.name}.md", lambda path, text=text: path.write_text(text))
    write_whole(PAGES / "index.md", lambda path: path.write_text(index()))


HEADER = ("place", "claim", "paper's figure", "ours", "n", "preset", "verdict", "page")
BEYOND = {
    "embedding_upgrade": "a new encoder for an old index, without embedding the texts again",
    "two_tokenizers": "decoders with different tokenizers",
    "few_pairs": "maps from few pairs, or none",
    "beyond_affine": "stitches that are not affine, and final features first",
    "transfer": "probes, directions and an autoencoder, carried through a stitch",
}
"""Studies of what no paper has: page -> what it is about."""
INDEX = """# All experiments

Every experiment, table and figure of the four papers that hf-stitch builds on, and what came out here. A verdict
follows a rule that its page states, with a word on what was known when it was written. *Stand-in*: networks or data
differ in kind from the paper's. *In part*: at some layers, networks or settings only.

{counts} Processor time of the experiments, as far as it was recorded, and without the training of networks that were
there: {hours:.1f} hours.{pending}

{tables}

## Beyond the papers

{beyond}

The pages and this table are written from the records by `make results`, which runs what is not done; the scripts of the
studies beyond the papers say how to run them.

```{{toctree}}
:hidden:

{pages}
```
"""


def index() -> str:
    """Return the table of all experiments, by paper."""
    times = _times()
    rows = list(claims())
    tables = []
    for paper, title in PAPERS.items():
        own = [row for row in rows if row["paper"] == paper]
        lines = [
            (r["place"], r["claim"], r["published"], r["ours"], r["n"], r["preset"], r["verdict"], r["page"])
            for r in own
        ]
        tables.append(f"## {title}\n\n{_markdown(HEADER, lines)}")
    counts = {word: sum(row["verdict"].removeprefix("stand-in ") == word for row in rows) for word in VERDICTS}
    pending = [experiment.name.replace("_", " ") for experiment in EXPERIMENTS if record_of(experiment) is None]
    return INDEX.format(
        pending=f" Without a record so far: {', '.join(pending)}." if pending else "",
        hours=sum(each["processor_seconds"] for each in times.values()) / 3600,
        counts=f"{len(rows)} rows: " + ", ".join(f"{count} {word}" for word, count in counts.items() if count) + ".",
        tables="\n\n".join(tables),
        beyond="\n".join(
            f"- [{about}]({page}.md)" for page, about in BEYOND.items() if (PAGES / f"{page}.md").is_file()
        ),
        pages="\n".join(sorted(path.stem for path in PAGES.glob("*.md") if path.stem != "index")),
    )


def claims() -> Iterator[dict[str, str]]:
    """Yield the rows of the table: those of every record, and those without a record.

    Raises:
        ValueError: If a verdict has another form than those of the table.
    """
    times = _times()
    for experiment in EXPERIMENTS:
        if (record := record_of(experiment)) is None:
            continue
        preset = times.get(experiment.name, {}).get("preset", "small")
        page = f"[{experiment.name.replace('_', ' ')}]({experiment.name}.md)"
        for row in imported(experiment).claims(record):
            if row["verdict"].removeprefix("stand-in ") not in VERDICTS:
                raise ValueError(f"{experiment.name}: there is no verdict {row['verdict']!r}")
            yield {**row, "preset": preset, "page": page}
    yield from other_claims()


def _times() -> dict[str, dict[str, Any]]:
    path = PAGES / "times.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def main() -> None:
    """Run experiments or write pages from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="run the experiments that are not done")
    running.add_argument("names", nargs="*", help="experiments; default: all")
    running.add_argument("--publish", action="store_true", help="copy the records to docs/results and write the pages")
    one = commands.add_parser("one", help="run one experiment in this process")
    one.add_argument("names", nargs=1)
    for each in (running, one):
        _add_options(each)
    commands.add_parser("pages", help="write the pages and their table from the records in docs/results")
    arguments = parser.parse_args()
    if arguments.command == "pages":
        write_pages()
    elif arguments.command == "one":
        run_here(*chosen(arguments.names), arguments)
    elif arguments.publish and arguments.preset == "test":
        parser.error("the figures of --preset test mean nothing: leave out --publish")
    else:
        sys.exit(run_all(arguments))


def _add_options(running: argparse.ArgumentParser) -> None:
    running.add_argument("--preset", choices=("small", "paper", "test"), default="small")
    running.add_argument("--data-dir", help="local folder of the data sets; default: the Hub")
    running.add_argument(
        "--published", type=Path, required=True,
        help="folder with the published networks in drfrankenstein_tiny10 and drfrankenstein_resnet20",
    )  # fmt: skip
    running.add_argument("--out", type=Path, required=True, help="folder of records, logs and trained networks")


if __name__ == "__main__":
    main()
