"""Samples of the jobs: texts and images of a folder of datasets, and seeded tones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor

import hf_stitch
from hf_stitch.data import read_data


def questions(split: str, folder: Path | None, count: int | None = None, start: int = 0) -> hf_stitch.Samples:
    """Return different questions of TREC with their six classes, in a seeded order; none of the test set is trained on.

    The training set contains questions twice, and a few of the test set.
    """
    rows = read_data("CogComp/trec", folder, split)
    seen = set(read_data("CogComp/trec", folder, "train")["text"]) if split == "test" else set()
    rows = rows.select([i for i, text in enumerate(rows["text"]) if not (text in seen or seen.add(text))])
    rows = rows.rename_columns({"coarse_label": "label"}).select_columns(["text", "label"])
    return hf_stitch.Samples.of(shuffled(rows, count, start))


def sentences(folder: Path | None, count: int | None = None, start: int = 0) -> list[str]:
    """Return English sentences of Tatoeba, short ones of everyday life."""
    rows = read_data("tatoeba_en_es_fr_ja", folder, "train")
    return list(shuffled(rows, count, start)["en"])


def photographs(split: str, folder: Path | None, count: int | None = None, start: int = 0) -> hf_stitch.Samples:
    """Return images of CIFAR-10 with their classes, 32 × 32 pixels."""
    rows = read_data("uoft-cs/cifar10", folder, split).rename_columns({"img": "image"})
    return hf_stitch.Samples.of(shuffled(rows, count, start))


def shuffled(rows: Dataset, count: int | None, start: int) -> Dataset:
    """Return rows of a seeded order."""
    order = np.random.default_rng(0).permutation(len(rows))
    return rows.select(order[start : None if count is None else start + count])


def tones(count: int, seed: int = 0) -> Tensor:
    """Return sounds of 64 ms at 16 kHz: a tone between 50 and 1,600 Hz with overtones, in noise of another size each.

    Every sound has mean 0 and variance 1, as CREPE expects.
    """
    random = np.random.default_rng(seed)
    time = np.arange(1024) / 16_000
    pitches = 50 * 32 ** random.random((count, 1))
    sounds = sum(
        random.random((count, 1)) / n * np.sin(2 * np.pi * (n * pitches * time + random.random((count, 1))))
        for n in range(1, 6)
    )
    sounds = sounds + random.random((count, 1)) * random.standard_normal((count, 1024))
    sounds = (sounds - sounds.mean(1, keepdims=True)) / sounds.std(1, keepdims=True)
    return torch.from_numpy(sounds.astype(np.float32))


def spectrograms(count: int, seed: int = 0) -> Tensor:
    """Return mel spectrograms ``(count, 160, 40)`` of seeded tones that glide."""
    random = np.random.default_rng(seed)
    frames, bands = np.arange(160) / 160, np.arange(40)
    centre = 20 + 12 * np.sin(2 * np.pi * (random.random((count, 1)) * 3 * frames + random.random((count, 1))))
    energy = np.exp(-((bands - centre[..., None]) ** 2) / (2 * (1 + 3 * random.random((count, 1, 1))) ** 2))
    energy = energy + 0.05 * random.random((count, 160, 40))
    return torch.from_numpy((energy * 0.02 * random.random((count, 1, 1))).astype(np.float32))


def samples(kind: str, folder: Path | None, count: int) -> Any:
    """Return unlabelled samples of a kind of network."""
    if kind == "texts":
        return sentences(folder, count)
    if kind == "images":
        return photographs("test", folder, count)
    return tones(count) if kind == "audio" else spectrograms(count)
