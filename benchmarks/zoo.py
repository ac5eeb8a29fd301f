"""Exact cuts across the families: the smallest model of every timm module, tiny configs of every transformers type.

``python benchmarks/zoo.py`` examines each family in a process of its own, which may crash or hang without harm to the
others, writes one line of JSON for it, and at the end the report. A second run goes on where the first ended.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import json
import multiprocessing
import resource
import sys
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

if not __package__:  # called by its path
    sys.path.insert(0, str(Path(__file__).parents[1]))

import timm
import torch
import transformers
from tqdm import tqdm

import hf_stitch
from benchmarks import exactness, tiny
from benchmarks.timing import paired
from benchmarks.zoo_report import report

SUITES = ("timm", *tiny.SUITES)
SECONDS, GIGABYTES = 900, 8
LARGE, SOME = 50_000_000, 5
BUSY, MOST = 0.05, 128
"""Seconds that a forward takes at least when it is timed, and the most samples for that."""


@dataclass(frozen=True)
class Record:
    """What was found of a family.

    Attributes:
        suite: ``timm``, or which head of transformers.
        family: Module of ``timm.models``, or type of transformers.
        model: Name of the model in timm, or of its class.
        parameters: How many it has.
        candidates: How many blocks everything seems to flow through.
        listed: Its cuts; of networks of more than 50 million parameters, those among five candidates.
        exact: How many of these are, by :mod:`benchmarks.exactness`.
        plans: How many cuts take which plan.
        middle: The cut at the middle.
        operations: Floating-point operations of encode + decode there, over those of one forward.
        seconds: The same of seconds.
        reason: Why there are fewer than two cuts; empty otherwise.
        inexact: Which listed cut is none, and where; empty where all are.
        took: Seconds for all of this.
    """

    suite: str
    family: str
    model: str = ""
    parameters: int = 0
    candidates: int = 0
    listed: tuple[str, ...] = ()
    exact: int = 0
    plans: dict[str, int] = field(default_factory=dict)
    middle: str = ""
    operations: float | None = None
    seconds: float | None = None
    reason: str = ""
    inexact: str = ""
    took: float = 0.0


def families(suite: str) -> tuple[str, ...]:
    """The families of a suite."""
    return tuple(timm.list_modules()) if suite == "timm" else tuple(tiny.types(suite))


def adapter_of(suite: str, family: str) -> hf_stitch.Adapter:
    """An adapter of a family's model, of the smallest size in which it runs.

    Raises:
        Exception: What the last attempt said, if no model can be made or runs.
    """
    attempts = tiny.timm_attempts(tiny.smallest(family)) if suite == "timm" else tiny.attempts(suite, family)
    failures = []
    for make in attempts:
        try:
            model, example = make()
            adapter = hf_stitch.load(model, example_inputs=example)
            with torch.no_grad():
                adapter.forward(adapter.example)
            tiny.calibrate(adapter.model, {**adapter.interface.options, **adapter.example})
            return adapter
        except Exception as error:
            failures.append(error)
    raise failures[-1]


def examine(suite: str, family: str) -> Record:
    """Find and check the cuts of a family."""
    start = time.monotonic()
    record = Record(suite, family)
    try:
        record = _examined(record, adapter_of(suite, family))
    except Exception as error:
        message = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
        record = dataclasses.replace(record, reason=message)
    return dataclasses.replace(record, took=round(time.monotonic() - start, 1))


def _examined(record: Record, adapter: hf_stitch.Adapter) -> Record:
    model: Any = adapter.model
    name = (getattr(model, "pretrained_cfg", None) or {}).get("architecture") if record.suite == "timm" else None
    record = dataclasses.replace(
        record, model=name or type(model).__name__, parameters=sum(p.numel() for p in model.parameters())
    )
    candidates = adapter.candidates
    if record.parameters > LARGE and len(candidates) > SOME:
        candidates = tuple(candidates[i * (len(candidates) - 1) // (SOME - 1)] for i in range(SOME))
    told = {layer: adapter.verify_cut(layer) for layer in candidates}
    listed = tuple(layer for layer, e in told.items() if e.status == "verified")
    refused = [e.reason for e in told.values() if e.status == "refused"]
    few = f"everything flows through {len(candidates) or 'no'} single module{'s'[: len(candidates) > 1]}"
    reason = "" if len(listed) > 1 else refused[0] if refused else few
    record = dataclasses.replace(
        record,
        candidates=len(adapter.candidates),
        listed=listed,
        plans=dict(Counter(str(told[n].plan) for n in listed)),
        reason=reason[:400],
    )
    if not listed:
        return record
    exact, inexact = 0, ""
    try:
        exactness.check(adapter, listed)
        exact = len(listed)
    except exactness.InexactError as error:
        inexact = str(error)
    middle = listed[len(listed) // 2]
    with torch.no_grad():
        inputs = busy(adapter)
        ratio = paired(
            lambda: adapter.decode(adapter.encode(inputs, middle)[middle], middle), lambda: adapter.forward(inputs), 5
        )[2]
    return dataclasses.replace(
        record,
        exact=exact,
        inexact=inexact,
        middle=middle,
        operations=exactness.cost(adapter, middle, inputs),
        seconds=ratio,
    )


def busy(adapter: hf_stitch.Adapter) -> dict[str, Any]:
    """Inputs of as many samples as keep the network busy for a while, so that its time is not that of Python."""
    samples = 2
    while True:
        inputs = exactness.batch(adapter, samples)
        start = time.perf_counter()
        adapter.forward(inputs)
        if time.perf_counter() - start > BUSY or samples >= MOST:
            return inputs
        samples *= 2


def _child(pipe: Connection, suite: str, family: str) -> None:
    limit = GIGABYTES * 2**30
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    pipe.send(dataclasses.asdict(examine(suite, family)))


def apart(suite: str, family: str) -> Record:
    """Examine a family in a process of its own, within limits of time and memory."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_child, args=(theirs, suite, family), daemon=True)
    process.start()
    theirs.close()
    try:
        if ours.poll(SECONDS):
            return Record(**ours.recv())
        return Record(suite, family, reason=f"took more than {SECONDS} s", took=SECONDS)
    except EOFError:
        process.join()
        return Record(suite, family, reason=f"the process died (exit code {process.exitcode})")
    finally:
        process.kill()
        process.join()


