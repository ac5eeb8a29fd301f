"""From plain convolutions to atoms and back."""

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
    """What the weights of a network lost.

    Attributes:
        by_layer: Layer -> relative Frobenius error of its weight. With as many atoms as a kernel has entries, this is
            rounding only. NaN on the meta device.
    """

    by_layer: Mapping[str, float]

    @property
    def worst(self) -> float:
        """The largest relative error."""
        return max(self.by_layer.values())


@dataclass(frozen=True, init=False)
class FilterAtomsRewrite(Rewrite):
    """The rewrite that :func:`atomize` applies and records.

    Args:
        atoms: Number of atoms of each layer, at most; see :func:`atomize`.
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
            raise ValueError("layers is empty, so there is nothing to atomize")
        object.__setattr__(self, "atoms", atoms)
        object.__setattr__(self, "layers", names)

    def apply(self, model: nn.Module) -> None:
        """Give atoms to the convolutions of a network, in place.

        Args:
            model: The network.

        Raises:
            ValueError: As for :func:`atomize`, except that values are not looked at.
        """
        for conv in self.convolutions(model).values():
            entries = conv.kernel_size[0] * conv.kernel_size[1]
            give_atoms(conv, min(self.atoms or entries, entries))

    def convolutions(self, model: nn.Module) -> dict[str, nn.Conv2d]:
        """Find the convolutions to decompose.

        Args:
            model: The network.

        Returns:
            Name -> convolution; a module with several names has the first.

        Raises:
            ValueError: If a layer is unknown or cannot be decomposed.
        """
        found = {name: module for name, module in model.named_modules() if isinstance(module, nn.Conv2d)}
        if not found:
            raise ValueError(f"{type(model).__name__} has no convolution (nn.Conv2d), so there is nothing to atomize")
        chosen = found if self.layers is None else _named(model, self.layers, found)
        for name, module in chosen.items():
            if isinstance(module, AtomConv2d):
                raise ValueError(f"layer {name!r} is already atomized; call deatomize first")
        _check_weights(model, chosen)
        return chosen


def atomize(model: nn.Module, atoms: int | None = None, layers: Iterable[str] | None = None) -> Truncation:
    """Decompose the convolutions of a network into atoms and coefficients, in place.

    Each ``nn.Conv2d``, also of a subclass, becomes an :class:`AtomConv2d`, with orthonormal atoms. Dtype, device,
    ``requires_grad``, training mode, hooks and names of the modules stay. A module that is used at two places is
    decomposed once. The number of atoms and all shapes depend on the arguments and the shapes of the network only.

    It is recorded on the network (:func:`hf_stitch.adapters.rewriting.rewrite`), so that hf-stitch saves and loads
    models that contain it. Pass the whole network, and select parts by ``layers``: ``atomize(model.layer1)`` is
    recorded on ``model.layer1`` only, and then a stitched model with ``model`` cannot be saved. Optimizers and
    adapters of the network must be made anew, because its parameters are others.

    The weight is afterwards computed from the atoms and coefficients. Writing into it, as
    ``nn.init.zeros_(conv.weight)`` does, changes a temporary tensor and has no effect, without an error: write into
    ``conv.atoms`` and ``conv.coefficients``, or initialize before this call.

    Args:
        model: The network, whole if it is to be saved.
        atoms: Number of atoms of each layer. A layer whose kernel has fewer entries gets as many as its kernel has
            entries. By default, all layers get as many as their kernel has entries, which is exact to rounding.
        layers: Names of the convolutions to decompose; all by default.

    Returns:
        The relative error of the weight of each layer.

    Raises:
        ValueError: If the number of atoms is less than 1, a layer is unknown, no convolution or already atomized, or
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
            raise ValueError(f"the weight of layer {name!r} contains values that are not finite")
    rewrite(model, change)
    made = atomized(model)
    return Truncation({name: relative_error(weight, made[name]) for name, weight in weights.items()})


def deatomize(model: nn.Module) -> None:
    """Turn all convolutions with atoms into plain ones of the class that they had before, in place.

    Args:
        model: The network that was given to :func:`atomize`, on which that is recorded.

    Raises:
        ValueError: If the network has no convolution with atoms.

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
    others = [record for record in rewrites_of(model) if record["name"] != FilterAtomsRewrite.name]
    setattr(model, ATTRIBUTE, others)


def atomized(model: nn.Module) -> dict[str, AtomConv2d]:
    """Find the convolutions with atoms of a network.

    Args:
        model: The network.

    Returns:
        Name -> convolution, in the order of the modules.

    Raises:
        ValueError: If there is none.
    """
    found = {name: module for name, module in model.named_modules() if isinstance(module, AtomConv2d)}
    if not found:
        raise ValueError("the network has no convolution with atoms; call hf_stitch_filter_atoms.atomize first")
    return found


def relative_error(weight: torch.Tensor, conv: AtomConv2d) -> float:
    """Compute the relative Frobenius error of a convolution with atoms.

    Args:
        weight: The weight that it should have.
        conv: The convolution.

    Returns:
        ``‖weight − coefficients × atoms‖ / ‖weight‖``; 0 if both are 0, NaN on the meta device.
    """
    if weight.is_meta:
        return float("nan")
    wanted = weight.detach().cpu().double()
    got = compose(conv.coefficients.detach().cpu().double(), conv.atoms.detach().cpu().double())
    error = (got - wanted).norm().item()
    return error / wanted.norm().item() if error else 0.0


def _named(model: nn.Module, names: Iterable[str], found: Mapping[str, nn.Conv2d]) -> dict[str, nn.Conv2d]:
    """Look up convolutions by any of their names, and return them by their first."""
    modules = dict(model.named_modules(remove_duplicate=False))
    first = {module: name for name, module in found.items()}
    chosen = {}
    for name in names:
        module = modules.get(name)
        if module is None:
            known = ", ".join(map(repr, found))
            raise ValueError(f"there is no layer {name!r}; the convolutions of the network: {known}")
        if not isinstance(module, nn.Conv2d):
            raise ValueError(f"layer {name!r} is a {type(module).__name__}, not an nn.Conv2d")
        chosen[first[module]] = module
    return chosen


def _check_weights(model: nn.Module, chosen: Mapping[str, nn.Conv2d]) -> None:
    owners: dict[int, set[str]] = defaultdict(set)
    for module_name, module in model.named_modules():
        for parameter_name, parameter in module._parameters.items():
            owners[id(parameter)].add(f"{module_name}.{parameter_name}".lstrip("."))
    for name, conv in chosen.items():
        weight = conv._parameters.get("weight")
        if weight is None:
            raise ValueError(f"the weight of layer {name!r} is computed by a parametrization; remove that first")
        if is_lazy(weight):
            raise ValueError(f"the weight of layer {name!r} is not initialized; run the network once first")
        taken = [part for part in ("atoms", "coefficients") if hasattr(conv, part)]
        if taken:
            raise ValueError(f"layer {name!r} ({type(conv).__name__}) already has an attribute {taken[0]!r}")
        if len(owners[id(weight)]) > 1:
            raise ValueError(
                f"{' and '.join(sorted(owners[id(weight)]))} are one parameter; atomizing would separate them. Give "
                "them weights of their own, or name other layers"
            )
        if not weight.is_floating_point():
            raise ValueError(f"the weight of layer {name!r} is {weight.dtype}, not floating point")
