"""What a class of networks has to be told about, where a watched forward does not show it.

An override is registered under the name of a class, its own or that of a base, in the registry ``overrides``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from ..registry import registries


class Override:
    """Says nothing: what holds for every network without an override. A subclass says what differs.

    Attributes:
        options: Arguments that every forward gets (``{"use_mems": False}``).

    Example:
        >>> import torch, hf_stitch
        >>> class Squares(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.first, self.second = torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)
        ...     def forward(self, x):
        ...         return self.second(self.first(x) ** 2)
        >>> @hf_stitch.registries.overrides.register("Squares")
        ... class ForSquares(Override):
        ...     def example(self, model):
        ...         return {"x": torch.randn(2, 3)}
        >>> hf_stitch.load(Squares()).layers
        ('first',)
    """

    options: ClassVar[Mapping[str, Any]] = {}

    def example(self, model: nn.Module) -> Mapping[str, Any] | None:
        """A batch of inputs, where they cannot be invented; ``None``: as for any network."""
        return None

    def special_ids(self, model: nn.Module) -> tuple[int, ...]:
        """Token ids that heads look for beside padding and end of text of the config: a context keeps them."""
        return ()

    def blocks(self, model: nn.Module) -> tuple[str, ...] | None:
        """Names of the modules to be listed, once verified, in the order that they run; ``None``: what a trace finds.

        An override can name what is not found; it cannot make a cut of what is none.
        """
        return None


def override_of(model: nn.Module) -> Override:
    """The override of a network: that of the nearest of its classes which has one.

    Raises:
        TypeError: If what is registered is no :class:`Override`.
    """
    for kind in type(model).__mro__:
        if kind.__name__ in registries.overrides:
            override = registries.overrides.get(kind.__name__)()
            if not isinstance(override, Override):
                raise TypeError(f"the override of {kind.__name__} must be an Override, got {type(override).__name__}")
            return override
    return Override()
