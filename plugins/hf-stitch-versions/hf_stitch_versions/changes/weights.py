"""Effective weights of a network, in any storage format, and differences between two versions of them."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils import parametrize, prune
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

Weights = Mapping[str, Tensor]
"""Name of a parameter -> its value, floating point, with the outputs of a linear map as the first axis."""

GRIDS = {"int4": 15, "int8": 255}
"""Recognised integer formats -> largest multiple of a scale."""

GROUPS = {"matrix": None, "row": 0, "column": -1, "group of 128": 128, "group of 64": 64, "group of 32": 32}
"""Groups of numbers that may share a scale -> their size; 0: a row, -1: a column, ``None``: all."""

DTYPES = (torch.float8_e4m3fn, torch.bfloat16, torch.float16)
"""Recognised floating-point formats."""

MOST = 0.99
"""Share of numbers in a quantized matrix above which it counts as rounded to nearest; the rest are clipped."""

ENDS = ("_orig", "_mask", "_g", "_v", "_u")
"""Suffixes of the tensors that hooks combine into a weight."""

FEW = 8
"""Minimum length of columns with a recognised scale: in shorter ones, any number may be its own multiple."""

ROWS = 64
"""Number of rows inspected to recognise the format of a matrix, plus the row of the largest number."""

EXACTLY = 1e-6
"""Minimum gap between numbers of a quantized format, relative to the largest; smaller gaps are rounding errors."""


def effective(model: nn.Module) -> dict[str, Tensor]:
    """Return the effective weights of a network, by their names in the plain network.

    PEFT adapters are merged, quantized weights dequantized, parametrisations and pruning masks applied, and weights
    that a layer computes as a property are evaluated. Plain weights are not copied. Tied weights have all their names.
    Running statistics of norms count as weights.
    """
    weights: dict[str, Tensor] = {}
    inside: set[str] = set()
    for name, module in model.named_modules(remove_duplicate=False):
        if any(name.startswith(f"{outer}.") for outer in inside):
            continue
        prefix = f"{plain(name)}." if name else ""
        if module is not model and (merged := _merged(module)) is not None:
            inside.add(name)
            weights |= {prefix + key: value for key, value in effective(merged).items()}
            continue
        if parametrize.is_parametrized(module):
            inside.add(f"{name}.parametrizations" if name else "parametrizations")
        weights |= {prefix + key: value for key, value in _own(module)}
    return weights


def dense(module: nn.Module) -> nn.Module:
    """Return a copy of a module with plain weights, which can be changed: merged, dequantized, without masks."""
    copied = copy.deepcopy(module)
    layer = _merged(copied) if not _packed(copied) else _linear(copied, copied)
    if layer is not None:
        return dense(layer)
    if parametrize.is_parametrized(copied):  # removing them would change the weights of the original
        values = {name: getattr(copied, name).detach() for name in _made(copied)}
        copied.__class__ = parametrize.type_before_parametrizations(copied)
        del copied._modules["parametrizations"]
        for name, value in values.items():
            copied.register_parameter(name, nn.Parameter(value, requires_grad=False))
    for key, (name, value) in _hooked(copied).items():
        del copied._forward_pre_hooks[key]
        for end in ENDS:
            copied._parameters.pop(f"{name}{end}", None)
            copied._buffers.pop(f"{name}{end}", None)
        vars(copied).pop(name, None)
        copied.register_parameter(name, nn.Parameter(value, requires_grad=False))
    if _composed(copied):
        _decompose(copied)
    for name, child in copied.named_children():
        setattr(copied, name, dense(child))
    return copied


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a network by their plain names; tied tensors have all their names."""
    buffers = {plain(name): value for name, value in model.named_buffers(remove_duplicate=False)}
    return buffers | {plain(name): value for name, value in model.named_parameters(remove_duplicate=False)}


def key_of(value: Tensor) -> tuple[int, torch.Size]:
    """Return a key that is equal for tied weights."""
    return value.data_ptr(), value.shape


def plain(name: str) -> str:
    """Return the name of a module or parameter in the plain network, without wrappers."""
    parts = [part for part in name.split(".") if part not in ("base_layer", "_orig_mod")]
    return ".".join(parts)


