"""Similarity metrics of convolutions, computed from weights alone."""

from __future__ import annotations

import math
import os
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hf_stitch.metrics import NotComparable, WeightMetric
from hf_stitch.options import checked
from hf_stitch.papers import Paper
from hf_stitch.statistics import Weights
from hf_stitch_filter_atoms.patches import load_cached
from hf_stitch_filter_atoms.reading import (
    angle,
    check_shared,
    convolutions,
    cosine,
    hash_of,
    in_double,
    rounding_share,
    shape_of,
    spatial,
)

CHEN_2023 = Paper(
    "Chen et al.: Inner Product-based Neural Network Similarity",
    "https://papers.nips.cc/paper_files/paper/2023/hash/ea7623ff02edffe68866f88da2667592-Abstract-Conference.html",
)
Gauge = Literal["trained", "orthonormal"]


@checked
def _filter_atoms(x: Weights, y: Weights, *, gauge: Gauge = "trained") -> float:
    return cosine(x.layer, _atoms(x, gauge), _atoms(y, gauge))


@checked
def _filter_atom_angle(x: Weights, y: Weights, *, gauge: Gauge = "trained") -> float:
    return angle(x.layer, _atoms(x, gauge), _atoms(y, gauge))


def _grassmann(x: Weights, y: Weights) -> float:
    bases = [_basis(side) for side in (x, y)]
    return torch.linalg.svdvals(bases[0].T @ bases[1]).mean().item()


def _patch_cosine(x: Weights, y: Weights, *, covariance: str | os.PathLike[str] = "", key: str = "") -> float:
    return cosine(x.layer, x.tensors["outputs"], y.tensors["outputs"])


def _filter_gram(x: Weights, y: Weights) -> float:
    return cosine(x.layer, x.tensors["gram"], y.tensors["gram"])


class _ConvolutionMetric(WeightMetric):
    """Base class of metrics that report differing properties and non-finite values of two convolutions."""

    def check_shared(self, a: Weights, b: Weights) -> None:
        """Check that two convolutions are finite and agree in shared properties, as in ``WeightMetric``."""
        check_shared(a, b)


class FilterAtoms(_ConvolutionMetric):
    """S_Atom: cosine of the filter atoms of two networks with shared atom coefficients.

    Atoms are compared by position and order in the gauge of the option: ``"trained"`` uses the atoms as trained,
    ``"orthonormal"`` uses orthonormal coefficients, so that the value is the cosine of the weights. The gauge changes
    the value but not the function of a network: see :func:`hf_stitch_filter_atoms.gauge_bounds`. The metric ignores
    batch normalization, classifiers and 1×1 convolutions (their atoms are scalars).

    Args:
        **options: ``gauge``.

    Example:
        >>> from hf_stitch_filter_atoms import atomize
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3))
        >>> _ = atomize(net)
        >>> metric = FilterAtoms()
        >>> read = metric.read(net)["0"]
        >>> round(metric.value(read, read), 6)
        1.0
    """

    name, title, papers = "filter_atoms", "cosine of filter atoms", (CHEN_2023,)
    function = staticmethod(_filter_atoms)
    range = (-1.0, 1.0)

    def read(self, model: nn.Module) -> dict[str, Weights]:
        """Return atoms, the Gram matrix of the coefficients, and a hash of the coefficients."""
        return _read_atoms(model)


class FilterAtomAngle(_ConvolutionMetric):
    """Angle of filter atoms, arccos S_Atom: a pseudometric, because atoms D and 2 D have distance 0.

    Args:
        **options: ``gauge``, as for ``filter_atoms``.
    """

    name, title, papers = "filter_atom_angle", "angle of filter atoms", (CHEN_2023,)
    function = staticmethod(_filter_atom_angle)
    range = (0.0, math.pi)
    higher_is_better = False
    triangle_inequality = True

    def read(self, model: nn.Module) -> dict[str, Weights]:
        """Return atoms, the Gram matrix of the coefficients, and a hash of the coefficients."""
        return _read_atoms(model)


