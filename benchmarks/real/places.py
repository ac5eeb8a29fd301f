"""Folders and networks that all jobs share."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hf_stitch
from benchmarks.real import networks
from hf_stitch import Adapter

QUIET: dict[str, Any] = {"progress": False}


@dataclass(frozen=True)
class Places:
    """Folders of datasets and of published networks; ``None``: the Hub; left out."""

    data: Path | None
    published: Path | None

    def network(self, name: str) -> Adapter:
        """Load a network."""
        if name in networks.NETWORKS:
            return networks.NETWORKS[name].load()
        if self.published is None:
            raise FileNotFoundError(f"{name} is in a folder of published networks: pass --published")
        family, _, number = name.rpartition(" ")
        folder, build = networks.PUBLISHED[family]
        return networks.published(self.published / folder / f"in{number}-gn{number}.safetensors", build())

    def kind(self, name: str) -> str:
        """Return the kind of samples of a network."""
        return networks.NETWORKS[name].data if name in networks.NETWORKS else "images"


def untrained(network: Adapter) -> Adapter:
    """Return a copy with random weights, which have the mean and the standard deviation of the trained ones."""
    twin = copy.deepcopy(network.model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in twin.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.std() + parameter.mean())
        for module in twin.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.reset_running_stats()
    return hf_stitch.load(twin, processor=network.processor, example_inputs=network.example)
