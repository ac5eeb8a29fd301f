"""Run the studies of all papers, and write every page and the table of all from the records.

    python run.py all --data-dir DATA --published PUBLISHED --out OUT
    python run.py pages

A study that is done is not run again, so that an interrupted run goes on where it stopped; several runs at once share
the work. After a change of a script or of its presets, remove its folder in OUT. Pages and table contain only what the
records do.
"""

import argparse
import importlib
import json
import resource
import runpy
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType

from filelock import FileLock, Timeout
from other_claims import other_claims
from rich.console import Console
from study import OWN, PRESETS, VERDICTS, Record, markdown

from hf_stitch.storage.files import write_whole

HERE = Path(__file__).resolve().parent
PAGES = HERE / "results"
PAPERS = {
    "1": "Similarity and matching (Csiszárik et al., NeurIPS 2021)",
    "2": "Relative representations (Moschella et al., ICLR 2023)",
    "3": "Filter-subspace similarity (Chen, Miao & Qiu, NeurIPS 2023)",
    "4": "How not to stitch (Balogh & Jelasity, AAAI 2025)",
    OWN: "Questions of our own",
}
"""Number of a paper, or :data:`study.OWN` -> title of its table."""


@dataclass(frozen=True)
class Study:
    """A study, whose script writes a record and a page."""

    script: str  # module of the script
    # arguments of the script besides ``--preset`` and ``--out``. ``{data}``, ``{published}``, ``{networks}`` and
    # ``{cache}`` stand for folders. ``None`` if it is run by hand: its page says how
    options: tuple[str, ...] | None = None
    named: str = ""  # name of the record and of the page, if it is not that of the script

    @property
    def name(self) -> str:
        """Name of the record and of the page."""
        return self.named or self.script.rpartition(".")[2]

    def module(self) -> ModuleType:
        """Import the script."""
        return importlib.import_module(self.script)

    def record(self) -> Record | None:
        """Read the record, or return ``None`` if there is none."""
        path = PAGES / f"{self.name}.json"
        return json.loads(path.read_text()) if path.is_file() else None

    def times(self, out: Path, preset: str) -> Record | None:
        """Read the time that it took, or return ``None`` if it is not done with the preset."""
        path = out / self.name / "done.json"
        times = json.loads(path.read_text()) if path.is_file() else None
        return times if times is not None and times["preset"] == preset else None


DATA = ("--data-dir", "{data}")
MATCHING = (*DATA, "--published", "{published}", "--networks", "{networks}")
RELATIVE = (*DATA, "--cache", "{cache}")
STUDIES: tuple[Study, ...] = (
    *(
        Study(f"dr_frankenstein.{name}", MATCHING)
        for name in (
            "direct_matching", "matching", "widths", "training_variants", "similarity_in_training", "low_cka",
            "initialisations", "mode_connectivity", "sparsity", "low_rank", "across_data_sets", "several_stitches",
        )
    ),
    *(
        Study(f"relative_representations.{name}", (*RELATIVE, "--published", "{published}"))
        for name in ("cross_seed", "angles", "cross_architecture_images", "anchor_study", "similarity_signal")
    ),
    *(
        Study(f"relative_representations.{name}", RELATIVE)
        for name in (
            "pretrained", "translated_labels", "reconstruction", "end_to_end", "graph_stitching", "performance_proxy",
        )
    ),
    *(
        Study(f"relative_representations.{name}", (*RELATIVE, "--encoders", "local"))
        for name in ("cross_architecture_text", "cross_language")
    ),
    Study("relative_representations.word_vectors", (*RELATIVE, "--texts", "{cache}/texts")),
    Study("dr_frankenstein.swaps", MATCHING, "swapping"),
    Study("dynamics.dynamics", RELATIVE, "training_dynamics"),
    *(Study(f"filter_atoms.{name}", ()) for name in ("propositions", "toy_regression")),
    *(
        Study(f"filter_atoms.{name}", MATCHING)
        for name in (
            "correlation", "blindness", "probing_data", "decorrelation", "across_data_sets_atoms", "unequal_widths",
            "dynamics_atoms", "federated", "federated_ensembles", "federated_table", "continual",
        )
    ),
    *(
        Study(f"how_not_to_stitch.{name}")
        for name in (
            "which_rows", "layer_identification", "layer_grids", "strange_activations", "cause", "low_rank_layers",
            "bench", "text_audit", "detector_gate", "task_loss_steps",
        )
    ),
    Study("embedding_upgrade.upgrade_table", named="embedding_upgrade"),
    Study("embedding_upgrade.latency", named="embedding_latency"),
    Study("embedding_upgrade.lazy_upgrade", named="embedding_lazy"),
    Study("language_models.two_tokenizers"),
    *(Study(f"{name}.{name}") for name in ("few_pairs", "beyond_affine", "transfer")),
)  # fmt: skip


