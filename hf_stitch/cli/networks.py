"""Networks of the quickstart: a small ResNet and a small ViT, trained from scratch on 32 × 32 images."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import timm
import timm.models
import torch
from torch import Tensor
from torch.nn import functional
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

import hf_stitch
from hf_stitch.adapters import Adapter
from hf_stitch.data import Samples
from hf_stitch.storage.files import replacing
from hf_stitch.tasks.base import logits_of

SIZE = 32
BATCH = 32
LEARNING_RATE = 2e-3


def residual_network(channels: int, classes: int) -> Adapter:
    """Build a narrow timm ResNet with four stages and random weights."""
    norm = {"mean": (0.5,) * channels, "std": (0.5,) * channels}
    images = {"input_size": (channels, SIZE, SIZE), "crop_pct": 1.0, "interpolation": "bilinear", **norm}
    sizes: dict[str, Any] = {"channels": (16, 32, 64, 128), "stem_width": 8, "in_chans": channels}
    return hf_stitch.load(timm.create_model("resnet10t", **sizes, num_classes=classes, pretrained_cfg_overlay=images))


def vision_transformer(channels: int, classes: int) -> Adapter:
    """Build a small transformers ViT with four blocks and random weights."""
    sizes: dict[str, Any] = {"image_size": SIZE, "patch_size": 8, "num_channels": channels, "num_labels": classes}
    config = ViTConfig(**sizes, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=128)
    processor = ViTImageProcessor(
        size={"height": SIZE, "width": SIZE}, image_mean=[0.5] * channels, image_std=[0.5] * channels
    )
    return hf_stitch.load(ViTForImageClassification(config), processor=processor)


ARCHITECTURES: dict[str, Callable[[int, int], Adapter]] = {"cnn": residual_network, "vit": vision_transformer}


def build(architecture: str, seed: int, samples: Samples) -> Adapter:
    """Build a network with random weights for samples."""
    image = next(samples.batches(1)).samples[0]
    torch.manual_seed(seed)
    return ARCHITECTURES[architecture](1 if image.mode == "L" else 3, samples.num_classes or 0)


def train(network: Adapter, samples: Samples, epochs: int, seed: int) -> Iterator[float]:
    """Train in place with AdamW and a one-cycle learning rate schedule; yield the last loss of each epoch."""
    model, inputs, labels = network.model, _inputs(network, samples), torch.tensor(samples.labels)
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.05)
    boundaries = list(range(BATCH, len(labels) - 1, BATCH))  # a single sample joins the last batch, for BatchNorm
    steps = epochs * (len(boundaries) + 1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps)
    for _ in range(epochs):
        model.train()
        for batch in torch.randperm(len(labels)).tensor_split(boundaries):
            loss = functional.cross_entropy(logits_of(model(inputs[batch])), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        model.eval()
        yield loss.item()


def save(network: Adapter, folder: Path) -> None:
    """Save a network in the format of its library, so that :func:`hf_stitch.load` can load it."""
    with replacing(folder) as fresh:
        if network.library == "timm":
            arguments = network.blueprint()["arguments"]
            timm.models.save_for_hf(network.model, str(fresh), model_args=arguments, safe_serialization=True)
        else:
            network.model.save_pretrained(fresh)  # type: ignore[operator]
            network.processor.save_pretrained(fresh)


def _inputs(network: Adapter, samples: Samples) -> Tensor:
    batches = (network.preprocess(batch.samples) for batch in samples.batches(256))
    return torch.cat([next(iter(batch.values())) for batch in batches])
