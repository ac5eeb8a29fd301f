"""The gauge of atoms: coefficients × M⁻¹ and M × atoms are the same network, with another similarity of its atoms."""

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
from hf_stitch_filter_atoms.reading import share_of_rounding

GRID = 33
"""Scales that are tried at once, and for conditions above 10 that many for each power of 10."""
ALTERNATIONS = 300
"""Most steps that move each scale towards its next local best, each with one of Dinkelbach's."""
SAME = 1e-6
"""Logarithms of scales that differ by less are one."""
ZOOMS = 10
"""Refinements of the grid, each by half of its size."""


def set_gauge(models: Sequence[nn.Module], gauge: Literal["orthonormal_coefficients"] | nn.Module) -> None:
    """Bring networks that share their coefficients into a gauge, in place. Their functions stay the same.

    For each layer, an invertible M exchanges coefficients α for ``α M⁻¹``, and the atoms D of each network for ``M D``.

    Args:
        models: Atomized networks with equal coefficients. They may share modules.
        gauge: ``"orthonormal_coefficients"``: the columns of α, ``(out · in / groups, m)``, become orthonormal, and
            the cosine of atoms becomes that of the weights. Or a reference network with the same coefficients, whose
            atoms become orthonormal; it is not modified, unless it is one of the models.

    Raises:
        ValueError: If there is no model, one is not atomized, coefficients differ, layers of different names share
            atoms or coefficients, or no M exists because columns of the coefficients, or atoms of the reference, are
            linearly dependent: a layer of fewer filters than atoms needs fewer atoms. No network is then modified.

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
        raise ValueError("there is no model to bring into a gauge")
    layers = [atomized(model) for model in models]
    reference = atomized(gauge) if isinstance(gauge, nn.Module) else None
    _check_shared([*layers, *([reference] if reference else [])])
    _check_own(layers)
    moves = {
        name: _to_orthonormal_coefficients(name, conv)
        if reference is None
        else _to_orthonormal_atoms(name, reference[name])
        for name, conv in layers[0].items()
    }
    coefficients = {
        name: _in_double(conv.coefficients) @ torch.linalg.inv(moves[name]) for name, conv in layers[0].items()
    }
    with torch.no_grad():
        for name, move in moves.items():
            for atoms in {id(each[name].atoms): each[name].atoms for each in layers}.values():  # each once
                atoms.copy_((move @ _in_double(atoms).flatten(1)).view_as(atoms))
            for each in layers:
                each[name].coefficients.copy_(coefficients[name])


def gauge_bounds(a: nn.Module, b: nn.Module, condition: float = 10.0) -> dict[str, tuple[float, float]]:
    """Compute the least and greatest cosine of atoms over gauges, which change the function of neither network.

    The gauges are all M, the same for both networks, whose greatest singular value is at most ``condition`` times the
    least. Both bounds are attained by a gauge. They are found by a search from many starts (:func:`extremes`), which
    is no proof that nothing lies outside. Measured on random atoms at condition 1000: three times as many starts
    improved no bound by more than 1e-9 (120 pairs of networks), and gradient ascents over M from 24 random starts each
    none at all (20 pairs). Least values above 0 and greatest ones below 0 have a proof, and were within 1e-10 of it at
    conditions 10 to 1000 (60 values each). One 3×3 layer takes less than a second of one CPU core.

    Args:
        a: An atomized network.
        b: Another one with the same coefficients.
        condition: Largest condition number of M, at least 1. At 1, both bounds are the cosine of the present atoms.

    Returns:
        Layer -> least and greatest cosine. Layers of 1×1 convolutions are left out.

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
        u, v = (_in_double(each[name].atoms).flatten(1) for each in layers)
        if not u.any() or not v.any():
            raise NotComparable(name, "all atoms of one network are zero, so there is no cosine")
        least, greatest = (cosine(u, v, p) for p in extremes(u, v, condition))
        bounds[name] = (least, greatest)
    if not bounds:
        raise ValueError("all convolutions with atoms are 1×1, whose atoms are numbers")
    return bounds


