"""Convolutions with a weight that is a product of coefficients and filter atoms."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from hf_stitch.options import Count, check


class AtomConv2d(nn.Conv2d):
    """Convolution with ``weight = coefficients × atoms``, the decomposition of Chen, Miao and Qiu (2023).

    The weight is computed in each forward pass; all remaining behaviour comes from the base class. For base classes
    other than ``nn.Conv2d``, such as timm's ``Conv2dSame`` or ``StdConv2d``, :func:`atom_class` returns a class that
    runs their forward.

    Write to ``atoms`` and ``coefficients``, not to ``weight``. The weight is not a parameter, and writes to it
    (``nn.init.zeros_(conv.weight)``) are lost.

    Attributes:
        atoms: Filter atoms, ``(m, kh, kw)``.
        coefficients: Atom coefficients, ``(out, in / groups, m)``.
        bias: Bias, ``(out,)``, or None.

    Args:
        *args: Arguments of the base class, such as channels and kernel size.
        atoms: Number of atoms m, at most ``kh·kw`` (default). The initial weight of the base class is approximated with
            this number of atoms.
        **kwargs: Keyword arguments of the base class.

    Raises:
        ValueError: If the number of atoms is less than 1 or exceeds the number of kernel entries.

    Example:
        >>> conv = AtomConv2d(3, 8, 3, atoms=6)
        >>> [(name, tuple(p.shape)) for name, p in conv.named_parameters()]
        [('atoms', (6, 3, 3)), ('coefficients', (8, 3, 6)), ('bias', (8,))]
        >>> conv(torch.zeros(1, 3, 5, 5)).shape
        torch.Size([1, 8, 3, 3])
    """

    atoms: nn.Parameter
    coefficients: nn.Parameter

    def __init__(self, *args: Any, atoms: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        entries = self.kernel_size[0] * self.kernel_size[1]
        check(Count | None, atoms=atoms)
        if atoms is not None and atoms > entries:
            raise ValueError(f"atoms must be at most {entries} (kernel entries), got {atoms}")
        _split(self, atoms or entries)

    # Raises AttributeError during construction of the base class; torch then looks into _parameters.
    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """Weight of the convolution, ``(out, in / groups, kh, kw)``, computed from coefficients and atoms."""
        return compose(self.coefficients, self.atoms)

    def reset_parameters(self) -> None:
        """Initialize like the base class, and decompose the new weight."""
        if "coefficients" not in self._parameters:  # called by the constructor of the base class
            super().reset_parameters()
            return
        count = len(self.atoms)
        _join(self)
        super().reset_parameters()
        _split(self, count)

    def extra_repr(self) -> str:
        """Return the settings of the convolution and the number of atoms."""
        return f"{super().extra_repr()}, atoms={len(self.atoms)}"

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle through the base class, because classes of further bases are created on demand."""
        return _empty, (base_class(self),), self.__getstate__()


_classes: dict[type[nn.Conv2d], type[AtomConv2d]] = {nn.Conv2d: AtomConv2d}


def compose(coefficients: Tensor, atoms: Tensor) -> Tensor:
    """Multiply coefficients and atoms.

    Args:
        coefficients: Coefficients, ``(out, in / groups, m)``.
        atoms: Atoms, ``(m, kh, kw)``.

    Returns:
        The weight, ``(out, in / groups, kh, kw)``.
    """
    product = coefficients.flatten(0, 1) @ atoms.flatten(1)
    return product.view(*coefficients.shape[:2], *atoms.shape[1:])


