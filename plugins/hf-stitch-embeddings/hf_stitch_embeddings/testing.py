"""Conformance check for vector stores: :func:`check_store` tests the whole contract of a store with real upgrades."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from hf_stitch_testing import conformance

from hf_stitch.stitches import LinearStitch
from hf_stitch_embeddings.embedding_map import EmbeddingMap
from hf_stitch_embeddings.stores.base import Rows, VectorStore
from hf_stitch_embeddings.upgrading import Upgraded, upgrade
from hf_stitch_embeddings.vectors import Metric, normalized

ROWS, BATCH = 30, 12
OLD, NEW = 6, 9
"""Widths of old and new vectors."""
KILLS = 5
"""Number of random kill times, in addition to a kill before each file operation of Python."""
OPERATIONS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink")
"""Events of Python's audit hooks to kill an upgrade before."""
REFUSED = 3
"""Exit code of a process after an ``OSError`` of the upgrade, as on a full disk."""


class StoreCase(ABC):
    """Base class to create, open and read a store for :func:`check_store`, independently of the checked code.

    Attributes:
        name: Name of the case in the ids of tests. Default: the name of the class.
        has_payloads: Whether rows have texts in addition to vectors.
        start_method: Start method of processes to kill: ``"fork"``, or ``"forkserver"`` if the library of the store
            does not support a fork. The case is then pickled, so that its class must be defined in a module.
        closed: Pattern of folders with randomly named files, e.g. ``"*.lance"``; remains of killed processes inside
            them are not compared. Default: none.

    Example:
        >>> from hf_stitch_embeddings.stores import open_store
        >>> class Arrays(StoreCase):
        ...     def make(self, folder, vectors, payloads):
        ...         np.save(folder / "old.npy", vectors)
        ...         return range(len(vectors))
        ...     def change(self, folder, ids, vectors):
        ...         np.save(folder / "old.npy", vectors)
        ...     def open(self, folder):
        ...         return open_store(folder / "old.npy", target=folder / "new.npy")
        ...     def read(self, folder):
        ...         file = folder / "new.npy" if (folder / "new.npy").exists() else folder / "old.npy"
        ...         return {number: (vector, None) for number, vector in enumerate(np.load(file))}
        >>> check_store.parts(Arrays())[0]()
    """

    name: str = ""
    has_payloads: bool = False
    start_method: Literal["fork", "forkserver"] = "fork"
    closed: str = ""

    @abstractmethod
    def make(self, folder: Path, vectors: Rows, payloads: Sequence[str]) -> Sequence[Any]:
        """Create the store in an empty folder.

        Args:
            folder: The folder.
            vectors: ``(n, width)`` old vectors of length 1.
            payloads: n texts to store with the vectors, if the store supports payloads.

        Returns:
            The ids of the rows.
        """

    @abstractmethod
    def change(self, folder: Path, ids: Sequence[Any], vectors: Rows) -> None:
        """Replace all old vectors, like a second program between two runs.

        Args:
            folder: The folder.
            ids: The ids of the rows.
            vectors: ``(n, width)``.
        """

    @abstractmethod
    def open(self, folder: Path) -> VectorStore:
        """Open the store; the folder may be empty.

        Args:
            folder: The folder.

        Returns:
            The store; the check closes it.
        """

    @abstractmethod
    def read(self, folder: Path) -> dict[Any, tuple[Rows, str | None]]:
        """Read the searched vectors: old ones before the switch, new ones after it.

        Args:
            folder: The folder.

        Returns:
            Id -> vector and payload, None for stores without payloads.
        """


def a_map(width: int = NEW, seed: int = 0) -> EmbeddingMap:
    """Return a random linear map of old vectors."""
    draws = torch.Generator().manual_seed(seed)
    return EmbeddingMap.of(LinearStitch.of(weight=torch.randn(width, OLD, generator=draws)))


MAP, OTHER_MAP, EQUAL_MAP = a_map(), a_map(seed=1), a_map(OLD)
"""A map, a different map, and a map to vectors of equal width."""


