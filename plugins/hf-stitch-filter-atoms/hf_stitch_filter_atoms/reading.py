"""What metrics of filter atoms read of convolutions, and what must agree between two of them."""

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
        "the atom coefficients differ, so their atoms have no relation; train the atoms of both networks from a common "
        "one (train_atoms_only), or call share_coefficients"
    ),
    "dtype": (
        "the dtypes differ ({}), and rounding alone makes the atom coefficients differ; convert a copy of each network "
        "to the narrower dtype"
    ),
    "covariance": "they were read with different patch covariances; read both with the same file",
    "bias": (
        "only one has a bias; if batch normalization was folded into it, fold it into both networks or into neither"
    ),
}
"""Property -> what to say if it differs; of several, the last."""


def share_of_rounding(dtype: torch.dtype) -> float:
    """Return the share of the largest singular value of parameters below which others are rounding of their dtype."""
    return max(1e-6, ROUNDINGS * torch.finfo(dtype).eps)


def spatial(model: nn.Module) -> dict[str, AtomConv2d]:
    """Find the convolutions with atoms, except 1×1, whose atoms are numbers.

    Args:
        model: An atomized network.

    Returns:
        Name -> convolution.

    Raises:
        ValueError: If there is none.
    """
    found = {name: conv for name, conv in atomized(model).items() if conv.kernel_size != (1, 1)}
    if not found:
        raise ValueError("all convolutions with atoms are 1×1, whose atoms are numbers")
    return found


def convolutions(model: nn.Module) -> dict[str, nn.Conv2d]:
    """Find all convolutions, plain or with atoms.

    Args:
        model: A network.

    Returns:
        Name -> convolution.

    Raises:
        ValueError: If there is none.
    """
    found = {name: module for name, module in model.named_modules() if isinstance(module, nn.Conv2d)}
    if not found:
        raise ValueError(f"{type(model).__name__} has no convolution (nn.Conv2d)")
    return found


def in_double(tensor: Tensor) -> Tensor:
    """Copy a tensor to the CPU in float64, detached.

    Args:
        tensor: Any floating point tensor.

    Returns:
        The copy.
    """
    return tensor.detach().to("cpu", torch.float64, copy=True)


def shape_of(conv: nn.Conv2d, **more: str) -> str:
    """Describe what two convolutions must have in common, as JSON.

    Args:
        conv: A convolution.
        **more: More properties, for example ``coefficients``.

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
    return json.dumps({**properties, **more})


def hash_of(tensor: Tensor) -> str:
    """Compute a hash of the shape and values of a tensor, which is the same for all dtypes that hold these values.

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
    """Check that two layers agree in everything that they must share, and are finite.

    Args:
        x: What was read of a layer.
        y: The same of another.

    Raises:
        NotComparable: A property differs, or a number is not finite; the message names it and says what to do.
    """
    left, right = json.loads(x.shared), json.loads(y.shared)
    odd = {name for name in left.keys() | right.keys() if left.get(name) != right.get(name)}
    shapes = sorted(name for name in odd if name not in ADVICE)
    if shapes:
        both = ", ".join(f"{name} {left.get(name)} v. {right.get(name)}" for name in shapes)
        raise NotComparable(x.layer, f"the convolutions differ ({both}); compare networks of one architecture")
    _check_finite(x, y)
    if odd <= {"dtype"}:  # then the values are the same
        return
    name = next(name for name in reversed(ADVICE) if name in odd)
    raise NotComparable(x.layer, ADVICE[name].format(f"{left.get(name)} v. {right.get(name)}"))


def cosine(layer: str, x: Tensor, y: Tensor) -> float:
    """Compute the cosine of two tensors of one shape.

    Args:
        layer: Name of the layer, for the message.
        x: A tensor of finite numbers.
        y: Another one.

    Returns:
        Their inner product over their norms, in float64.

    Raises:
        NotComparable: If one is zero.
    """
    return _unit(layer, x).dot(_unit(layer, y)).item()


def angle(layer: str, x: Tensor, y: Tensor) -> float:
    """Compute the angle between two tensors of one shape; small angles are exact too, unlike those of ``arccos``.

    Args:
        layer: Name of the layer, for the message.
        x: A tensor of finite numbers.
        y: Another one.

    Returns:
        The angle, between 0 and π.

    Raises:
        NotComparable: If one is zero.
    """
    u, v = _unit(layer, x), _unit(layer, y)
    return 2 * torch.atan2((u - v).norm(), (u + v).norm()).item()


def _check_finite(x: Weights, y: Weights) -> None:
    for which, side in (("first", x), ("second", y)):
        for name, tensor in side.tensors.items():
            if not tensor.isfinite().all():
                raise NotComparable(
                    side.layer, f"the {name} of the {which} network contains NaN or infinity, so there is no value"
                )


def _unit(layer: str, x: Tensor) -> Tensor:
    flat = x.double().flatten()
    norm = flat.norm()
    if not norm > 0:
        raise NotComparable(layer, "the weights of one network are zero, so there is no cosine")
    return flat / norm


def _times(numbers: Iterable[int]) -> str:
    return "×".join(map(str, numbers))