def decompose(weight: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Decompose a weight into orthonormal atoms and coefficients, with the least squared error.

    The atoms are eigenvectors of the ``kh·kw × kh·kw`` Gram matrix of the spatial filters, computed in float64, in
    descending order of eigenvalues. The entry of largest magnitude of each atom is positive.

    Args:
        weight: Weight, ``(out, in / groups, kh, kw)``. On the meta device, only the shapes are computed.
        count: Number of atoms m, at most ``kh·kw``.

    Returns:
        Coefficients, ``(out, in / groups, m)``, and atoms, ``(m, kh, kw)``, with the dtype and device of the weight.

    """
    if weight.is_meta:
        return weight.new_empty(*weight.shape[:2], count), weight.new_empty(count, *weight.shape[2:])
    # A network before loading its weights may contain arbitrary values.
    filters = weight.detach().cpu().double().nan_to_num(0, 0, 0).flatten(2).flatten(0, 1)
    atoms = torch.linalg.eigh(filters.T @ filters).eigenvectors.flip(1)[:, :count].T
    peaks = atoms.gather(1, atoms.abs().argmax(1, keepdim=True))
    atoms = (atoms * peaks.sign()).contiguous()
    coefficients = (filters @ atoms.T).view(*weight.shape[:2], count)
    return coefficients.to(weight), atoms.view(count, *weight.shape[2:]).to(weight)


def atom_class(base: type[nn.Conv2d]) -> type[AtomConv2d]:
    """Return a class of convolutions with atoms that runs the forward of a base class.

    Args:
        base: ``nn.Conv2d`` or a subclass without atoms.

    Returns:
        The class; repeated calls return the same class.

    Example:
        >>> from timm.layers import StdConv2d
        >>> atom_class(StdConv2d)(3, 8, 3)
        AtomStdConv2d(3, 8, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), bias=False, atoms=9)
    """
    if base not in _classes:
        new_class = type(f"Atom{base.__name__}", (AtomConv2d, base), {"__module__": base.__module__})
        _classes[base] = cast("type[AtomConv2d]", new_class)
    return _classes[base]


def base_class(conv: AtomConv2d) -> type[nn.Conv2d]:
    """Return the original class of a convolution with atoms.

    Args:
        conv: A convolution with atoms.

    Returns:
        ``nn.Conv2d`` or a subclass.
    """
    classes = type(conv).__mro__
    return cast("type[nn.Conv2d]", classes[classes.index(AtomConv2d) + 1])


def give_atoms(conv: nn.Conv2d, count: int) -> AtomConv2d:
    """Convert a convolution to a convolution with atoms in place; hooks, buffers and attributes stay.

    Args:
        conv: A convolution without atoms.
        count: Number of atoms, at most the number of kernel entries.

    Returns:
        The same module.
    """
    _split(conv, count)
    conv.__class__ = atom_class(type(conv))
    return cast("AtomConv2d", conv)


def take_atoms(conv: AtomConv2d) -> nn.Conv2d:
    """Convert a convolution with atoms to a plain convolution in place.

    Args:
        conv: A convolution with atoms.

    Returns:
        The same module, with its original class.
    """
    base = base_class(conv)
    _join(conv)
    plain: nn.Conv2d = conv
    plain.__class__ = base
    return plain


def _split(conv: nn.Conv2d, count: int) -> None:
    """Replace the parameter ``weight`` by ``atoms`` and ``coefficients``."""
    weight = cast("nn.Parameter", conv._parameters["weight"])
    coefficients, atoms = decompose(weight, count)
    tensors = {"atoms": atoms, "coefficients": coefficients}
    _exchange(conv, "weight", {k: nn.Parameter(v, requires_grad=weight.requires_grad) for k, v in tensors.items()})


def _join(conv: AtomConv2d) -> None:
    """Replace the parameters ``atoms`` and ``coefficients`` by ``weight``."""
    requires_grad = conv.atoms.requires_grad or conv.coefficients.requires_grad
    with torch.no_grad():
        product = compose(conv.coefficients.double(), conv.atoms.double()).to(conv.atoms)
    del conv._parameters["atoms"]
    _exchange(conv, "coefficients", {"weight": nn.Parameter(product, requires_grad=requires_grad)})


def _exchange(conv: nn.Conv2d, old: str, new: dict[str, nn.Parameter]) -> None:
    """Replace a parameter by new ones, which come first to preserve the parameter order of ``nn.Conv2d``."""
    remaining = {name: parameter for name, parameter in conv._parameters.items() if name != old}
    conv._parameters.clear()
    conv._parameters.update({**new, **remaining})


def _empty(base: type[nn.Conv2d]) -> AtomConv2d:
    convolution_class = atom_class(base)
    return convolution_class.__new__(convolution_class)