class _CaseStore:
    """Store of a case in a folder, with its expected content."""

    def __init__(self, case: StoreCase, folder: Path) -> None:
        draws = np.random.default_rng(0)
        self.case, self.folder = case, folder
        self.vectors, self.changed = (normalized(draws.normal(size=(ROWS, OLD)).astype(np.float32)) for _ in range(2))
        self.payloads = [f"text {number}" for number in range(ROWS)]
        self.ids = list(case.make(folder, self.vectors, self.payloads))

    def open(self) -> VectorStore:
        return self.case.open(self.folder)

    def upgrade(
        self,
        embedding_map: EmbeddingMap = MAP,
        batch_size: int = BATCH,
        after_write: Callable[[int], object] = lambda rows: None,
    ) -> Upgraded:
        """Upgrade the store, and call a function with the number of rows after each write."""
        with self.open() as store:
            write = store.write

            def writing(ids: Sequence[Any], vectors: Rows) -> None:
                write(ids, vectors)
                after_write(len(ids))

            store.write = writing  # type: ignore[method-assign]
            return upgrade(store, embedding_map, batch_size=batch_size, progress=False)

    def interrupt(self) -> None:
        """Interrupt an upgrade after two batches."""
        countdown = [1, 0]

        def stop(rows: int) -> None:
            if not countdown.pop(0):
                raise KeyboardInterrupt

        with suppress(KeyboardInterrupt):
            self.upgrade(after_write=stop)

    def holds(self, vectors: Rows) -> bool:
        """Return whether a search sees these vectors in all rows, with their ids."""
        content = self.case.read(self.folder)
        _require(set(content) == set(self.ids), f"a search must see the ids {self.ids[:3]}…, got {list(content)[:3]}…")
        rows = [np.asarray(content[id_][0], np.float32) for id_ in self.ids]
        return all(a.shape == b.shape and np.allclose(a, b, atol=1e-5) for a, b in zip(rows, vectors, strict=True))

    def names(self) -> set[str]:
        """Return the names of all files and folders outside folders that match ``closed``."""
        paths = {p.relative_to(self.folder) for p in self.folder.rglob("*")}
        closed = self.case.closed
        return {str(path) for path in paths if not closed or not any(parent.match(closed) for parent in path.parents)}

    def check_new(self, after: str, embedding_map: EmbeddingMap = MAP) -> None:
        same = self.holds(embedding_map(self.vectors))
        _require(same, f"after {after}, a search must see the mapped vector of every row under its id")

    def finish(self, after: str) -> None:
        """Check that a search sees the whole old or the whole new store; rerun, and check the new store."""
        try:
            is_new = self.holds(MAP(self.vectors))
            is_complete = is_new or self.holds(self.vectors)
        except Exception as error:
            raise AssertionError(f"after {after}, the store cannot be read: {error!r}") from error
        _require(is_complete, f"after {after}, a search sees a mixture of old and new vectors")
        try:
            self.upgrade()
        except Exception as error:
            if not (is_new and isinstance(error, ValueError | OSError)):  # stores may reject a second upgrade
                raise AssertionError(f"after {after}, the next run must continue; it raised {error!r}") from error
        self.check_new(f"{after} and another run")

    def in_process(self, run: Callable[[StoreCase, Path, Any], None], argument: Any) -> int:
        """Run a function in a new process, and return its exit code, or minus the signal that ended it."""
        context = multiprocessing.get_context(self.case.start_method)
        if self.case.start_method == "forkserver":
            context.set_forkserver_preload([__name__])
        child: Any = context.Process(target=run, args=(self.case, self.folder, argument))  # type: ignore[attr-defined]
        child.start()
        child.join()
        exit_code: int = child.exitcode
        _require(exit_code in (0, REFUSED, -signal.SIGKILL), f"an upgrade in a new process ended with {exit_code}")
        return exit_code


@contextmanager
def _case_store(case: StoreCase) -> Iterator[_CaseStore]:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # stores warn of unfinished upgrades and of columns of equal width
        yield _CaseStore(case, Path(folder))


def _require(condition: bool, message: str) -> None:
    """Raise ``AssertionError`` if a condition fails, also under ``python -O``."""
    if not condition:
        raise AssertionError(message)


