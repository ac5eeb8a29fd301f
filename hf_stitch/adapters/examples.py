"""Check and name the example inputs with which the cuts of a network are found and verified."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy


class ExampleError(ValueError):
    """Raised if the example inputs of a network are missing or do not fit its forward.

    Attributes:
        model: The network.

    Args:
        message: Text of the error.
        model: The network.
    """

    def __init__(self, message: str, model: nn.Module) -> None:
        super().__init__(message)
        self.model = model


def named(model: nn.Module, example: Any, options: Mapping[str, Any], content: str | None = None) -> dict[str, Any]:
    """Return example inputs as keyword arguments of the forward of a network.

    Args:
        model: The network.
        example: A tensor, a tuple or list in the order of the arguments, or a mapping of arguments.
        options: Additional arguments of every forward.
        content: Name of the argument for a single tensor. ``None`` (default): the first argument.

    Returns:
        The inputs by the names of the arguments.

    Raises:
        ExampleError: If the inputs have another type, or do not match the signature of the forward.

    Example:
        >>> named(nn.Linear(2, 2), torch.zeros(1, 2), {})
        {'input': tensor([[0., 0.]])}
    """
    kind, signature = type(model).__name__, inspect.signature(model.forward)
    names = _names(model)
    if isinstance(example, Tensor):
        example = {content or first_argument(model): example}
    elif isinstance(example, (tuple, list)):
        if len(example) > len(names):
            raise ExampleError(
                f"example_inputs contain {len(example)} values, but the forward of {kind} takes {len(names)}: "
                f"{', '.join(names)}",
                model,
            )
        example = dict(zip(names, example, strict=False))
    elif not isinstance(example, Mapping):
        raise ExampleError(
            "example_inputs must be a tensor, a tuple of the arguments of the forward in their order or a dict of "
            f"them by name, got {type(example).__name__}",
            model,
        )
    try:
        signature.bind(**{**{n: v for n, v in options.items() if n in signature.parameters}, **example})
    except TypeError as error:
        takes = ", ".join(str(p) for p in signature.parameters.values())
        raise ExampleError(
            f"example_inputs ({', '.join(example) or 'none'}) do not fit the forward of {kind}, which takes ({takes}) "
            f"and receives all arguments by name: {error}",
            model,
        ) from error
    return dict(example)


def check_runs(model: Any) -> None:
    """Check that the forward of a network can run and can be traced.

    Args:
        model: The network. Objects that are not modules are accepted.

    Raises:
        ValueError: If it is TorchScript, or its weights are lazy or on the meta device without offloading.

    Example:
        >>> check_runs(nn.LazyLinear(2))
        Traceback (most recent call last):
        ValueError: LazyLinear has lazy weights without a shape (weight): run it once on a batch of its inputs
    """
    kind = type(model).__name__
    if not isinstance(model, nn.Module):
        return
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError(
            f"{kind} is TorchScript, whose modules can be neither traced nor exchanged: pass the nn.Module from which "
            "it was compiled"
        )
    weights = dict(model.named_parameters()) | dict(model.named_buffers())
    if lazy := [name for name, value in weights.items() if is_lazy(value)]:
        raise ValueError(f"{kind} has lazy weights without a shape ({lazy[0]}): run it once on a batch of its inputs")
    offloaded = any(hasattr(module, "_hf_hook") for module in model.modules())
    if not offloaded and (empty := [name for name, value in weights.items() if value.is_meta]):
        raise ValueError(
            f"weights of {kind} are on the meta device and have no values ({empty[0]}): load them with "
            "load_state_dict(…, assign=True)"
        )


def first_argument(model: nn.Module) -> str:
    """Return the name of the first argument of the forward of a model.

    Args:
        model: The model.

    Example:
        >>> first_argument(nn.Linear(2, 2))
        'input'
    """
    return _names(model)[0]


def arguments_of(model: nn.Module, content: str) -> Mapping[str, inspect.Parameter]:
    """Return the arguments that a network takes beside one that it certainly takes.

    A forward with ``**kwargs`` may pass on what it does not name, to that of a class that it extends. If none of these
    names the content, the first module inside that does takes the arguments.

    Args:
        model: The network.
        content: Name of an argument.

    Returns:
        The parameters by name, those of the outermost forward first.

    Example:
        >>> list(arguments_of(nn.Linear(2, 2), "input"))
        ['input']
    """
    found: dict[str, inspect.Parameter] = {}
    extended = (vars(kind)["forward"] for kind in type(model).__mro__ if "forward" in vars(kind))
    for forward in (model.forward, *extended):
        parameters = inspect.signature(forward).parameters
        found |= {name: p for name, p in parameters.items() if name not in found}
        if not _passes_on(parameters):
            return found
    if content not in found:
        inside = (inspect.signature(module.forward).parameters for module in model.modules())
        found |= next((parameters for parameters in inside if content in parameters), {})
    return found


def passes_on(model: nn.Module) -> bool:
    """Return whether the forward of a network takes arguments that it does not name.

    Args:
        model: The network.

    Example:
        >>> passes_on(nn.Linear(2, 2))
        False
    """
    return _passes_on(inspect.signature(model.forward).parameters)


def _passes_on(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _names(model: nn.Module) -> list[str]:
    """Return the names of the arguments of a forward; if it has none, of the first module inside that has some."""
    for module in model.modules():
        parameters = inspect.signature(module.forward).parameters.values()
        if names := [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]:
            return names
    return list(inspect.signature(model.forward).parameters)
