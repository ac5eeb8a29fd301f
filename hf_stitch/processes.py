"""The processes that share a job: a single one, or those that ``accelerate launch`` started.

This is the only module that knows how processes share work. Each process takes a part of the samples
(:meth:`Processes.part`), statistics and measures of all parts are put together in the order of the samples
(:meth:`Processes.gather`, :meth:`Processes.from_rank`), and a job is done :meth:`together`: if a process fails or is
killed, the others end with its error.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psutil  # type: ignore[import-untyped]

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

K = TypeVar("K")
T = TypeVar("T")


LAUNCHED = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
"""Environment variables with the number of processes: that of torchrun, and those of several mpirun."""
BEAT = 1.0
"""Seconds between two looks at the other processes."""
SILENT = 20.0
"""Seconds without a sign of life after which a process on another machine counts as ended."""
HEARD = 3.0
"""Seconds for which a process that fails waits until the others have read its error."""
ABSENT = 60.0
"""Seconds after which a warning names the processes that have not begun a job."""


class OtherProcessError(RuntimeError):
    """Another process of the job has failed or ended, so that this one cannot go on."""


@dataclass(frozen=True)
class Processes:
    """The processes that share the samples."""

    accelerator: Accelerator | None  # accelerator of the processes; None for a single process

    @classmethod
    def of(cls, accelerator: Accelerator | None) -> Processes:
        """Use the given accelerator, or create one if several processes were launched."""
        if accelerator is None and any(int(os.environ.get(name, "1")) > 1 for name in LAUNCHED):
            import torch
            from accelerate import Accelerator, PartialState

            # torchrun does not tell accelerate to use CPUs; without it, each process would do the whole job
            fresh = not PartialState._shared_state
            accelerator = Accelerator(cpu=fresh and not torch.accelerator.is_available())
        if accelerator is not None and not hasattr(accelerator, "num_processes"):
            raise TypeError(f"accelerator must be an accelerate.Accelerator, got {accelerator!r}")
        return cls(accelerator)

    @property
    def count(self) -> int:
        """Number of processes."""
        return 1 if self.accelerator is None else self.accelerator.num_processes

    @property
    def rank(self) -> int:
        """Rank of this process, from 0."""
        return 0 if self.accelerator is None else self.accelerator.process_index

    @property
    def device(self) -> torch.device | None:
        """Device on which this process runs networks; ``None`` without an accelerator."""
        return None if self.accelerator is None else self.accelerator.device

    def shown(self, label: str, progress: bool) -> str | None:
        """Return the label of a progress bar, which only the first process shows."""
        return label if progress and self.rank == 0 else None

    # -- samples ----------------------------------------------------------------------------------------------------
    def part(self, n: int, batch_size: int = 1) -> tuple[int, int]:
        """Return the range of samples of this process; the ranges of all processes are a partition."""
        if n < self.count:
            raise ValueError(
                f"{n} samples are not enough for {self.count} processes: pass more samples or launch fewer processes"
            )
        size = batch_size if -(-n // batch_size) >= self.count else 1
        start, stop = (min(-(-n // size) * rank // self.count * size, n) for rank in (self.rank, self.rank + 1))
        return start, stop

    def watched(self, batches: Iterable[T]) -> Iterator[T]:
        """Iterate over the batches of this process, as long as no other process has failed."""
        for batch in batches:
            self.check()
            yield batch

    # -- exchange ---------------------------------------------------------------------------------------------------
    def agree(self, value: T) -> T:
        """Broadcast a value from rank 0."""
        if self.count == 1:
            return value
        from accelerate.utils import broadcast_object_list

        with self.exchange():
            return broadcast_object_list([value])[0]

    def check_same(self, recipe: Mapping[str, Any]) -> None:
        """Check that all processes do the same job, for example with the same weights."""
        first, *others = self.gather(recipe)
        if differing := sorted({key for other in others for key in first if other.get(key) != first[key]}):
            raise ValueError(
                f"the processes do different jobs: {', '.join(differing)} differ; load the same weights and samples in "
                "all of them (random networks: set the same seed before)"
            )

    def gather(self, value: T) -> list[T]:
        """Gather a value from every process."""
        if self.count == 1:
            return [value]
        from accelerate.utils import gather_object

        with self.exchange():
            return gather_object([value])

    def from_rank(self, mine: Mapping[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
        """Broadcast tensors of one process to all."""
        import torch
        from accelerate.utils import broadcast, broadcast_object_list

        if self.accelerator is None:
            return dict(mine)
        with self.exchange():
            own = {name: (tuple(value.shape), value.dtype, value.device.type) for name, value in mine.items()}
            (forms,) = broadcast_object_list([own], from_process=rank)
            received = {}
            for name, (shape, dtype, device) in forms.items():
                value = mine[name] if self.rank == rank else torch.empty(shape, dtype=dtype)
                sent = broadcast(value.to(self.accelerator.device, copy=True), from_process=rank)
                received[name] = sent.to("cpu" if device == "cpu" else self.accelerator.device)
            return received

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """Wait until all processes are here; the body may then call functions in which they wait for each other."""
        if self.count == 1 or _JOB is None:
            yield
            return
        _JOB.meet()
        try:
            yield
        except RuntimeError as error:  # torch raises it when a connection is closed
            _JOB.raise_after(error)
            raise

    # -- jobs -------------------------------------------------------------------------------------------------------
    @contextmanager
    def together(self, name: str) -> Iterator[None]:
        """Do a job in all processes: if one of them fails or is killed, the others end with its error.

        They notice it between two batches and where they exchange values. All processes must do the same jobs in the
        same order. A job inside of another one is a part of it.
        """
        global _JOB
        store = _store()
        if self.count == 1 or store is None or _JOB is not None:
            yield
            return
        _JOB = job = _Job(store, f"hf_stitch/{next(_NUMBERS)}/{name}", name, self.rank, self.count)
        try:
            yield
            job.meet(last=True)
        except BaseException as error:
            job.tell(error)
            raise
        finally:
            _JOB = None
            job.end()

    def check(self) -> None:
        """Raise an error if another process of the job has failed."""
        if self.count > 1 and _JOB is not None:
            _JOB.check()


ALONE = Processes(None)
"""A single process."""


def joined(parts: Iterable[Mapping[K, Sequence[T]]]) -> dict[K, list[T]]:
    """Put together lists by name, which several processes have made."""
    found: dict[K, list[T]] = {}
    for part in parts:
        for name, items in part.items():
            found.setdefault(name, []).extend(items)
    return found


class _Job:
    """What the processes tell each other during a job, in the store with which torch has connected them.

    A thread looks at the other processes every :data:`BEAT` seconds. Of processes of this machine it sees whether they
    exist, of others whether they still count up.
    """

    def __init__(self, store: Any, prefix: str, name: str, rank: int, count: int) -> None:
        self._store, self._prefix, self._name = store, prefix, name
        self._rank, self._count = rank, count
        self._others = [other for other in range(count) if other != rank]
        self._met = 0
        self._failure, self._gone = "", set[int]()
        self._ended = threading.Event()
        self._set("place", rank, json.dumps(_place(os.getpid())))
        self._thread = threading.Thread(target=self._watch, name="hf_stitch processes", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise an error if another process has failed."""
        if self._failure:
            raise OtherProcessError(f"{self._name} stops in process {self._rank}, because {self._failure}")

    def meet(self, last: bool = False) -> None:
        """Wait for all processes. The store may end with another process that has left its last meeting."""
        self._met += 1
        what, began, pause, warned = f"met/{self._met}", time.monotonic(), 0.0002, False
        try:
            self._set(what, self._rank, "here")
            while not self._store.check([self._key(what, other) for other in self._others]):
                self.check()
                time.sleep(pause)
                pause = min(2 * pause, 0.02)
                if not warned and time.monotonic() - began > ABSENT:
                    warned = True
                    self._warn()
        except RuntimeError as error:
            if last and not isinstance(error, OtherProcessError):
                return
            self.raise_after(error)
            raise

    def raise_after(self, error: RuntimeError) -> None:
        """Raise the error of the process on account of which a connection broke off, as soon as it is known."""
        if isinstance(error, OtherProcessError):
            return
        until = time.monotonic() + 4 * BEAT
        while not self._failure and time.monotonic() < until:
            time.sleep(BEAT / 10)
        if self._failure:
            raise OtherProcessError(f"{self._name} stops in process {self._rank}, because {self._failure}") from error

    def tell(self, error: BaseException) -> None:
        """Tell the others why this process fails, and wait a moment until they have heard it, or of another failure."""
        with suppress(RuntimeError):
            if not isinstance(error, OtherProcessError):
                self._set("error", self._rank, f"{type(error).__name__}: {error}")
            until = time.monotonic() + HEARD
            while time.monotonic() < until and not all(map(self._has_heard, self._others)):
                time.sleep(BEAT / 10)

    def end(self) -> None:
        """Stop looking at the others."""
        self._ended.set()
        self._thread.join(5 * BEAT)

    def _has_heard(self, other: int) -> bool:
        return other in self._gone or any(self._get(what, other) is not None for what in ("heard", "error"))

    def _watch(self) -> None:
        seen: dict[int, tuple[str, float]] = {}
        places: dict[int, dict[str, Any]] = {}
        looked = time.monotonic()
        for beat in itertools.count():
            if self._ended.wait(BEAT if len(places) == len(self._others) else BEAT / 10):
                return
            try:
                self._set("beat", self._rank, str(beat))
                self._failure = self._look(seen, places, time.monotonic() - looked > SILENT / 2) or self._failure
                if self._failure:
                    self._set("heard", self._rank, "yes")
            except RuntimeError as error:  # the store has ended, with the process that keeps it
                time.sleep(BEAT)  # until that process no longer exists
                gone = [other for other, place in places.items() if place and not _exists(place)]
                who = f"process {gone[0]} has ended (killed?)" if gone else "the process that connects all has ended"
                self._failure = self._failure or f"{who} ({type(error).__name__})"
            if self._failure:
                return
            looked = time.monotonic()

    def _look(self, seen: dict[int, tuple[str, float]], places: dict[int, dict[str, Any]], was_away: bool) -> str:
        """Return why the job cannot go on; empty if it can."""
        now = time.monotonic()
        for other in self._others:
            if (error := self._get("error", other)) is not None:
                return f"process {other} failed: {error}"
            if other not in places and (found := self._get("place", other)) is not None:
                place = json.loads(found)
                places[other] = place if place["machine"] == _machine() else {}
                seen[other] = ("", now)
            if other not in places:
                continue
            if places[other]:
                if not _exists(places[other]):
                    self._gone.add(other)
                    return f"process {other} has ended (killed?)"
                continue
            beat = self._get("beat", other)
            if beat is not None and (was_away or seen[other][0] != beat):
                seen[other] = (beat, now)
            if now - seen[other][1] > SILENT:
                return f"process {other} has given no sign of life for {SILENT:.0f} seconds"
        return ""

    def _warn(self) -> None:
        with suppress(RuntimeError):
            absent = [other for other in self._others if self._get("place", other) is None]
            if absent:
                warnings.warn(
                    f"process {self._rank} waits in {self._name} for process {', '.join(map(str, absent))}, which has "
                    "not begun it: all processes must call it, not the first one only",
                    stacklevel=2,
                )

    def _key(self, what: str, rank: int) -> str:
        return f"{self._prefix}/{what}/{rank}"

    def _set(self, what: str, rank: int, value: str) -> None:
        self._store.set(self._key(what, rank), value)

    def _get(self, what: str, rank: int) -> str | None:
        key = self._key(what, rank)
        found: bytes | None = self._store.get(key) if self._store.check([key]) else None
        return None if found is None else found.decode()


_JOB: _Job | None = None
"""The job of this process."""
_NUMBERS = itertools.count()
"""Numbers of jobs, the same in all processes."""


def _place(number: int) -> dict[str, Any]:
    """Describe a process of this machine."""
    return {"machine": _machine(), "number": number, "since": psutil.Process(number).create_time()}


def _machine() -> str:
    """Describe the machine, or the container in which processes have numbers of their own."""
    with suppress(OSError):  # Linux
        boot, numbers = Path("/proc/sys/kernel/random/boot_id").read_text("ascii"), os.stat("/proc/self/ns/pid").st_ino
        return f"{boot.strip()} {numbers}"
    return socket.gethostname()


def _exists(place: Mapping[str, Any]) -> bool:
    """Whether a process of this machine runs."""
    try:
        process = psutil.Process(place["number"])
        return process.status() != psutil.STATUS_ZOMBIE and abs(process.create_time() - place["since"]) < 1
    except psutil.Error:
        return False


def _store() -> Any:
    """Return the store with which torch has connected the processes, if it has."""
    from torch import distributed

    if not distributed.is_available() or not distributed.is_initialized():
        return None
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()