# -- run ---------------------------------------------------------------------------------------------------------------


RUNS_ELSEWHERE = 75
"""Exit status of a process that finds its study running in another one."""


def run_all(arguments: argparse.Namespace) -> int:
    """Run the studies one after another; copy the records of those that are done and write all pages."""
    console, failed = Console(), False
    for number, study in enumerate(chosen(arguments.names), 1):
        console.print(f"{number}. {study.name} …")
        happened = run(study, arguments)
        failed |= happened.startswith("failed")
        console.print(f"   {happened}", markup=False)
        if arguments.publish:
            publish(arguments.out)
    return int(failed)


def chosen(names: Sequence[str]) -> list[Study]:
    """Return the studies of some names, or all that need no hand."""
    known = {study.name: study for study in STUDIES if study.options is not None}
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"there is no study {unknown[0]!r} to run; there are {', '.join(known)}")
    return [known[name] for name in names or known]


def run(study: Study, shared: argparse.Namespace) -> str:
    """Run a study in a process of its own, which goes on if this one ends."""
    if study.times(shared.out, shared.preset) is not None:
        return "done before"
    folder = shared.out / study.name
    folder.mkdir(parents=True, exist_ok=True)
    data = ["--data-dir", shared.data_dir] if shared.data_dir else []
    published = ["--published", str(shared.published)] if shared.published else []
    command = [
        sys.executable, __file__, "one", study.name, "--preset", shared.preset, *data, *published,
        "--out", str(shared.out),
    ]  # fmt: skip
    with open(folder / "log.txt", "a") as log:
        code = subprocess.run(command, stdout=log, stderr=log, check=False).returncode
    if code == RUNS_ELSEWHERE:
        return "runs elsewhere"
    times = study.times(shared.out, shared.preset)
    return f"failed; see {folder / 'log.txt'}" if code or times is None else f"done in {times['seconds']:,} s"


