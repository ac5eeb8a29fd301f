"""How a job runs: the options that all jobs share, the processes that do it, and whether it is only planned."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from hf_stitch.options import Count, Natural, check, check_fields, check_names
from hf_stitch.processes import ALONE, Processes

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["Run", "RunOptions"]

PLANNING = "only plan"
"""Option with which :func:`hf_stitch.plan` calls a job; no parameter can have this name."""


class RunOptions(TypedDict, total=False):
    """Options that jobs share. A job refuses those that it does not use.

    Attributes:
        batch_size: Number of samples per forward pass. Default: 64.
        seed: Seed of all that is drawn: splits, permutations, noise and the resamples of intervals. Default: 0.
        progress: Whether to show progress bars. Default: yes.
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
    """How a job runs, as inner functions receive it.

    Attributes:
        batch_size: As in :class:`RunOptions`.
        seed: As in :class:`RunOptions`.
        progress: As in :class:`RunOptions`.
        processes: The processes that share the samples.
        checkpoint_dir: As in :class:`RunOptions`.
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

        Raises:
            TypeError: If an option is not used, or has the wrong type.
            ValueError: If an option is out of its range.

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