@conformance
def check_store(case: StoreCase) -> Iterator[tuple[str, Callable[[], object]]]:
    """Check that a vector store satisfies the contract of :class:`~hf_stitch_embeddings.stores.VectorStore`.

    The parts:

    - ``description``: the number of rows, width, name and metrics are correct; reading them does not change the store.
    - ``missing``: a missing store raises ``FileNotFoundError`` on opening or describing.
    - ``ids``: each row is pending once, and keeps its id.
    - ``payload``: texts of the rows stay unchanged.
    - ``order``: ids, old and new vectors match in pending rows, samples and ``vectors``, in any order.
    - ``dtype``: all returned vectors are float32 matrices.
    - ``widths``: new vectors may be narrower, wider, or of the same width.
    - ``batches``: batches are neither empty nor too large, and their size does not affect the result.
    - ``search``: searches return the nearest rows first and see replaced vectors; unknown ids are ignored or raise an
      error.
    - ``continued``: a rerun after an interruption maps only the remaining rows.
    - ``another_map``: an upgrade never continues with a different map.
    - ``finished``: a second upgrade with the same map maps zero rows or raises an error; with a different map, it maps
      all rows or raises an error.
    - ``second_writer``: of two concurrent upgrades, one raises an error, or both leave the same complete store.
    - ``changed_source``: if old vectors change after an interruption, a rerun raises an error or maps the changed ones.
    - ``killed``: ``kill -9`` before any file operation leaves the complete old or new store; the next run finishes the
      upgrade and removes temporary files.
    - ``killed_anytime``: the same at random times.
    - ``full_disk``: a full disk raises ``OSError`` and leaves the old store intact; with free space, a rerun continues.

    The parts on killed processes and full disks require Linux or macOS.

    Args:
        case: Case that creates, opens and reads the store.

    Raises:
        AssertionError: If the store violates the contract; the message describes the violation.
    """
    parts = (
        _description, _missing, _ids, _payload, _order, _dtype, _widths, _batches, _search, _continued, _another_map,
        _finished, _second_writer, _changed_source, _killed, _killed_anytime, _full_disk,
    )  # fmt: skip
    for part in parts:
        yield part.__name__[1:], partial(part, case)


def _description(case: StoreCase) -> None:
    with _case_store(case) as case_store:
        with case_store.open() as store:
            description = store.describe()
        for field, actual, expected in (("rows", description.rows, ROWS), ("width", description.width, OLD)):
            _require(actual == expected, f"describe() must return {field}={expected}, got {actual}")
        metrics = get_args(Metric)
        valid = bool(description.metrics) and set(description.metrics) <= set(metrics)
        _require(valid, f"describe() must return metrics among {', '.join(metrics)}, got {description.metrics}")
        _require(
            isinstance(description.name, str) and description.name != "",
            f"describe() must return a name, got {description.name!r}",
        )
        _require(case_store.holds(case_store.vectors), "describe() must not change the store")


def _missing(case: StoreCase) -> None:
    with tempfile.TemporaryDirectory() as folder:
        try:
            with case.open(Path(folder)) as store:
                store.describe()
        except FileNotFoundError:
            return
    raise AssertionError("a missing store must raise FileNotFoundError, got no error")


def _ids(case: StoreCase) -> None:
    with _case_store(case) as case_store, case_store.open() as store:
        pending = [id_ for ids, _ in _start(store).pending(BATCH) for id_ in ids]
        _require(
            len(pending) == ROWS and set(pending) == set(case_store.ids),
            f"pending must yield each of {ROWS} ids once, got {len(pending)} ids ({len(set(pending))} different), "
            f"e.g. {pending[:3]}",
        )
        _require(store.missing() == ROWS, f"missing() must be {ROWS} at the start, got {store.missing()}")
    with _case_store(case) as case_store:
        upgraded = case_store.upgrade()
        valid = upgraded.rows == upgraded.mapped == ROWS
        _require(valid, f"{ROWS} rows must be mapped, got {upgraded.mapped} of {upgraded.rows}")
        case_store.check_new("an upgrade")


def _start(store: VectorStore) -> VectorStore:
    store.describe()
    store.start("0123456789ab", NEW)
    return store


def _payload(case: StoreCase) -> None:
    with _case_store(case) as case_store:
        for after in ("its creation", "an upgrade"):
            content = case.read(case_store.folder)
            payloads = [content[id_][1] for id_ in case_store.ids]
            expected: list[Any] = list(case_store.payloads) if case.has_payloads else [None] * ROWS
            _require(payloads == expected, f"after {after}, payloads must be {expected[:2]}…, got {payloads[:2]}…")
            if after == "its creation":
                case_store.upgrade()


def _order(case: StoreCase) -> None:
    with _case_store(case) as case_store:
        old = dict(zip(case_store.ids, case_store.vectors, strict=True))
        new = dict(zip(case_store.ids, MAP(case_store.vectors), strict=True))
        with case_store.open() as store:
            _start(store)
            for ids, rows in list(store.pending(BATCH)):
                _same(rows, [old[id_] for id_ in ids], "old vectors that pending yields")
                store.write(ids, MAP(rows))
            row_count = 0
            for ids, before, after in store.sample(ROWS, 0):
                _same(before, [old[id_] for id_ in ids], "old vectors of a sample")
                _same(after, [new[id_] for id_ in ids], "new vectors of a sample")
                row_count += len(ids)
            _require(row_count == ROWS, f"a sample of all rows must have {ROWS}, got {row_count}")
            store.switch()
            subset = case_store.ids[::-3]
            _same(store.vectors(subset), [new[id_] for id_ in subset], "vectors()")


