"""Sweep over model families: the smallest model of every timm module and a tiny config of every transformers type.

``python benchmarks/zoo.py`` examines each family in a separate process, so that a crash or a timeout does not affect
the others, and appends one line of JSON per family. ``--report`` writes the report at the end. A second run resumes
where the first one stopped.
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

if not __package__:  # run as a script
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
"""Minimum seconds of a timed forward pass, and the maximum number of samples to reach it."""


@dataclass(frozen=True)
class Record:
    """Results for one family.

    Attributes:
        suite: ``timm``, or a head of transformers.
        family: Module of ``timm.models``, or model type of transformers.
        model: Name of the timm model, or of the transformers class.
        parameters: Number of parameters.
        candidates: Number of blocks that are candidates for cuts.
        listed: Verified cuts. Only five candidates are tried in networks with more than 50 million parameters.
        exact: Number of listed cuts that :mod:`benchmarks.exactness` found exact.
        plans: Plan -> number of cuts that use it.
        middle: The listed cut in the middle.
        operations: Floating-point operations of encode and decode at the middle cut over those of one forward pass.
        seconds: Seconds of encode and decode at the middle cut over those of one forward pass.
        reason: Why there are fewer than two cuts, or an empty string.
        inexact: The listed cut that is not exact and the inputs that show it, or an empty string.
        took: Seconds to examine the family.
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
    """Return the families of a suite."""
    return tuple(timm.list_modules()) if suite == "timm" else tuple(tiny.types(suite))


def adapter_of(suite: str, family: str) -> hf_stitch.Adapter:
    """Load a family's model in the smallest size that runs.

    Args:
        suite: One of :data:`SUITES`.
        family: A family of the suite.

    Returns:
        The adapter of a model with random weights.

    Raises:
        Exception: The error of the last attempt, if no model can be created and run.
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
    """Find and check the cuts of a family. Errors are stored in the record."""
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
    else:
        _ = adapter.layers  # verifies all of them together
    infos = {layer: adapter.verify_cut(layer) for layer in candidates}
    listed = tuple(layer for layer, e in infos.items() if e.status == "verified")
    refused = [e.reason for e in infos.values() if e.status == "refused"]
    few = f"everything flows through {len(candidates) or 'no'} single module{'s'[: len(candidates) > 1]}"
    reason = "" if len(listed) > 1 else refused[0] if refused else few
    record = dataclasses.replace(
        record,
        candidates=len(adapter.candidates),
        listed=listed,
        plans=dict(Counter(str(infos[n].plan) for n in listed)),
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
    """Draw enough samples for a forward pass that takes longer than the overhead of Python."""
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
    """Examine a family in a separate process with limits on time and memory."""
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
    """Read the records of a file: (suite, family) -> the last record."""
    if not path.exists():
        return {}
    records = [Record(**json.loads(line)) for line in path.read_text().splitlines()]
    return {(record.suite, record.family): record for record in records}


def main() -> None:
    """Run the sweep and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suite", choices=SUITES, action="append", help="suite to examine, repeatable; default: all")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="examine families that match, e.g. 'resnet*'")
    parser.add_argument("--again", action="store_true", help="examine families again that have a record")
    parser.add_argument("--failed", action="store_true", help="examine families again whose record contains a failure")
    parser.add_argument("--records", type=Path, default=Path("build/zoo.jsonl"), help="file of records")
    parser.add_argument("--report", type=Path, help="write the report to this file, e.g. docs/zoo.md")
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
    adapter_of("text", "llama")  # import shared modules before forking
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