class Grassmann(_ConvolutionMetric):
    """S_Gras: mean cosine of the principal angles between the spans of the atoms of two networks.

    The value does not depend on the gauge or the coefficients. As many atoms as kernel entries span the whole space, so
    that S_Gras would always be 1: use fewer atoms (``atomize(model, atoms=6)``).
    """

    name, title, papers = "grassmann", "Grassmann similarity of filter subspaces", (CHEN_2023,)
    function = staticmethod(_grassmann)

    def read(self, model: nn.Module) -> dict[str, Weights]:
        """Return an orthonormal basis of the span of the atoms for all layers except 1×1 convolutions."""
        return {
            name: Weights(name, _space(conv.atoms), shape_of(conv, atoms=str(len(conv.atoms))))
            for name, conv in spatial(model).items()
        }


class PatchCosine(_ConvolutionMetric):
    """Cosine of the outputs of two convolutions on the inputs of a reference network.

    The value is the cosine of the weights in the metric of input patches, ``⟨W, W′⟩ = tr(W C W′ᵀ)``, without biases. C
    is the covariance of the patches of one reference network, measured once. The value does not depend on the gauge; it
    is the cosine of the weights if C is the identity. For weight-standardized convolutions, W is the weight before
    standardization, so that the value is not the cosine of outputs.

    Args:
        **options: ``covariance``: file from ``PatchCovariance.save``, a ``str`` or a path; required to read networks,
            not to compare readings. ``key``: expected ``PatchCovariance.key`` of the file. By default, the first
            reading sets the key, so that the recipe of a comparison contains it. A metric built from this recipe then
            raises an error for a file with different content. The label omits the key.

    Raises:
        OptionError: If ``covariance`` is not a path, or ``key`` is not a string.
    """

    name, title = "patch_cosine", "cosine of the weights in the metric of input patches"
    function = staticmethod(_patch_cosine)
    range = (-1.0, 1.0)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.options["covariance"] = os.fspath(self.options["covariance"])

    @property
    def label(self) -> str:
        """Name with the file, without the key."""
        path = self.options["covariance"]
        return f"{self.name}(covariance={path})" if path else self.name

    def read(self, model: nn.Module) -> dict[str, Weights]:
        """Return the weights of all convolutions, multiplied by a square root of the covariance of their patches."""
        layers, path = convolutions(model), self.options["covariance"]
        if not path:
            raise ValueError("patch_cosine requires covariance=, a file from PatchCovariance.save")
        covariance, key = load_cached(path)
        if self.options["key"] not in ("", key):
            raise ValueError(
                f"{path} must contain the patch covariance {self.options['key']}, got {key}; pass the original file, "
                "or build the metric without key="
            )
        self.options["key"] = key
        return {
            name: Weights(
                name, {"outputs": _outputs(name, conv, covariance.factors.get(name))}, shape_of(conv, covariance=key)
            )
            for name, conv in layers.items()
        }


class FilterGram(_ConvolutionMetric):
    """Cosine of the Gram matrices of spatial filters, for layers with any numbers of channels.

    All kernels of a layer are rows of F, ``(out · in / groups, kh·kw)``. Their Gram matrix ``Fᵀ F``, divided by the
    number of rows, is ``Dᵀ αᵀ α D`` in terms of atoms, and describes which directions of kernels the layer uses and how
    much. It does not depend on the gauge or on shared coefficients, and ignores which channels a kernel connects. Only
    the kernel sizes must agree. The metric is a proposal for coefficients of unequal dimension, an open problem in the
    paper.
    """

    name, title = "filter_gram", "cosine of the Gram matrices of spatial filters"
    function = staticmethod(_filter_gram)

    def read(self, model: nn.Module) -> dict[str, Weights]:
        """Return the Gram matrices of all layers except 1×1 convolutions."""
        layers = {name: conv for name, conv in convolutions(model).items() if conv.kernel_size != (1, 1)}
        if not layers:
            raise ValueError("all convolutions are 1×1, with scalar kernels")
        return {name: _read_gram(name, conv) for name, conv in layers.items()}


