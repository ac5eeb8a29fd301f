"""How a job runs: the options that all jobs share, the processes that do it, and whether it is only planned.

This is the only module that knows how processes share work: a single one, or those that ``accelerate launch`` started.
Each takes a part of the samples (:meth:`Processes.part`), and statistics and measures of all parts are put together in
the order of the samples (:meth:`Processes.gather`, :meth:`Processes.from_rank`). If a process fails or is killed, the
launcher ends the others.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

from hf_stitch.options import Count, Natural, check, check_fields, check_names

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

__all__ = ["Run", "RunOptions"]

K = TypeVar("K")
T = TypeVar("T")

PLANNING = "only plan"
"""Option with which :func:`hf_stitch.plan` calls a job; no parameter can have this name."""
LAUNCHED = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
"""Environment variables with the number of processes: that of torchrun, and those of several mpirun."""
BACKENDS = ("gloo", "NCCL")
"""What torch calls the connections between processes in errors about them."""


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

    # -- exchange ---------------------------------------------------------------------------------------------------
    def agree(self, value: T) -> T:
        """Broadcast a value from rank 0."""
        if self.count == 1:
            return value
        from accelerate.utils import broadcast_object_list

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

        return gather_object([value])

    def from_rank(self, mine: Mapping[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
        """Broadcast tensors of one process to all."""
        import torch
        from accelerate.utils import broadcast, broadcast_object_list

        if self.accelerator is None:
            return dict(mine)
        own = {name: (tuple(value.shape), value.dtype, value.device.type) for name, value in mine.items()}
        (forms,) = broadcast_object_list([own], from_process=rank)
        received = {}
        for name, (shape, dtype, device) in forms.items():
            value = mine[name] if self.rank == rank else torch.empty(shape, dtype=dtype)
            sent = broadcast(value.to(self.accelerator.device, copy=True), from_process=rank)
            received[name] = sent.to("cpu" if device == "cpu" else self.accelerator.device)
        return received

    @contextmanager
    def together(self, name: str) -> Iterator[None]:
        """Do a job in all processes, which must do the same jobs in the same order.

        Where the connection to another process breaks off, the error points at that process: its own has the cause.
        """
        try:
            yield
        except RuntimeError as error:
            if self.count == 1 or not any(backend in str(error) for backend in BACKENDS):
                raise
            raise OtherProcessError(
                f"{name} stops in process {self.rank}, because another process has failed or ended: see its error"
            ) from error


ALONE = Processes(None)
"""A single process."""


def joined(parts: Iterable[Mapping[K, Sequence[T]]]) -> dict[K, list[T]]:
    """Put together lists by name, which several processes have made."""
    found: dict[K, list[T]] = {}
    for part in parts:
        for name, items in part.items():
            found.setdefault(name, []).extend(items)
    return found


class RunOptions(TypedDict, total=False):
    """Options that jobs share. A job refuses those that it does not use.

    Attributes:
        batch_size: Number of samples per forward pass. Default: 64.
        seed: Seed of all that is drawn: splits, permutations, noise and the resamples of intervals. Default: 0.
        progress: Whether to show progress: bars on terminals, else a line a minute. Default: yes.
        accelerator: The ``accelerate.Accelerator`` of the processes, each of which takes a part of the samples and
            returns the same result. Default: created if several were launched (``accelerate launch``).
        checkpoint_dir: Folder for the state of the job, from which a repeated call resumes an interrupted one with
            bitwise identical results. Use one folder per job, and as many processes as before. Default: no state is
            kept.

    Example:
        >>> quick: RunOptions = {"batch_size": 256, "progress": False}
        >>> import hf_stitch, torch
        >>> module = torch.nn.Sequential(torch.nn.Linear(4, 9), torch.nn.ReLU(), torch.nn.Linear(9, 2))
        >>> net = hf_stitch.load(module, example_inputs=torch.randn(2, 4))
        >>> hf_stitch.compare(net, net, torch.randn(30, 4), **quick).n
        30
    """

    batch_size: int
    seed: int
    progress: bool
    accelerator: Accelerator | None
    checkpoint_dir: str | Path | None


ALL = tuple(RunOptions.__annotations__)
WITHOUT_STATE = ("batch_size", "seed", "progress", "accelerator")
"""Options of jobs that cannot be resumed."""


@dataclass(frozen=True)
class Run:
    """How a job runs, as inner functions receive it: :class:`RunOptions`, and what they do not say.

    Attributes:
        processes: The processes that share the samples.
        planning: Whether to return a plan instead of the result.

    Example:
        >>> Run(progress=False).shown("fitting") is None
        True
    """

    batch_size: Count = 64
    seed: Natural = 0
    progress: bool = True
    processes: Processes = ALONE
    checkpoint_dir: Path | None = None
    planning: bool = False

    def __post_init__(self) -> None:
        check_fields(self)

    @classmethod
    @contextmanager
    def of(
        cls, job: Callable[..., Any], options: Any, takes: Iterable[str] = ALL, *,
        rest: bool = False,
    ) -> Iterator[Run]:  # fmt: skip
        """Take the options of a run out of the options of a job, and do the job in all processes.

        Args:
            job: The function that does it.
            options: The options with which it was called, a dictionary of its own.
            takes: Options of a run that it uses.
            rest: Whether it uses what is left of ``options`` in another way.

        Example:
            >>> def measure(data, **options):
            ...     with Run.of(measure, options, takes=["batch_size"]) as run:
            ...         return run.batch_size
            >>> measure([], batch_size=2)
            2
            >>> measure([], batchsize=2)
            Traceback (most recent call last):
            ...
            TypeError: measure has no option 'batchsize'; did you mean 'batch_size'? Its options: batch_size
        """
        planning = options.pop(PLANNING, False)
        given = {option: options.pop(option) for option in ALL if option in options}
        own = [each.name for each in inspect.signature(job).parameters.values() if each.kind is each.KEYWORD_ONLY]
        check_names(job.__name__, (*given, *(() if rest else options)), [*own, *takes])
        check(str | Path | None, checkpoint_dir=(folder := given.pop("checkpoint_dir", None)))
        given["processes"] = Processes.of(given.pop("accelerator", None))
        run = cls(**given, checkpoint_dir=None if folder is None else Path(folder), planning=planning)
        with run.processes.together(job.__name__):
            yield run

    @property
    def options(self) -> RunOptions:
        """The options for a job inside of this one."""
        return {
            "batch_size": self.batch_size, "seed": self.seed, "progress": self.progress,
            "accelerator": self.processes.accelerator,
        }  # fmt: skip

    def shown(self, label: str) -> str | None:
        """Return the label of a progress bar, which only the first process shows."""
        return self.processes.shown(label, self.progress)
