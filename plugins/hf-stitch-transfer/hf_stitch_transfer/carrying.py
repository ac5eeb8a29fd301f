"""Probes, directions and sparse autoencoders in the coordinates of another network."""

from __future__ import annotations

import copy
import math
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from hf_stitch_transfer.maps import Affine, Side, Stitching, maps_of
from hf_stitch_transfer.sparse_autoencoder import SparseAutoencoder

LINEAR = {"LinearModel", "LinearClassifierMixin"}
"""Names of the bases of scikit-learn's models that predict by a linear form."""
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
    """Carry a linear probe to the other network of a stitch.

    The carried probe computes what the probe computes of mapped activations. To the source this is exact: the stitch
    itself maps there. To the target the activations have to be mapped back, by the pseudo-inverse of the stitch
    (``rcond``) or by a stitch that was fitted in that direction (``reverse``), which is usually better: least squares
    in one direction is not the inverse of least squares in the other.

    Args:
        probe: Weight (classes, width) or (width,) and bias, as a tuple of tensors; a ``torch.nn.Linear``; or a fitted
            linear model of scikit-learn, with ``coef_`` and ``intercept_``.
        stitch: A stitch from source to target: affine, in any form (``Stitcher``, ``StitchedModel``, …).
        to: The network that the probe is carried to. It was trained on the other one.
        reverse: An affine stitch from the target to the source.
        rcond: Share of the largest singular value below which singular values of the stitch count as zero.

    Returns:
        A probe of the same kind, for activations of the network ``to``.

    Raises:
        TypeError: If the probe is of another kind, for example a pipeline.
        ValueError: If widths do not fit, the stitch is not affine, or an option is missing or has no effect.

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
            kinds = ", ".join(type(part).__name__ for part in probe)
            raise TypeError(f"a probe as a tuple must be two tensors (weight, bias), got ({kinds})")
        weight, bias = probe
        return _composed(weight, bias, back, to)  # type: ignore[return-value]
    if isinstance(probe, nn.Linear):
        weight, found = _composed(probe.weight.detach(), None if probe.bias is None else probe.bias.detach(), back, to)
        made = nn.utils.skip_init(nn.Linear, weight.shape[1], weight.shape[0], dtype=weight.dtype)
        made.load_state_dict({"weight": weight, "bias": found})
        return made.to(probe.weight.device)
    return _estimator(probe, back, to)


def transfer_direction(
    direction: Direction,
    stitch: Stitching,
    *,
    to: Side = "target",
    reverse: Stitching | None = None,
    rcond: float | None = None,
) -> Direction:
    """Carry directions in activation space to the other network of a stitch: differences of class means, steering.

    A direction is a difference of activations, so that the bias of the stitch plays no part. It is not what a probe
    reads: the weight of a probe is a linear form, and is carried by :func:`transfer_probe`.

    Args:
        direction: (width,) or (n, width), a tensor or an array.
        stitch: A stitch from source to target: affine, in any form.
        to: The network that the directions are carried to.
        reverse: An affine stitch from the target to the source, for ``to="source"``.
        rcond: As for :func:`transfer_probe`, for ``to="source"``.

    Returns:
        The directions in the other network, of the same type and dtype; their lengths are those of the mapped vectors.

    Raises:
        ValueError: If widths do not fit, the stitch is not affine, or an option is missing or has no effect.

    Example:
        >>> from hf_stitch.stitches import LinearStitch
        >>> stitch = LinearStitch.of(weight=torch.tensor([[0.0, 2.0], [1.0, 0.0]]), bias=torch.ones(2))
        >>> transfer_direction(torch.tensor([1.0, 0.0]), stitch)
        tensor([0., 1.])
    """
    there, _ = maps_of(stitch, to, reverse, rcond, inverts=to == "source")
    assert there is not None
    given = torch.as_tensor(direction)
    _check("the direction", given, there.weight.shape[1], to)
    found = (given.double().cpu() @ there.weight.T).to(given)
    return found.numpy() if isinstance(direction, np.ndarray) else found


def transfer_sae(
    autoencoder: SparseAutoencoder,
    stitch: Stitching,
    *,
    to: Side = "target",
    reverse: Stitching | None = None,
    rcond: float | None = None,
) -> SparseAutoencoder:
    """Carry a sparse autoencoder to the other network of a stitch.

    Activations of the other network are mapped to those of its own, encoded, decoded, and mapped back: features stay
    the same. Both maps become part of its weights, so that it is an autoencoder like any other. It is a start
    for training, or a way to read features without any: what the stitch loses, it cannot reconstruct.

    Args:
        autoencoder: The autoencoder.
        stitch: A stitch from source to target: affine, in any form.
        to: The network that the autoencoder is carried to.
        reverse: An affine stitch from the target to the source.
        rcond: As for :func:`transfer_probe`. One of the two is needed in both directions.

    Returns:
        The autoencoder for activations of the network ``to``.

    Raises:
        ValueError: If widths do not fit, the stitch is not affine, or an option is missing.

    Example:
        >>> from hf_stitch.stitches import LinearStitch
        >>> stitch = LinearStitch(4, 4)
        >>> carried = transfer_sae(SparseAutoencoder(4, 16), stitch, rcond=1e-6)
        >>> carried(torch.randn(5, 4)).shape
        torch.Size([5, 4])
    """
    there, back = maps_of(stitch, to, reverse, rcond, inverts=True)
    assert there is not None and back is not None
    given = autoencoder.W_enc
    _check("the autoencoder", given.T, back.weight.shape[0], to)
    enc, b_enc, dec, b_dec = (
        getattr(autoencoder, name).detach().double().cpu() for name in ("W_enc", "b_enc", "W_dec", "b_dec")
    )
    entering = back.bias - b_dec if autoencoder.apply_b_dec_to_input else back.bias
    made = SparseAutoencoder(
        there.weight.shape[0], autoencoder.d_sae, autoencoder.architecture, k=autoencoder.k, dtype=given.dtype,
        metadata={**autoencoder.metadata, "carried_to": to},
    )  # fmt: skip
    state = {
        "W_enc": back.weight.T @ enc, "b_enc": b_enc + entering @ enc, "W_dec": dec @ there.weight.T,
        "b_dec": b_dec @ there.weight.T + there.bias,
    }  # fmt: skip
    if autoencoder.threshold is not None:
        state["threshold"] = autoencoder.threshold.detach()
    made.load_state_dict(state)
    return made.to(given.device)


def _composed(weight: Tensor, bias: Tensor | None, back: Affine, to: Side) -> tuple[Tensor, Tensor]:
    """Return weight and bias of a probe after the map to its own network."""
    _check("the probe", weight, back.weight.shape[0], to)
    if bias is not None and bias.shape != weight.shape[:-1]:
        raise ValueError(
            f"the bias of the probe must have the shape {tuple(weight.shape[:-1])}, one for each row of its weight, "
            f"got {tuple(bias.shape)}"
        )
    own = weight.double().cpu()
    added = own @ back.bias
    return (own @ back.weight).to(weight), (added if bias is None else added + bias.double().cpu()).to(weight)


def _estimator(probe: Any, back: Affine, to: Side) -> Any:
    """Return a copy of a linear model of scikit-learn with other coefficients."""
    coefficients, intercept = getattr(probe, "coef_", None), getattr(probe, "intercept_", None)
    if coefficients is None or intercept is None:
        raise TypeError(
            f"the probe must be (weight, bias), a torch.nn.Linear or a fitted linear model of scikit-learn, got "
            f"{type(probe).__name__}: of a pipeline, fold the scaling into the weights first"
        )
    if not LINEAR & {base.__name__ for base in type(probe).__mro__}:
        raise TypeError(
            f"{type(probe).__name__} may not predict by activations · coef_ + intercept_: use a linear model, "
            "LinearSVC or linear discriminant analysis of scikit-learn"
        )
    weight, given = torch.as_tensor(np.asarray(coefficients)), np.asarray(intercept)
    rows = weight.shape[:-1]
    bias = np.broadcast_to(given.reshape(rows) if given.size == math.prod(rows) else given, rows)
    found, added = _composed(weight, torch.as_tensor(bias.copy()), back, to)
    carried = copy.deepcopy(probe)
    carried.coef_ = found.numpy()
    carried.intercept_ = added.numpy() if added.ndim else added.numpy().reshape(given.shape)[()]
    carried.n_features_in_ = found.shape[-1]
    if hasattr(carried, "feature_names_in_"):
        del carried.feature_names_in_  # those of the other network
    return carried


def _check(what: str, given: Tensor, width: int, to: Side) -> None:
    """Check the width and the values of what is carried."""
    if given.ndim not in (1, 2) or given.shape[-1] != width:
        own = "source" if to == "target" else "target"
        raise ValueError(
            f"{what} belongs to the {own}, whose activations have width {width} in this stitch, but it has the shape "
            f"{tuple(given.shape)}; to= names the network that it is carried to"
        )
    if not given.is_floating_point():
        raise TypeError(f"{what} must be floating point, got {given.dtype}")
    if not bool(given.isfinite().all()):
        raise ValueError(f"{what} has values that are NaN or infinite")
