"""What every matcher is, and how one is built by name."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal

import torch

from hf_stitch.registry import did_you_mean, registries
from hf_stitch.statistics import Moments
from hf_stitch.stitches import Stitch


@dataclasses.dataclass(frozen=True)
class Matcher:
    """A frozen dataclass whose fields are its options, each validated in ``__post_init__``.

    Attributes:
        name: What the registry of matchers calls it.
        fits: What it is fitted from: ``"moments"`` (in closed form) or ``"task"`` (trained on the task's loss).
        unequal_widths: Whether it matches representations of different widths.
    """

    name: ClassVar[str]
    fits: ClassVar[Literal["moments", "task"]]
    unequal_widths: ClassVar[bool] = True

    def to_dict(self) -> dict[str, Any]:
        """The name and every option as JSON values; ``build_matcher(**matcher.to_dict())`` is an equal matcher."""
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
    def rehearse(self, stitched: Any, data: Any, *, target: Any = None, target_data: Any = None) -> None:
        """Take one batch all the way, so that what cannot be trained fails before all data are read.

        Args:
            stitched: The model, its stitch of no consequence.
            data: Raw samples.
            target: The whole target network.
            target_data: Where the target is to see other samples.

        Raises:
            ValueError: If training could not begin.
        """

    @abstractmethod
    def fit(
        self, stitched: Any, data: Any, *, target: Any = None, target_data: Any = None, progress: bool = True
    ) -> Any:
        """The trained ``StitchingLayer`` of a ``StitchedModel`` that starts from the stitch it has.

        Args:
            stitched: The model; it is not changed.
            data: Raw samples.
            target: The whole target network.
            target_data: Where the target is to see other samples.
            progress: Show a progress bar.
        """


def build_matcher(name: str | Matcher, **options: Any) -> Matcher:
    """A matcher from its name and options; one that is built already is passed through.

    Args:
        name: A name in the registry of matchers, or a matcher.
        **options: The matcher's fields; those left out keep their defaults.

    Raises:
        UnknownNameError: No matcher has that name.
        TypeError: An option is unknown or lacking, or options come with a matcher that is built already.
        ValueError: An option is out of its range.

    Example:
        >>> build_matcher("ridge", ridge=0.5)
        Ridge(ridge=0.5)
    """
    if isinstance(name, Matcher):
        if options:
            raise TypeError(f"{name!r} is built already, got the options {sorted(options)} too; give them with a name")
        return name
    factory = registries.matchers.get(name)
    if not (isinstance(factory, type) and issubclass(factory, Matcher)):
        raise TypeError(f"matcher {name!r} is registered as {factory!r}, which is no subclass of Matcher")
    _check_options(name, factory, options)
    return factory(**options)


def _check_options(name: str, factory: type[Matcher], options: dict[str, Any]) -> None:
    fields = {field.name: field for field in dataclasses.fields(factory) if field.init}
    for option in options.keys() - fields.keys():
        hint = did_you_mean(option, fields)
        raise TypeError(
            f"matcher {name!r} has no option {option!r}{f'; did you mean {hint!r}?' if hint else '.'} "
            f"Its options: {', '.join(fields) or 'none'}"
        )
    for field in fields.values():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and field.name not in options:
            raise TypeError(f"matcher {name!r} needs the option {field.name!r}, as in {name}({field.name}=…)")
