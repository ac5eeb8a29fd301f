"""Base class for statistics of all layers of two sides at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor

if TYPE_CHECKING:
    from accelerate import Accelerator


class LayerStatistic(ABC):
    """Base class of statistics of the rows of every layer of two sides. Row i is the same sample in every layer.

    Example:
        >>> import torch
        >>> from hf_stitch.statistics import LayerMoments
        >>> statistic = LayerMoments([torch.zeros(3), torch.zeros(5)])
        >>> isinstance(statistic, LayerStatistic)
        True
    """

    def keep(self, rows: Tensor) -> Any:
        """Copy what is needed of the rows of one layer until the batch of all other layers is available.

        Args:
            rows: ``(n, d)``, any float dtype. They are overwritten after the call.

        Returns:
            What :meth:`update` accepts instead of the rows: a copy, or a smaller summary.
        """
        return rows.clone()

    @abstractmethod
    def update(self, x: Sequence[Any], y: Sequence[Any] | None = None) -> Self:
        """Add a batch.

        Args:
            x: For each layer of the first side its rows ``(n, d)``, or the result of :meth:`keep`.
            y: The same for the second side; None if both sides are the same layers.

        Returns:
            This statistic.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """Return a copy of the state as tensors, except rows in files."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Tensor]) -> Self:
        """Restore the state from :meth:`state_dict`.

        Args:
            state: The tensors.

        Returns:
            This statistic.
        """

    @abstractmethod
    def all_reduce(self, accelerator: Accelerator) -> Self:
        """Combine the statistics of all processes; every process then has the total.

        All processes must call this method once, after the last row.

        Args:
            accelerator: The ``accelerate.Accelerator`` of the processes.

        Returns:
            This statistic.
        """
