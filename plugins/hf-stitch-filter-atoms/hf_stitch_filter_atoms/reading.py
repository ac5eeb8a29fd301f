"""Helpers of the filter atom metrics: find convolutions, describe them, and check that two are comparable."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from hf_stitch.metrics import NotComparable
from hf_stitch.statistics import Weights
from hf_stitch.statistics.spectrum import ROUNDINGS
from hf_stitch_filter_atoms.atomizing import atomized
from hf_stitch_filter_atoms.convolution import AtomConv2d, base_class

ADVICE = {
    "coefficients": (
        "the atom coefficients differ, so that their atoms are unrelated; train the atoms of both networks from a "
        "common start (train_atoms_only), or call share_coefficients"
    ),
    "dtype": (
        "the dtypes differ ({}), and rounding error alone makes the atom coefficients differ; convert a copy of each "
        "network to the narrower dtype"
    ),
    "covariance": "the patch covariances differ; read both networks with the same file",
    "bias": (
        "only one has a bias; if batch normalization was folded into it, fold it into both networks or into neither"
    ),
}
"""Property -> advice if it differs; of several properties, the last one counts."""


def rounding_share(dtype: torch.dtype) -> float:
    """Return the threshold for singular values, relative to the largest, below which they are rounding error."""
    return max(1e-6, ROUNDINGS * torch.finfo(dtype).eps)


def spatial(model: nn.Module) -> dict[str, AtomConv2d]:
    """Return the convolutions with atoms, except 1×1 convolutions (their atoms are scalars).

    Args:
        model: An atomized network.

    Returns:
        Name -> convolution.

    Raises:
        ValueError: If the network does not have such convolutions.
    """
    convs = {name: conv for name, conv in atomized(model).items() if conv.kernel_size != (1, 1)}
    if not convs:
        raise ValueError("all convolutions with atoms are 1×1, with scalar atoms")
    return convs


def convolutions(model: nn.Module) -> dict[str, nn.Conv2d]:
    """Return all convolutions, plain or with atoms.

    Args:
        model: A network.

    Returns:
        Name -> convolution.

    Raises:
        ValueError: If the network does not have convolutions.
    """
    convs = {name: module for name, module in model.named_modules() if isinstance(module, nn.Conv2d)}
    if not convs:
        raise ValueError(f"{type(model).__name__} must have a convolution (nn.Conv2d)")
    return convs


def in_double(tensor: Tensor) -> Tensor:
    """Copy a tensor to the CPU in float64, detached.

    Args:
        tensor: Any floating point tensor.

    Returns:
        The copy.
    """
    return tensor.detach().to("cpu", torch.float64, copy=True)


def shape_of(conv: nn.Conv2d, **extra: str) -> str:
    """Return the properties of a convolution that a comparable one must share, as JSON.

    Args:
        conv: A convolution.
        **extra: Further properties, for example ``coefficients``.

    Returns:
        Names and values of the properties.
    """
    kind = base_class(conv) if isinstance(conv, AtomConv2d) else type(conv)
    properties = {
        "class": kind.__name__,
        "channels": f"{conv.in_channels} -> {conv.out_channels}",
        "kernel": _times(conv.kernel_size),
        "stride": _times(conv.stride),
        "padding": conv.padding if isinstance(conv.padding, str) else _times(conv.padding),
        "padding mode": conv.padding_mode,
        "dilation": _times(conv.dilation),
        "groups": str(conv.groups),
        "bias": "no" if conv.bias is None else "yes",
    }
    return json.dumps({**properties, **extra})


def hash_of(tensor: Tensor) -> str:
    """Compute a hash of the shape and values of a tensor, independent of the dtype.

    Args:
        tensor: Any floating point tensor.

    Returns:
        16 hexadecimal digits.
    """
    values = in_double(tensor).contiguous()
    digest = hashlib.sha256(str(tuple(values.shape)).encode())
    digest.update(values.view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def check_shared(x: Weights, y: Weights) -> None:
    """Check that two layers agree in all shared properties, and are finite.

    Args:
        x: Reading of a layer.
        y: Reading of a second layer.

    Raises:
        NotComparable: If a property differs, or a value is not finite; the message has the property and advice.
    """
    left, right = json.loads(x.shared), json.loads(y.shared)
    differing = {name for name in left.keys() | right.keys() if left.get(name) != right.get(name)}
    shapes = sorted(name for name in differing if name not in ADVICE)
    if shapes:
        both = ", ".join(f"{name} {left.get(name)} v. {right.get(name)}" for name in shapes)
        raise NotComparable(x.layer, f"the convolutions differ ({both}); compare networks of one architecture")
    _check_finite(x, y)
    if differing <= {"dtype"}:  # then the values are equal
        return
    name = next(name for name in reversed(ADVICE) if name in differing)
    raise NotComparable(x.layer, ADVICE[name].format(f"{left.get(name)} v. {right.get(name)}"))


def cosine(layer: str, x: Tensor, y: Tensor) -> float:
    """Compute the cosine of two tensors of one shape.

    Args:
        layer: Name of the layer, for the message.
        x: A tensor of finite numbers.
        y: A second tensor.

    Returns:
        The inner product divided by the norms, in float64.

    Raises:
        NotComparable: If a tensor is zero.
    """
    return _unit(layer, x).dot(_unit(layer, y)).item()


def angle(layer: str, x: Tensor, y: Tensor) -> float:
    """Compute the angle between two tensors of one shape; unlike with ``arccos``, small angles are exact.

    Args:
        layer: Name of the layer, for the message.
        x: A tensor of finite numbers.
        y: A second tensor.

    Returns:
        The angle, between 0 and π.

    Raises:
        NotComparable: If a tensor is zero.
    """
    u, v = _unit(layer, x), _unit(layer, y)
    return 2 * torch.atan2((u - v).norm(), (u + v).norm()).item()


def _check_finite(x: Weights, y: Weights) -> None:
    for which, side in (("first", x), ("second", y)):
        for name, tensor in side.tensors.items():
            if not tensor.isfinite().all():
                raise NotComparable(side.layer, f"the {name} of the {which} network contains NaN or infinity")


def _unit(layer: str, x: Tensor) -> Tensor:
    flat = x.double().flatten()
    norm = flat.norm()
    if not norm > 0:
        raise NotComparable(layer, "the weights of one network are zero, so that the cosine is undefined")
    return flat / norm


def _times(numbers: Iterable[int]) -> str:
    return "×".join(map(str, numbers))
