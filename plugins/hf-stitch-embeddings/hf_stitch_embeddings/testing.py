"""Conformance check for vector stores: :func:`check_store` upgrades a store in every way that its contract covers."""

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
KILLS = 5
"""Random moments at which an upgrade is killed, beside all operations of Python on files."""
OPERATIONS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink")
"""Events of Python's audit hooks before which an upgrade is killed."""
REFUSED = 3
"""Exit code of a process whose upgrade raised an ``OSError``, as on a full disk."""


class StoreCase(ABC):
    """How :func:`check_store` makes a store, opens it, and reads it without the code that it checks.

    Attributes:
        name: Name of the case in the ids of tests. Default: the name of the class.
        has_payloads: Whether rows have texts beside their vectors.
        start_method: How processes begin that are killed: ``"fork"``, or ``"forkserver"`` if the library of the store
            does not survive a fork; the case must then be pickled, so its class stands in a module.
        closed: Pattern of the folders whose files the library of the store names at random, e.g. ``"*.lance"``: what
            killed processes leave inside them is not compared. Default: none.

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
        """Make the store in an empty folder.

        Args:
            folder: The folder.
            vectors: ``(n, width)`` old vectors, of length 1.
            payloads: n texts, to be kept beside the vectors if the store keeps such.

        Returns:
            The ids of the rows.
        """

    @abstractmethod
    def change(self, folder: Path, ids: Sequence[Any], vectors: Rows) -> None:
        """Replace all old vectors, as another program could do between two runs.

        Args:
            folder: The folder.
            ids: The ids of the rows.
            vectors: ``(n, width)``.
        """

    @abstractmethod
    def open(self, folder: Path) -> VectorStore:
        """Open the store, also in a folder that has none.

        Args:
            folder: The folder.

        Returns:
            The store; the check closes it.
        """

    @abstractmethod
    def read(self, folder: Path) -> dict[Any, tuple[Rows, str | None]]:
        """Read what a search sees: old vectors, or new ones after the switch.

        Args:
            folder: The folder.

        Returns:
            Id -> vector and payload, None for stores without payloads.
        """


def a_map(width: int = NEW, seed: int = 0) -> EmbeddingMap:
    """Make a linear map of old vectors."""
    draws = torch.Generator().manual_seed(seed)
    return EmbeddingMap.of(LinearStitch.of(weight=torch.randn(width, OLD, generator=draws)))


MAP, OTHER, EQUAL = a_map(), a_map(seed=1), a_map(OLD)


class _Made:
    """A store of a case in a folder, with what it must contain."""

    def __init__(self, case: StoreCase, folder: Path) -> None:
        draws = np.random.default_rng(0)
        self.case, self.folder = case, folder
        self.vectors, self.others = (normalized(draws.normal(size=(ROWS, OLD)).astype(np.float32)) for _ in range(2))
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
        """Upgrade, and call a function with the number of rows after each write."""
        with self.open() as store:
            write = store.write

            def writing(ids: Sequence[Any], vectors: Rows) -> None:
                write(ids, vectors)
                after_write(len(ids))

            store.write = writing  # type: ignore[method-assign]
            return upgrade(store, embedding_map, batch_size=batch_size, progress=False)

    def interrupt(self) -> None:
        """Upgrade until two batches are written."""
        left = [1, 0]

        def stop(rows: int) -> None:
            if not left.pop(0):
                raise KeyboardInterrupt

        with suppress(KeyboardInterrupt):
            self.upgrade(after_write=stop)

    def holds(self, vectors: Rows) -> bool:
        """Whether a search sees these vectors in all rows, with their ids."""
        found = self.case.read(self.folder)
        _require(set(found) == set(self.ids), f"a search must see the ids {self.ids[:3]}…, got {list(found)[:3]}…")
        rows = [np.asarray(found[each][0], np.float32) for each in self.ids]
        return all(a.shape == b.shape and np.allclose(a, b, atol=1e-5) for a, b in zip(rows, vectors, strict=True))

    def names(self) -> set[str]:
        """Return the names of all files and folders, without those in folders that the case closes."""
        paths = {each.relative_to(self.folder) for each in self.folder.rglob("*")}
        closed = self.case.closed
        return {str(path) for path in paths if not closed or not any(each.match(closed) for each in path.parents)}

    def check_new(self, after: str, embedding_map: EmbeddingMap = MAP) -> None:
        same = self.holds(embedding_map(self.vectors))
        _require(same, f"after {after}, a search must see the mapped vector of every row under its id")

    def finish(self, after: str) -> None:
        """Check that a search sees the whole old store or the whole new one; run again, and check the new one."""
        try:
            done = self.holds(MAP(self.vectors))
            whole = done or self.holds(self.vectors)
        except Exception as error:
            raise AssertionError(f"after {after}, the store cannot be read: {error!r}") from error
        _require(whole, f"after {after}, a search sees a mixture of old and new vectors")
        try:
            self.upgrade()
        except Exception as error:
            if not (done and isinstance(error, ValueError | OSError)):  # a store may refuse to be upgraded twice
                raise AssertionError(f"after {after}, the next run must continue; it raised {error!r}") from error
        self.check_new(f"{after} and another run")

    def in_process(self, run: Callable[[StoreCase, Path, Any], None], argument: Any) -> int:
        """Run a function in a process, and return how it ended: an exit code, or minus a signal."""
        context = multiprocessing.get_context(self.case.start_method)
        if self.case.start_method == "forkserver":
            context.set_forkserver_preload([__name__])
        child: Any = context.Process(target=run, args=(self.case, self.folder, argument))  # type: ignore[attr-defined]
        child.start()
        child.join()
        ended: int = child.exitcode
        _require(ended in (0, REFUSED, -signal.SIGKILL), f"an upgrade in a process of its own ended with {ended}")
        return ended


@contextmanager
def _made(case: StoreCase) -> Iterator[_Made]:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # stores warn of what other maps have left, and of columns of equal width
        yield _Made(case, Path(folder))


def _require(condition: bool, message: str) -> None:
    """Raise AssertionError, under ``python -O`` too."""
    if not condition:
        raise AssertionError(message)


@conformance
def check_store(case: StoreCase) -> Iterator[tuple[str, Callable[[], object]]]:
    """Check that a vector store satisfies the contract of :class:`~hf_stitch_embeddings.stores.VectorStore`.

    The parts:

    - ``description``: number of rows, width, name and metrics are right; reading them changes nothing.
    - ``missing``: a store that does not exist raises a ``FileNotFoundError`` when it is opened or described.
    - ``ids``: every row is pending once, and has the same id afterwards.
    - ``payload``: texts beside the vectors stay.
    - ``order``: ids, old and new vectors of pending rows, of samples and of ``vectors`` belong together, in any order.
    - ``dtype``: all vectors that it returns are matrices of float32.
    - ``widths``: new vectors may be narrower, wider, or of the same width.
    - ``batches``: no batch is empty or too large, and sizes of batches change nothing.
    - ``search``: searches find the nearest first, exact vectors replace mapped ones, and unknown ids are left out or
      refused.
    - ``continued``: an upgrade that was interrupted maps only what is left.
    - ``another_map``: what one map has begun, another one never continues.
    - ``finished``: a second upgrade with the same map maps nothing, or is refused; with another one, all or nothing.
    - ``second_writer``: of two upgrades at a time, one is refused, or both leave the same whole store.
    - ``changed_source``: if old vectors have changed since an interruption, it is refused, or maps the changed ones.
    - ``killed``: ``kill -9`` before any operation on files leaves the whole old store or the whole new one, and the
      next run ends what was begun, and leaves nothing beside it.
    - ``killed_anytime``: the same at random moments.
    - ``full_disk``: an ``OSError`` that leaves the old store whole; with room, the next run continues.

    The parts on killed processes and full disks need Linux or macOS.

    Args:
        case: How the store is made, opened and read.

    Raises:
        AssertionError: The contract is violated; the message names the violation.
    """
    parts = (
        _description, _missing, _ids, _payload, _order, _dtype, _widths, _batches, _search, _continued, _another_map,
        _finished, _second_writer, _changed_source, _killed, _killed_anytime, _full_disk,
    )  # fmt: skip
    for part in parts:
        yield part.__name__[1:], partial(part, case)


def _description(case: StoreCase) -> None:
    with _made(case) as made:
        with made.open() as store:
            found = store.describe()
        for what, got, wanted in (("rows", found.rows, ROWS), ("width", found.width, OLD)):
            _require(got == wanted, f"describe() must give {what}={wanted}, got {got}")
        known = get_args(Metric)
        right = bool(found.metrics) and set(found.metrics) <= set(known)
        _require(right, f"describe() must give metrics among {', '.join(known)}, got {found.metrics}")
        _require(isinstance(found.name, str) and found.name != "", f"describe() must give a name, got {found.name!r}")
        _require(made.holds(made.vectors), "describe() must change nothing")


def _missing(case: StoreCase) -> None:
    with tempfile.TemporaryDirectory() as folder:
        try:
            with case.open(Path(folder)) as store:
                store.describe()
        except FileNotFoundError:
            return
    raise AssertionError("a store that does not exist must raise FileNotFoundError; nothing was raised")


def _ids(case: StoreCase) -> None:
    with _made(case) as made, made.open() as store:
        pending = [each for ids, _ in _started(store).pending(BATCH) for each in ids]
        _require(
            len(pending) == ROWS and set(pending) == set(made.ids),
            f"pending must yield each of {ROWS} ids once, got {len(pending)} ids, {len(set(pending))} of them "
            f"different, e.g. {pending[:3]}",
        )
        _require(store.missing() == ROWS, f"missing() must be {ROWS} at the start, got {store.missing()}")
    with _made(case) as made:
        done = made.upgrade()
        _require(done.rows == done.mapped == ROWS, f"{ROWS} rows must be mapped, got {done.mapped} of {done.rows}")
        made.check_new("an upgrade")


def _started(store: VectorStore) -> VectorStore:
    store.describe()
    store.start("0123456789ab", NEW)
    return store


def _payload(case: StoreCase) -> None:
    with _made(case) as made:
        for after in ("making it", "an upgrade"):
            found = case.read(made.folder)
            kept = [found[each][1] for each in made.ids]
            wanted: list[Any] = list(made.payloads) if case.has_payloads else [None] * ROWS
            _require(kept == wanted, f"after {after}, payloads must be {wanted[:2]}…, got {kept[:2]}…")
            if after == "making it":
                made.upgrade()


def _order(case: StoreCase) -> None:
    with _made(case) as made:
        old = dict(zip(made.ids, made.vectors, strict=True))
        new = dict(zip(made.ids, MAP(made.vectors), strict=True))
        with made.open() as store:
            _started(store)
            for ids, rows in list(store.pending(BATCH)):
                _same(rows, [old[each] for each in ids], "old vectors that pending yields")
                store.write(ids, MAP(rows))
            seen = 0
            for ids, before, after in store.sample(ROWS, 0):
                _same(before, [old[each] for each in ids], "old vectors of a sample")
                _same(after, [new[each] for each in ids], "new vectors of a sample")
                seen += len(ids)
            _require(seen == ROWS, f"a sample of all rows must have {ROWS}, got {seen}")
            store.switch()
            some = made.ids[::-3]
            _same(store.vectors(some), [new[each] for each in some], "vectors()")


def _same(found: Rows, wanted: Sequence[Rows], what: str) -> None:
    same = np.shape(found) == np.shape(wanted) and np.allclose(found, wanted, atol=1e-5)
    _require(same, f"{what} must be those of the ids beside them, in their order")


def _dtype(case: StoreCase) -> None:
    with _made(case) as made, made.open() as store:
        _started(store)
        for ids, rows in list(store.pending(BATCH)):
            _float32(rows, OLD, "pending")
            store.write(ids, MAP(rows))
        for _, before, after in store.sample(5, 0):
            _float32(before, OLD, "sample")
            _float32(after, NEW, "sample")
        store.switch()
        _float32(store.vectors(made.ids[:2]), NEW, "vectors")


def _float32(rows: Any, width: int, what: str) -> None:
    kind = f"{getattr(rows, 'dtype', type(rows).__name__)} of shape {np.shape(rows)}"
    right = isinstance(rows, np.ndarray) and rows.dtype == np.float32 and rows.shape[1:] == (width,)
    _require(right, f"{what} must give float32 of shape (n, {width}), got {kind}")


def _widths(case: StoreCase) -> None:
    for width in (OLD - 2, OLD, NEW):
        with _made(case) as made:
            made.upgrade(a_map(width))
            made.check_new(f"an upgrade from width {OLD} to {width}", a_map(width))


def _batches(case: StoreCase) -> None:
    for size in (1, ROWS - 1, 10 * ROWS):
        with _made(case) as made:
            sizes: list[int] = []
            made.upgrade(batch_size=size, after_write=sizes.append)
            right = all(1 <= each <= size for each in sizes) and sum(sizes) == ROWS
            _require(right, f"batches must have from 1 to {size} rows, and {ROWS} together, got {sizes}")
            made.check_new(f"an upgrade in batches of {size}")


def _search(case: StoreCase) -> None:
    with _made(case) as made, made.open() as store:
        upgrade(store, MAP, progress=False)
        new = MAP(made.vectors)
        found = store.search(new[:5], 3)
        _require([row[0] for row in found] == made.ids[:5], "each vector must find its own row first")
        _require(all(len(row) == 3 for row in found), f"search must return k ids for each query, got {found}")
        store.replace(made.ids[:2], -new[:2])
        _same(store.vectors(made.ids[:3]), [*-new[:2], new[2]], "vectors() after replace()")
        first = [row[0] for row in store.search(-new[:2], 1)]
        _require(first == made.ids[:2], "searches must see vectors that were replaced")
        unknown = "nobody" if isinstance(made.ids[0], str) else 10**6
        store.replace([unknown, made.ids[3]], -new[2:4])  # left out: a lazy upgrade may know rows that are gone
        _same(store.vectors(made.ids[2:4]), [new[2], -new[3]], "vectors() after replace() with an unknown id")
        try:
            store.vectors([unknown])
        except ValueError:
            return
        raise AssertionError(f"vectors() must raise ValueError for the unknown id {unknown!r}; nothing was raised")


def _continued(case: StoreCase) -> None:
    with _made(case) as made:
        made.interrupt()
        _require(made.holds(made.vectors), "searches must see the old vectors until all rows have new ones")
        done = made.upgrade()
        _require(
            done.mapped == ROWS - 2 * BATCH,
            f"after an interruption {ROWS - 2 * BATCH} rows are left to map, and {done.mapped} were mapped",
        )
        made.check_new("an interruption and another run")


def _another_map(case: StoreCase) -> None:
    with _made(case) as made:
        made.interrupt()
        try:
            made.upgrade(OTHER)
        except ValueError:
            made.finish("an upgrade with another map, which was refused")
        else:
            made.check_new("an upgrade with another map", OTHER)


def _finished(case: StoreCase) -> None:
    for first, again in ((MAP, MAP), (MAP, OTHER), (EQUAL, EQUAL), (EQUAL, a_map(OLD, seed=1))):
        with _made(case) as made:
            made.upgrade(first)
            try:
                mapped = made.upgrade(again).mapped
            except (ValueError, FileExistsError):
                made.check_new("a second upgrade, which was refused", first)
            else:
                right = again is not first or mapped == 0
                _require(right, f"a second upgrade with the same map must map 0 rows: {mapped}")
                made.check_new("a second upgrade", again)


def _second_writer(case: StoreCase) -> None:
    for second in (MAP, OTHER):
        _both_write(case, second)


def _both_write(case: StoreCase, second: EmbeddingMap) -> None:
    refused: list[bool] = []
    with _made(case) as made:

        def meanwhile(rows: int) -> None:
            if not refused:
                refused.append(False)
                try:
                    made.upgrade(second)
                except (OSError, ValueError):
                    refused[0] = True

        try:
            made.upgrade(after_write=meanwhile)
        except (OSError, ValueError):
            if refused[0]:
                raise  # then the first one must come through
        whole = made.holds(MAP(made.vectors)) or (not refused[0] and made.holds(second(made.vectors)))
        _require(whole, "two upgrades at the same time must leave a whole store; refuse the second with an OSError")


def _changed_source(case: StoreCase) -> None:
    with _made(case) as made:
        made.interrupt()
        case.change(made.folder, made.ids, made.others)
        try:
            made.upgrade()
        except ValueError:
            _require(made.holds(made.others), "a refused upgrade must leave the old vectors as they are")
        else:
            whole = made.holds(MAP(made.others))
            _require(whole, "old vectors that have changed since the start must be refused, or be mapped themselves")


def _killed(case: StoreCase) -> None:
    _skip_on_windows()
    with _made(case) as made:
        made.upgrade()
        left = made.names()
    number, killed = 1, True
    while killed:
        with _made(case) as made:
            killed = made.in_process(_killed_before, number) == -signal.SIGKILL
            what = f"kill -9 before operation {number} on files"
            made.finish(what)
            found = made.names()
            _require(found == left, f"after {what} and another run, {', '.join(sorted(found - left))} is left")
            number += 1


def _killed_before(case: StoreCase, folder: Path, number: int) -> None:
    """Upgrade, and kill this process before an operation on files of the store."""
    left = number

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event not in OPERATIONS or not isinstance(arguments[0], str | os.PathLike):
            return
        path = Path(arguments[0])
        if not path.is_absolute() or path.is_relative_to(folder):  # relative ones: a folder that is removed
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    with case.open(folder) as store:
        sys.addaudithook(count)
        upgrade(store, MAP, batch_size=2 * BATCH, progress=False)


def _killed_anytime(case: StoreCase) -> None:
    _skip_on_windows()
    with _made(case) as made:
        begun = time.perf_counter()
        made.upgrade()
        longest = time.perf_counter() - begun
    moments = random.Random(0)
    for _ in range(KILLS):
        with _made(case) as made:
            seconds = moments.uniform(0, longest)
            made.in_process(_killed_after, seconds)
            made.finish(f"kill -9 after {seconds:.4f} of {longest:.4f} s")


def _killed_after(case: StoreCase, folder: Path, seconds: float) -> None:
    with case.open(folder) as store:
        clock = threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGKILL))
        clock.start()
        upgrade(store, MAP, batch_size=BATCH, progress=False)
        clock.cancel()


def _full_disk(case: StoreCase) -> None:
    _skip_on_windows()
    with _made(case) as made:
        made.upgrade()
        largest = max(each.stat().st_size for each in made.folder.rglob("*") if each.is_file())
    for room in (0, largest // 2, largest - 1):
        with _made(case) as made:
            refused = made.in_process(_upgrade_on_full_disk, room) == REFUSED
            _require(refused or room > 0, "an upgrade without any room must raise an OSError")
            made.finish(f"a full disk, with room for files of {room} bytes")


def _upgrade_on_full_disk(case: StoreCase, folder: Path, room: int) -> None:
    import resource

    with case.open(folder) as store:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        try:
            upgrade(store, MAP, batch_size=BATCH, progress=False)
        except OSError:
            os._exit(REFUSED)  # without what other libraries would write at the end


def _skip_on_windows() -> None:
    from unittest import SkipTest

    if os.name == "nt":
        raise SkipTest("processes are killed and disks are full on Linux and macOS only")
