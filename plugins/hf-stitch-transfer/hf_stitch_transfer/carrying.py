"""Transfer of probes, directions and sparse autoencoders to the coordinates of a second network."""

from __future__ import annotations

import copy
import math
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from hf_stitch_transfer.maps import Affine, Side, Stitching, maps_of
from hf_stitch_transfer.sparse_autoencoder import SparseAutoencoder

LINEAR_BASES = {"LinearModel", "LinearClassifierMixin"}
"""Names of base classes of scikit-learn models with linear predictions."""
Probe = TypeVar("Probe")
Direction = TypeVar("Direction", Tensor, "np.ndarray[Any, Any]")


def transfer_probe(
    probe: Probe,
    stitch: Stitching,
    *,
    to: Side = "target",
    reverse: Stitching | None = None,
    rcond: float | None = None,
) -> Probe:
    """Transfer a linear probe between the networks of a stitch.

    The transferred probe equals the original probe on mapped activations. A transfer to the source is exact, because
    the stitch maps source activations to the target. A transfer to the target maps activations back, by the
    pseudo-inverse of the stitch (``rcond``) or by a stitch fitted in that direction (``reverse``). The latter is
    usually better: least squares in one direction is not the inverse of least squares in the opposite direction.

    Args:
        probe: Weight (classes, width) or (width,) and bias, as a tuple of tensors; a ``torch.nn.Linear``; or a fitted
            linear model of scikit-learn, with ``coef_`` and ``intercept_``.
        stitch: An affine stitch from source to target, in any form (``Stitcher``, ``StitchedModel``, …).
        to: Destination of the transfer. The probe was trained on the opposite side.
        reverse: An affine stitch from the target to the source.
        rcond: Singular values of the stitch below this share of the largest count as zero.

    Returns:
        A probe of the same kind, for activations of the network ``to``.

    Raises:
        TypeError: If the probe has a different type, for example a pipeline.
        ValueError: If widths do not match, the stitch is not affine, or an option is missing or unused.

    Example:
        >>> from hf_stitch.stitches import LinearStitch
        >>> stitch = LinearStitch(4, 3)  # activations of width 4 -> of width 3
        >>> on_target = torch.nn.Linear(3, 2)
        >>> on_source = transfer_probe(on_target, stitch, to="source")
        >>> x = torch.randn(5, 4)
        >>> bool(torch.allclose(on_source(x), on_target(stitch(x)), atol=1e-5))
        True
    """
    _, back = maps_of(stitch, to, reverse, rcond, inverts=to == "target")
    assert back is not None
    if isinstance(probe, tuple):
        if len(probe) != 2 or not isinstance(probe[0], Tensor) or not isinstance(probe[1], Tensor | None):
            kinds = ", ".join(type(item).__name__ for item in probe)
            raise TypeError(f"a probe as a tuple must be two tensors (weight, bias), got ({kinds})")
        weight, bias = probe
        return _compose(weight, bias, back, to)  # type: ignore[return-value]
    if isinstance(probe, nn.Linear):
        weight, new_bias = _compose(
            probe.weight.detach(), None if probe.bias is None else probe.bias.detach(), back, to
        )
        linear = nn.utils.skip_init(nn.Linear, weight.shape[1], weight.shape[0], dtype=weight.dtype)
        linear.load_state_dict({"weight": weight, "bias": new_bias})
        return linear.to(probe.weight.device)
    return _transfer_estimator(probe, back, to)


def transfer_direction(
    direction: Direction,
    stitch: Stitching,
    *,
    to: Side = "target",
    reverse: Stitching | None = None,
    rcond: float | None = None,
) -> Direction:
    """Transfer directions in activation space between the networks of a stitch, e.g. class mean differences.

    A direction is a difference of activations, so that the bias of the stitch cancels. The weight of a probe is not a
    direction but a linear form: use :func:`transfer_probe`.

    Args:
        direction: (width,) or (n, width), a tensor or an array.
        stitch: An affine stitch from source to target, in any form.
        to: Destination of the transfer.
        reverse: An affine stitch from the target to the source, for ``to="source"``.
        rcond: As for :func:`transfer_probe`, for ``to="source"``.

    Returns:
        The mapped directions, of the same type and dtype, without normalisation.

    Raises:
        ValueError: If widths do not match, the stitch is not affine, or an option is missing or unused.

    Example:
        >>> from hf_stitch.stitches import LinearStitch
        >>> stitch = LinearStitch.of(weight=torch.tensor([[0.0, 2.0], [1.0, 0.0]]), bias=torch.ones(2))
        >>> transfer_direction(torch.tensor([1.0, 0.0]), stitch)
        tensor([0., 1.])
    """
    forward, _ = maps_of(stitch, to, reverse, rcond, inverts=to == "source")
    assert forward is not None
    directions = torch.as_tensor(direction)
    _check("the direction", directions, forward.weight.shape[1], to)
    mapped = (directions.double().cpu() @ forward.weight.T).to(directions)
    return mapped.numpy() if isinstance(direction, np.ndarray) else mapped


