"""Conformance of rewrites of networks."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from functools import cache

import torch
from torch import Tensor, nn

from hf_stitch.adapters.rewriting import Rewrite, rewrite, rewrites_of
from hf_stitch.adapters.skeleton import weightless
from hf_stitch.registry import registries
from hf_stitch.testing._require import require
from hf_stitch.testing.conformance import conformance


@conformance
def check_rewrite(change: Rewrite, model: nn.Module) -> Iterator[tuple[str, Callable[[], None]]]:
    """Check that a rewrite does what its class promises.

    The parts:

    - ``config``: it can be built again from its own record, after this went through JSON.
    - ``recorded``: it is recorded on the network.
    - ``changes``: it changes modules or tensors of the network in place.
    - ``copied``: a copy of the rewritten network equals it.
    - ``values``: with other values of the weights, modules and tensors have the same names, classes, shapes and dtypes.
    - ``dtype``: new tensors are in the dtype of the network.
    - ``weightless``: so are they in a network without values, on its device.

    Args:
        change: The rewrite.
        model: A network that it fits, with weights of one dtype. It is not changed.

    Raises:
        AssertionError: It does not conform; the message contains what was expected and what came.

    Example:
        >>> check_rewrite(registries.rewrites.build("my_rewrite"), timm.create_model("resnet10t"))  # doctest: +SKIP
    """

    @cache
    def made() -> nn.Module:
        changed = copy.deepcopy(model)
        rewrite(changed, change)
        return changed

    yield "config", lambda: _check_config(change)
    yield "recorded", lambda: _check_recorded(change, model, made())
    yield "changes", lambda: _check_changes(model, made())
    yield "copied", lambda: _check_copied(made())
    yield "values", lambda: _check_values(change, model, made())
    yield "dtype", lambda: _check_dtype(change, model)
    yield "weightless", lambda: _check_weightless(change, model, made())


def _check_config(change: Rewrite) -> None:
    again = registries.rewrites.build(json.loads(json.dumps(change.to_dict())))
    require(again == change, f"built from its own record, it is {again}, not {change}")


def _check_recorded(change: Rewrite, model: nn.Module, made: nn.Module) -> None:
    recorded = [*rewrites_of(model), json.loads(json.dumps(change.to_dict()))]
    require(rewrites_of(made) == recorded, f"the network must record {recorded}, got {rewrites_of(made)}")


def _check_changes(model: nn.Module, made: nn.Module) -> None:
    require(_outline(made) != _outline(model), "it must change modules or tensors of the network, got the same ones")


def _check_copied(made: nn.Module) -> None:
    require(_outline(copy.deepcopy(made)) == _outline(made), "a copy of the rewritten network must equal it")


def _check_values(change: Rewrite, model: nn.Module, made: nn.Module) -> None:
    other = copy.deepcopy(model)
    with torch.no_grad():
        for tensor in _tensors(other).values():
            if tensor.is_floating_point():
                tensor.neg_()
    change.apply(other)
    require(_outline(other) == _outline(made), "with other values of the weights, it must make the same modules")


def _check_dtype(change: Rewrite, model: nn.Module) -> None:
    double = copy.deepcopy(model).double()
    change.apply(double)
    left = sorted({str(t.dtype) for t in _tensors(double).values() if t.is_floating_point()} - {"torch.float64"})
    require(not left, f"new tensors in a network of float64 must be float64, got {', '.join(left)}")


def _check_weightless(change: Rewrite, model: nn.Module, made: nn.Module) -> None:
    empty = copy.deepcopy(model).to("meta")
    try:
        with weightless():
            change.apply(empty)
    except Exception as error:
        got = f"{type(error).__name__}: {error}"
        raise AssertionError(f"it must change a network without values too, got {got}") from error
    require(_outline(empty) == _outline(made), "without values of the weights, it must make the same modules")
    elsewhere = [name for name, tensor in _tensors(empty).items() if not tensor.is_meta]
    require(not elsewhere, f"tensors must be on the device of the network, but not {', '.join(elsewhere)}")


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])


def _outline(model: nn.Module) -> tuple[dict[str, type], dict[str, tuple[torch.Size, torch.dtype]]]:
    """Return the classes of all modules, and shape and dtype of all tensors, by their names."""
    modules = {name: type(module) for name, module in model.named_modules()}
    return modules, {name: (tensor.shape, tensor.dtype) for name, tensor in _tensors(model).items()}