def cosine(u: Tensor, v: Tensor, p: Tensor) -> float:
    """Compute the cosine of atoms in the gauge M with ``p = MᵀM``.

    Args:
        u: Atoms of a network, ``(m, kh·kw)``.
        v: Atoms of another, ``(m, kh·kw)``.
        p: The symmetric positive definite matrix, ``(m, m)``.

    Returns:
        ``⟨Mu, Mv⟩ / (‖Mu‖ ‖Mv‖)``.
    """
    return ((p * (u @ v.T)).sum() / ((p * (u @ u.T)).sum() * (p * (v @ v.T)).sum()).sqrt()).item()


def extremes(u: Tensor, v: Tensor, condition: float) -> tuple[Tensor, Tensor]:
    """Find the gauges with the least and the greatest cosine of atoms.

    In a gauge with ``P = MᵀM`` the cosine is ``⟨P, C⟩ / √(⟨P, A⟩⟨P, B⟩)``, where ``A = u uᵀ``, ``B = v vᵀ`` and C is
    the symmetric part of ``u vᵀ``. As ``√(x y)`` is the least ``(s x + y / s) / 2`` over s > 0, a positive cosine is
    the greatest ``⟨P, C⟩ / ⟨P, s A + B / s⟩ · 2`` over s. For given s this is a ratio of linear functions of P, and
    Dinkelbach's method finds its extremes over all P with eigenvalues between 1 and ``condition²``. What remains is a
    search in one dimension, over s; least and greatest may be exchanged by Sion's theorem. Negative cosines are those
    of ``−v``.

    Args:
        u: Atoms of a network, ``(m, kh·kw)``, float64, not all zero.
        v: Atoms of another, ``(m, kh·kw)``, float64, not all zero.
        condition: Largest condition number of M.

    Returns:
        P of the least, and P of the greatest cosine, ``(m, m)``.
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
    """P of the greatest ratio, if it is not negative: the greatest over s of the greatest over P."""
    count = max(GRID, math.ceil(GRID * math.log10(bound) / 2))
    scales = _grid(-math.log(bound) / 2, math.log(bound) / 2, a, count)
    found = _of_scales(scales, a, b, c, bound)[1]
    for _ in range(ALTERNATIONS):
        before, (scales, found) = scales, _distinct(_best_scale(found, a, b), found)
        if len(scales) == len(before) and bool(((scales - before).abs() < SAME).all()):
            break
        found = _of_scales(scales, a, b, c, bound, start=found, steps=1)[1]
    values, found = _of_scales(scales, a, b, c, bound)
    best = scales[values.argmax()].item()
    width = math.log(bound) / GRID
    for _ in range(ZOOMS):
        scales = _grid(best - width, best + width, a)
        values, found = _of_scales(scales, a, b, c, bound)
        best, width = scales[values.argmax()].item(), 4 * width / GRID
    return found[values.argmax()]


def _least_positive(a: Tensor, b: Tensor, c: Tensor, bound: float) -> Tensor:
    """P of the least ratio, if it is positive: the greatest over s, which is one hill, of the least over P."""
    middle, width = 0.0, math.log(bound) / 2
    for _ in range(ZOOMS):
        scales = _grid(middle - width, middle + width, a)
        values, found = _of_scales(scales, a, b, c, bound, least=True)
        middle, width = scales[values.argmax()].item(), 4 * width / GRID
    return _between(found[0], found[-1], middle, a, b)


def _between(first: Tensor, last: Tensor, scale: float, a: Tensor, b: Tensor) -> Tensor:
    """The P on a segment whose own best scale is this: where the least jumps, it is a mixture of both sides."""
    gaps = [_best_scale(p[None], a, b).item() - scale for p in (first, last)]
    if gaps[0] * gaps[1] >= 0:
        return min((first, last), key=lambda p: abs(_best_scale(p[None], a, b).item() - scale))
    # exp(2 scale) ⟨P, A⟩ − ⟨P, B⟩ is linear along the segment.
    ends = [(math.exp(2 * scale) * (p * a).sum() - (p * b).sum()).item() for p in (first, last)]
    share = ends[0] / (ends[0] - ends[1])
    return (1 - share) * first + share * last


def _grid(low: float, high: float, like: Tensor, count: int = GRID) -> Tensor:
    return torch.linspace(low, high, count, dtype=like.dtype)


def _distinct(scales: Tensor, found: Tensor) -> tuple[Tensor, Tensor]:
    """The scales in order, without those that almost equal the one before, and their P."""
    scales, order = scales.sort()
    kept = torch.cat([torch.ones(1, dtype=torch.bool), scales.diff() > SAME])
    return scales[kept], found[order][kept]


def _best_scale(p: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The logarithm of the s at which ``(s x + y / s) / 2`` is ``√(x y)``, for each P."""
    return ((p * b).sum((-2, -1)) / (p * a).sum((-2, -1))).log() / 2


