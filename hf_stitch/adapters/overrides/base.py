"""What a class of networks has to be told about, where a watched forward does not show it.

An override is registered in the registry ``overrides``, under the name of a class, its own or that of a base.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar

from torch import nn

from hf_stitch.registry import did_you_mean, registries


class Override:
    """Says nothing: what holds for every network without an override. A subclass says what differs.

    It keeps nothing of a network: one instance serves all.

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


def full_name(kind: type) -> str:
    """The name of a class with that of the package it comes from: ``transformers.BertModel``.

    Example:
        >>> full_name(nn.Linear)
        'torch.Linear'
    """
    return f"{kind.__module__.partition('.')[0]}.{kind.__name__}"


def override_of(model: nn.Module) -> Override:
    """The override of a network: that of the nearest of its classes which has one.

    It stands under the name of the class with its package (``transformers.BertModel``) or under the bare name, which
    holds for every class that is called so.

    Raises:
        TypeError: If what is registered is no :class:`Override`, or its blocks are no names.
        ValueError: If its blocks name a module that the network does not have.
    """
    for kind in type(model).__mro__:
        for name in (full_name(kind), kind.__name__):
            if name in registries.overrides:
                override = _made(registries.overrides.get(name))
                if not isinstance(override, Override):
                    raise TypeError(f"the override of {name} must be an Override, got {type(override).__name__}")
                _check_blocks(override.blocks(model), model, f"the override of {name}")
                return override
    return Override()


@cache
def _made(kind: type[Override]) -> Override:
    return kind()


def _check_blocks(blocks: Any, model: nn.Module, what: str) -> None:
    if blocks is None:
        return
    if not isinstance(blocks, tuple) or not all(isinstance(name, str) for name in blocks):
        raise TypeError(f"{what} must give its blocks as a tuple of names or as None, got {blocks!r}")
    names = [name for name, _ in model.named_modules() if name]
    for name in blocks:
        if name not in names:
            hint = did_you_mean(name, names)
            raise ValueError(
                f"{what} names a block {name!r} that {type(model).__name__} does not have"
                + (f"; did you mean {hint!r}?" if hint else "")
            )
