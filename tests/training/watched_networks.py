"""A small network with all state that a measurement could disturb, images and trainers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Trainer, TrainingArguments

import hf_stitch

CLASSES = 3


class Net(nn.Module):
    """Convolutional network with BatchNorm statistics and random dropout."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.Dropout(0.3))
            for a in (3, width)
        )
        self.head = nn.Linear(width, CLASSES)

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        for block in self.blocks:
            pixel_values = block(pixel_values)
        logits = self.head(pixel_values.mean((2, 3)))
        if labels is None:
            return {"logits": logits}
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


class Other(Net):
    """The same architecture with other layer names."""

    def __init__(self) -> None:
        super().__init__(5)
        self.stages = self.blocks
        del self.blocks

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        for block in self.stages:
            pixel_values = block(pixel_values)
        return {"logits": self.head(pixel_values.mean((2, 3)))}


def images(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, 3, 6, 6, generator=torch.Generator().manual_seed(seed))


def net(seed: int = 0, kind: type[Net] = Net) -> Net:
    torch.manual_seed(seed)
    return kind()


@torch.no_grad()
def balanced(model: Net, points: Tensor) -> Net:
    """Centre the logits such that the network does not predict one class for all points."""
    model.eval().head.bias -= model(points)["logits"].mean(0)
    return model


def adapter(model: nn.Module) -> hf_stitch.Adapter:
    return hf_stitch.load(model, example_inputs={"pixel_values": images(2)})


def trainer(folder: Path, model: Net | None = None, **arguments: Any) -> Trainer:
    options: dict[str, Any] = {
        "num_train_epochs": 2, "per_device_train_batch_size": 8, "learning_rate": 0.01, "report_to": [], "seed": 3,
        "use_cpu": True, "disable_tqdm": True, "logging_steps": 2, "save_strategy": "no",
        "dataloader_num_workers": 0, "remove_unused_columns": False,
    }  # fmt: skip
    data = [{"pixel_values": image, "labels": place % CLASSES} for place, image in enumerate(images(32))]
    return Trainer(
        model=net() if model is None else model,
        args=TrainingArguments(output_dir=str(folder), **{**options, **arguments}),
        train_dataset=data,
        eval_dataset=data[:8],
    )
