"""Training loop of all small networks in the experiments."""

import math
import sys
from collections.abc import Callable

import study
import torch
from torch import Tensor, nn
from tqdm.auto import tqdm


def train(
    network: nn.Module, samples: int, loss: Callable[[Tensor], Tensor], *, epochs: int, batch: int,
    learning_rate: float, seed: int, weight_decay: float = 0.0, schedule: bool = False, clip: bool = False,
    name: str = "training",
) -> None:  # fmt: skip
    """Minimise a loss over shuffled batches with AdamW, and switch the network to eval mode."""
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
                study.descend(optimizer, loss(places), parameters if clip else ())
                rates.step()
                bar.update()
    network.eval()


def _warm_cosine(share: float) -> float:
    """Return the factor of the learning rate: linear warm-up over a tenth of the steps, then cosine decay to 0."""
    return 10 * share + 1e-3 if share < 0.1 else 0.5 * (1 + math.cos(math.pi * (share - 0.1) / 0.9))