def _read_atoms(model: nn.Module) -> dict[str, Weights]:
    readings = {}
    for name, conv in spatial(model).items():
        columns = in_double(conv.coefficients).flatten(0, 1)
        tensors = {"atoms": in_double(conv.atoms), "gram": columns.T @ columns / len(columns)}
        coefficients = conv.coefficients
        shared = shape_of(
            conv, atoms=str(len(conv.atoms)), coefficients=hash_of(coefficients), dtype=str(coefficients.dtype)
        )
        readings[name] = Weights(name, tensors, shared)
    return readings


def _atoms(weights: Weights, gauge: Gauge) -> Tensor:
    """Return the atoms in a gauge, ``(m, kh·kw)``."""
    atoms = weights.tensors["atoms"].double().flatten(1)
    if gauge == "trained":
        return atoms
    eigenvalues, vectors = torch.linalg.eigh(weights.tensors["gram"].double())
    return (vectors * eigenvalues.clamp(min=0).sqrt()).T @ atoms


def _space(atoms: Tensor) -> dict[str, Tensor]:
    """Return an orthonormal basis of the span of atoms, ``(kh·kw, m)``, and the singular values of the atoms.

    Singular values at the level of rounding error of the dtype are set to 0.
    """
    rows = in_double(atoms).flatten(1)
    if not rows.isfinite().all():
        return {"basis of the atoms": rows.T.contiguous(), "singular values": torch.zeros(len(rows)).to(rows)}
    _, sizes, right = torch.linalg.svd(rows, full_matrices=False)
    sizes = torch.where(sizes > rounding_share(atoms.dtype) * sizes[0], sizes, 0)
    return {"basis of the atoms": right.T.contiguous(), "singular values": sizes}


def _basis(weights: Weights) -> Tensor:
    """Return the basis of a reading, ``(kh·kw, m)``; raise ``NotComparable`` if the similarity is meaningless."""
    basis, singular_values = weights.tensors["basis of the atoms"].double(), weights.tensors["singular values"].double()
    entries, count = basis.shape
    if count >= entries:
        raise NotComparable(
            weights.layer,
            f"{count} atoms span all kernels of {entries} entries, so that the similarity is always 1; use fewer "
            f"atoms, for example atomize(model, atoms={max(1, entries * 2 // 3)})",
        )
    if not singular_values[-1] > 0:
        raise NotComparable(weights.layer, "the atoms of one network are linearly dependent; use fewer atoms")
    return basis


def _outputs(name: str, conv: nn.Conv2d, factor: Tensor | None) -> Tensor:
    """Return the weight times the factor of the covariance, ``(out, in / groups · kh · kw)``."""
    weight = in_double(conv.weight).flatten(1)
    if factor is None:
        raise ValueError(f"the covariance lacks layer {name!r}; measure it with a network of this architecture")
    if factor.shape != (conv.groups, weight.shape[1], weight.shape[1]):
        expected = (conv.groups, weight.shape[1], weight.shape[1])
        raise ValueError(
            f"the covariance of layer {name!r} must have shape {expected}, got {tuple(factor.shape)}; measure it with "
            "a network of this architecture"
        )
    return (weight.unflatten(0, (conv.groups, -1)) @ factor.double()).flatten(0, 1)


def _read_gram(name: str, conv: nn.Conv2d) -> Weights:
    filters = in_double(conv.weight).flatten(2).flatten(0, 1)
    kernel = "×".join(map(str, conv.kernel_size))
    return Weights(name, {"gram": filters.T @ filters / len(filters)}, f'{{"kernel": "{kernel}"}}')
