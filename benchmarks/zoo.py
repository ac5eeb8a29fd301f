"""Sweep over model families: the smallest model of every timm module and a tiny config of every transformers type.

``python -m benchmarks.zoo`` renews ``docs/zoo.json``, with one row per family; the documentation makes a page of it. It
examines the families without a row, or with a row of other versions of torch, timm and transformers, so that a second
run resumes where the first one stopped. Each family runs in a separate process: a crash or a timeout does not affect
the rest.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import multiprocessing
import resource
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import timm
import torch
import transformers
from tqdm import tqdm

import hf_stitch
from benchmarks import exactness, padding, tiny
from benchmarks.timing import paired
from benchmarks.zoo_records import FILE, Record, read, write

SUITES = ("timm", *tiny.SUITES)
SECONDS, GIGABYTES = 900, 8
LARGE, SOME = 50_000_000, 5
VERSIONS = ", ".join(f"{each.__name__} {each.__version__.partition('+')[0]}" for each in (torch, timm, transformers))
BUSY, MOST = 0.05, 128
"""Minimum seconds of a timed forward pass, and the maximum number of samples to reach it."""


def families(suite: str) -> tuple[str, ...]:
    """Return the families of a suite."""
    return tuple(timm.list_modules()) if suite == "timm" else tuple(tiny.types(suite))


def adapter_of(suite: str, family: str, name: str | None = None) -> hf_stitch.Adapter:
    """Load a family's model, with random weights, in the smallest size that runs.

    Args:
        suite: One of :data:`SUITES`.
        family: A family of the suite.
        name: Model of timm. Default: the model with the fewest parameters; finding it takes seconds.
    """
    attempts = tiny.timm_attempts(name or tiny.smallest(family)) if suite == "timm" else tiny.attempts(suite, family)
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
    record = Record(suite, family, versions=VERSIONS)
    try:
        return _examined(record, adapter_of(suite, family))
    except Exception as error:
        return dataclasses.replace(record, reason=told(error))


def told(error: Exception) -> str:
    """Return an error as one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"


def quiet() -> None:
    """Set one thread, and turn off warnings."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)


def _examined(record: Record, adapter: hf_stitch.Adapter) -> Record:
    model: Any = adapter.model
    name = (getattr(model, "pretrained_cfg", None) or {}).get("architecture") if record.suite == "timm" else None
    record = dataclasses.replace(record, model=name or type(model).__name__)
    candidates = adapter.candidates
    if sum(p.numel() for p in model.parameters()) > LARGE and len(candidates) > SOME:
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
        candidates=len(adapter.candidates), cuts=len(listed), reason=reason[:400],
        plans=dict(Counter(str(infos[n].plan) for n in listed)),
    )  # fmt: skip
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
    if adapter.interface.modality == "text":
        network = padding.tokenizing(adapter)
        record = dataclasses.replace(record, padding=network._padded().padding)
        with suppress(Exception):  # a network that does not accept texts of two tokens
            moved = max(padding.moved(network, side, 8) for side in ("right", "left"))
            record = dataclasses.replace(record, moved=moved)
    return dataclasses.replace(
        record,
        exact=exact, inexact=inexact, middle=middle, seconds=round(ratio, 2),
        operations=round(exactness.cost(adapter, middle, inputs), 2),
    )  # fmt: skip


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


def _child(pipe: Connection, work: Callable[[], Any]) -> None:
    limit = GIGABYTES * 2**30
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    record = work()
    pipe.send(record if isinstance(record, dict) else dataclasses.asdict(record))


def examined(suite: str, family: str, seconds: int = SECONDS) -> Record:
    """Examine a family in a separate process, and return its row."""
    fields = apart(partial(examine, suite, family), seconds)
    return Record(**{"suite": suite, "family": family, "versions": VERSIONS, **fields})


def apart(work: Callable[[], Any], seconds: int = SECONDS) -> dict[str, Any]:
    """Examine a family in a separate process with limits on time and memory.

    Args:
        work: Returns a record: a dataclass, or a dictionary.
        seconds: The limit on time.

    Returns:
        The fields of the record, or the ``reason`` of a failure.
    """
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_child, args=(theirs, work), daemon=True)
    process.start()
    theirs.close()
    try:
        return dict(ours.recv()) if ours.poll(seconds) else {"reason": f"took more than {seconds} s"}
    except EOFError:
        process.join()
        return {"reason": f"the process died (exit code {process.exitcode})"}
    finally:
        process.kill()
        process.join()


def main() -> None:
    """Renew the records."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suite", choices=SUITES, action="append", help="suite to examine, repeatable; default: all")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="examine families that match, e.g. 'resnet*'")
    parser.add_argument("--again", action="store_true", help="also examine families with a row of these versions")
    parser.add_argument("--failed", action="store_true", help="also examine families with a failure in their row")
    parser.add_argument("--records", type=Path, default=FILE, help="file of the rows [default: docs/zoo.json]")
    options = parser.parse_args()
    quiet()
    done = read(options.records)
    pending = [
        (suite, family)
        for suite in options.suite or SUITES
        for family in families(suite)
        if fnmatch.fnmatch(family, options.only)
        and (
            options.again
            or (suite, family) not in done
            or done[suite, family].versions != VERSIONS
            or (options.failed and (done[suite, family].reason or done[suite, family].inexact))
        )
    ]
    adapter_of("text", "llama")  # import shared modules before forking
    for suite, family in tqdm(pending, "families", file=sys.stderr):
        record = done[suite, family] = examined(suite, family)
        write(done.values(), options.records)
        print(
            f"{suite}:{family} {record.model} {record.cuts} cuts, {record.exact} exact {record.plans} "
            f"{record.reason} {record.inexact}",
            flush=True,
        )


if __name__ == "__main__":
    main()
