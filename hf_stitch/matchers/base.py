"""What every matcher is, and how one is built by name."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal

import torch

from hf_stitch.papers import Paper
from hf_stitch.statistics import Moments
from hf_stitch.stitches import Stitch


@dataclasses.dataclass(frozen=True)
class Matcher:
    """A frozen dataclass whose fields are its options, each validated in ``__post_init__``.

    Attributes:
        name: What the registry of matchers calls it.
        title: What it is called in prose.
        papers: Where it comes from.
        fits: What it is fitted from: ``"moments"`` (in closed form) or ``"task"`` (trained on the task's loss).
        unequal_widths: Whether it matches representations of different widths.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    papers: ClassVar[tuple[Paper, ...]] = ()
    fits: ClassVar[Literal["moments", "task"]]
    unequal_widths: ClassVar[bool] = True

    def to_dict(self) -> dict[str, Any]:
        """The name and every option as JSON values; ``registries.matchers.build`` reads it."""
        return {"name": self.name, **dataclasses.asdict(self)}


@dataclasses.dataclass(frozen=True)
class ClosedFormMatcher(Matcher, ABC):
    """A matcher whose stitch follows from the moments of the paired rows."""

    fits: ClassVar[Literal["moments", "task"]] = "moments"

    @abstractmethod
    def fit(self, moments: Moments, dtype: torch.dtype = torch.float32) -> Stitch:
        """The stitch that maps x rows to y rows, computed in float64 on the device of the moments.

        Args:
            moments: Of the source's rows (x) and the target's (y).
            dtype: Of the stitch's weights. ``stitch.fitted["r2"]`` holds for the weights as stored.

        Returns:
            The stitch, on the device of the moments; its ``fitted`` holds ``n``, ``r2`` and what the matcher found out.

        Raises:
            ValueError: The rows do not determine a stitch: too few of them, or no variation in y.
            torch.linalg.LinAlgError: A decomposition did not converge.
        """


@dataclasses.dataclass(frozen=True)
class TrainedMatcher(Matcher, ABC):
    """A matcher that trains a stitch on the task, from a start that another matcher finds.

    Attributes:
        initial: The matcher of the start.
    """

    fits: ClassVar[Literal["moments", "task"]] = "task"
    initial: ClosedFormMatcher

    @abstractmethod
    def check(self, samples: Any, task: str | None) -> None:
        """Refuse ``hf_stitch.Samples`` and tasks that cannot be trained on, before layers are looked for.

        Raises:
            ValueError: For these.
        """

    @abstractmethod
    def rehearse(self, stitched: Any, data: Any, *, target: Any = None, paired_data: Any = None) -> None:
        """Take one batch all the way, so that what cannot be trained fails before all data are read.

        Args:
            stitched: The model, its stitch of no consequence.
            data: Raw samples.
            target: The whole target network.
            paired_data: Where the target is to see other samples.

        Raises:
            ValueError: If training could not begin.
        """

    @abstractmethod
    def fit(
        self, stitched: Any, data: Any, *, target: Any = None, paired_data: Any = None, progress: bool = True
    ) -> Any:
        """The trained ``StitchingLayer`` of a ``StitchedModel`` that starts from the stitch it has.

        Args:
            stitched: The model; it is not changed.
            data: Raw samples.
            target: The whole target network.
            paired_data: Where the target is to see other samples.
            progress: Show a progress bar.
        """
