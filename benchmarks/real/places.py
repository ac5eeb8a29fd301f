"""Folders, networks and figures that all jobs share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import hf_stitch
from benchmarks.real import networks
from hf_stitch import Adapter

QUIET: dict[str, Any] = {"progress": False}


@dataclass(frozen=True)
class Places:
    """Folders of datasets and of published networks (``None``: the Hub; left out), and interpreters of runtimes."""

    data: Path | None
    published: Path | None
    python: Mapping[str, str] = field(default_factory=dict)

    def network(self, name: str) -> Adapter:
        """Load a network."""
        if name in networks.NETWORKS:
            return networks.NETWORKS[name].load()
        if self.published is None:
            raise FileNotFoundError(f"{name} is in a folder of published networks: pass --published")
        family, _, number = name.rpartition(" ")
        folder = f"drfrankenstein_{family.replace('-', '').lower()}"
        return networks.published(self.published / folder / f"in{number}-gn{number}.safetensors")

    def kind(self, name: str) -> str:
        """Return the kind of samples of a network."""
        return networks.NETWORKS[name].data if name in networks.NETWORKS else "images"


@torch.no_grad()
def outputs(model: Any, samples: hf_stitch.Samples) -> torch.Tensor:
    """Return one output vector per sample: logits, or the mean over positions."""
    rows = []
    for batch in samples.batches(32):
        inputs = model.preprocess(batch.samples)
        output = model.forward(inputs) if isinstance(model, hf_stitch.Adapter) else model(**inputs)
        value = output if isinstance(output, torch.Tensor) else next(iter(output.values()))
        if value.dim() == 3:
            mask = inputs.get("attention_mask", torch.ones(value.shape[:2]))
            mask = mask[:, : value.shape[1], None].to(value.dtype)
            value = (value * mask).sum(1) / mask.sum(1)
        rows.append(value)
    return torch.cat(rows)


def closeness(found: torch.Tensor, target: torch.Tensor, classes: bool) -> NDArray[np.float64]:
    """Return for each sample whether the class is the same; without classes, the cosine about the mean."""
    if classes:
        return (found.argmax(-1) == target.argmax(-1)).double().numpy()
    return torch.cosine_similarity(found - found.mean(0), target - target.mean(0)).double().numpy()


def interval(values: NDArray[np.float64]) -> tuple[float, float, float]:
    """Return the mean with its 95% interval (bootstrap over samples)."""
    random = np.random.default_rng(0)
    means = values[random.integers(len(values), size=(1000, len(values)))].mean(1)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(values.mean()), float(low), float(high)


def shown(score: tuple[float, float, float]) -> str:
    """Return a figure with its interval as text."""
    return f"{score[0]:.3f} [{score[1]:.3f}, {score[2]:.3f}]"


def overlap(found: torch.Tensor, target: torch.Tensor, k: int = 10) -> NDArray[np.float64]:
    """Return for each sample the share of its k nearest neighbours (by cosine about the mean) that are the same."""
    near = []
    for rows in (found - target.mean(0), target - target.mean(0)):
        unit = (rows / rows.norm(dim=1, keepdim=True)).double()
        near.append((unit @ unit.T).fill_diagonal_(-2).topk(k).indices.numpy())
    return np.array([len({*a} & {*b}) / k for a, b in zip(*near, strict=True)])
