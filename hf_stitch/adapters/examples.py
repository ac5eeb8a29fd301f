"""The batch of inputs by which a network is looked at: named by argument, and refused where it cannot be."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy


class ExampleError(ValueError):
    """Inputs by which a network is to be looked at are missing, or do not fit its forward.

    Attributes:
        model: The network.
    """

    def __init__(self, message: str, model: nn.Module) -> None:
        super().__init__(message)
        self.model = model


def named(model: nn.Module, example: Any, options: Mapping[str, Any], content: str | None = None) -> dict[str, Any]:
    """Example inputs as arguments of a network's forward.

    Args:
        model: The network.
        example: A tensor, several in the order of the arguments, or a mapping of them.
        options: Arguments that every forward gets besides.
        content: The argument that a single tensor is; ``None``: the first.

    Raises:
        ExampleError: If they are of another kind, or the forward has no such arguments or needs more.

    Example:
        >>> named(nn.Linear(2, 2), torch.zeros(1, 2), {})
        {'input': tensor([[0., 0.]])}
    """
    kind, signature = type(model).__name__, inspect.signature(model.forward)
    if isinstance(example, Tensor):
        example = {content or first_argument(model): example}
    elif isinstance(example, (tuple, list)):
        if len(example) > len(signature.parameters):
            raise ExampleError(
                f"example_inputs hold {len(example)} values, and the forward of {kind} takes "
                f"{len(signature.parameters)}: {', '.join(signature.parameters)}",
                model,
            )
        example = dict(zip(signature.parameters, example, strict=False))
    elif not isinstance(example, Mapping):
        raise ExampleError(
            "example_inputs must be a tensor, a tuple of a forward's arguments in their order or a dict of them by "
            f"name, got {type(example).__name__}",
            model,
        )
    try:
        signature.bind(**{**{n: v for n, v in options.items() if n in signature.parameters}, **example})
    except TypeError as error:
        takes = ", ".join(str(p) for p in signature.parameters.values())
        raise ExampleError(
            f"example_inputs ({', '.join(example) or 'none'}) do not fit the forward of {kind}, which takes ({takes}), "
            f"and is given all by name: {error}",
            model,
        ) from error
    return dict(example)


def check_runs(model: Any) -> None:
    """Refuse a network that cannot be watched as it is.

    Raises:
        ValueError: If it is TorchScript, or has weights that are not there yet.
    """
    kind = type(model).__name__
    if not isinstance(model, nn.Module):
        return
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError(
            f"{kind} is TorchScript, whose modules can be neither watched nor exchanged: pass the nn.Module that it "
            "was made from"
        )
    weights = dict(model.named_parameters()) | dict(model.named_buffers())
    if lazy := [name for name, value in weights.items() if is_lazy(value)]:
        raise ValueError(f"{kind} has lazy weights without a shape ({lazy[0]}): run it once on a batch of its inputs")
    offloaded = any(hasattr(module, "_hf_hook") for module in model.modules())
    if not offloaded and (empty := [name for name, value in weights.items() if value.is_meta]):
        raise ValueError(
            f"weights of {kind} are on the meta device and hold no values ({empty[0]}): load them, with "
            "load_state_dict(…, assign=True)"
        )


def first_argument(model: nn.Module) -> str:
    """The name of the first argument of a model's forward."""
    return next(iter(inspect.signature(model.forward).parameters))
