"""The gauge of atoms: coefficients × M⁻¹ and M × atoms are the same network with different similarities of atoms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from hf_stitch.metrics import NotComparable
from hf_stitch_filter_atoms.atomizing import atomized
from hf_stitch_filter_atoms.coefficients import check_same_layers
from hf_stitch_filter_atoms.convolution import AtomConv2d
from hf_stitch_filter_atoms.reading import rounding_share

GRID = 33
"""Number of scales in a grid; for conditions above 10, for each power of 10."""
ALTERNATIONS = 300
"""Maximum number of steps towards the local optimum of each scale, each with one Dinkelbach step."""
MERGE_DISTANCE = 1e-6
"""Scales with logarithms that differ by less are merged."""
ZOOMS = 10
"""Number of refinements of the grid, each by half of its size."""


def set_gauge(models: Sequence[nn.Module], gauge: Literal["orthonormal_coefficients"] | nn.Module) -> None:
    """Transform networks with shared coefficients to a gauge, in place, without changing their functions.

    For each layer, an invertible M replaces the coefficients α by ``α M⁻¹``, and the atoms D of each network by
    ``M D``.

    Args:
        models: Atomized networks with equal coefficients. They may share modules.
        gauge: ``"orthonormal_coefficients"`` makes the columns of α, ``(out · in / groups, m)``, orthonormal, so that
            the cosine of atoms equals the cosine of weights. A reference network with the same coefficients makes its
            atoms orthonormal; it is modified only if it is one of the models.

    Raises:
        ValueError: If ``models`` is empty, a network is not atomized, coefficients differ, layers of different names
            share atoms or coefficients, or M does not exist. M does not exist if columns of the coefficients, or atoms
            of the reference, are linearly dependent: use fewer atoms for layers with fewer filters than atoms. The
            networks are then not modified.

    Example:
        >>> from hf_stitch_filter_atoms import atomize
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3))
        >>> _ = atomize(net)
        >>> set_gauge([net], "orthonormal_coefficients")
        >>> columns = net[0].coefficients.flatten(0, 1)
        >>> torch.allclose(columns.T @ columns, torch.eye(9), atol=1e-5)
        True
    """
    if not isinstance(gauge, nn.Module) and gauge != "orthonormal_coefficients":
        raise ValueError(f"gauge must be 'orthonormal_coefficients' or a network, got {gauge!r}")
    if not models:
        raise ValueError("models must not be empty")
    layers = [atomized(model) for model in models]
    reference = atomized(gauge) if isinstance(gauge, nn.Module) else None
    _check_shared([*layers, *([reference] if reference else [])])
    _check_separate(layers)
    gauge_matrices = {
        name: _to_orthonormal_coefficients(name, conv)
        if reference is None
        else _to_orthonormal_atoms(name, reference[name])
        for name, conv in layers[0].items()
    }
    coefficients = {
        name: _in_double(conv.coefficients) @ torch.linalg.inv(gauge_matrices[name]) for name, conv in layers[0].items()
    }
    with torch.no_grad():
        for name, matrix in gauge_matrices.items():
            for atoms in {id(convs[name].atoms): convs[name].atoms for convs in layers}.values():  # without repetition
                atoms.copy_((matrix @ _in_double(atoms).flatten(1)).view_as(atoms))
            for convs in layers:
                convs[name].coefficients.copy_(coefficients[name])


def gauge_bounds(a: nn.Module, b: nn.Module, condition: float = 10.0) -> dict[str, tuple[float, float]]:
    """Compute the minimum and maximum cosine of atoms over gauges, which do not change the functions of the networks.

    The gauges are all matrices M with a condition number of at most ``condition``, the same for both networks. Gauges
    attain both bounds. A search from many starts computes them (:func:`extremes`), without a proof of optimality.
    Measured on random atoms at condition 1000: three times as many starts improved bounds by at most 1e-9 (120 pairs of
    networks), and gradient ascents over M from 24 random starts each did not improve any (20 pairs). Minima above 0 and
    maxima below 0 have a proof, and were within 1e-10 of it at conditions 10 to 1000 (60 values each). A 3×3 layer
    takes less than a second on one CPU core.

    Args:
        a: An atomized network.
        b: A second network with the same coefficients.
        condition: Maximum condition number of M, at least 1. At 1, both bounds are the cosine of the current atoms.

    Returns:
        Layer -> minimum and maximum cosine. Layers of 1×1 convolutions are skipped.

    Raises:
        NotComparable: If coefficients differ, or all atoms of a layer are zero.
        ValueError: If a network is not atomized, the networks differ, or ``condition`` is less than 1.

    Example:
        >>> from hf_stitch_filter_atoms import atomize
        >>> a, b = (nn.Sequential(nn.Conv2d(3, 8, 3)) for _ in range(2))
        >>> _, _ = atomize(a), b.load_state_dict(a.state_dict()) if atomize(b) else None
        >>> {layer: (round(least, 6), round(greatest, 6)) for layer, (least, greatest) in gauge_bounds(a, b).items()}
        {'0': (1.0, 1.0)}
    """
    if not 1 <= condition < math.inf:
        raise ValueError(f"condition must be a number of at least 1, got {condition}")
    layers = [atomized(model) for model in (a, b)]
    _check_shared(layers)
    bounds = {}
    for name, conv in layers[0].items():
        if conv.atoms[0].numel() == 1:
            continue
        u, v = (_in_double(convs[name].atoms).flatten(1) for convs in layers)
        if not u.any() or not v.any():
            raise NotComparable(name, "all atoms of one network are zero, so that the cosine is undefined")
        least, greatest = (cosine(u, v, p) for p in extremes(u, v, condition))
        bounds[name] = (least, greatest)
    if not bounds:
        raise ValueError("all convolutions with atoms are 1×1, with scalar atoms")
    return bounds


def cosine(u: Tensor, v: Tensor, p: Tensor) -> float:
    """Compute the cosine of atoms in the gauge M with ``p = MᵀM``.

    Args:
        u: Atoms of a network, ``(m, kh·kw)``.
        v: Atoms of a second network, ``(m, kh·kw)``.
        p: The symmetric positive definite matrix, ``(m, m)``.

    Returns:
        ``⟨Mu, Mv⟩ / (‖Mu‖ ‖Mv‖)``.
    """
    return ((p * (u @ v.T)).sum() / ((p * (u @ u.T)).sum() * (p * (v @ v.T)).sum()).sqrt()).item()


def extremes(u: Tensor, v: Tensor, condition: float) -> tuple[Tensor, Tensor]:
    """Return the gauges with the minimum and the maximum cosine of atoms.

    In a gauge with ``P = MᵀM`` the cosine is ``⟨P, C⟩ / √(⟨P, A⟩⟨P, B⟩)``, where ``A = u uᵀ``, ``B = v vᵀ`` and C is
    the symmetric part of ``u vᵀ``. Since ``√(x y)`` is the minimum of ``(s x + y / s) / 2`` over s > 0, a positive
    cosine is the maximum of ``⟨P, C⟩ / ⟨P, s A + B / s⟩ · 2`` over s. For fixed s this is a ratio of linear functions
    of P, and Dinkelbach's method finds its extremes over all P with eigenvalues between 1 and ``condition²``. The
    remaining search is one-dimensional, over s; Sion's theorem allows swapping minimum and maximum. Negative cosines
    follow by replacing v by ``−v``.

    Args:
        u: Atoms of a network, ``(m, kh·kw)``, float64, not all zero.
        v: Atoms of a second network, ``(m, kh·kw)``, float64, not all zero.
        condition: Maximum condition number of M.

    Returns:
        P of the minimum and P of the maximum cosine, ``(m, m)``.
    """
    return _greatest(u, -v, condition), _greatest(u, v, condition)


def _greatest(u: Tensor, v: Tensor, condition: float) -> Tensor:
    product = u @ v.T
    a, b, c = u @ u.T / u.square().sum(), v @ v.T / v.square().sum(), (product + product.T) / 2
    c = c / (u.norm() * v.norm())
    bound = condition**2
    if (_extreme(c, bound) * c).sum() >= 0:
        return _greatest_positive(a, b, c, bound)
    return _least_positive(a, b, -c, bound)


def _greatest_positive(a: Tensor, b: Tensor, c: Tensor, bound: float) -> Tensor:
    """Return P of the maximum ratio, if it is not negative: the maximum over s of the maximum over P."""
    count = max(GRID, math.ceil(GRID * math.log10(bound) / 2))
    scales = _grid(-math.log(bound) / 2, math.log(bound) / 2, a, count)
    optima = _optima_of_scales(scales, a, b, c, bound)[1]
    for _ in range(ALTERNATIONS):
        previous_scales, (scales, optima) = scales, _drop_near_duplicates(_best_scale(optima, a, b), optima)
        if len(scales) == len(previous_scales) and bool(((scales - previous_scales).abs() < MERGE_DISTANCE).all()):
            break
        optima = _optima_of_scales(scales, a, b, c, bound, start=optima, steps=1)[1]
    values, optima = _optima_of_scales(scales, a, b, c, bound)
    best = scales[values.argmax()].item()
    width = math.log(bound) / GRID
    for _ in range(ZOOMS):
        scales = _grid(best - width, best + width, a)
        values, optima = _optima_of_scales(scales, a, b, c, bound)
        best, width = scales[values.argmax()].item(), 4 * width / GRID
    return optima[values.argmax()]


def _least_positive(a: Tensor, b: Tensor, c: Tensor, bound: float) -> Tensor:
    """Return P of the minimum ratio, if it is positive: the maximum over s (unimodal) of the minimum over P."""
    middle, width = 0.0, math.log(bound) / 2
    for _ in range(ZOOMS):
        scales = _grid(middle - width, middle + width, a)
        values, optima = _optima_of_scales(scales, a, b, c, bound, least=True)
        middle, width = scales[values.argmax()].item(), 4 * width / GRID
    return _point_on_segment(optima[0], optima[-1], middle, a, b)


def _point_on_segment(first: Tensor, last: Tensor, scale: float, a: Tensor, b: Tensor) -> Tensor:
    """Return the P on a segment with this optimal scale; where the minimum jumps, a mixture of both ends."""
    gaps = [_best_scale(p[None], a, b).item() - scale for p in (first, last)]
    if gaps[0] * gaps[1] >= 0:
        return min((first, last), key=lambda p: abs(_best_scale(p[None], a, b).item() - scale))
    # exp(2 scale) ⟨P, A⟩ − ⟨P, B⟩ is linear along the segment.
    ends = [(math.exp(2 * scale) * (p * a).sum() - (p * b).sum()).item() for p in (first, last)]
    fraction = ends[0] / (ends[0] - ends[1])
    return (1 - fraction) * first + fraction * last


def _grid(low: float, high: float, like: Tensor, count: int = GRID) -> Tensor:
    return torch.linspace(low, high, count, dtype=like.dtype)


def _drop_near_duplicates(scales: Tensor, optima: Tensor) -> tuple[Tensor, Tensor]:
    """Return sorted scales without near-duplicates, and their P."""
    scales, order = scales.sort()
    is_new = torch.cat([torch.ones(1, dtype=torch.bool), scales.diff() > MERGE_DISTANCE])
    return scales[is_new], optima[order][is_new]


def _best_scale(p: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return the logarithm of the s with ``(s x + y / s) / 2 = √(x y)``, for each P."""
    return ((p * b).sum((-2, -1)) / (p * a).sum((-2, -1))).log() / 2


