"""Base classes of matchers."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from hf_stitch.papers import Paper
from hf_stitch.registry import label_of
from hf_stitch.statistics import Moments
from hf_stitch.stitches import Stitch


@dataclasses.dataclass(frozen=True)
class Matcher:
    """Base class of matchers: frozen dataclasses that fit a stitch between two representations.

    The fields of a matcher are its options, which ``__post_init__`` validates.

    Attributes:
        name: Name in the registry of matchers.
        title: Name in text.
        papers: Papers that define the matcher.
        fits: What the matcher is fitted from: ``"moments"`` (in closed form), ``"rows"`` or ``"task"`` (trained on the
            task loss).
        unequal_widths: Whether the two representations may have different widths.

    Example:
        >>> from hf_stitch import registries
        >>> registries.matchers.build("ridge", ridge=0.5).to_dict()
        {'name': 'ridge', 'ridge': 0.5}
    """

    name: ClassVar[str]
    title: ClassVar[str]
    papers: ClassVar[tuple[Paper, ...]] = ()
    fits: ClassVar[Literal["moments", "rows", "task"]]
    unequal_widths: ClassVar[bool] = True

    def to_dict(self) -> dict[str, Any]:
        """Return the name and all options as JSON values, for ``registries.matchers.build``."""
        return {"name": self.name, **dataclasses.asdict(self)}

    @property
    def label(self) -> str:
        """The name with all options that differ from their defaults: ``ridge(ridge=0.5)``."""
        return label_of(self)

    @property
    def fitted_first(self) -> Matcher:
        """The matcher that reads activations: this one, or the initial one if the stitch is then trained."""
        return self


@dataclasses.dataclass(frozen=True)
class ClosedFormMatcher(Matcher, ABC):
    """Base class of matchers whose stitch is computed from the moments of paired rows.

    Example:
        >>> import torch
        >>> from hf_stitch import registries
        >>> x = torch.randn(50, 3)
        >>> matcher = registries.matchers.build("lstsq")
        >>> round(matcher.fit(Moments(3, 3).update(x, -x)).fitted["r2"], 6)
        1.0
    """

    fits: ClassVar[Literal["moments", "rows", "task"]] = "moments"

    @abstractmethod
    def fit(self, moments: Moments, dtype: torch.dtype = torch.float32) -> Stitch:
        """Fit the stitch that maps x rows to y rows; computed in float64 on the device of the moments.

        Args:
            moments: Moments of the source's rows (x) and the target's rows (y).
            dtype: Dtype of the weights. ``stitch.fitted["r2"]`` is computed with the weights in this dtype.

        Returns:
            The stitch, on the device of the moments. Its ``fitted`` contains ``n``, ``r2`` and results of the matcher.

        Raises:
            ValueError: The rows do not determine a stitch: there are too few, or y does not vary.
            torch.linalg.LinAlgError: A decomposition did not converge.
        """


@dataclasses.dataclass(frozen=True)
class RowsMatcher(Matcher, ABC):
    """Base class of matchers that need the paired rows themselves: their regions, or gradient descent on them.

    Example:
        >>> import torch
        >>> from hf_stitch import registries
        >>> x = torch.randn(200, 3)
        >>> registries.matchers.build("piecewise", clusters=2).fit(x, 2 * x.abs()).fitted["n"]
        200
    """

    fits: ClassVar[Literal["moments", "rows", "task"]] = "rows"

    @abstractmethod
    def fit(self, x: Tensor, y: Tensor, dtype: torch.dtype = torch.float32) -> Stitch:
        """Fit the stitch that maps x rows to y rows.

        Args:
            x: ``(n, dx)`` floating point: the source's rows.
            y: ``(n, dy)`` floating point: the target's rows.
            dtype: Dtype of the weights.

        Returns:
            The stitch, on the CPU. Its ``fitted`` contains ``n``, ``r2`` and results of the matcher.

        Raises:
            ValueError: The rows do not determine a stitch: there are too few, or y does not vary.
        """


class NoAlignmentError(ValueError):
    """The rows give no evidence that one space can be mapped to the other; the message has the figures."""


@dataclasses.dataclass(frozen=True)
class UnpairedMatcher(RowsMatcher, ABC):
    """Base class of matchers of rows that also take rows of which nobody knows which belong together.

    Attributes:
        least_pairs: The least number of pairs. With 0, the matcher needs none, and takes the rows of pairs as further
            rows without partners.

    Example:
        >>> import torch
        >>> from hf_stitch import registries
        >>> matcher = registries.matchers.build("seeded_refinement")
        >>> x = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
        >>> matcher.fit(x[:20], -x[:20], unpaired=(x[20:110], -x[110:])).fitted["seeds"]
        20
    """

    least_pairs: ClassVar[int] = 0

    @abstractmethod
    def fit(
        self, x: Tensor, y: Tensor, dtype: torch.dtype = torch.float32, *, unpaired: tuple[Tensor, Tensor] | None = None
    ) -> Stitch:
        """Fit the stitch.

        Args:
            x: ``(n, dx)`` floating point: the source's rows of the pairs.
            y: ``(n, dy)`` floating point: the target's rows of the pairs.
            dtype: Dtype of the weights.
            unpaired: ``(m, dx)`` and ``(m', dy)``: rows of both sides without partners.

        Returns:
            The stitch, on the CPU. Its ``fitted`` contains ``n``, the number of pairs of the last fit, those that the
            matcher has found included, ``r2`` on these, and results of the matcher.

        Raises:
            NoAlignmentError: Nothing indicates that the spaces correspond.
            ValueError: The rows do not determine a stitch.
        """


@dataclasses.dataclass(frozen=True)
class TrainedMatcher(Matcher, ABC):
    """Base class of matchers that train a stitch on the task loss, initialised by another matcher.

    Attributes:
        initial: The matcher that computes the initial stitch.

    Example:
        >>> from hf_stitch import registries
        >>> issubclass(registries.matchers.get("ridge"), TrainedMatcher)
        False
    """

    fits: ClassVar[Literal["moments", "rows", "task"]] = "task"
    initial: ClosedFormMatcher | RowsMatcher

    @property
    def fitted_first(self) -> Matcher:
        """The initial matcher."""
        return self.initial

    @abstractmethod
    def check(self, samples: Any, task: str | None) -> None:
        """Check that samples and task can be used for training, before any layer is searched.

        Args:
            samples: The ``hf_stitch.Samples``.
            task: Name of the task, or None.

        Raises:
            ValueError: Training on these is not possible.
        """

    @abstractmethod
    def samples_read(self, count: int) -> int:
        """Return how many samples training reads, repeated ones included, to predict its duration.

        Args:
            count: Number of training samples.
        """

    @abstractmethod
    def rehearse(self, stitched: Any, data: Any, *, target: Any = None, paired_data: Any = None) -> None:
        """Run one batch through training, so that errors occur before all data are read.

        Args:
            stitched: The model; the values of its stitch do not matter.
            data: Raw samples.
            target: The complete target network.
            paired_data: Samples for the target, if they differ from ``data``.

        Raises:
            ValueError: Training could not begin.
        """

    @abstractmethod
    def fit(
        self,
        stitched: Any,
        data: Any,
        *,
        target: Any = None,
        paired_data: Any = None,
        checkpoint_dir: Any = None,
        progress: bool = True,
    ) -> Any:
        """Train the stitching layer of a ``StitchedModel``, starting from its current weights.

        Args:
            stitched: The model, or a list of models with the same target; they are not changed.
            data: Raw samples.
            target: The complete target network.
            paired_data: Samples for the target, if they differ from ``data``.
            checkpoint_dir: Folder for the training state, from which interrupted training resumes; None for no state.
            progress: Whether to show a progress bar.

        Returns:
            The trained ``StitchingLayer``, or a list of them.
        """
