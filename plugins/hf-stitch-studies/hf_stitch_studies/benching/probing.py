"""Linear probes: linear classifiers of representations."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_stitch.options import Count, Natural, Positive, checked

DECAY_AFTER = 0.5
"""Share of the epochs before the learning rate is divided by 10."""


def linear_probe(
    features: Tensor,
    labels: Sequence[int] | Tensor,
    *,
    classes: int | None = None,
    epochs: int = 10,
    batch_size: int = 64,
    learning_rate: float = 1e-3,
    seed: int = 0,
) -> nn.Linear:
    """Train a linear classifier on features (Alain and Bengio 2017; settings of Balogh and Jelasity 2025).

    Adam minimises the cross-entropy; after half of the epochs the learning rate is divided by 10. Features are not
    standardised, so a few steps fit features on a small scale less closely. The paper does not state its batch size;
    the default here is 64.

    Args:
        features: ``(n, d)`` floating point, one row per sample. The probe is trained in float32 on their device.
        labels: The ``n`` classes, integers from 0.
        classes: Number of classes; ``None`` uses the largest label plus one.
        epochs: Passes over the samples.
        batch_size: Samples per step.
        learning_rate: Learning rate of the first half.
        seed: Seed of the initial weights and of the sample order. The global random state is not used.

    Returns:
        The trained layer from d features to logits, float32, with frozen parameters.

    Raises:
        ValueError: If features are not a finite ``(n, d)`` tensor, the number of labels is not n, a label is not a
            class, or an option is out of range.

    Example:
        >>> labels = torch.arange(300) % 3
        >>> features = functional.one_hot(labels, 3) + 0.1 * torch.randn(300, 3)
        >>> probe = linear_probe(features, labels, epochs=20, learning_rate=0.1)
        >>> (probe(features).argmax(1) == labels).float().mean().item()
        1.0
    """
    (probe,) = linear_probes(
        [features], labels, classes=classes, epochs=epochs, batch_size=batch_size, learning_rate=learning_rate,
        seed=seed,
    )  # fmt: skip
    return probe


@checked
def linear_probes(
    features: Sequence[Tensor],
    labels: Sequence[int] | Tensor,
    *,
    classes: int | None = None,
    epochs: Count = 10,
    batch_size: Count = 64,
    learning_rate: Positive = 1e-3,
    seed: Natural = 0,
) -> list[nn.Linear]:
    """Train one linear classifier on each of several feature tensors of the same samples, in parallel.

    Each classifier has the initial weights and batches of :func:`linear_probe`, and the same result up to float32
    rounding error.

    Args:
        features: Tensors ``(n, d)`` of the same shape.
        labels: As in :func:`linear_probe`.
        classes: As in :func:`linear_probe`.
        epochs: As in :func:`linear_probe`.
        batch_size: As in :func:`linear_probe`.
        learning_rate: As in :func:`linear_probe`.
        seed: As in :func:`linear_probe`.

    Returns:
        The trained layers.

    Raises:
        ValueError: As in :func:`linear_probe`, or if the shapes differ.

    Example:
        >>> features = torch.randn(40, 3)
        >>> [probe.weight.shape for probe in linear_probes([features, 2 * features], [0, 1] * 20)]
        [torch.Size([2, 3]), torch.Size([2, 3])]
    """
    stacked, targets, classes = _check_inputs(features, labels, classes)
    count, n, width = stacked.shape
    generator = torch.Generator().manual_seed(seed)
    bound = 1 / math.sqrt(width)  # initialisation of nn.Linear
    initial = (torch.rand(classes, width + 1, generator=generator) * 2 - 1).mul(bound).to(stacked.device)
    weight = initial[:, :width].T.repeat(count, 1, 1).requires_grad_()
    bias = initial[:, width].repeat(count, 1, 1).requires_grad_()
    optimizer = torch.optim.Adam([weight, bias], lr=learning_rate)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [math.ceil(epochs * DECAY_AFTER)], gamma=0.1)
    with torch.enable_grad():
        for _ in range(epochs):
            for batch in torch.randperm(n, generator=generator).to(stacked.device).split(batch_size):
                logits = torch.baddbmm(bias, stacked[:, batch], weight)
                # Sum over probes, so that each gets the gradients of separate training.
                loss = functional.cross_entropy(logits.flatten(0, 1), targets[batch].repeat(count)) * count
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            schedule.step()
    return [_linear_layer(w, b) for w, b in zip(weight.detach(), bias.detach(), strict=True)]


def _check_inputs(
    features: Sequence[Tensor], labels: Sequence[int] | Tensor, classes: int | None
) -> tuple[Tensor, Tensor, int]:
    """Return the stacked features ``(probes, n, d)``, the labels and the number of classes."""
    shapes = {tuple(tensor.shape) for tensor in features}
    if len(shapes) != 1 or len(shape := shapes.pop()) != 2 or not all(map(torch.is_floating_point, features)):
        raise ValueError(
            "features must be floating-point tensors (n, d), all of the same shape, got "
            + (", ".join(f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in features) or "none")
        )
    targets = torch.as_tensor(labels, device=features[0].device).long()
    if targets.shape != shape[:1] or not len(targets):
        raise ValueError(f"labels must have the shape ({shape[0]},), one per row, got {tuple(targets.shape)}")
    classes = int(targets.max()) + 1 if classes is None else classes
    if wrong := targets[(targets < 0) | (targets >= classes)].tolist():
        raise ValueError(f"labels must be from 0 to {classes - 1}, got {wrong[0]}")
    stacked = torch.stack([tensor.detach().float() for tensor in features])
    if not bool(stacked.isfinite().all()):
        raise ValueError("features contain NaN or infinity; drop such samples, or run the network in a wider dtype")
    return stacked, targets, classes


def _linear_layer(weight: Tensor, bias: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[0], weight.shape[1], device="meta")
    layer.load_state_dict({"weight": weight.T.contiguous(), "bias": bias[0].contiguous()}, assign=True)
    return layer.requires_grad_(False).eval()