def transfer_sae(
    autoencoder: SparseAutoencoder,
    stitch: Stitching,
    *,
    to: Side = "target",
    reverse: Stitching | None = None,
    rcond: float | None = None,
) -> SparseAutoencoder:
    """Transfer a sparse autoencoder between the networks of a stitch.

    Activations of the new network are mapped to the original network, encoded, decoded, and mapped back; the features
    stay the same. Both maps are merged into the weights, so that the result is a regular autoencoder. Use it as an
    initialization for training, or to compute features without training. It cannot reconstruct information that the
    stitch loses.

    Args:
        autoencoder: The autoencoder.
        stitch: An affine stitch from source to target, in any form.
        to: Destination of the transfer.
        reverse: An affine stitch from the target to the source.
        rcond: As for :func:`transfer_probe`. Both directions require either ``reverse`` or ``rcond``.

    Returns:
        The autoencoder for activations of the network ``to``.

    Raises:
        ValueError: If widths do not match, the stitch is not affine, or an option is missing.

    Example:
        >>> from hf_stitch.stitches import LinearStitch
        >>> stitch = LinearStitch(4, 4)
        >>> carried = transfer_sae(SparseAutoencoder(4, 16), stitch, rcond=1e-6)
        >>> carried(torch.randn(5, 4)).shape
        torch.Size([5, 4])
    """
    forward, back = maps_of(stitch, to, reverse, rcond, inverts=True)
    assert forward is not None and back is not None
    encoder = autoencoder.W_enc
    _check("the autoencoder", encoder.T, back.weight.shape[0], to)
    enc, b_enc, dec, b_dec = (
        getattr(autoencoder, name).detach().double().cpu() for name in ("W_enc", "b_enc", "W_dec", "b_dec")
    )
    input_shift = back.bias - b_dec if autoencoder.apply_b_dec_to_input else back.bias
    transferred = SparseAutoencoder(
        forward.weight.shape[0], autoencoder.d_sae, autoencoder.architecture, k=autoencoder.k, dtype=encoder.dtype,
        metadata={**autoencoder.metadata, "carried_to": to},
    )  # fmt: skip
    weights = {
        "W_enc": back.weight.T @ enc, "b_enc": b_enc + input_shift @ enc, "W_dec": dec @ forward.weight.T,
        "b_dec": b_dec @ forward.weight.T + forward.bias,
    }  # fmt: skip
    if autoencoder.threshold is not None:
        weights["threshold"] = autoencoder.threshold.detach()
    transferred.load_state_dict(weights)
    return transferred.to(encoder.device)


def _compose(weight: Tensor, bias: Tensor | None, back: Affine, to: Side) -> tuple[Tensor, Tensor]:
    """Return weight and bias of a probe composed with the map to its original network."""
    _check("the probe", weight, back.weight.shape[0], to)
    if bias is not None and bias.shape != weight.shape[:-1]:
        raise ValueError(
            f"the bias of the probe must have the shape {tuple(weight.shape[:-1])}, one per row of the weight, "
            f"got {tuple(bias.shape)}"
        )
    weight_64 = weight.double().cpu()
    shift = weight_64 @ back.bias
    return (weight_64 @ back.weight).to(weight), (shift if bias is None else shift + bias.double().cpu()).to(weight)


def _transfer_estimator(probe: Any, back: Affine, to: Side) -> Any:
    """Return a copy of a linear model of scikit-learn with transferred coefficients."""
    coefficients, intercept = getattr(probe, "coef_", None), getattr(probe, "intercept_", None)
    if coefficients is None or intercept is None:
        raise TypeError(
            f"the probe must be (weight, bias), a torch.nn.Linear or a fitted linear model of scikit-learn, got "
            f"{type(probe).__name__}; for a pipeline, fold the scaling into the weights first"
        )
    if not LINEAR_BASES & {base.__name__ for base in type(probe).__mro__}:
        raise TypeError(
            f"the probe must predict from activations · coef_ + intercept_, got {type(probe).__name__}: use a linear "
            "model, LinearSVC or linear discriminant analysis of scikit-learn"
        )
    weight, intercept_array = torch.as_tensor(np.asarray(coefficients)), np.asarray(intercept)
    rows = weight.shape[:-1]
    bias = np.broadcast_to(
        intercept_array.reshape(rows) if intercept_array.size == math.prod(rows) else intercept_array, rows
    )
    new_weight, new_bias = _compose(weight, torch.as_tensor(bias.copy()), back, to)
    transferred = copy.deepcopy(probe)
    transferred.coef_ = new_weight.numpy()
    # A single intercept of scikit-learn is a number or an array of one.
    transferred.intercept_ = new_bias.numpy() if new_bias.ndim else new_bias.numpy().reshape(intercept_array.shape)[()]
    transferred.n_features_in_ = new_weight.shape[-1]
    if hasattr(transferred, "feature_names_in_"):
        del transferred.feature_names_in_  # names of the original network
    return transferred


def _check(name: str, weights: Tensor, width: int, to: Side) -> None:
    """Check the width and the values of weights to transfer."""
    if weights.ndim not in (1, 2) or weights.shape[-1] != width:
        origin = "source" if to == "target" else "target"
        raise ValueError(
            f"{name} must have width {width} like the {origin} of the stitch, got shape {tuple(weights.shape)}; `to` "
            "is the destination of the transfer"
        )
    if not weights.is_floating_point():
        raise TypeError(f"{name} must be floating point, got {weights.dtype}")
    if not bool(weights.isfinite().all()):
        raise ValueError(f"{name} must not contain NaN or infinite values")
