"""Conversion between plain convolutions and convolutions with atoms."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from hf_stitch.adapters.rewriting import ATTRIBUTE, Rewrite, rewrite, rewrites_of
from hf_stitch.options import Count, check
from hf_stitch_filter_atoms.convolution import AtomConv2d, compose, give_atoms, take_atoms


@dataclass(frozen=True)
class Truncation:
    """Truncation error of the weights of a network.

    Attributes:
        by_layer: Layer -> relative Frobenius error of its weight. With as many atoms as kernel entries, the error is
            float32 rounding error. NaN on the meta device.
    """

    by_layer: Mapping[str, float]

    @property
    def worst(self) -> float:
        """Largest relative error."""
        return max(self.by_layer.values())


@dataclass(frozen=True, init=False)
class FilterAtomsRewrite(Rewrite):
    """Rewrite that :func:`atomize` applies and records.

    Args:
        atoms: Maximum number of atoms of each layer; see :func:`atomize`.
        layers: Names of the convolutions; None for all.

    Raises:
        ValueError: If the number of atoms is less than 1, or ``layers`` is a string or empty.

    Example:
        >>> from hf_stitch import registries
        >>> registries.rewrites.build("filter_atoms", atoms=6, layers=["conv1"])
        FilterAtomsRewrite(atoms=6, layers=('conv1',))
    """

    name: ClassVar[str] = "filter_atoms"
    atoms: int | None = None
    layers: tuple[str, ...] | None = None

    def __init__(self, atoms: int | None = None, layers: Iterable[str] | None = None) -> None:
        check(Count | None, atoms=atoms)
        check(Iterable[str] | None, layers=layers)
        names = None if layers is None else tuple(layers)
        if names == ():
            raise ValueError("layers must not be empty")
        object.__setattr__(self, "atoms", atoms)
        object.__setattr__(self, "layers", names)

    def apply(self, model: nn.Module) -> None:
        """Decompose the convolutions of a network in place.

        Args:
            model: The network.

        Raises:
            ValueError: As for :func:`atomize`, but without checking values.
        """
        for conv in self.convolutions(model).values():
            entries = conv.kernel_size[0] * conv.kernel_size[1]
            give_atoms(conv, min(self.atoms or entries, entries))

    def convolutions(self, model: nn.Module) -> dict[str, nn.Conv2d]:
        """Return the convolutions to decompose.

        Args:
            model: The network.

        Returns:
            Name -> convolution; a module with several names is listed under the first.

        Raises:
            ValueError: If a layer is unknown or cannot be decomposed.
        """
        convs = {name: module for name, module in model.named_modules() if isinstance(module, nn.Conv2d)}
        if not convs:
            raise ValueError(f"{type(model).__name__} must have a convolution (nn.Conv2d) to atomize")
        selected = convs if self.layers is None else _select(model, self.layers, convs)
        for name, module in selected.items():
            if isinstance(module, AtomConv2d):
                raise ValueError(f"layer {name!r} is already atomized; call deatomize first")
        _check_weights(model, selected)
        return selected


def atomize(model: nn.Module, atoms: int | None = None, layers: Iterable[str] | None = None) -> Truncation:
    """Decompose the convolutions of a network into atoms and coefficients, in place.

    Each ``nn.Conv2d``, including subclasses, becomes an :class:`AtomConv2d` with orthonormal atoms. Dtype, device,
    ``requires_grad``, training mode, hooks and module names stay. A shared module is decomposed once. The number of
    atoms and all shapes depend only on the arguments and the shapes of the network.

    The network records the rewrite (:func:`hf_stitch.adapters.rewriting.rewrite`), so that hf-stitch saves and loads
    models with it. Pass the whole network, and select parts with ``layers``: ``atomize(model.layer1)`` is recorded on
    ``model.layer1`` only, and a stitched model with ``model`` can then not be saved. Create optimizers and adapters
    after this call, because it replaces parameters.

    The weight is then computed from atoms and coefficients. Writing to it, e.g. ``nn.init.zeros_(conv.weight)``,
    changes a temporary tensor without effect and without an error: write to ``conv.atoms`` and ``conv.coefficients``,
    or initialize before this call.

    Args:
        model: The network; pass the whole network to save it later.
        atoms: Number of atoms of each layer, limited to the number of kernel entries. Default: the number of kernel
            entries, which is exact up to float32 rounding error.
        layers: Names of the convolutions to decompose. Default: all.

    Returns:
        The relative error of the weight of each layer.

    Raises:
        ValueError: If the number of atoms is less than 1, a layer is unknown, not a convolution or already atomized, or
            its weight is shared with another module, parametrized, not initialized or not finite. The network is then
            not modified.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 5))
        >>> atomize(net).worst < 1e-6
        True
        >>> [tuple(net[i].atoms.shape) for i in (0, 2)]
        [(9, 3, 3), (25, 5, 5)]
    """
    change = FilterAtomsRewrite(atoms, layers)
    weights = {name: conv.weight.detach() for name, conv in change.convolutions(model).items()}
    for name, weight in weights.items():
        if not weight.is_meta and not weight.isfinite().all():
            raise ValueError(f"the weight of layer {name!r} must be finite")
    rewrite(model, change)
    convs = atomized(model)
    return Truncation({name: relative_error(weight, convs[name]) for name, weight in weights.items()})


def deatomize(model: nn.Module) -> None:
    """Restore plain convolutions of the original classes, in place.

    Args:
        model: The network passed to :func:`atomize`, which has the record.

    Raises:
        ValueError: If the network does not have convolutions with atoms.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3))
        >>> _ = atomize(net)
        >>> deatomize(net)
        >>> net
        Sequential(
          (0): Conv2d(3, 8, kernel_size=(3, 3), stride=(1, 1))
        )
    """
    for conv in atomized(model).values():
        take_atoms(conv)
    other_rewrites = [record for record in rewrites_of(model) if record["name"] != FilterAtomsRewrite.name]
    setattr(model, ATTRIBUTE, other_rewrites)


def atomized(model: nn.Module) -> dict[str, AtomConv2d]:
    """Return the convolutions with atoms of a network.

    Args:
        model: The network.

    Returns:
        Name -> convolution, in the order of the modules.

    Raises:
        ValueError: If the network does not have convolutions with atoms.
    """
    convs = {name: module for name, module in model.named_modules() if isinstance(module, AtomConv2d)}
    if not convs:
        raise ValueError("the network must have convolutions with atoms; call hf_stitch_filter_atoms.atomize first")
    return convs


def relative_error(weight: torch.Tensor, conv: AtomConv2d) -> float:
    """Compute the relative Frobenius error of a convolution with atoms.

    Args:
        weight: The expected weight.
        conv: The convolution.

    Returns:
        ``‖weight − coefficients × atoms‖ / ‖weight‖``; 0 if both are 0, NaN on the meta device.
    """
    if weight.is_meta:
        return float("nan")
    expected = weight.detach().cpu().double()
    product = compose(conv.coefficients.detach().cpu().double(), conv.atoms.detach().cpu().double())
    error = (product - expected).norm().item()
    return error / expected.norm().item() if error else 0.0


def _select(model: nn.Module, names: Iterable[str], convs: Mapping[str, nn.Conv2d]) -> dict[str, nn.Conv2d]:
    """Look up convolutions by any of their names, and return them by their first name."""
    modules = dict(model.named_modules(remove_duplicate=False))
    first_names = {module: name for name, module in convs.items()}
    selected = {}
    for name in names:
        module = modules.get(name)
        if module is None:
            listing = ", ".join(map(repr, convs))
            raise ValueError(f"layer {name!r} does not exist; the convolutions of the network: {listing}")
        if not isinstance(module, nn.Conv2d):
            raise ValueError(f"layer {name!r} must be an nn.Conv2d, got {type(module).__name__}")
        selected[first_names[module]] = module
    return selected


def _check_weights(model: nn.Module, selected: Mapping[str, nn.Conv2d]) -> None:
    owners: dict[int, set[str]] = defaultdict(set)
    for module_name, module in model.named_modules():
        for parameter_name, parameter in module._parameters.items():
            owners[id(parameter)].add(f"{module_name}.{parameter_name}".lstrip("."))
    for name, conv in selected.items():
        weight = conv._parameters.get("weight")
        if weight is None:
            raise ValueError(f"the weight of layer {name!r} has a parametrization; remove it first")
        if is_lazy(weight):
            raise ValueError(f"the weight of layer {name!r} is not initialized; run the network once first")
        existing = [attribute for attribute in ("atoms", "coefficients") if hasattr(conv, attribute)]
        if existing:
            raise ValueError(f"layer {name!r} ({type(conv).__name__}) already has an attribute {existing[0]!r}")
        if len(owners[id(weight)]) > 1:
            raise ValueError(
                f"{' and '.join(sorted(owners[id(weight)]))} share a parameter, which atomizing would separate; copy "
                "the weight, or select different layers"
            )
        if not weight.is_floating_point():
            raise ValueError(f"the weight of layer {name!r} must be floating point, got {weight.dtype}")
