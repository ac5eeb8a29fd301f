"""Linear probes: linear classifiers that predict labels from a representation."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_stitch.options import Count, Natural, Positive, checked

DECAY_AFTER = 0.5
"""The learning rate falls to a tenth after this share of the epochs."""


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

    Adam minimises the cross-entropy; after half of the epochs the learning rate falls to a tenth. Features are not
    standardised: with few steps, features on a small scale are fitted less closely. The paper does not state its batch
    size; here it is 64.

    Args:
        features: ``(n, d)`` floating point, one row per sample; trained in float32 on their device.
        labels: The ``n`` classes, integers from 0.
        classes: Number of classes. ``None``: the largest label plus one.
        epochs: Passes over the samples.
        batch_size: Samples per step.
        learning_rate: Learning rate of the first half.
        seed: Seed of the initial weights and of the sample order. The global random state is not used.

    Returns:
        The trained layer from d features to logits, float32, without gradients.

    Raises:
        ValueError: If features are not a finite ``(n, d)`` tensor, labels do not match the rows, a label is out of
            range, or an option is out of range.

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
    """Train linear classifiers on several features of the same samples, side by side.

    Each probe has the initial weights, the batches and, up to float32 rounding error, the result of
    :func:`linear_probe`.

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
        >>> wide = torch.randn(40, 3)
        >>> [probe.weight.shape for probe in linear_probes([wide, 2 * wide], [0, 1] * 20)]
        [torch.Size([2, 3]), torch.Size([2, 3])]
    """
    stacked, targets, classes = _checked(features, labels, classes)
    count, n, width = stacked.shape
    generator = torch.Generator().manual_seed(seed)
    bound = 1 / math.sqrt(width)  # as nn.Linear is initialised
    drawn = (torch.rand(classes, width + 1, generator=generator) * 2 - 1).mul(bound).to(stacked.device)
    weight = drawn[:, :width].T.repeat(count, 1, 1).requires_grad_()
    bias = drawn[:, width].repeat(count, 1, 1).requires_grad_()
    optimizer = torch.optim.Adam([weight, bias], lr=learning_rate)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [math.ceil(epochs * DECAY_AFTER)], gamma=0.1)
    with torch.enable_grad():
        for _ in range(epochs):
            for batch in torch.randperm(n, generator=generator).to(stacked.device).split(batch_size):
                logits = torch.baddbmm(bias, stacked[:, batch], weight)
                # A sum over probes, so that each probe has the gradients of separate training.
                loss = functional.cross_entropy(logits.flatten(0, 1), targets[batch].repeat(count)) * count
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            schedule.step()
    return [_layer(w, b) for w, b in zip(weight.detach(), bias.detach(), strict=True)]


def _checked(
    features: Sequence[Tensor], labels: Sequence[int] | Tensor, classes: int | None
) -> tuple[Tensor, Tensor, int]:
    shapes = {tuple(rows.shape) for rows in features}
    if len(shapes) != 1 or len(shape := shapes.pop()) != 2 or not all(rows.is_floating_point() for rows in features):
        raise ValueError(
            "features must be floating-point tensors (n, d), all of the same shape, got "
            + (", ".join(f"{rows.dtype} {tuple(rows.shape)}" for rows in features) or "none")
        )
    targets = torch.as_tensor(labels, device=features[0].device).long()
    if targets.shape != shape[:1] or not len(targets):
        raise ValueError(f"labels must have one entry per row ({shape[0]}), got shape {tuple(targets.shape)}")
    classes = int(targets.max()) + 1 if classes is None else classes
    if wrong := targets[(targets < 0) | (targets >= classes)].tolist():
        raise ValueError(f"labels must be from 0 to {classes - 1}, got {wrong[0]}")
    stacked = torch.stack([rows.detach().float() for rows in features])
    if not bool(stacked.isfinite().all()):
        raise ValueError("features contain NaN or infinity; drop such samples, or run the network in a wider dtype")
    return stacked, targets, classes


def _layer(weight: Tensor, bias: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[0], weight.shape[1], device="meta")
    layer.load_state_dict({"weight": weight.T.contiguous(), "bias": bias[0].contiguous()}, assign=True)
    return layer.requires_grad_(False).eval()