def _of_scales(
    scales: Tensor, a: Tensor, b: Tensor, c: Tensor, bound: float, least: bool = False, start: Tensor | None = None,
    steps: int = 50,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Extremes over P of ``⟨P, C⟩ / ⟨P, E⟩`` for each s, by Dinkelbach's method from a start: values and P."""
    s = scales.exp()[:, None, None]
    e = (s * a + b / s) / 2
    p = torch.eye(len(c), dtype=c.dtype) if start is None else start
    ratio = (p * c).sum((-2, -1)) / (p * e).sum((1, 2))
    sign = -1 if least else 1
    for _ in range(steps):
        p = _extreme(sign * (c - ratio[:, None, None] * e), bound)
        following = (p * c).sum((1, 2)) / (p * e).sum((1, 2))
        done = bool((sign * (following - ratio) <= 1e-14).all())  # each step improves, quadratically near the end
        ratio = following
        if done:
            break
    return ratio, p


def _extreme(matrix: Tensor, bound: float) -> Tensor:
    """The P with the greatest product: ``bound`` on the eigenspace of positive eigenvalues, 1 on the rest."""
    values, vectors = torch.linalg.eigh(matrix)
    chosen = torch.ones_like(values).masked_fill(values > 0, bound)
    return (vectors * chosen[..., None, :]) @ vectors.mT


def _in_double(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().double()


def _check_shared(layers: Sequence[dict[str, AtomConv2d]]) -> None:
    check_same_layers(layers)
    for other in layers[1:]:
        for name, conv in layers[0].items():
            if not torch.equal(conv.coefficients.detach().cpu(), other[name].coefficients.detach().cpu()):
                raise NotComparable(name, "the coefficients differ, so there is no common gauge; share_coefficients")


def _check_own(layers: Sequence[dict[str, AtomConv2d]]) -> None:
    """Check that layers of different names have parameters of their own, because each layer has its own M."""
    owners: dict[int, str] = {}
    for each in layers:
        for name, conv in each.items():
            for parameter in (conv.atoms, conv.coefficients):
                owner = owners.setdefault(id(parameter), name)
                if owner != name:
                    raise ValueError(f"layers {owner!r} and {name!r} share a parameter, so neither has its own gauge")


def _to_orthonormal_coefficients(name: str, conv: AtomConv2d) -> Tensor:
    """M with orthonormal ``α M⁻¹``: the positive square root of ``αᵀα``."""
    return _scaling(name, conv.coefficients.detach().flatten(0, 1), "columns of the coefficients")


def _to_orthonormal_atoms(name: str, conv: AtomConv2d) -> Tensor:
    """M with orthonormal rows of ``M D``: the inverse of the positive square root of ``D Dᵀ``."""
    return torch.linalg.inv(_scaling(name, conv.atoms.detach().flatten(1).T, "atoms of the reference"))


def _scaling(name: str, columns: Tensor, what: str) -> Tensor:
    _, values, right = torch.linalg.svd(_in_double(columns), full_matrices=False)
    rank = int((values > values.max() * share_of_rounding(columns.dtype)).sum())
    if rank < columns.shape[1]:
        raise ValueError(
            f"layer {name!r}: only {rank} of {columns.shape[1]} {what} are linearly independent; start from a network "
            f"in which this layer has fewer atoms: atomize(model, atoms={max(1, rank)}, layers=[{name!r}]), and name "
            "the other layers in another call"
        )
    return (right.T * values) @ right
