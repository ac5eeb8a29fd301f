"""Architecture overrides: facts about a class of networks that a trace of its forward does not reveal.

Register an override in ``hf_stitch.registries.overrides`` under the name of the network's class or of a base class.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar

from torch import nn

from hf_stitch.options import did_you_mean
from hf_stitch.registry import registries


class Override:
    """Base class of architecture overrides, with the defaults for networks without an override.

    A subclass overrides the methods that its networks require. It must not store anything about a network, because one
    instance serves all networks of the class.

    Attributes:
        options: Additional arguments of every forward (``{"use_mems": False}``).

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
        """Return a batch of inputs by name, or ``None`` (default) if they can be generated automatically."""
        return None

    def special_ids(self, model: nn.Module) -> tuple[int, ...]:
        """Return token ids that heads search for, in addition to padding and end of text in the config.

        A context for decoding replaces all token ids of the content by a filler, except these.
        """
        return ()

    def blocks(self, model: nn.Module) -> tuple[str, ...] | None:
        """Return the names of the candidates for cuts, in execution order; by default, the candidates of a trace.

        Candidates are always verified: an override can add modules that the trace does not list, but a module with a
        bypass remains refused.
        """
        return None


def full_name(kind: type) -> str:
    """Return the name of a class with its package: ``transformers.BertModel``.

    Example:
        >>> full_name(nn.Linear)
        'torch.Linear'
    """
    return f"{kind.__module__.partition('.')[0]}.{kind.__name__}"


def override_of(model: nn.Module) -> Override:
    """Return the override of the first class in the method resolution order of a network that has one.

    An override is registered under the name of a class with its package (``transformers.BertModel``), or under the bare
    name, which applies to every class of that name. Without a registered override, return a plain :class:`Override`.
    """
    for kind in type(model).__mro__:
        for name in (full_name(kind), kind.__name__):
            if name in registries.overrides:
                override = _instance(registries.overrides.get(name))
                if not isinstance(override, Override):
                    raise TypeError(f"the override of {name} must be an Override, got {type(override).__name__}")
                _check_blocks(override.blocks(model), model, f"the override of {name}")
                return override
    return Override()


@cache
def _instance(kind: type[Override]) -> Override:
    return kind()


def _check_blocks(blocks: Any, model: nn.Module, subject: str) -> None:
    if blocks is None:
        return
    if not isinstance(blocks, tuple) or not all(isinstance(name, str) for name in blocks):
        raise TypeError(f"{subject} must return its blocks as a tuple of names or as None, got {blocks!r}")
    names = [name for name, _ in model.named_modules() if name]
    for name in blocks:
        if name not in names:
            hint = did_you_mean(name, names)
            raise ValueError(
                f"{subject} names a block {name!r} that {type(model).__name__} does not have"
                + (f"; did you mean {hint!r}?" if hint else "")
            )