def run_here(study: Study, shared: argparse.Namespace) -> None:
    """Run a study in this process and write its time, unless it runs in another process."""
    out = shared.out.resolve()
    lock = FileLock(out / study.name / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        sys.exit(RUNS_ELSEWHERE)
    with lock:
        if study.times(out, shared.preset) is not None:
            return
        places = {"data": shared.data_dir, "published": shared.published, "networks": out / "networks",
                  "cache": out / "cache"}  # fmt: skip
        given = [option.format(**places) for option in study.options or () if shared.data_dir or option not in DATA]
        began = time.time()
        sys.argv = [study.script, "--preset", shared.preset, *given, "--out", str(out / study.name)]
        runpy.run_module(study.script, run_name="__main__")
        used = [resource.getrusage(of) for of in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        times = {
            "preset": shared.preset,
            "seconds": round(time.time() - began),
            "processor_seconds": round(sum(each.ru_utime + each.ru_stime for each in used)),
        }
        write_whole(out / study.name / "done.json", lambda path: path.write_text(json.dumps(times) + "\n"))


def publish(out: Path) -> None:
    """Copy the records and times of studies that are done to the pages, and write the pages."""
    times = _times()
    for study in STUDIES:
        done, record = (out / study.name / name for name in ("done.json", f"{study.name}.json"))
        if done.is_file() and record.is_file():
            _write(PAGES / record.name, record.read_text())
            times[study.name] = json.loads(done.read_text())
    _write(PAGES / "times.json", json.dumps(times, indent=1) + "\n")
    write_pages()


# -- pages -------------------------------------------------------------------------------------------------------------


def write_pages() -> None:
    """Write every page that has a record, its figures that need no more, and the table of all studies."""
    for study in STUDIES:
        if (record := study.record()) is not None:
            module = study.module()
            _write(PAGES / f"{study.name}.md", module.page(record))
            for name, figure in module.pictures(record).items() if hasattr(module, "pictures") else ():
                write_whole(PAGES / f"{name}.png", partial(figure.savefig, dpi=120, format="png"))
    _write(PAGES / "index.md", index())


COLUMNS = {"place": "place", "claim": "claim", "published": "paper's figure"} | {
    name: name for name in ("ours", "n", "preset", "verdict", "page")
}
"""Key of a row -> its header in the table."""
BEYOND = {
    "embedding_upgrade": "a new encoder for an old index, without embedding the texts again",
    "two_tokenizers": "decoders with different tokenizers",
    "few_pairs": "maps from few pairs, or none",
    "beyond_affine": "stitches that are not affine, and final features first",
    "transfer": "probes, directions and an autoencoder, carried through a stitch",
}
"""Studies of what no paper has: page -> what it is about."""
INDEX = """# All experiments

**What to do**: look up the claim that you rely on, and read the rule of its verdict on the page. Build on *confirmed*
alone. *Undecided* is no evidence against a claim: the figures here do not tell.

Every experiment, table and figure of the four papers that hf-stitch builds on, and what came out here. A verdict
follows a rule that its page states, with a word on what was known when it was written. *Stand-in*: networks or data
differ in kind from the paper's. *In part*: at some layers, networks or settings only. *Undecided*: figures do not tell,
or they rest on one pair of networks, as all of the two published ResNet-20 do. *Not tested*: what a test takes, or why
there is none, stands in the place of a figure. [Which verdicts changed](../changed_verdicts.md), and why.

{counts}

{tables}

## Beyond the papers

{beyond}

The pages and this table are written from the records by `make results`, which runs what is not done; the scripts of the
studies beyond the papers say how to run them. Their commands start in the folder of the studies.
"""


def index() -> str:
    """Return the table of all studies, by paper."""
    rows = list(claims())
    tables = []
    for paper, title in PAPERS.items():
        cells = [[row[key] for key in COLUMNS] for row in rows if row["paper"] == paper]
        tables.append(f"## {title}\n\n{markdown([*COLUMNS.values()], cells)}")
    counts = {word: sum(row["verdict"].removeprefix("stand-in ") == word for row in rows) for word in VERDICTS}
    pending = [study.name.replace("_", " ") for study in STUDIES if study.record() is None]
    hours = sum(each["processor_seconds"] for each in _times().values()) / 3600
    verdicts = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
    counted = (
        f"{len(rows)} rows: {verdicts}. Processor time of the experiments, as far as it was recorded, and without "
        "the training of networks that were there: "
        f"{hours:.1f} hours." + (f" Without a record so far: {', '.join(pending)}." if pending else "")
    )
    return INDEX.format(
        counts=textwrap.fill(counted, 120),
        tables="\n\n".join(tables),
        beyond="\n".join(
            f"- [{about}]({page}.md)" for page, about in BEYOND.items() if (PAGES / f"{page}.md").is_file()
        ),
    )


def claims() -> Iterator[dict[str, str]]:
    """Yield the rows of the table: those of every record, and those without a record."""
    times = _times()
    for study in STUDIES:
        if (record := study.record()) is None:  # its script may be what failed
            continue
        if (claimed := getattr(study.module(), "claims", None)) is not None:
            preset = times.get(study.name, {}).get("preset", "small")
            page = f"[{study.name.replace('_', ' ')}]({study.name}.md)"
            yield from ({**row, "preset": preset, "page": page} for row in claimed(record))
    yield from other_claims()


def _times() -> dict[str, Record]:
    path = PAGES / "times.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def _write(path: Path, text: str) -> None:
    write_whole(path, lambda whole: whole.write_text(text))


def main() -> None:
    """Run studies or write pages from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, about in (("all", "run the studies that are not done"), ("one", "run one study in this process")):
        running = commands.add_parser(name, help=about)
        running.add_argument("names", nargs="*", help="studies; default: all that need no hand")
        running.add_argument("--publish", action="store_true", help="copy the records to results/ and write the pages")
        running.add_argument("--preset", choices=PRESETS, default="small")
        running.add_argument("--data-dir", help="local folder of the data sets; default: the Hub")
        running.add_argument("--published", type=Path, help="folder of the published networks, for studies of them")
        running.add_argument("--out", type=Path, required=True, help="folder of records, logs and trained networks")
    commands.add_parser("pages", help="write the pages and their table from the records in results/")
    arguments = parser.parse_args()
    if arguments.command == "pages":
        write_pages()
    elif arguments.publish and arguments.preset == "test":
        parser.error("the figures of --preset test mean nothing: leave out --publish")
    elif arguments.published is None and (named := [
        study.name for study in chosen(arguments.names) if "{published}" in (study.options or ())
    ]):  # fmt: skip
        parser.error(f"--published is needed for {', '.join(named)}")
    elif arguments.command == "one":
        run_here(*chosen(arguments.names), arguments)
    else:
        sys.exit(run_all(arguments))


if __name__ == "__main__":
    main()