def _merged(module: nn.Module) -> nn.Module | None:
    """Return the plain layer equivalent to a PEFT layer; ``None`` for modules of other kinds."""
    if hasattr(module, "modules_to_save") and hasattr(module, "original_module"):
        saved: Any = module  # a module that PEFT trains whole
        active = None if saved.disable_adapters else next(iter(saved.active_adapters), None)
        active_module: nn.Module = saved.original_module if active is None else saved.modules_to_save[active]
        return active_module
    base = getattr(module, "base_layer", None)
    if not (hasattr(module, "get_base_layer") and hasattr(module, "merge")):
        return _linear(module, base) if isinstance(base, nn.Module) and hasattr(base, "in_features") else None
    copied: Any = copy.deepcopy(module)
    if not copied.merged and not copied.disable_adapters:
        copied.merge()
    layer: nn.Module = copied.get_base_layer()
    return layer


def _linear(module: nn.Module, base: Any) -> nn.Linear:
    """Return the linear layer equivalent to a wrapper around a linear layer."""
    weight = computed(module, base.in_features)
    bias = base.bias() if callable(base.bias) else base.bias
    layer = nn.Linear(base.in_features, len(weight), bias=bias is not None)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach().clone(), requires_grad=False)
    return layer


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a module, without its submodules."""
    is_transposed = type(module).__name__ == "Conv1D"  # of transformers: inputs are the first axis
    made_by_hooks = dict(_hooked(module).values())
    hidden = {f"{name}{end}" for name in made_by_hooks for end in ENDS}
    names = dict.fromkeys([*module._parameters, *module._buffers, *_made(module)])
    for name in ("bias", "weight") if _composed(module) else names:
        if name in hidden or name in module._non_persistent_buffers_set:
            continue
        value = made_by_hooks[name] if name in made_by_hooks else getattr(module, name)
        value = value() if callable(value) and not isinstance(value, Tensor) else value
        if isinstance(value, Tensor) and (dense := _dense(module, name, value)) is not None:
            yield name, dense.T if is_transposed and dense.dim() == 2 else dense


def _made(module: nn.Module) -> list[str]:
    """Return the names of computed weights of a module: parametrised, pruned, normalised, or packed as integers."""
    parametrizations = getattr(module, "parametrizations", None) if parametrize.is_parametrized(module) else None
    names = [name for name, _ in parametrizations.named_children()] if isinstance(parametrizations, nn.Module) else []
    return [*names, *dict(_hooked(module).values()), *(["weight", "bias"] if _packed(module) else [])]


def _composed(module: nn.Module) -> bool:
    """Return whether a linear layer or a convolution computes its weight from other parameters, as a property."""
    lacks_weight = isinstance(module, (nn.Linear, _ConvNd)) and "weight" not in module._parameters
    return lacks_weight and isinstance(getattr(type(module), "weight", None), property)


def _decompose(module: Any) -> None:
    """Turn a layer with a computed weight, in place, into its base class with the weight as a parameter."""
    weight, bias = module.weight.detach(), module.bias
    classes = type(module).__mro__
    definer = next(index for index, class_ in enumerate(classes) if "weight" in vars(class_))
    module.__class__ = classes[definer + 1]
    module._parameters.clear()
    module.register_parameter("weight", nn.Parameter(weight, requires_grad=False))
    module.register_parameter("bias", bias)


@torch.no_grad()
def _hooked(module: nn.Module) -> dict[int, tuple[str, Tensor]]:
    """Return the weights that hooks compute before each forward: pruning masks, weight and spectral norms."""
    weights = {}
    for key, hook in module._forward_pre_hooks.items():
        method: Any = hook
        if isinstance(hook, prune.BasePruningMethod):
            weights[key] = method._tensor_name, method.apply_mask(module).detach()
        elif isinstance(hook, WeightNorm):
            weights[key] = method.name, method.compute_weight(module).detach()
        elif isinstance(hook, SpectralNorm):
            weights[key] = method.name, method.compute_weight(module, do_power_iteration=False).detach()
    return weights


def packed(module: nn.Module) -> bool:
    """Return whether a module contains quantized linear layers, which may quantize their inputs as well."""
    return any(_packed(submodule) for submodule in module.modules())


def _packed(module: nn.Module) -> bool:
    """Return whether a module is a quantized linear layer of PyTorch; its weights are not parameters."""
    return type(module).__module__.startswith("torch.ao.nn.") and callable(getattr(module, "weight", None))


def integers(model: nn.Module) -> tuple[float, list[str]]:
    """Return the share of the weights of a network that are stored as integers, and the classes that store them."""
    integer_count, total, classes = 0, 0, list[str]()
    for module in model.modules():
        for name, value in _own(module):
            stored: Tensor | None = module._parameters.get(name)
            stored = module._buffers.get(name) if stored is None else stored
            total += value.numel()
            if _packed(module) if stored is None else _is_quantized(stored) or not stored.is_floating_point():
                integer_count += value.numel()
                classes.append(type(stored if stored is not None and _is_quantized(stored) else module).__name__)
    return integer_count / total if total else 0.0, classes


def _is_quantized(value: Tensor) -> bool:
    """Return whether a tensor is quantized."""
    is_subclass = type(value) not in (Tensor, nn.Parameter) and hasattr(value, "dequantize")
    return is_subclass or value.is_quantized


def dequantized(value: Tensor) -> Tensor:
    """Return a tensor, dequantized if it is quantized."""
    value = value.detach()
    return value.dequantize() if _is_quantized(value) else value


@torch.no_grad()
def _dense(module: nn.Module, name: str, value: Tensor) -> Tensor | None:
    """Return a weight as dense numbers; ``None`` for integers that are not a weight."""
    value = dequantized(value)
    if not value.is_floating_point() and name == "weight" and hasattr(module, "in_features"):
        return computed(module, module.in_features)
    return value if value.is_floating_point() else None


@torch.no_grad()
def computed(module: nn.Module, width: Any) -> Tensor:
    """Return the matrix of a linear layer from its outputs: for each unit vector, minus the output for zero."""
    device = next((value.device for value in (*module.parameters(), *module.buffers())), torch.device("cpu"))
    rows = torch.cat([torch.eye(width, device=device), torch.zeros(1, width, device=device)])
    outputs: Tensor = module(rows)
    return (outputs[:-1] - outputs[-1]).T.contiguous()


# -- how two versions differ ------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class WeightChange:
    """Change of the weights of a part, measured without data.

    Attributes:
        count: Number of common weights.
        change: Norm of the difference over the norm of the first network's weights. Weights of only one network count
            as change.
        cosine: Cosine of all weights of both, as one vector each.
        rank: Effective rank of the change (Roy and Vetterli 2007: the exponential of the entropy of the normalised
            singular values), over the largest possible rank; mean over matrices, weighted by the squared norm of their
            change. NaN without a change of a matrix.
        rows: Share of the rows of matrices that differ.
        format: Quantized format of the second network's matrices, such as ``int8 by row``; empty if not recognised.
        rounding: Whether the matrices are the first network's matrices, rounded to this format.
        alone: Share of ``change`` in weights of only one network: their norm over the same norm.
    """

    count: int
    change: float
    cosine: float
    rank: float
    rows: float
    format: str
    rounding: bool
    alone: float = 0.0


@dataclass
class Distance:
    """Sums over all weights of two networks: squares of the difference and of each network, and products."""

    both: float = 0.0  # squared differences of common weights
    alone: float = 0.0  # squared weights of only one network
    size: float = 0.0
    other: float = 0.0
    product: float = 0.0

    def add(self, x: Tensor, y: Tensor, alone: Tensor) -> None:
        """Add a weight from :func:`aligned`."""
        gap = y - x
        self.both += float(gap[~alone].square().sum())
        self.alone += float(gap[alone].square().sum())
        self.size, self.other = self.size + float(x.square().sum()), self.other + float(y.square().sum())
        self.product += float((x * y).sum())

    def over(self, gap: float) -> float:
        """Return the norm of a difference over the norm of the weights of the first network."""
        return math.sqrt(gap / self.size) if self.size else (0.0 if gap == 0 else math.inf)

    @property
    def change(self) -> float:
        """Norm of the difference over the norm of the weights of the first network."""
        return self.over(self.both + self.alone)

    @property
    def cosine(self) -> float:
        """Cosine of all weights of both networks."""
        return self.product / math.sqrt(self.size * self.other) if self.size and self.other else math.nan


def aligned(
    a: Weights, b: Weights, sides: tuple[str, str] = ("the first network", "the second network")
) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:  # fmt: skip
    """Yield the weights of two networks padded to the same shape, in float64: missing weights are zeros.

    Weights with the same name and different shapes, such as embeddings with added tokens, are aligned at their first
    rows and columns.

    Yields:
        The name, both weights, and a mask of the entries of only one network: in their shape, or a scalar.

    Raises:
        ValueError: If a weight is not finite.
    """
    for name in dict.fromkeys((*a, *b)):
        x, y = a.get(name), b.get(name)
        for side, value in zip(sides, (x, y), strict=True):
            if value is not None and not bool(value.isfinite().all()):
                raise ValueError(f"{name} of {side} contains values that are not finite, so its change is not defined")
        if x is None or y is None or x.dim() != y.dim():
            if x is not None:
                yield name, x.double(), torch.zeros_like(x, dtype=torch.float64), x.new_tensor(True, dtype=torch.bool)
            if y is not None:
                yield name, torch.zeros_like(y, dtype=torch.float64), y.double(), y.new_tensor(True, dtype=torch.bool)
        elif x.shape == y.shape:
            yield name, x.double(), y.to(x.device).double(), x.new_tensor(False, dtype=torch.bool)
        else:
            shape = [max(sizes) for sizes in zip(x.shape, y.shape, strict=True)]
            padded, alone = x.new_zeros(2, *shape, dtype=torch.float64), x.new_ones(shape, dtype=torch.bool)
            padded[0][_places(x)], padded[1][_places(y)] = x.double(), y.to(x.device).double()
            alone[tuple(slice(min(sizes)) for sizes in zip(x.shape, y.shape, strict=True))] = False
            yield name, padded[0], padded[1], alone


def _places(value: Tensor) -> tuple[slice, ...]:
    """Return the slices of a tensor in a larger one."""
    return tuple(map(slice, value.shape))


def weight_change(a: Weights, b: Weights) -> WeightChange:
    """Compare weights by name; weights of only one network count as change.

    Args:
        a: Weights of the first network.
        b: Weights of the second network.

    Returns:
        How much they differ.

    Raises:
        ValueError: If no weight has the same name, or a weight is not finite.

    Example:
        >>> one = {"w": torch.eye(4)}
        >>> change = weight_change(one, {"w": torch.eye(4) + 0.1 * torch.ones(4, 4)})
        >>> round(change.change, 3), round(change.rank, 3), change.rows
        (0.2, 0.25, 1.0)
    """
    if not any(name in b for name in a):
        raise ValueError(
            "expected versions of one network, but no weights have the same name. Compare activations with "
            "hf_stitch.compare"
        )
    distance, count = Distance(), 0
    ranks, energies, changed, rows = list[float](), list[float](), 0, 0
    for _, x, y, alone in aligned(a, b):
        distance.add(x, y, alone)
        count += int((~alone).expand_as(x).sum())
        if x.dim() > 1:
            matrix = (y - x).flatten(1)
            different = matrix.any(1)
            changed, rows = changed + int(different.sum()), rows + len(matrix)
            if bool(different.any()):
                ranks.append(update_rank_of(matrix))
                energies.append(float(matrix.square().sum()))
    matrices = {n: (x, b[n]) for n, x in a.items() if n in b and x.shape == b[n].shape and x.dim() > 1}
    format_, rounding = _rounding(matrices)
    total = sum(energies)
    return WeightChange(
        count, distance.change, distance.cosine,
        sum(rank * energy for rank, energy in zip(ranks, energies, strict=True)) / total if total else math.nan,
        changed / rows if rows else math.nan,
        format_, rounding, distance.over(distance.alone),
    )  # fmt: skip


def update_rank_of(matrix: Tensor) -> float:
    """Return the effective rank of a matrix (float64) over the largest possible rank."""
    gram = matrix.T @ matrix if matrix.shape[0] > matrix.shape[1] else matrix @ matrix.T
    values = torch.linalg.eigvalsh(gram).clamp(min=0).sqrt()
    return float(torch.special.entr(values / values.sum()).sum().exp()) / min(matrix.shape)


# -- rounding ---------------------------------------------------------------------------------------------------------
def _rounding(pairs: Mapping[str, tuple[Tensor, Tensor]]) -> tuple[str, bool]:
    """Return the quantized format of the second matrices, and whether they are the rounded first ones."""
    differing = [(x, y) for x, y in pairs.values() if bool(y.any()) and not torch.equal(x, y.to(x))]
    if not differing:
        return "", False
    for dtype in DTYPES:
        if all(torch.equal(y.to(dtype).to(y), y) for _, y in differing):
            equal = all(torch.equal(x.to(dtype).float(), y.to(x.device).float()) for x, y in differing)
            return str(dtype).removeprefix("torch."), equal
    formats = [_integers(x.to(y.device), y) for x, y in differing]
    if not all(formats):
        return "", False
    labels, group_names, are_rounded = zip(*filter(None, formats), strict=True)
    return f"{' and '.join(sorted({*labels}))} by {' or '.join(dict.fromkeys(group_names))}", all(are_rounded)


def _integers(x: Tensor, y: Tensor) -> tuple[str, str, bool] | None:
    """Return the integer format of a matrix, its groups with a common scale, and whether it is the rounded first one.

    The largest groups come first: rows of int8 with one scale may have few levels each, like rows of int4.
    """
    for group_name, size in GROUPS.items():
        rows_a, rows_b = ((matrix.flatten(1).T if size == -1 else matrix.flatten(1)) for matrix in (x, y))
        if size == -1 and rows_b.shape[1] < FEW:
            continue
        largest = rows_b.abs().amax(1).argmax()
        sample_a, sample_b = (torch.cat([matrix[:ROWS], matrix[largest][None]]).double() for matrix in (rows_a, rows_b))
        for label, levels in GRIDS.items():
            if (step := _step(_grouped(sample_b, size), levels)) is not None:
                return label, group_name, _nearest(_grouped(sample_a, size), _grouped(sample_b, size), step)
    return None


def _nearest(x: Tensor, y: Tensor, step: Tensor) -> bool:
    """Return whether ``y`` is ``x`` rounded: nearly all numbers to the nearest, with clipped ends."""
    error = (x - y).abs() / step
    return bool((error <= 1.01).all()) and float((error <= 0.51).double().mean()) > MOST


def _grouped(rows: Tensor, size: int | None) -> Tensor:
    """Return rows of a matrix, split into groups of numbers that may share a scale."""
    if size is None:
        return rows.reshape(1, -1)
    return rows.reshape(-1, size) if size > 0 and rows.shape[1] % size == 0 else rows


def _step(groups: Tensor, levels: int) -> Tensor | None:
    """Return the step of each group, if its numbers are small multiples of a step; else ``None``."""
    if groups.shape[1] == 1:  # one number is a multiple of itself
        return groups.abs().clamp(min=EXACTLY)
    sorted_values = groups.sort(1).values
    gaps = sorted_values.diff(dim=1)
    largest = groups.abs().amax(1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    smallest_gap = gaps.where(gaps > EXACTLY * largest, torch.inf).amin(1, keepdim=True)
    step = torch.full_like(smallest_gap, torch.nan)
    full_range = (largest / (levels // 2 + low) for low in (0, 1))  # the largest number is the last of the format
    for candidate in (*(smallest_gap / part for part in (1, 2, 3, 4)), *full_range):
        multiples = groups / candidate
        are_multiples = ((multiples - multiples.round()).abs() < 0.01).all(1, keepdim=True)
        fits = are_multiples & (multiples.abs().amax(1, keepdim=True) <= levels)
        step = torch.where(step.isnan() & fits, candidate, step)
    zero = groups.abs().amax(1, keepdim=True) == 0
    step = step.masked_fill(zero, 1.0)
    return None if bool(step.isnan().any()) else step
