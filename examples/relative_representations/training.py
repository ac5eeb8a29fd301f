"""One loop for every small network of the experiments."""

import math
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm


def train(
    network: nn.Module,
    samples: int,
    loss: Callable[[Tensor], Tensor],
    *,
    epochs: int,
    batch: int,
    learning_rate: float,
    seed: int,
    weight_decay: float = 0.0,
    schedule: bool = False,
    clip: float | None = None,
    name: str = "training",
) -> None:
    """Minimise a loss over shuffled batches by AdamW; the network ends in eval mode.

    Args:
        network: Its parameters that require a gradient are trained.
        samples: How many there are; a last batch of fewer is left out.
        loss: From the places of a batch ``(batch,)`` to a scalar.
        epochs: Passes over the samples.
        batch: Samples in a batch.
        learning_rate: The highest.
        seed: Of the order, and of what the loss draws at random.
        weight_decay: Decoupled.
        schedule: Whether the learning rate rises over a tenth of the steps and falls to 0 by a cosine.
        clip: The most that the gradient may be long.
        name: What the progress bar says.
    """
    torch.manual_seed(seed)
    parameters = [p for p in network.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, learning_rate, weight_decay=weight_decay)
    batch = min(batch, samples)
    steps = epochs * (samples // batch)
    share = _warm_cosine if schedule else lambda done: 1.0
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: share(step / max(steps, 1)))
    network.train()
    with tqdm(total=steps, desc=name, delay=3, disable=not sys.stderr.isatty()) as bar:
        for _ in range(epochs):
            for places in torch.randperm(samples).split(batch)[: samples // batch]:
                value = loss(places)
                optimizer.zero_grad()
                value.backward()
                if clip is not None:
                    nn.utils.clip_grad_norm_(parameters, clip)
                optimizer.step()
                rates.step()
                bar.update()
    network.eval()


def _warm_cosine(share: float) -> float:
    """Of the learning rate, by the share of the steps done: up to 1 over a tenth, down to 0 by a cosine."""
    return 10 * share + 1e-3 if share < 0.1 else 0.5 * (1 + math.cos(math.pi * (share - 0.1) / 0.9))