def _same(actual: Rows, expected: Sequence[Rows], name: str) -> None:
    same = np.shape(actual) == np.shape(expected) and np.allclose(actual, expected, atol=1e-5)
    _require(same, f"{name} must match their ids, in order")


def _dtype(case: StoreCase) -> None:
    with _case_store(case) as case_store, case_store.open() as store:
        _start(store)
        for ids, rows in list(store.pending(BATCH)):
            _float32(rows, OLD, "pending")
            store.write(ids, MAP(rows))
        for _, before, after in store.sample(5, 0):
            _float32(before, OLD, "sample")
            _float32(after, NEW, "sample")
        store.switch()
        _float32(store.vectors(case_store.ids[:2]), NEW, "vectors")


def _float32(rows: Any, width: int, name: str) -> None:
    kind = f"{getattr(rows, 'dtype', type(rows).__name__)} of shape {np.shape(rows)}"
    valid = isinstance(rows, np.ndarray) and rows.dtype == np.float32 and rows.shape[1:] == (width,)
    _require(valid, f"{name} must return float32 of shape (n, {width}), got {kind}")


def _widths(case: StoreCase) -> None:
    for width in (OLD - 2, OLD, NEW):
        with _case_store(case) as case_store:
            case_store.upgrade(a_map(width))
            case_store.check_new(f"an upgrade from width {OLD} to {width}", a_map(width))


def _batches(case: StoreCase) -> None:
    for size in (1, ROWS - 1, 10 * ROWS):
        with _case_store(case) as case_store:
            sizes: list[int] = []
            case_store.upgrade(batch_size=size, after_write=sizes.append)
            valid = min(sizes) >= 1 and max(sizes) <= size and sum(sizes) == ROWS
            _require(valid, f"batches must have 1 to {size} rows and {ROWS} in total, got {sizes}")
            case_store.check_new(f"an upgrade in batches of {size}")


def _search(case: StoreCase) -> None:
    with _case_store(case) as case_store, case_store.open() as store:
        upgrade(store, MAP, progress=False)
        new = MAP(case_store.vectors)
        neighbours = store.search(new[:5], 3)
        _require([row[0] for row in neighbours] == case_store.ids[:5], "each vector must find its row first")
        _require(all(len(row) == 3 for row in neighbours), f"search must return k ids for each query, got {neighbours}")
        store.replace(case_store.ids[:2], -new[:2])
        _same(store.vectors(case_store.ids[:3]), [*-new[:2], new[2]], "vectors() after replace()")
        first = [row[0] for row in store.search(-new[:2], 1)]
        _require(first == case_store.ids[:2], "searches must see replaced vectors")
        unknown = "nobody" if isinstance(case_store.ids[0], str) else 10**6
        store.replace([unknown, case_store.ids[3]], -new[2:4])  # ignored: a lazy upgrade may know deleted rows
        _same(store.vectors(case_store.ids[2:4]), [new[2], -new[3]], "vectors() after replace() with an unknown id")
        try:
            store.vectors([unknown])
        except ValueError:
            return
        raise AssertionError(f"vectors() must raise ValueError for the unknown id {unknown!r}, got no error")


def _continued(case: StoreCase) -> None:
    with _case_store(case) as case_store:
        case_store.interrupt()
        _require(case_store.holds(case_store.vectors), "searches must see the old vectors until all rows have new ones")
        upgraded = case_store.upgrade()
        _require(
            upgraded.mapped == ROWS - 2 * BATCH,
            f"after an interruption {ROWS - 2 * BATCH} rows must be mapped, got {upgraded.mapped}",
        )
        case_store.check_new("an interruption and another run")


def _another_map(case: StoreCase) -> None:
    with _case_store(case) as case_store:
        case_store.interrupt()
        try:
            case_store.upgrade(OTHER_MAP)
        except ValueError:
            case_store.finish("a rejected upgrade with a different map")
        else:
            case_store.check_new("an upgrade with a different map", OTHER_MAP)


def _finished(case: StoreCase) -> None:
    for first, again in ((MAP, MAP), (MAP, OTHER_MAP), (EQUAL_MAP, EQUAL_MAP), (EQUAL_MAP, a_map(OLD, seed=1))):
        with _case_store(case) as case_store:
            case_store.upgrade(first)
            try:
                mapped = case_store.upgrade(again).mapped
            except (ValueError, FileExistsError):
                case_store.check_new("a rejected second upgrade", first)
            else:
                valid = again is not first or mapped == 0
                _require(valid, f"a second upgrade with the same map must map 0 rows, got {mapped}")
                case_store.check_new("a second upgrade", again)