def read(path: Path) -> dict[tuple[str, str], Record]:
    """The records of a file, the last of each family."""
    if not path.exists():
        return {}
    records = [Record(**json.loads(line)) for line in path.read_text().splitlines()]
    return {(record.suite, record.family): record for record in records}


def main() -> None:
    """Run the sweep and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suite", choices=SUITES, action="append", help="one of the suites; default: all")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="families by a pattern, as 'resnet*'")
    parser.add_argument("--again", action="store_true", help="examine families anew that have a record")
    parser.add_argument("--failed", action="store_true", help="examine families anew whose record has a reason")
    parser.add_argument("--records", type=Path, default=Path("build/zoo.jsonl"), help="where records are kept")
    parser.add_argument("--report", type=Path, help="where the report goes, as docs/zoo.md")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    done = read(options.records)
    wanted = [
        (suite, family)
        for suite in options.suite or SUITES
        for family in families(suite)
        if fnmatch.fnmatch(family, options.only)
        and (
            options.again
            or (suite, family) not in done
            or (options.failed and (done[suite, family].reason or done[suite, family].inexact))
        )
    ]
    adapter_of("text", "llama")  # what every process needs is imported before they part
    options.records.parent.mkdir(parents=True, exist_ok=True)
    with options.records.open("a") as file:
        for suite, family in tqdm(wanted, "families", file=sys.stderr):
            record = apart(suite, family)
            file.write(json.dumps(dataclasses.asdict(record)) + "\n")
            file.flush()
            done[suite, family] = record
            print(
                f"{suite}:{family} {record.model} {len(record.listed)} cuts, {record.exact} exact {record.plans} "
                f"{record.reason} {record.inexact} ({record.took} s)",
                flush=True,
            )
    if options.report:
        options.report.write_text(report(done.values()))


if __name__ == "__main__":
    main()
