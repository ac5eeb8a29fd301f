"""Running jobs: common options, processes, and planning.

Only this module distributes work over processes: a single process, or the processes of ``accelerate launch``. Each
process works on a part of the samples (:meth:`Processes.part`); statistics and measures of all parts are combined in
the order of the samples (:meth:`Processes.gather`, :meth:`Processes.from_rank`). If a process fails or is killed, the
launcher ends the remaining processes.
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
"""Option that :func:`hf_stitch.plan` passes to a job; a parameter cannot have this name."""
LAUNCHED = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
"""Environment variables with the number of processes, of torchrun and of several mpirun."""
BACKENDS = ("gloo", "NCCL")
"""Names of connections between processes in torch errors."""


class OtherProcessError(RuntimeError):
    """Raised if another process of the job has failed or ended."""


@dataclass(frozen=True)
class Processes:
    """Processes that share the samples."""

    accelerator: Accelerator | None  # None for a single process

    @classmethod
    def of(cls, accelerator: Accelerator | None) -> Processes:
        """Return the processes of an accelerator; without one, create it if several processes were launched."""
        if accelerator is None and any(int(os.environ.get(name, "1")) > 1 for name in LAUNCHED):
            import torch
            from accelerate import Accelerator, PartialState

            # torchrun does not make accelerate use CPUs; otherwise each process would do the whole job
            is_first = not PartialState._shared_state
            accelerator = Accelerator(cpu=is_first and not torch.accelerator.is_available())
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
        """Device of this process for networks; ``None`` without an accelerator."""
        return None if self.accelerator is None else self.accelerator.device

    def shown(self, label: str, progress: bool) -> str | None:
        """Return the label of a progress bar in the first process; ``None`` in other processes."""
        return label if progress and self.rank == 0 else None

    # -- samples ----------------------------------------------------------------------------------------------------
    def part(self, n: int, batch_size: int = 1) -> tuple[int, int]:
        """Return the range of samples of this process; the ranges of all processes form a partition."""
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
        """Raise an error if processes do different jobs, for example with different weights."""
        first, *rest = self.gather(recipe)
        if differing := sorted({key for recipe in rest for key in first if recipe.get(key) != first[key]}):
            raise ValueError(
                f"the processes do different jobs: {', '.join(differing)} differ; load the same weights and samples in "
                "all processes (for random networks: set the same seed first)"
            )

    def gather(self, value: T) -> list[T]:
        """Gather a value from every process."""
        if self.count == 1:
            return [value]
        from accelerate.utils import gather_object

        return gather_object([value])

    def from_rank(self, mine: Mapping[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
        """Broadcast tensors of one process to all processes."""
        import torch
        from accelerate.utils import broadcast, broadcast_object_list

        if self.accelerator is None:
            return dict(mine)
        own_specs = {name: (tuple(tensor.shape), tensor.dtype, tensor.device.type) for name, tensor in mine.items()}
        (specs,) = broadcast_object_list([own_specs], from_process=rank)
        received = {}
        for name, (shape, dtype, device) in specs.items():
            tensor = mine[name] if self.rank == rank else torch.empty(shape, dtype=dtype)
            copy_ = broadcast(tensor.to(self.accelerator.device, copy=True), from_process=rank)
            received[name] = copy_.to("cpu" if device == "cpu" else self.accelerator.device)
        return received

    @contextmanager
    def together(self, name: str) -> Iterator[None]:
        """Do a job in all processes, which must do the same jobs in the same order.

        If the connection to another process breaks, the error refers to the error of that process.
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
    """Concatenate lists of several processes by name."""
    lists: dict[K, list[T]] = {}
    for part in parts:
        for name, entries in part.items():
            lists.setdefault(name, []).extend(entries)
    return lists


class RunOptions(TypedDict, total=False):
    """Common options of jobs. A job raises an error for options that it does not use.

    Attributes:
        batch_size: Number of samples per forward pass. Default: 64.
        seed: Seed of all random draws: splits, permutations, noise and the resamples of confidence intervals.
            Default: 0.
        progress: Whether to show progress: bars on terminals, otherwise a line per minute. Default: yes.
        accelerator: The ``accelerate.Accelerator`` of the processes. Each process works on a part of the samples and
            returns the same result. Default: created if several processes were launched (``accelerate launch``).
        checkpoint_dir: Folder for the state of the job: a repeated call resumes an interrupted job with bitwise
            identical results. Use one folder per job, and the same number of processes. Default: the state is not
            saved.

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
    """Settings of a job for inner functions: :class:`RunOptions`, processes and planning.

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
        """Pop the options of a run from the options of a job, and do the job in all processes.

        Args:
            job: The function of the job.
            options: Dictionary of its options, which is changed.
            takes: Options of a run that it uses.
            rest: Whether the job uses the remaining ``options``.

        Example:
            >>> def measure(data, **options):
            ...     with Run.of(measure, options, takes=["batch_size"]) as run:
            ...         return run.batch_size
            >>> measure([], batch_size=2)
            2
            >>> measure([], batchsize=2)
            Traceback (most recent call last):
            ...
            TypeError: measure got an unexpected option 'batchsize'; did you mean 'batch_size'? Its options: batch_size
        """
        planning = options.pop(PLANNING, False)
        run_options = {option: options.pop(option) for option in ALL if option in options}
        parameters = inspect.signature(job).parameters.values()
        valid = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
        check_names(job.__name__, (*run_options, *(() if rest else options)), [*valid, *takes])
        check(str | Path | None, checkpoint_dir=(folder := run_options.pop("checkpoint_dir", None)))
        run_options["processes"] = Processes.of(run_options.pop("accelerator", None))
        run = cls(**run_options, checkpoint_dir=None if folder is None else Path(folder), planning=planning)
        with run.processes.together(job.__name__):
            yield run

    @property
    def options(self) -> RunOptions:
        """The options for a nested job."""
        return {
            "batch_size": self.batch_size, "seed": self.seed, "progress": self.progress,
            "accelerator": self.processes.accelerator,
        }  # fmt: skip

    def shown(self, label: str) -> str | None:
        """Return the label of a progress bar in the first process; ``None`` in other processes."""
        return self.processes.shown(label, self.progress)