def _second_writer(case: StoreCase) -> None:
    for second in (MAP, OTHER_MAP):
        _both_write(case, second)


def _both_write(case: StoreCase, second: EmbeddingMap) -> None:
    is_refused: list[bool] = []
    with _case_store(case) as case_store:

        def upgrade_meanwhile(rows: int) -> None:
            if not is_refused:
                is_refused.append(False)
                try:
                    case_store.upgrade(second)
                except (OSError, ValueError):
                    is_refused[0] = True

        try:
            case_store.upgrade(after_write=upgrade_meanwhile)
        except (OSError, ValueError):
            if is_refused[0]:
                raise  # then the first one must succeed
        is_complete = case_store.holds(MAP(case_store.vectors)) or (
            not is_refused[0] and case_store.holds(second(case_store.vectors))
        )
        _require(is_complete, "two concurrent upgrades must leave a complete store; raise an OSError for the second")


def _changed_source(case: StoreCase) -> None:
    with _case_store(case) as case_store:
        case_store.interrupt()
        case.change(case_store.folder, case_store.ids, case_store.changed)
        try:
            case_store.upgrade()
        except ValueError:
            _require(case_store.holds(case_store.changed), "a rejected upgrade must leave the old vectors unchanged")
        else:
            is_complete = case_store.holds(MAP(case_store.changed))
            _require(is_complete, "if old vectors have changed since the start, raise an error or map the changed ones")


def _killed(case: StoreCase) -> None:
    _skip_on_windows()
    with _case_store(case) as case_store:
        case_store.upgrade()
        expected_names = case_store.names()
    number, killed = 1, True
    while killed:
        with _case_store(case) as case_store:
            killed = case_store.in_process(_killed_before, number) == -signal.SIGKILL
            event = f"kill -9 before file operation {number}"
            case_store.finish(event)
            remaining = case_store.names()
            _require(
                remaining == expected_names,
                f"after {event} and another run, {', '.join(sorted(remaining - expected_names))} must not remain",
            )
            number += 1


def _killed_before(case: StoreCase, folder: Path, number: int) -> None:
    """Upgrade, and kill this process before a file operation of the store."""
    remaining = number

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal remaining
        if event not in OPERATIONS or not isinstance(arguments[0], str | os.PathLike):
            return
        path = Path(arguments[0])
        if not path.is_absolute() or path.is_relative_to(folder):  # relative paths occur during the removal of a folder
            remaining -= 1
            if remaining == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    with case.open(folder) as store:
        sys.addaudithook(count)
        upgrade(store, MAP, batch_size=2 * BATCH, progress=False)


def _killed_anytime(case: StoreCase) -> None:
    _skip_on_windows()
    with _case_store(case) as case_store:
        start = time.perf_counter()
        case_store.upgrade()
        duration = time.perf_counter() - start
    generator = random.Random(0)
    for _ in range(KILLS):
        with _case_store(case) as case_store:
            seconds = generator.uniform(0, duration)
            case_store.in_process(_killed_after, seconds)
            case_store.finish(f"kill -9 after {seconds:.4f} of {duration:.4f} s")


def _killed_after(case: StoreCase, folder: Path, seconds: float) -> None:
    with case.open(folder) as store:
        clock = threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGKILL))
        clock.start()
        upgrade(store, MAP, batch_size=BATCH, progress=False)
        clock.cancel()


def _full_disk(case: StoreCase) -> None:
    _skip_on_windows()
    with _case_store(case) as case_store:
        case_store.upgrade()
        largest = max(path.stat().st_size for path in case_store.folder.rglob("*") if path.is_file())
    for free_bytes in (0, largest // 2, largest - 1):
        with _case_store(case) as case_store:
            refused = case_store.in_process(_upgrade_on_full_disk, free_bytes) == REFUSED
            _require(refused or free_bytes > 0, "an upgrade without free disk space must raise an OSError")
            case_store.finish(f"a full disk with {free_bytes} bytes of free space")


def _upgrade_on_full_disk(case: StoreCase, folder: Path, free_bytes: int) -> None:
    import resource

    with case.open(folder) as store:
        resource.setrlimit(resource.RLIMIT_FSIZE, (free_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        try:
            upgrade(store, MAP, batch_size=BATCH, progress=False)
        except OSError:
            os._exit(REFUSED)  # skips exit handlers of libraries


def _skip_on_windows() -> None:
    from unittest import SkipTest

    if os.name == "nt":
        raise SkipTest("killed processes and full disks are tested on Linux and macOS only")
