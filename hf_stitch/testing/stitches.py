"""Conformance check for stitches."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import cast

import torch
from torch import Tensor

from hf_stitch.registry import registries
from hf_stitch.stitches import SequenceStitch, Stitch
from hf_stitch.testing._require import require, require_error, skip_unless
from hf_stitch.testing.conformance import conformance


@conformance
def check_stitch(stitch: Stitch) -> Iterator[tuple[str, Callable[[], None]]]:
    """Check that a stitch satisfies the contract of ``Stitch``; the stitch is not modified.

    The parts:

    - ``registered``: its name is that of its class in the registry of stitches.
    - ``rebuilt``: config and state dict rebuild it bit for bit, directly and on ``meta``.
    - ``shapes``: it accepts any leading dimensions, and no vectors at all.
    - ``dtypes``: it computes in its own dtype, and in float64 once it is cast.
    - ``independent``: it maps each vector independently; a :class:`~hf_stitch.stitches.SequenceStitch` each sample.
    - ``padding``: masked positions change no other position (sequence stitches).
    - ``causal``: no position changes an earlier one, if declared (sequence stitches).
    - ``affine``: it is an affine map, if declared.
    - ``gradients``: finite gradients reach its input and parameters.
    - ``width``: an input of a wrong width raises a ``ValueError`` that names the right one.

    Args:
        stitch: The stitch, with its weights fitted or loaded.

    Raises:
        AssertionError: The contract is violated; the message names the violation.

    Example:
        >>> from hf_stitch.stitches import LinearStitch
        >>> check_stitch(LinearStitch(3, 2))
    """
    yield "registered", lambda: _check_registered(stitch)
    yield "rebuilt", lambda: _check_rebuilding(stitch, _probe(stitch))
    yield "shapes", lambda: _check_shapes(stitch, _probe(stitch))
    yield "dtypes", lambda: _check_dtypes(stitch, _probe(stitch))
    yield "independent", lambda: _check_independent(stitch, _probe(stitch))
    yield "padding", lambda: _check_padding(stitch, _probe(stitch))
    yield "causal", lambda: _check_causal(stitch, _probe(stitch))
    yield "affine", lambda: _check_affine(stitch, _probe(stitch))
    yield "gradients", lambda: _check_gradients(stitch, _probe(stitch))
    yield "width", lambda: _check_width(stitch, _probe(stitch))


def _probe(stitch: Stitch) -> Tensor:
    """Vectors of shape ``(2, 3, in_features)`` in the dtype and on the device of the stitch."""
    tensors = [*stitch.parameters(), *stitch.buffers()]
    dtype = next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.float32)
    x = torch.randn(2, 3, stitch.in_features, generator=torch.Generator().manual_seed(0))
    return x.to(tensors[0].device if tensors else "cpu", dtype)


def _check_registered(stitch: Stitch) -> None:
    registered = registries.stitches.get(stitch.name)
    require(registered is type(stitch), f"{stitch.name!r} is registered as {registered}, not as {type(stitch)}")


@torch.no_grad()
def _check_rebuilding(stitch: Stitch, x: Tensor) -> None:
    description = json.loads(json.dumps(stitch.to_dict(), allow_nan=False))
    expected = stitch(x)
    for device in (x.device, torch.device("meta")):
        with device:
            twin = Stitch.from_dict(description)
        twin.load_state_dict(stitch.state_dict(), strict=True, assign=device.type == "meta")
        for name, tensor in [*twin.named_parameters(), *twin.named_buffers()]:
            require(not tensor.is_meta, f"{name} is not in the state dict: make it a persistent buffer")
        require(twin.to_dict() == description, f"a twin describes itself as {twin.to_dict()}, not as {description}")
        require(torch.equal(twin(x), expected), f"a twin built on {device} and loaded maps to other values")


@torch.no_grad()
def _check_shapes(stitch: Stitch, x: Tensor) -> None:
    for shaped in (x, x[0], x[0, 0], x[:0]):
        shape, expected = stitch(shaped).shape, (*shaped.shape[:-1], stitch.out_features)
        require(shape == expected, f"an input of shape {tuple(shaped.shape)} must give {expected}, gave {tuple(shape)}")


@torch.no_grad()
def _check_dtypes(stitch: Stitch, x: Tensor) -> None:
    require(stitch(x).dtype == x.dtype, f"an input of {x.dtype} must give {x.dtype}, gave {stitch(x).dtype}")
    exact = _in_float64(stitch)
    require(exact(x.double()).dtype == torch.float64, "cast to float64, it must compute in float64")


@torch.no_grad()
def _check_independent(stitch: Stitch, x: Tensor) -> None:
    exact, x = _in_float64(stitch), x.double()
    sequences = isinstance(stitch, SequenceStitch)
    given = x if sequences else x.flatten(0, 1)
    apart = torch.stack([exact(each) for each in given])
    close = torch.allclose(exact(given), apart, rtol=1e-10, atol=1e-12)
    what = "sample must not depend on the other samples" if sequences else "vector must not depend on the other vectors"
    require(close, f"the output for a {what}")


@torch.no_grad()
def _check_padding(stitch: Stitch, x: Tensor) -> None:
    skip_unless(isinstance(stitch, SequenceStitch), f"{stitch.name} looks at single positions")
    exact, x = cast(SequenceStitch, _in_float64(stitch)), x.double()
    for mask in (torch.tensor([[True, True, False]]), torch.tensor([[False, True, True]])):
        mask = mask.expand(len(x), -1).to(x.device)
        other = torch.where(mask[..., None], x, 7.0)
        close = torch.allclose(exact.map_sequence(x, mask)[mask], exact.map_sequence(other, mask)[mask], rtol=1e-10)
        require(close, "the output at real positions must not depend on values at masked ones")
        short = exact.map_sequence(x[:, mask[0]]).flatten(0, 1)
        close = torch.allclose(exact.map_sequence(x, mask)[mask], short, rtol=1e-10, atol=1e-12)
        require(close, "the output at real positions must be that without the masked ones")


@torch.no_grad()
def _check_causal(stitch: Stitch, x: Tensor) -> None:
    skip_unless(
        isinstance(stitch, SequenceStitch) and stitch.causal, f"{stitch.name} does not declare that it is causal"
    )
    exact, x = _in_float64(stitch), x.double()
    close = torch.allclose(exact(x)[:, :2], exact(x[:, :2]), rtol=1e-10, atol=1e-12)
    require(close, "the output at a position must not depend on later ones: set causal = False")


@torch.no_grad()
def _check_affine(stitch: Stitch, x: Tensor) -> None:
    skip_unless(stitch.affine, f"{stitch.name} does not declare that it is affine")
    exact, x = _in_float64(stitch), x.double()
    mixed = torch.lerp(exact(x[:1]), exact(x[1:2]), 0.3)
    close = torch.allclose(exact(torch.lerp(x[:1], x[1:2], 0.3)), mixed, rtol=1e-10, atol=1e-12)
    require(close, "the map is not affine: set affine = False")


def _in_float64(stitch: Stitch) -> Stitch:
    return copy.deepcopy(stitch).double()


def _check_gradients(stitch: Stitch, x: Tensor) -> None:
    twin, x = copy.deepcopy(stitch), x.clone().requires_grad_()
    with torch.enable_grad():
        out = twin(x)
        require(out.requires_grad, "no gradient reaches the input")
        out.square().sum().backward()
    for name, tensor in [("the input", x), *twin.named_parameters()]:
        reached = not tensor.requires_grad or (tensor.grad is not None and bool(tensor.grad.isfinite().all()))
        require(reached, f"no finite gradient reaches {name}")


def _check_width(stitch: Stitch, x: Tensor) -> None:
    wrong = x.new_zeros(2, stitch.in_features + 1)
    message = require_error(ValueError, lambda: stitch(wrong), f"an input of width {wrong.shape[1]}")
    require(str(stitch.in_features) in message, f"the error on a wrong width must name {stitch.in_features}: {message}")