def _optima_of_scales(
    scales: Tensor, a: Tensor, b: Tensor, c: Tensor, bound: float, least: bool = False, start: Tensor | None = None,
    steps: int = 50,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return values and P of the extremes of ``⟨P, C⟩ / ⟨P, E⟩`` over P for each s, by Dinkelbach's method."""
    s = scales.exp()[:, None, None]
    e = (s * a + b / s) / 2
    p = torch.eye(len(c), dtype=c.dtype) if start is None else start
    ratio = (p * c).sum((-2, -1)) / (p * e).sum((1, 2))
    sign = -1 if least else 1
    for _ in range(steps):
        p = _extreme(sign * (c - ratio[:, None, None] * e), bound)
        next_ratio = (p * c).sum((1, 2)) / (p * e).sum((1, 2))
        converged = bool((sign * (next_ratio - ratio) <= 1e-14).all())  # monotone, with quadratic convergence
        ratio = next_ratio
        if converged:
            break
    return ratio, p


def _extreme(matrix: Tensor, bound: float) -> Tensor:
    """Return the P with the maximum product: ``bound`` on the eigenspace of positive eigenvalues, 1 elsewhere."""
    eigenvalues, vectors = torch.linalg.eigh(matrix)
    new_eigenvalues = torch.ones_like(eigenvalues).masked_fill(eigenvalues > 0, bound)
    return (vectors * new_eigenvalues[..., None, :]) @ vectors.mT


def _in_double(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().double()


def _check_shared(layers: Sequence[dict[str, AtomConv2d]]) -> None:
    check_same_layers(layers)
    for second in layers[1:]:
        for name, conv in layers[0].items():
            if not torch.equal(conv.coefficients.detach().cpu(), second[name].coefficients.detach().cpu()):
                raise NotComparable(name, "a common gauge requires equal coefficients; call share_coefficients")


def _check_separate(layers: Sequence[dict[str, AtomConv2d]]) -> None:
    """Check that layers of different names do not share parameters, because each layer has a separate M."""
    owners: dict[int, str] = {}
    for convs in layers:
        for name, conv in convs.items():
            for parameter in (conv.atoms, conv.coefficients):
                owner = owners.setdefault(id(parameter), name)
                if owner != name:
                    raise ValueError(f"layers {owner!r} and {name!r} must not share a parameter")


def _to_orthonormal_coefficients(name: str, conv: AtomConv2d) -> Tensor:
    """Return M with orthonormal ``α M⁻¹``: the positive square root of ``αᵀα``."""
    return _scaling(name, conv.coefficients.detach().flatten(0, 1), "columns of the coefficients")


def _to_orthonormal_atoms(name: str, conv: AtomConv2d) -> Tensor:
    """Return M with orthonormal rows of ``M D``: the inverse of the positive square root of ``D Dᵀ``."""
    return torch.linalg.inv(_scaling(name, conv.atoms.detach().flatten(1).T, "atoms of the reference"))


def _scaling(name: str, columns: Tensor, label: str) -> Tensor:
    _, singular_values, right = torch.linalg.svd(_in_double(columns), full_matrices=False)
    rank = int((singular_values > singular_values.max() * rounding_share(columns.dtype)).sum())
    if rank < columns.shape[1]:
        raise ValueError(
            f"layer {name!r}: only {rank} of {columns.shape[1]} {label} are linearly independent; use fewer atoms for "
            f"this layer: atomize(model, atoms={max(1, rank)}, layers=[{name!r}]), and a second call for the rest"
        )
    return (right.T * singular_values) @ right
